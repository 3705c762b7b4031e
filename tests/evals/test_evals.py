import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import golden, golden_about, seeded
from stopmim import evals
from stopmim.base.errors import DataError, NonFiniteError
from stopmim.cli import main
from stopmim.data.crops import center_crop, normalise
from stopmim.data.decode import BadImageError
from stopmim.evals import knn, lowshot
from stopmim.evals.features import extract, rankme
from stopmim.evals.knn import knn_accuracy
from stopmim.evals.linear import L2S, linear_probe
from stopmim.evals.lowshot import fit_logistic, standardise
from stopmim.evals.results import Result, wilson_interval
from stopmim.method.encoder import VisionTransformer

# ------------------------------------------------------------------------------ made-up data


class Photos:
    """Images of different shapes; those in `broken` cannot be read."""

    fingerprint = "photos"

    def __init__(self, n: int, broken: tuple[int, ...] = ()) -> None:
        rng = np.random.default_rng(0)
        shapes = rng.integers(20, 60, size=(n, 2))
        self.pixels = [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in shapes]
        self.labels: dict[str, np.ndarray] = {}
        self.broken = broken

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, i: int) -> np.ndarray:
        if i in self.broken:
            raise BadImageError("ends after 3 bytes")
        return self.pixels[i]

    def name(self, i: int) -> str:
        return f"folder/{i}.jpg"


def encoder() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(32, 8, width=16, depth=3, heads=2)


def planted(n: int, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (n, classes + 10) that contain the label in noise, on an offset."""
    generator = seeded(seed)
    y = torch.randint(classes, (n,), generator=generator)
    noise = torch.randn(n, classes + 10, generator=generator)
    return 5 + 0.15 * noise + F.pad(F.one_hot(y, classes), (0, 10)), y


def noise(n: int, d: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features and labels that have nothing to do with one another."""
    generator = seeded(seed)
    return torch.randn(n, d, generator=generator), torch.randint(classes, (n,), generator=generator)


def binomial_tail(correct: int, n: int, p: float) -> float:
    """Chance of a count at least as far out as `correct`, on its side."""

    def chance(i: int) -> float:
        ways = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        return math.exp(ways + i * math.log(p) + (n - i) * math.log(1 - p))

    side = range(correct + 1) if correct < n * p else range(correct, n + 1)
    return math.fsum(map(chance, side))


def objective(weights: Tensor, x: Tensor, y: Tensor, l2: float, *, intercept: bool) -> Tensor:
    """What `fit_logistic` says that it minimises, written down once more."""
    w, b = (weights[:, :-1], weights[:, -1]) if intercept else (weights, torch.zeros(()))
    return F.cross_entropy(x.double() @ w.T + b, y) + l2 / 2 * w.square().sum()


def gradient(weights: Tensor, x: Tensor, y: Tensor, l2: float, *, intercept: bool) -> Tensor:
    weights = weights.clone().requires_grad_()
    (result,) = torch.autograd.grad(objective(weights, x, y, l2, intercept=intercept), weights)
    return result


# ------------------------------------------------------------------------------ features


def test_features_are_those_of_the_encoder_on_the_view_of_evaluations() -> None:
    photos, model = Photos(5), encoder().eval()
    batch = torch.stack([center_crop(photos.read(i), 32, 37) for i in range(5)])
    with torch.no_grad():
        expected = model.features(normalise(batch), layers=2)
    found = extract(model, photos, size=32, layers=2)
    assert found.shape == (5, 2 * 16)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 100])
def test_features_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    photos, model = Photos(7), encoder()
    whole = extract(model, photos, size=32, batch_size=7)
    found = extract(model, photos, size=32, batch_size=batch_size)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_features_of_an_image_do_not_depend_on_its_place() -> None:
    photos, model = Photos(7), encoder()
    forth = extract(model, photos, size=32, batch_size=3)
    photos.pixels.reverse()
    back = extract(model, photos, size=32, batch_size=3)
    torch.testing.assert_close(back.flip(0), forth, rtol=1e-5, atol=1e-5)


def test_no_images_are_no_features() -> None:
    assert extract(encoder(), Photos(0), size=32).shape == (0, 16)


def test_extraction_leaves_every_module_in_the_mode_it_was_in() -> None:
    model = encoder().train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    seen: list[bool] = []
    model.norm.register_forward_hook(lambda module, *_: seen.append(module.training))
    extract(model, Photos(1), size=32)
    assert seen == [False]
    assert [module.training for module in model.modules()] == before


