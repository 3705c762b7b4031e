"""The measurements of a run, and the verdicts on runs that are unhealthy on purpose."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import seeded
from plant import FOLDER, PLANTS
from stopmim.ablations.record import read_records
from stopmim.base.errors import UserError
from stopmim.cli import main
from stopmim.config.schema import override
from stopmim.data.sources.scenes import Scenes
from stopmim.evals import results
from stopmim.health import measure as health
from stopmim.health.doctor import Watch, diagnose, examine
from stopmim.health.log import measurements
from stopmim.health.measure import (
    Health,
    effective_rank,
    label_agreement,
    neighbour_score,
)
from stopmim.health.rules import EXIT_CODES
from stopmim.method.build import build, configure
from stopmim.method.model import MaskedImageModel
from stopmim.runs.next_commands import next_commands
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain
from stopmim.weights.export import export
from tiny import NoiseImages, curve, tiny, weights

ILL = {"collapse", "partial collapse", "shortcut", "over-training"}


def planted(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def measured(model: MaskedImageModel, **changes: Any) -> dict[str, float]:
    config = configure(tiny(**changes))
    return Health(Scenes(64, size=24), config, torch.device("cpu")).measure(model)


@pytest.fixture(scope="module")
def model() -> MaskedImageModel:
    return build(configure(tiny()))


# ------------------------------------------------------------------------------ the verdict


@pytest.mark.parametrize("name", PLANTS)
def test_the_verdict_on_a_planted_run_is_what_was_planted(name: str) -> None:
    found = diagnose(planted(name))
    assert found.verdict == PLANTS[name].verdict, found


@pytest.mark.parametrize("name", PLANTS)
def test_no_moment_of_an_ill_run_is_called_healthy_and_none_of_a_healthy_one_ill(name: str) -> None:
    rows, well = planted(name), PLANTS[name].verdict in ("not collapsed", "too early to say")
    said = {diagnose(rows[: n + 1]).verdict for n in range(len(rows))}
    assert not said & (ILL if well else {"not collapsed"})


PHOTOS = sorted((Path(__file__).parents[1] / "golden" / "health" / "photos").glob("*.jsonl"))


@pytest.mark.parametrize("log", PHOTOS, ids=lambda log: log.stem)
def test_targets_that_lose_rank_while_the_run_learns_have_not_collapsed(log: Path) -> None:
    """I-JEPA on 9,469 photographs of Imagenette: an encoder 20 points better than untrained.

    The targets lose up to three quarters of their rank in the first thousand updates, and regain a
    part; all the time two crops of an image match better and better. The log of ViT-B ends in the
    dip, with fewer neighbours of the same class than before training: nobody knows yet.
    """
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    start = next(row["random_init"] for row in rows if "random_init" in row)
    lowest = min(row["target_rank"] for row in rows if "target_rank" in row)
    assert lowest < 0.45 * start["target_rank"]
    said = [diagnose(rows[: n + 1]).verdict for n in range(len(rows))]
    assert not set(said) & ILL
    assert said[-1] == ("too early to say" if log.stem == "vit-b" else "not collapsed")


def test_a_recorded_run_with_little_rank_is_called_well_only_if_it_beats_random_init() -> None:
    """By k-NN, of the runs in results/; older records have shares in place of percentages."""
    said: dict[str, list[bool]] = {"not collapsed": [], "too early to say": [], "collapse": []}
    for record in read_records(Path(__file__).parents[2] / "results"):
        lines = [{"random_init": record["random_init"]}, *record["curve"]]
        knn = [a for a in record["answers"] if (a["protocol"], a["name"]) == ("knn", "accuracy")]
        start, measured = measurements(lines)
        if start and knn and measured[-1]["target_rank"] <= 0.5 * start["target_rank"]:
            better = knn[0]["value"] > knn[0]["random_init"]
            said.setdefault(diagnose(lines).verdict, []).append(better)
    assert len(said["not collapsed"]) >= 5
    assert all(said["not collapsed"])
    assert not any(said["collapse"])
    assert said["too early to say"].count(False) >= 5


def test_there_are_twelve_plants_of_six_kinds() -> None:
    assert {plant.verdict for plant in PLANTS.values()} == set(EXIT_CODES)
    assert len(PLANTS) >= 12
    assert {diagnose(planted(name)).verdict for name in PLANTS} == set(EXIT_CODES)


def test_a_diagnosis_has_its_numbers_its_advice_and_its_exit_code() -> None:
    found = diagnose(planted("too-fast-0"))
    text = str(found)
    assert text.startswith("collapse at step ")
    assert "--optim.lr" in text
    rank = next(e for e in found.evidence if e.name == "targets: effective rank")
    assert rank.start is not None
    assert rank.value < 0.2 * rank.start
    assert found.keep is None
    assert json.loads(found.as_json())["exit_code"] == found.exit_code == 11
    assert diagnose(planted("healthy-0")).keep == planted("healthy-0")[-1]["step"]


def test_of_a_run_that_was_trained_too_long_an_earlier_step_is_kept() -> None:
    rows = planted("too-long-0")
    keep = diagnose(rows).keep
    assert keep is not None
    assert 0 < keep < rows[-1]["step"]


def test_a_predictor_that_has_learned_is_not_said_to_have_learned_nothing() -> None:
    """With less than half of the rank of the targets left, it is too early to say more."""
    *rows, last = planted("healthy-0")
    start = next(row["random_init"] for row in [*rows, last] if "random_init" in row)
    found = diagnose([*rows, last | {"target_rank": 0.45 * start["target_rank"]}])
    assert found.verdict == "too early to say"
    assert "tells images apart" in found.because


def test_a_change_of_the_verdict_is_said_once() -> None:
    rows = planted("healthy-0")
    watch = Watch([])
    said = [news for row in rows if (news := watch.see(row))]
    assert len(said) == 1
    assert "not collapsed" in said[0]
    assert Watch(rows).see(rows[-1]) is None  # resumed: it was said before


def test_nothing_measured_is_too_early_and_a_run_that_never_measures_is_refused(
    tmp_path: Path,
) -> None:
    assert diagnose([]).verdict == "too early to say"
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(runtime={"health_every": 0}), stop_at=2)
    assert not [row for row in run.metrics if "target_rank" in row or "random_init" in row]
    with pytest.raises(UserError, match="has measured nothing"):
        examine(run.path)
    assert examine(run.path, "scenes:32:24").step == 2  # measured now
    with pytest.raises(UserError, match="not a run directory"):
        examine(run.checkpoint)
    assert examine(run.checkpoint, "scenes:32:24") == examine(run.path, "scenes:32:24")
    # Neither a step nor one to keep is made up for a file that does not say any.
    file = export(run.path, "ijepa", tmp_path / "export") / "model.pth.tar"
    assert "step" not in str(examine(file, "scenes:32:24"))


def test_a_run_that_stopped_before_it_was_measured_says_no_more(tmp_path: Path) -> None:
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(runtime={"health_every": 5}), stop_at=2)
    said = str(examine(run.path)).splitlines()[0]
    assert said == "too early to say: nothing has been measured yet"


def test_one_image_is_the_reason_why_nothing_was_measured(tmp_path: Path) -> None:
    config = tiny(optim={"batch_size": 1, "epochs": 1}, runtime={"health_every": 1})
    run = pretrain(NoiseImages(1), tmp_path / "run", config)
    with pytest.raises(UserError, match=r"it has one image, which does not .*; give --data IMAGES"):
        examine(run.path)
    assert f"stopmim doctor {run.path} --data FOLDER" in next_commands(run)


def test_the_command_ends_with_the_exit_code_of_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    for name in ("healthy-0", "too-fast-0", "no-average", "nothing-to-tell-0", "too-long-0"):
        (tmp_path / "metrics.jsonl").write_text((FOLDER / f"{name}.jsonl").read_text())
        assert main(["doctor", str(tmp_path)]) == EXIT_CODES[PLANTS[name].verdict]
        assert capsys.readouterr().out.startswith(PLANTS[name].verdict)


@pytest.mark.parametrize(("name", "gain", "told"), [
    ("healthy-0", 0.0, True), ("healthy-0", 0.3, False), ("too-fast-0", 0.0, False),
])  # fmt: skip
def test_a_healthy_run_that_is_nowhere_above_random_init_is_told_what_to_try(
    name: str, gain: float, told: bool, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text((FOLDER / f"{name}.jsonl").read_text())
    interval = (gain - 0.1, gain + 0.1)
    result = results.Result("accuracy", "knn", "class", 0.4 + gain, (0.3, 0.8), 90, "none", 0, 0.4)
    result = replace(result, difference=interval, chance=0.3)
    facts = {"test_data": "pets (90 images)", "step": 1, "branch": "target"}
    results.record(tmp_path / "results.jsonl", [result.as_dict()], facts)
    assert any("train longer" in line for line in examine(tmp_path).advice) == told


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLANTS)
def test_a_run_planted_anew_gets_the_same_verdict(name: str, tmp_path: Path) -> None:
    assert diagnose(PLANTS[name].grow(tmp_path / "run")).verdict == PLANTS[name].verdict


# ------------------------------------------------------------------------------ the numbers


def test_the_effective_rank_is_rankme() -> None:
    x = torch.randn(200, 24, generator=seeded()) * torch.logspace(0, -4, 24)
    p = torch.linalg.svdvals(x.double())
    p = p / p.sum() + 1e-7  # as in the paper
    assert effective_rank(x) == pytest.approx(float(torch.exp(-(p * p.log()).sum())), rel=1e-5)
    assert effective_rank(torch.ones(50, 8)) == pytest.approx(1.0, abs=1e-4)
    assert effective_rank(torch.eye(8).repeat(5, 1)) == pytest.approx(8.0, rel=1e-4)


def test_targets_that_ignore_the_image_have_no_image_share(model: MaskedImageModel) -> None:
    usual = measured(model)
    assert 0.02 < usual["target_image_share"] < 1
    blind = build(configure(tiny()))
    torch.nn.init.zeros_(blind.branch().patch_embed.proj.weight)
    found = measured(blind)
    assert found["target_image_share"] < 1e-6
    assert found["target_spread"] > 0.1  # positions alone have spread and rank
    assert found["neighbours"] == pytest.approx(0.5, abs=0.05)
    assert diagnose([{"random_init": usual, "step": 1}, found | {"step": 9}]).exit_code == 11


def test_skill_is_one_for_the_truth_and_zero_for_the_mean_of_every_place() -> None:
    target = torch.randn(2, 50, 3, 8, generator=seeded()) + torch.arange(3)[:, None]
    truth = health._predictions(target, target)
    place = health._predictions(target.mean(dim=1, keepdim=True).expand_as(target), target)
    mean = health._predictions(target.mean(dim=(0, 1, 2)).expand_as(target), target)
    assert truth["skill"] == pytest.approx(1)
    assert truth["predicted_image_share"] > 0.3
    assert place["skill"] == pytest.approx(0, abs=0.05)
    assert place["predicted_image_share"] == pytest.approx(0, abs=1e-5)
    assert mean["skill"] < -0.3
    assert mean["predicted_mean_share"] == pytest.approx(1, abs=1e-4)


def test_two_crops_find_each_other_if_features_say_which_image_it_is() -> None:
    x = torch.randn(40, 16, generator=seeded())
    assert neighbour_score(x, x) == 1.0
    assert neighbour_score(x + 100, x + 100) == 1.0  # what all have in common is taken out
    other = torch.randn(40, 16, generator=seeded(1))
    assert neighbour_score(x, other) == pytest.approx(0.5, abs=0.1)
    same = torch.ones(40, 16)
    assert neighbour_score(same, same) == 0.5


def test_neighbours_agree_on_labels_that_features_show() -> None:
    labels = torch.arange(60) % 3
    x = torch.eye(3)[labels] + 0.05 * torch.randn(60, 3, generator=seeded())
    assert label_agreement(x, labels) == 1.0
    assert label_agreement(x, labels[torch.randperm(60, generator=seeded())]) < 0.6


def test_noise_to_signal_is_the_power_of_the_draws(model: MaskedImageModel) -> None:
    predictor = model.predictor
    index = torch.arange(36).expand(400, 1, 36)
    noise = predictor.draw(index[:, 0], index, seeded()).masked
    assert noise is not None
    moved = torch.nn.functional.linear(noise, predictor.noise_layer.weight.detach())
    power = moved.square().sum(-1).mean()
    signal = predictor.positions.mean(index).square().sum(-1).mean().detach()
    assert health.noise_to_signal(model) == pytest.approx(float(power / signal), rel=0.05)
    certain = build(configure(tiny(positions={"kind": "sincos", "sigma": None})))
    assert health.noise_to_signal(certain) == 0.0


@torch.no_grad()
def test_in_released_mode_the_bias_of_a_plays_the_part_of_the_mask_token() -> None:
    model = build(configure(tiny(compat="released", image_size=48)))
    predictor, index = model.predictor, torch.arange(144).expand(100, 1, 144)
    predictor.predictor_embed.bias.normal_(generator=seeded())
    predictor.positions.mask_token.fill_(100.0)  # no token sees it
    assert health.norms(model)["norm_mask_token"] == float(predictor.predictor_embed.bias.norm())
    noise = predictor.draw(index[:, 0], index, seeded()).masked
    assert noise is not None
    still, moved = (
        predictor.positions(index, predictor.noise_layer, noise=n) for n in (0 * noise, noise)
    )
    power, signal = ((x.square().sum(-1).mean()) for x in (moved - still, still))
    assert health.noise_to_signal(model) == pytest.approx(float(power / signal), rel=0.05)


def test_the_released_code_without_stop_adds_nothing_to_a_position() -> None:
    certain = {"kind": "sincos", "sigma": None}
    model = build(configure(tiny(compat="released", image_size=48, positions=certain)))
    assert health.norms(model)["norm_mask_token"] == 0.0


def test_a_measurement_leaves_the_model_and_all_generators_alone(model: MaskedImageModel) -> None:
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    first = measured(model)
    assert measured(model) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(math.isfinite(value) for value in first.values())


# ------------------------------------------------------------------------------ in a run


def test_a_run_is_the_same_whether_it_is_measured_or_not(tmp_path: Path) -> None:
    without = pretrain(NoiseImages(), tmp_path / "a", tiny(runtime={"health_every": 0}))
    often = pretrain(NoiseImages(), tmp_path / "b", tiny(runtime={"health_every": 4}))
    a, b = weights(without), weights(often)
    assert all(torch.equal(a[name], b[name]) for name in a)
    for old, new in zip(curve(without), curve(often), strict=True):
        assert old.items() <= new.items()
    at = [row["step"] for row in often.metrics if "target_rank" in row]
    assert at == [4, 8, 10]  # and at the end
    start = often.metrics[0]["random_init"]
    assert start == measured_of(often, step=0)


def measured_of(run: Run, step: int) -> dict[str, float]:
    assert step == 0
    return Health(NoiseImages(), run.config, torch.device("cpu")).measure(build(run.config))


def test_of_a_single_image_nothing_is_measured_rather_than_what_is_no_number(
    tmp_path: Path,
) -> None:
    config = tiny(**{"optim.batch_size": 1, "optim.epochs": 2, "runtime.health_every": 1})
    run = pretrain(NoiseImages(1), tmp_path, config)
    assert all(math.isfinite(value) for line in run.metrics for value in line.values())
    assert diagnose(run.metrics).because == "nothing has been measured yet"


def test_a_run_of_a_later_version_is_one_line_and_no_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pretrain(NoiseImages(), tmp_path, tiny(runtime={"health_every": 1}), stop_at=1)
    about = run.about
    about["config"]["optim"]["not_yet"] = 3
    (tmp_path / "run.json").write_text(json.dumps(about))
    capsys.readouterr()
    assert main(["doctor", str(tmp_path)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "no config that stopmim" in line
    assert "optim.not_yet" in line


def test_a_run_that_goes_on_keeps_what_was_measured_of_the_untrained_network(
    tmp_path: Path,
) -> None:
    config = tiny(runtime={"health_every": 4})
    pretrain(NoiseImages(), tmp_path / "run", config, stop_at=6)
    run = pretrain(NoiseImages(), tmp_path / "run", config)
    whole = pretrain(NoiseImages(), tmp_path / "whole", config)
    assert curve(run) == curve(whole)


def test_measurements_are_rarer_for_smaller_batches_and_never_too_often() -> None:
    config = configure("tiny_cpu")
    assert health.due_every(override(config, {"optim.batch_size": 2048})) == health.FEWEST
    assert health.due_every(override(config, {"optim.batch_size": 8})) > health.due_every(config)
    assert health.due_every(override(config, {"runtime.health_every": 7})) == 7
