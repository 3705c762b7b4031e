"""A new kind of position, mask or target is named wherever a run is described, by its own words."""

from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from stopmim.gpu.blocks import take
from stopmim.health.doctor import diagnose, examine
from stopmim.health.reference import find_reference
from stopmim.insight import What
from stopmim.insight.analyse import analyse
from stopmim.insight.report.page import write_report
from stopmim.method.build import configure
from stopmim.method.encoder import VisionTransformer
from stopmim.method.masks import Masks, MaskSampler, Sizes
from stopmim.method.model import Target
from stopmim.method.positions import StochasticPositions
from stopmim.runs.run import Run
from stopmim.train.loop import pretrain
from tiny import tiny

IMAGES = "scenes:32:24"


class Wobbling(StochasticPositions):
    @property
    def method(self) -> str:
        return " with wobbling positions"

    def describe(self) -> str:
        return "positions that wobble"


@dataclass(frozen=True)
class Stripe(MaskSampler):
    """The upper half is seen, the last row predicted; the options are those of `MultiBlock`."""

    targets: int = 4
    target_scale: tuple[float, float] = (0.0, 0.0)
    target_aspect: tuple[float, float] = (0.0, 0.0)
    context_scale: tuple[float, float] = (0.0, 0.0)
    context_length: int | None = None

    def draw(self, batch: int, generator: torch.Generator, sizes: Sizes | None = None) -> Masks:
        every = torch.arange(self.side**2, device=generator.device)
        seen, hidden = every[: len(every) // 2], every[-self.side :]
        return Masks(seen.expand(batch, -1), hidden.expand(1, batch, -1))

    def describe(self) -> str:
        return "the last row from the upper half"


@dataclass(frozen=True)
class PatchMeans(Target):
    """The mean colour of a patch: fixed, not learned, and without a target encoder."""

    name = "Colour regression"
    layers: int = 1  # it has the place of Features here, which is built with these
    visible: float = 0.0
    vicreg: float = 0.0

    def width(self, encoder: VisionTransformer) -> int:
        return 3

    def of(self, teacher: VisionTransformer, images: Tensor, index: Tensor) -> Tensor:
        means = torch.nn.functional.avg_pool2d(images, teacher.patch).flatten(2).transpose(1, 2)
        return torch.stack([take(means, block) for block in index])

    def describe(self) -> str:
        return "mean colours"


KINDS = {
    "StochasticPositions": (Wobbling, ["I-JEPA with wobbling positions", "positions that wobble"]),
    "MultiBlock": (Stripe, ["the last row from the upper half", "<b>6</b> outlined patches"]),
    "Features": (PatchMeans, ["Colour regression + StoP", "mean colours"]),
}


@pytest.mark.parametrize(
    "replaced", [pytest.param(one, marks=[pytest.mark.slow] * (one != "Features")) for one in KINDS]
)
def test_a_new_kind_is_named_by_report_and_doctor_and_drawn_by_every_analysis(
    replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, words = KINDS[replaced]
    monkeypatch.setattr(f"stopmim.method.build.{replaced}", kind)
    monkeypatch.setattr("stopmim.insight.analyse.DPI", 40)
    config = tiny(**{"runtime.health_every": 1})
    run = pretrain(IMAGES, tmp_path / "run", config, stop_at=2)
    page = unescape(write_report(run, others=[run]).read_text())
    for word in words:
        assert word in page
    assert 'class="missing">No' not in page.replace('missing">No evaluation', "")
    found = examine(run.path)
    assert found.step == 2
    assert found.evidence
    assert examine(run.path, IMAGES).step == 2
    assert len(analyse("all", [run.path, run.path], tmp_path / "figures")) == len(get_args(What))


@pytest.mark.parametrize("replaced", ["StochasticPositions", "Features"])
def test_a_new_kind_is_not_compared_with_the_reference_of_another(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure("tiny_cpu")
    assert find_reference(config, {"source": "scenes:9:48"}) is not None
    monkeypatch.setattr(f"stopmim.method.build.{replaced}", KINDS[replaced][0])
    assert find_reference(config, {"source": "scenes:9:48"}) is None


def test_fixed_targets_are_not_judged_by_their_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopmim.method.build.Features", PatchMeans)
    run = pretrain(IMAGES, tmp_path, tiny(**{"runtime.health_every": 1}), stop_at=2)
    assert "feature_rank" in Run(tmp_path).metrics[-1]
    names = [e.name for e in diagnose(run.metrics).evidence]
    assert "features: effective rank" in names
    assert "targets: effective rank" not in names