def test_a_classifier_can_be_trained_on_extracted_features() -> None:
    found = extract(encoder(), Photos(3), size=32)
    head = torch.nn.Linear(16, 2)
    head(found).sum().backward()  # an inference tensor would refuse
    assert head.weight.grad is not None


def test_autocast_changes_features_by_its_rounding_only() -> None:
    photos, model = Photos(3), encoder()
    exact = extract(model, photos, size=32)
    rough = extract(model, photos, size=32, precision=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.1)


def test_an_unreadable_image_ends_an_evaluation_and_is_named() -> None:
    with pytest.raises(DataError, match=r"^folder/4\.jpg: ends after 3 bytes; [^\n]*$"):
        extract(encoder(), Photos(6, broken=(4,)), size=32, batch_size=2)


def test_an_encoder_that_gives_nan_is_an_error() -> None:
    model = encoder()
    torch.nn.init.constant_(model.norm.weight, math.nan)
    with pytest.raises(NonFiniteError, match=r"no finite features for folder/0\.jpg"):
        extract(model, Photos(2), size=32)


def test_rankme_of_k_equal_singular_values_is_k() -> None:
    q, _ = torch.linalg.qr(torch.randn(100, 12, generator=seeded()).double())
    assert rankme(3 * q) == pytest.approx(12, rel=1e-4)
    assert rankme(q[:, :5] @ q[:12, :5].T) < 5.001


def test_rankme_of_rank_one_and_of_zero_is_1() -> None:
    column, row = torch.randn(50, 1, generator=seeded()), torch.randn(1, 8, generator=seeded(1))
    assert rankme(column @ row) == pytest.approx(1, abs=1e-4)
    assert rankme(torch.zeros(50, 8)) == pytest.approx(1, abs=1e-4)


def test_rankme_is_of_singular_values_and_not_of_eigenvalues() -> None:
    def perplexity(weights: Tensor) -> float:
        p = weights / weights.sum()
        return float(torch.exp(-(p * p.log()).sum()))

    values = torch.tensor([4.0, 2.0, 1.0])
    q, _ = torch.linalg.qr(torch.randn(40, 3, generator=seeded()))
    assert rankme(q * values) == pytest.approx(perplexity(values), rel=1e-5)
    assert perplexity(values.square()) < 0.9 * perplexity(values)


def test_rankme_refuses_fewer_samples_than_features() -> None:
    with pytest.raises(ValueError, match="more samples than features, got 8 x 8"):
        rankme(torch.randn(8, 8))


# ------------------------------------------------------------------------------ knn


def test_knn_equals_a_vote_written_out_for_one_sample_at_a_time() -> None:
    (x, y), (test_x, test_y) = noise(60, 4, 3), noise(40, 4, 3, seed=1)
    correct = 0
    for sample, label in zip(test_x.double(), test_y.tolist(), strict=True):
        near = [float(F.cosine_similarity(sample, other, dim=0)) for other in x.double()]
        votes = [0.0, 0.0, 0.0]
        for i in sorted(range(60), key=lambda i: -near[i])[:7]:
            votes[int(y[i])] += math.exp(near[i] / 0.2)
        correct += votes.index(max(votes)) == label
    assert knn_accuracy(x, y, test_x, test_y, k=7, temperature=0.2) == correct / 40


def test_knn_finds_planted_labels() -> None:
    accuracy = knn_accuracy(*planted(1000), *planted(500, seed=1))
    assert 0.99 < accuracy <= 1


def test_knn_of_unrelated_labels_is_chance() -> None:
    accuracy = knn_accuracy(*noise(1000, 8, 4), *noise(2000, 8, 4, seed=1))
    assert binomial_tail(round(accuracy * 2000), 2000, 1 / 4) > 1e-4


def test_all_neighbours_as_near_as_the_last_one_vote() -> None:
    x = torch.tensor([[1.0, 0.0]] * 5)
    test = torch.tensor([[2.0, 0.0]])
    for y in ([0, 1, 1, 1, 0], [1, 1, 0, 0, 1]):
        assert knn_accuracy(x, torch.tensor(y), test, torch.tensor([1]), k=1) == 1
    # Two votes each: the lowest label wins.
    y_even = torch.tensor([2, 1, 2, 1])
    assert knn_accuracy(x[:4], y_even, test, torch.tensor([1]), k=1) == 1


