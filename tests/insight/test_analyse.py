"""The analyses: their arrays are what they claim to be, and every figure is drawn."""

import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stopmim.base.errors import UserError
from stopmim.cli import main
from stopmim.config.schema import override
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import Subset
from stopmim.health.measure import patch_targets
from stopmim.insight import What
from stopmim.insight import analyse as analysis
from stopmim.insight.analyse import analyse
from stopmim.insight.figures import curves, masks, pca, prediction, theory
from stopmim.insight.figures.pictures import Preview
from stopmim.insight.figures.subject import Subject, indices, load, pixels
from stopmim.method.build import configure
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain
from tiny import tiny

IMAGES = "scenes:32:24"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(IMAGES, tmp_path_factory.mktemp("runs") / "noisy", tiny(), stop_at=3)


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = tiny(positions={"kind": "sincos", "sigma": None})
    return pretrain(IMAGES, tmp_path_factory.mktemp("runs") / "certain", config, stop_at=3)


@pytest.fixture(scope="module")
def subject(run: Run) -> Subject:
    return load([run], None, 4)[0]


def looked_at(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


# ------------------------------------------------------------------------------ the command


def test_every_analysis_of_one_run_is_drawn(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(analysis, "IMAGES", 3)
    monkeypatch.setattr(analysis, "DPI", 80)
    assert main(["analyse", "all", str(run.path), "--out", str(tmp_path / "figures")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert [path.stem for path in paths] == list(get_args(What))
    for path in paths:
        picture = looked_at(path)
        assert min(picture.shape[:2]) >= 200
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20, path  # not blank


def test_two_runs_are_set_side_by_side(run: Run, certain: Run, tmp_path: Path) -> None:
    (one,) = analyse("prediction", [run.path], tmp_path / "one")
    (two,) = analyse("prediction", [run.path, certain.path], tmp_path / "two")
    assert looked_at(two).shape[1] > looked_at(one).shape[1]


def test_figures_go_into_the_run_unless_told_otherwise(run: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    assert analyse("noise", [copy.path]) == [copy.path / "figures" / "noise.png"]
    with pytest.raises(UserError, match="name a run"):
        analyse("pca", [], tmp_path)
    with pytest.raises(UserError, match="name a run directory, or a folder"):
        analyse("smoothing", [])
    assert analyse("smoothing", [], tmp_path / "x")[0].exists()


def test_images_that_are_gone_are_one_line_and_others_can_be_given(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Run(shutil.copytree(run.path, tmp_path / "copy"))
    about = run.about
    about["data"]["source"] = str(tmp_path / "gone")
    (copy.path / "run.json").write_text(json.dumps(about))
    assert main(["analyse", "pca", str(copy.path)]) == 3
    assert "no such folder" in capsys.readouterr().err
    assert main(["analyse", "pca", str(copy.path), "--data", IMAGES]) == 0


# ------------------------------------------------------------------------------ the arrays


def test_heat_is_the_softmax_of_the_cosine_with_every_target(subject: Subject) -> None:
    cosine = prediction.predict(subject.model, subject.views, subject.config)
    context, targets = indices(subject.views)
    with torch.no_grad():
        model = subject.model.eval()
        images = pixels(subject.views, subject.config)
        predicted = model.predict(images, context, targets)  # eval: no noise
        target = patch_targets(model, images)
    image, block, k = 2, 1, 3
    row = block * targets.shape[2] + k
    want = torch.cosine_similarity(predicted[block, image, k], target[image], dim=-1)
    np.testing.assert_allclose(cosine[image, row], want, atol=1e-5)
    assert subject.views[image].targets.ravel()[row] == targets[block, image, k]
    hot = torch.softmax(want / prediction.TEMPERATURE, dim=0)
    np.testing.assert_allclose(prediction.heat(want.numpy()), hot / hot.max(), atol=1e-5)


def test_heat_nearby_is_that_of_the_hidden_patch_and_its_eight_neighbours() -> None:
    image, corner, middle = np.zeros((24, 24, 3), np.uint8), 0, 14  # of a grid of 6x6
    view = Preview(image, np.array([35]), np.array([[corner, middle]]), side=6)
    even = np.zeros((1, 2, 36))
    assert prediction.heat_nearby(even, [view]) == pytest.approx((4 + 9) / 2 / 36)
    sharp = np.full((1, 2, 36), -9.0)
    sharp[0, 0, 7] = 0.0  # beside the corner, across
    sharp[0, 1, [15, 16]] = 0.0  # beside the middle, and one further
    assert prediction.heat_nearby(sharp, [view]) == pytest.approx((1 + 0.5) / 2)


def test_a_feature_that_is_only_in_one_place_is_hottest_there() -> None:
    cosine = np.zeros(36)
    cosine[7] = 0.9
    assert prediction.heat(cosine).argmax() == 7
    assert prediction.heat(cosine)[7] == 1
    assert prediction.heat(cosine)[8] < 1e-3


def test_sigma_against_norms_has_the_last_norms_of_every_run(run: Run, certain: Run) -> None:
    against, over = curves.norms([run, certain]), curves.norms([run])
    for axes, key in zip(against.axes, ("norm_A", "norm_mask_token"), strict=True):
        (line,) = axes.lines
        want = [(0.0, certain.metrics[-1][key]), (0.25, run.metrics[-1][key])]
        np.testing.assert_allclose(np.asarray(line.get_xydata()), np.array(want))
    assert "sigma" in against.axes[0].get_xlabel()
    assert over.axes[0].get_xlabel() == "step"


def altered(run: Run, out: Path, changes: dict[str, object]) -> Run:
    """A copy of `run` whose config says something else."""
    copy = Run(shutil.copytree(run.path, out))
    about = run.about
    about["config"] = override(run.config, changes).model_dump(mode="json")
    (copy.path / "run.json").write_text(json.dumps(about))
    return copy


@pytest.mark.parametrize(
    "other",
    [{"positions": {"kind": "jitter", "sigma": 1.0}}, {"positions": {"covariance": "fixed"}}],
    ids=["jitter", "fixed"],
)
def test_sigma_of_another_meaning_is_not_on_the_same_axis(
    run: Run, certain: Run, tmp_path: Path, other: dict[str, object]
) -> None:
    picture = curves.norms([altered(run, tmp_path / "other", other), certain])
    assert picture.axes[0].get_xlabel() == "step"


def test_the_norm_of_a_released_run_is_called_that_of_the_bias(run: Run, tmp_path: Path) -> None:
    released = altered(run, tmp_path / "released", {"compat": "released", "image_size": 48})
    titles = [axes.get_title() for axes in curves.norms([run, released]).axes]
    assert titles == ["norm of A", "norm of the mask token (released: bias of A)"]


def test_the_curves_of_collapse_say_what_their_matrix_carries(
    run: Run, certain: Run, tmp_path: Path
) -> None:
    free = altered(run, tmp_path / "free", {"positions.covariance": "untied"})
    legend = theory.collapse([run, certain, free]).axes[1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "noisy: A carries context and noise\nStoP, sigma 0.25 (a variance), tied covariance",
        "certain: A carries context only\nsine-cosine positions",
        "free: A carries noise only\nStoP, sigma 0.25 (a variance), untied covariance",
    ]


def test_every_run_has_its_curve_even_if_colours_repeat(run: Run) -> None:
    assert len(theory.collapse([run] * 9).axes[1].lines) == 9
    assert [len(axes.lines) for axes in curves.norms([run] * 9).axes] == [9, 9]


def test_a_free_matrix_shrinks_and_a_tied_one_does_not() -> None:
    tied, free = (theory.toy(tied=tied) for tied in (True, False))
    assert tied[-1] > 0.5
    assert free[-1] < 0.1
    assert free[0] == tied[0] == 1


def test_the_best_prediction_is_smoother_with_more_noise() -> None:
    lines = [line.get_ydata() for line in theory.smoothing().axes[0].lines]
    rough = [np.abs(np.diff(line)).sum() for line in lines]
    assert len(rough) == 4
    assert rough == sorted(rough, reverse=True)
    # A sine of angular frequency w shrinks by exp(-w^2 v / 2), away from edges.
    x = np.linspace(0, 20, 2001)
    best = theory.posterior_mean(np.array([10.0]), x, np.sin(3 * x), 0.05)
    assert best[0] == pytest.approx(np.exp(-9 * 0.05 / 2) * np.sin(30), abs=1e-3)


def test_components_do_not_show_what_all_images_have_in_common(subject: Subject) -> None:
    same = subject._replace(views=[subject.views[0]] * 4)
    colours, explained = pca.maps(subject)
    assert colours.shape == (4, 6, 6, 3)
    assert 0 < explained <= 1
    assert colours.std() > 0.1
    flat, _ = pca.maps(same)  # four times one image: nothing is left but rounding
    assert np.ptp(flat, axis=0).max() < 1e-6


def test_the_preview_of_masks_counts_every_patch() -> None:
    config = configure(tiny())
    shown, hidden = masks.coverage(config, steps=200)
    seen = config.masking.context_length or round(0.28 * 36)
    assert shown.sum() == pytest.approx(seen)
    assert shown.min() > 0.1  # no corner is left out
    assert hidden.min() > 0.05
    released = override(config, {"masking.compat": "released", "image_size": 48})
    assert masks.coverage(released, steps=20)[1, -1].max() == 0  # as the released sampler does


def test_uncertainty_is_zero_without_noise_and_grows_with_it(
    subject: Subject, certain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, noisy, times = prediction.uncertainty(subject, masks=6, draws=4)
    (without,) = load([certain], None, 4)
    _, calm, _ = prediction.uncertainty(without, masks=6, draws=4)
    known = times > 0
    assert known.mean() > 0.8
    assert np.nanmax(calm) < 1e-10
    assert np.nanmean(noisy) > 1e-6
    assert np.isnan(error[~known]).all()
    monkeypatch.setattr(subject.model.predictor.positions, "sigma", 16 * 0.25)
    _, loud, _ = prediction.uncertainty(subject, masks=6, draws=4)
    assert np.nanmean(loud) > 4 * np.nanmean(noisy)


def test_the_error_of_a_perfect_prediction_would_be_zero(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = patch_targets(subject.model, pixels(subject.views, subject.config))
    rows = torch.arange(len(found))[:, None]

    def truth(_seen: Tensor, _context: Tensor, targets: Tensor, _noise: object) -> Tensor:
        return torch.stack([found[rows, block] for block in targets])

    monkeypatch.setattr(subject.model.predictor, "forward", truth)
    error, _, _ = prediction.uncertainty(subject, masks=3, draws=2)
    assert np.nanmax(error) < 1e-10


def test_views_are_those_of_training(subject: Subject, run: Run) -> None:
    view: Preview = subject.views[0]
    assert view.image.shape == (24, 24, 3)
    assert not set(view.context.tolist()) & set(view.targets.ravel().tolist())
    (again,) = load([run], Scenes(32, size=24), 4)
    np.testing.assert_array_equal(again.views[1].image, subject.views[1].image)


def test_images_that_the_run_left_out_are_not_shown(tmp_path: Path) -> None:
    images = Scenes(32, size=24)
    skip = tmp_path / "skip.jsonl"
    skip.write_text("".join(json.dumps({"name": images.name(i)}) + "\n" for i in range(16)))
    run = pretrain(IMAGES, tmp_path / "run", tiny(data={"skip": str(skip)}), stop_at=1)
    (kept,) = load([run], Subset(images, range(16, 32)), 4)
    (own,) = load([run], None, 4)
    for ours, theirs in zip(own.views, kept.views, strict=True):
        np.testing.assert_array_equal(ours.image, theirs.image)