def test_knn_does_not_depend_on_the_order_of_the_training_set_nor_on_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (x, y), (test_x, test_y) = noise(200, 3, 4), noise(300, 3, 4, seed=1)
    x, test_x = x.round(), test_x.round()  # on a grid: many are equally near
    expected = knn_accuracy(x, y, test_x, test_y, k=5)
    order = torch.randperm(200, generator=seeded(2))
    assert knn_accuracy(x[order], y[order], test_x, test_y, k=5) == expected
    monkeypatch.setattr(knn, "CHUNK", 200 * 7)
    assert knn_accuracy(x, y, test_x, test_y, k=5) == expected


@pytest.mark.parametrize("k", [0, 11])
def test_knn_refuses_a_k_beyond_the_training_set(k: int) -> None:
    x, y = noise(10, 3, 2)
    with pytest.raises(ValueError, match=f"between 1 and the 10 training samples, got {k}"):
        knn_accuracy(x, y, x, y, k=k)


# ------------------------------------------------------------------------------ logistic regression


@pytest.mark.parametrize("name", ["lam0", "lam1"])
def test_logistic_regression_reaches_the_recorded_optimum(name: str) -> None:
    recorded, about = golden("logreg"), golden_about("logreg")["results"][name]
    train, test, y = recorded["train_x"], recorded["test_x"], recorded["train_y"]
    x, l2 = standardise(train, train), about["lambda_cli"] / len(y)
    weights = fit_logistic(x, y, l2)
    value = float(objective(weights, x, y, l2, intercept=False))
    assert value == pytest.approx(about["optimal_objective"], rel=1e-8)
    torch.testing.assert_close(weights.float(), recorded[f"{name}.weights"], rtol=0, atol=1e-4)
    for statistics, reading in ((train, "train"), (test, "test")):
        predicted = (standardise(test, statistics) @ weights.T).argmax(dim=1)
        assert torch.equal(predicted.int(), recorded[f"{name}.test_pred_{reading}_stats"])
        accuracy = float((predicted == recorded["test_y"]).double().mean())
        assert accuracy == pytest.approx(about[f"test_accuracy_{reading}_statistics"])


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "l2"), [(200, 10, 1e-2), (200, 10, 100.0), (20, 50, 1e-3), (60, 30, 1e-7)]
)
def test_at_the_optimum_the_gradient_is_zero(n: int, d: int, l2: float, intercept: bool) -> None:
    x, y = noise(n, d, 4)
    x = x * torch.logspace(0, -2, d) + 1  # neither scaled nor centred
    weights = fit_logistic(x, y, l2, intercept)
    assert weights.shape == (4, d + intercept)
    start = gradient(torch.zeros_like(weights), x, y, l2, intercept=intercept)
    left = gradient(weights, x, y, l2, intercept=intercept)
    assert left.norm() < 1e-4 * start.norm()
    value = float(objective(weights, x, y, l2, intercept=intercept))
    if not intercept:  # at most ||gradient||^2 / (2 l2) above the least, by strong convexity
        assert float(left.norm()) ** 2 / (2 * l2) < 1e-9 * value


def test_a_looser_tolerance_is_kept_as_well() -> None:
    x, y = noise(100, 10, 4)
    least = objective(fit_logistic(x, y, 1e-4), x, y, 1e-4, intercept=False)
    value = objective(fit_logistic(x, y, 1e-4, tolerance=1e-3), x, y, 1e-4, intercept=False)
    assert 0 < float(value / least) - 1 < 1e-3


def test_features_of_any_size_and_rank_are_solved_as_well_as_float64_allows() -> None:
    x, y = noise(60, 5, 3)
    least = objective(fit_logistic(x, y, 1e-8), x, y, 1e-8, intercept=False)
    for size in (1e-6, 1e4, 1e6):
        # The same problem in other units, and every feature split into three that are equal.
        wide, l2 = x.double().repeat(1, 3) * size, 1e-8 * 3 * size**2
        weights = fit_logistic(wide, y, l2)
        torch.testing.assert_close(objective(weights, wide, y, l2, intercept=False), least)
    # Here the proof would need a gradient smaller than its rounding.
    weights = fit_logistic(x.double() * 1e4, y, 1e-3)
    left = gradient(weights, x.double() * 1e4, y, 1e-3, intercept=False)
    assert left.norm() < 1e-7


def test_a_rotation_of_the_features_rotates_the_weights() -> None:
    """Why the rotation in the released code (logistic_eval.py:180-186) can be left out."""
    x, y = noise(100, 10, 4)
    q, _ = torch.linalg.qr(torch.randn(10, 10, generator=seeded(1)).double())
    torch.testing.assert_close(
        fit_logistic(x.double() @ q, y, 1e-2), fit_logistic(x, y, 1e-2) @ q, rtol=0, atol=1e-5
    )


def test_an_intercept_takes_up_an_offset_of_the_features() -> None:
    x, y = noise(100, 10, 4)
    near, far = (fit_logistic(x.double() + offset, y, 1e-2, True) for offset in (0, 30))
    torch.testing.assert_close(far[:, :-1], near[:, :-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        far[:, -1], near[:, -1] - 30 * near[:, :-1].sum(dim=1), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_classes_without_samples_are_part_of_the_problem_and_never_predicted(
    intercept: bool,
) -> None:
    x, y = planted(200, classes=3)
    y = y * 2 + 1  # 1, 3, 5; of 0 to 6 the others are missing
    weights = fit_logistic(x, y, 1e-3, intercept, classes=7)
    assert weights.shape == (7, x.shape[1] + intercept)
    assert weights.isfinite().all()
    assert gradient(weights, x, y, 1e-3, intercept=intercept).norm() < 1e-6
    logits = x.double() @ weights[:, : x.shape[1]].T + (weights[:, -1] if intercept else 0)
    assert set(logits.argmax(dim=1).tolist()) == {1, 3, 5}
    if intercept:  # nothing holds the missing ones back
        assert logits.softmax(dim=1)[:, ::2].max() == 0
        alone = fit_logistic(x, y // 2, 1e-3, True)
        assert torch.equal(weights[1::2], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l2": 0.0}, "l2 must be more than 0, got 0.0"),
        ({"y": torch.ones(20, dtype=torch.long)}, "all 20 labels are 1: there is nothing"),
        ({"classes": 3}, "labels from 0 to 3 for 3 classes"),
        ({"y": torch.arange(20) - 1}, "labels from -1 to 18 for 19 classes"),
        ({"x": torch.full((20, 5), math.nan)}, "features must be finite"),
    ],
)
def test_a_problem_without_a_solution_is_refused(change: dict[str, Any], message: str) -> None:
    problem: dict[str, Any] = {"x": torch.randn(20, 5), "y": torch.arange(20) % 4, "l2": 0.1}
    with pytest.raises(ValueError, match=message):
        fit_logistic(**problem | change)


def test_a_fit_that_does_not_get_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowshot, "ROUNDS", 1)
    with pytest.raises(ValueError, match="no optimum for l2 = 1e-06"):
        fit_logistic(*noise(50, 10, 4), 1e-6)


def test_standardised_features_have_mean_0_and_deviation_1_and_constant_ones_are_0() -> None:
    x = torch.randn(50, 4, generator=seeded()) * torch.tensor([1.0, 10.0, 0.0, 0.1]) + 7.3
    found = standardise(x, x)
    assert found[:, 2].abs().max() < 1e-12
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(4).double(), rtol=0, atol=1e-12)
    others = found[:, [0, 1, 3]].std(dim=0)
    torch.testing.assert_close(others, torch.ones(3).double(), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------ linear probe


def test_a_linear_probe_finds_planted_labels() -> None:
    result = linear_probe(*planted(1000), *planted(500, seed=1))
    assert 0.99 < result.accuracy <= 1
    assert result.interval == wilson_interval(round(500 * result.accuracy), 500)


def test_a_linear_probe_of_unrelated_labels_is_chance() -> None:
    result = linear_probe(*noise(500, 20, 4), *noise(2000, 20, 4, seed=1))
    assert binomial_tail(round(result.accuracy * 2000), 2000, 1 / 4) > 1e-4


def test_neither_the_chosen_l2_nor_the_classifier_depends_on_the_test_set() -> None:
    train, (test_x, test_y) = noise(200, 20, 4), noise(100, 20, 4, seed=1)
    first = linear_probe(*train, test_x, test_y)
    shuffled = test_y[torch.randperm(100, generator=seeded(2))]
    for x, y in ((test_x, shuffled), (test_x * 5 - 3, test_y)):
        other = linear_probe(*train, x, y)
        assert other.accuracy != first.accuracy
        assert other.l2 == first.l2
        assert torch.equal(other.weights, first.weights)


def test_the_probe_is_fitted_to_all_of_train_with_the_chosen_l2() -> None:
    x, y = planted(200)
    result = linear_probe(x, y, x, y)
    problem = standardise(x, x), y, result.l2
    start = gradient(torch.zeros_like(result.weights), *problem, intercept=True)
    left = gradient(result.weights, *problem, intercept=True)
    assert left.norm() < 1e-3 * start.norm()


def test_l2_is_chosen_on_samples_that_were_not_fitted() -> None:
    # Four of five labels are 0, and the features say nothing: to learn them by heart is a mistake.
    x, y = noise(300, 250, 5)
    y = (y == 0).long()
    z = standardise(x, x)
    strict, free = ((z @ fit_logistic(z, y, l2).T).argmax(dim=1) == y for l2 in (10.0, 1e-5))
    assert free.all()
    assert not strict.all()  # so that the fitted samples would say 1e-5
    for seed in range(3):
        assert linear_probe(x, y, x, y, seed=seed, l2s=(10.0, 1e-5)).l2 == 10.0


def test_of_equally_good_penalties_the_largest_is_chosen() -> None:
    x, y = planted(300, classes=2)
    assert linear_probe(x, y, x, y, l2s=(1e-4, 1e-2, 1e-3)).l2 == 1e-2


def test_the_split_depends_on_the_seed_and_on_nothing_else() -> None:
    x, y = noise(100, 5, 3)
    torch.manual_seed(1)
    first = linear_probe(x, y, x, y, seed=3)
    torch.manual_seed(2)
    assert torch.equal(linear_probe(x, y, x, y, seed=3).weights, first.weights)
    assert len({linear_probe(x, y, x, y, seed=seed, l2s=L2S).l2 for seed in range(8)}) > 1


def test_a_label_that_train_does_not_have_counts_as_wrong() -> None:
    (x, y), (test_x, test_y) = planted(400), planted(400, seed=1)
    known = (y != 2) & (y != 4)
    result = linear_probe(x[known], y[known], test_x, test_y)
    expected = float(((test_y != 2) & (test_y != 4)).double().mean())
    assert result.accuracy == pytest.approx(expected, abs=0.01)
    assert knn_accuracy(x[known], y[known], test_x, test_y) == pytest.approx(expected, abs=0.01)


# ------------------------------------------------------------------------------ results


def test_protocols_are_found_without_an_import_of_their_own() -> None:
    code = "import stopmim; stopmim.evals.lowshot.fit_logistic; stopmim.evals.knn.knn_accuracy"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match=r"stopmim\.evals' has no attribute 'nothing'"):
        _ = evals.nothing


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    # R: binom::binom.wilson; the first by hand: z^2 / (n + z^2)
    [(0, 10, 0.0, 0.27753), (8, 10, 0.49016, 0.94331), (10, 10, 0.72247, 1.0)],
)
def test_wilson_interval_is_the_known_one(correct: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(correct, n) == pytest.approx((low, high), abs=2e-5)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_wilson_interval_contains_the_truth_19_times_of_20(p: float) -> None:
    n, covered = 200, 0.0
    for i in range(n + 1):
        low, high = wilson_interval(i, n)
        chance = math.comb(n, i) * p**i * (1 - p) ** (n - i)
        covered += chance * (low <= p <= high)
    assert covered == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_refuses_what_is_no_fraction(correct: int, n: int) -> None:
    with pytest.raises(ValueError, match="no such fraction"):
        wilson_interval(correct, n)


def test_a_result_is_a_line_of_json_without_what_is_not_known() -> None:
    result = Result("accuracy", "linear", "count", 0.5, (0.4, 0.6), 100, "held-out", 0, 0.25)
    assert json.loads(json.dumps(result.as_dict())) == {
        "name": "accuracy",
        "protocol": "linear",
        "label": "count",
        "unit": "percent",
        "value": 50.0,
        "low": 40.0,
        "high": 60.0,
        "n": 100,
        "selection": "held-out",
        "seed": 0,
        "random_init": 25.0,
        "difference": 25.0,
        "verdict": "above random init",
    }
    plain = Result("rankme", "rankme", "", 12.5, None, 100, "none", 0, unit="")
    assert (plain.as_dict()["value"], plain.as_dict()["unit"]) == (12.5, "")
    assert not {"low", "high", "interval", "random_init"} & plain.as_dict().keys()


@pytest.mark.parametrize("words", [["knn", "--data", "scenes"], ["tracking", "--videos", "x"]])
def test_a_name_no_file_can_have_is_refused_like_any_file_that_is_missing(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    protocol, *options = words
    assert main(["eval", protocol, "\u00e9" * 200 + ".safetensors", *options]) == 4
    assert "no such file or folder" in capsys.readouterr().err
