"""Is my run healthy? A verdict from what a run has logged, with its reasons and a way out.

`diagnose` is a pure function of the lines of metrics.jsonl; only those with a measurement of
`health.py` count. The rules are the table RULES, read from top to bottom: the first that holds is
the verdict. Losses count against the untrained network, in halves and quarters: half of the
directions and half of the spread gone is a partial collapse, three quarters of the directions a
whole one. tests/plant.py plants runs of every kind to try the rules on.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from stopmim.base.errors import UserError
from stopmim.config.schema import Config, MaskingConfig
from stopmim.data.sources.open import open_images
from stopmim.health.measure import Health, probe
from stopmim.health.reference import reference, share
from stopmim.method.encoder import INITIALISERS
from stopmim.method.model import MaskedImageModel
from stopmim.runs import checkpoint
from stopmim.runs.run import Run
from stopmim.weights.load import load_model

Verdict = Literal[
    "healthy", "too early to say", "partial collapse", "collapse", "shortcut", "over-training"
]
EXIT_CODES: dict[Verdict, int] = {
    "healthy": 0,
    "too early to say": 0,
    "partial collapse": 10,
    "collapse": 11,
    "shortcut": 12,
    "over-training": 13,
}

Row = Mapping[str, Any]


class Evidence(NamedTuple):
    name: str
    value: float
    start: float | None  # of the untrained network
    bar: str  # what a healthy run has
    reference: float | None = None  # what one of ours had at the same share of its training


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    verdict: Verdict
    because: str
    evidence: tuple[Evidence, ...]
    advice: tuple[str, ...]
    step: int | None  # the verdict is about the run up to this step
    keep: int | None  # the step whose weights are the best known; None: none of them
    reference: str | None = None  # what was trained on what, if there is a run to compare with

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        lines = [f"{self.verdict}{at}: {self.because}"]
        if self.evidence:
            width = max(len(e.name) for e in self.evidence)
            rows = [("", "now", "untrained", "reference", "healthy")]
            rows += [
                (e.name, _text(e.value), _text(e.start), _text(e.reference), e.bar)
                for e in self.evidence
            ]
            for name, now, start, other, bar in rows:
                beside = f"  {other:>9}" if self.reference else ""
                lines.append(f"  {name:{width}}  {now:>8}  {start:>9}{beside}  {bar}")
        if self.reference:
            lines.append(f"  reference: {self.reference}, at the same share of its training")
        lines += [f"- {line}" for line in self.advice]
        if self.keep is not None:
            lines.append(f"keep the checkpoint of step {self.keep}, or the nearest that is left")
        return "\n".join(lines)

    def as_json(self) -> str:
        fields = dataclasses.asdict(self) | {"exit_code": self.exit_code}
        return json.dumps(fields | {"evidence": [e._asdict() for e in self.evidence]})


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# ------------------------------------------------------------------------------ the rules


class Signs(NamedTuple):
    """What the rules look at: measurements now, at half of the way, of the untrained network."""

    now: Row
    half: Row
    start: Row
    rows: Sequence[Row]  # all since the start, oldest first

    def relative(self, key: str) -> float:
        """`key` now, over that of the untrained network."""
        return self.now[key] / max(1e-12, self.start[key])

    def of_best(self, key: str) -> float:
        """`key` now, over the most it has ever been."""
        return self.now[key] / max(1e-12, *(row[key] for row in self.rows), self.start[key])

    def risen(self, key: str) -> float:
        """`key` now, over the least it has been; 1 if it was not logged."""
        known = [row[key] for row in self.rows if key in row]
        return known[-1] / max(1e-12, min(known)) if known else 1.0

    def lately(self, key: str) -> float:
        """The lower of the last two values: once can be chance."""
        return min(row[key] for row in self.rows[-2:])


class Rule(NamedTuple):
    verdict: Verdict
    holds: Callable[[Signs], bool]
    because: str
    advice: tuple[str, ...]


COLLAPSED = (
    "if it began so, look at the data: are all images alike, or read wrongly?",
    "raise --optim.ema towards 0.999, lower --optim.lr by 3 to 10",
    "make the predictor wider and deeper (--predictor.width, --predictor.depth)",
)


def _has_learned(signs: Signs) -> bool:
    return signs.lately("skill") > 0 and signs.lately("predicted_image_share") > 0.05


REPEATED = 10  # epochs; nobody learns by heart what he has seen a few times

RULES = (
    Rule(
        "collapse",
        lambda s: s.now["target_image_share"] < 0.02,
        "the targets are the same for all images",
        COLLAPSED,
    ),
    Rule(
        "collapse",
        lambda s: s.now["target_spread"] < 0.05 or s.now["target_rank"] < 1.6,
        "the targets are the same everywhere",
        COLLAPSED,
    ),
    Rule(
        "collapse",
        lambda s: s.relative("target_rank") < 0.25,
        "the targets fill hardly any of the directions of the untrained network",
        COLLAPSED[1:],
    ),
    Rule(
        "collapse",
        lambda s: (
            s.start["neighbours"] > 0.6
            and s.now["neighbours"] - 0.5 < 0.25 * (s.start["neighbours"] - 0.5)
        ),
        "two crops of an image find each other hardly better than by chance",
        COLLAPSED[1:],
    ),
    Rule(
        "over-training",
        lambda s: (
            s.now.get("epoch", 0) > REPEATED
            and s.of_best("target_rank") < 0.6
            and s.risen("target_rank") < 1.1
            and s.relative("target_spread") > 0.7
            and s.risen("loss") > 2
        ),
        "the loss has long risen while the targets lose directions and keep their spread",
        (
            "stop earlier: fewer --optim.epochs, or more images",
            "lower --optim.lr and --optim.final_lr, or raise --optim.ema",
        ),
    ),
    Rule(
        "partial collapse",
        lambda s: s.relative("target_rank") < 0.4,
        "the targets fill far fewer directions than those of the untrained network",
        COLLAPSED[1:],
    ),
    Rule(
        "partial collapse",
        lambda s: (
            s.relative("target_rank") < 0.5
            and s.relative("target_spread") < 0.5
            and s.now["skill"] < 0.02
        ),
        "half of the spread and of the directions of the targets is gone, and nothing was learned",
        COLLAPSED[1:],
    ),
    Rule(
        "healthy",
        lambda s: _has_learned(s) and s.relative("target_rank") > 0.5,
        "the predictor tells images apart, and the targets are rich",
        (),
    ),
    Rule(
        "shortcut",
        lambda s: (
            max(s.now["skill"], s.half["skill"]) < 0.03
            and max(s.now["predicted_image_share"], s.half["predicted_image_share"]) < 0.02
            and min(s.now["skill"], s.half["skill"]) > -0.3
            and s.now["target_image_share"] < 1.05 * s.half["target_image_share"]
        ),
        "the predictor knows the place of a patch and nothing of the image",
        (
            "show more of the image: raise --masking.context_length, lower --masking.target_scale"
            " (random masks: lower --masking.ratio)",
            "look at `stopmim analyse masks` and the images: can what is hidden be told at all?",
        ),
    ),
)
# Pixels stay what they are: if they are poor, so are the images, and nothing can collapse.
RULES_FOR_PIXELS = (
    Rule(
        "collapse",
        lambda s: s.now["target_image_share"] < 0.02 or s.now["target_spread"] < 0.05,
        "the pixels to predict are the same in all images",
        ("look at the data: are all images alike, or read wrongly?",),
    ),
    *(rule for rule in RULES if rule.verdict in ("healthy", "shortcut")),
)
TOO_EARLY = "the predictor does not tell images apart yet, and nothing has settled"
TOO_CLOSE = "the predictor tells images apart, but the targets are poorer than they may become"


def diagnose(metrics: Sequence[Row], config: Config | None = None) -> Diagnosis:
    """The verdict on a run from the lines of its metrics.jsonl.

    With its `config`, what a run of ours of the same kind measured is set beside the evidence.
    """
    start, rows = measurements(metrics)
    if not rows:
        return Diagnosis("too early to say", "nothing has been measured yet", (), (), None, None)
    now = rows[-1]
    half = min(rows, key=lambda row: abs(row["step"] - now["step"] / 2))
    signs = Signs(now, half, start or rows[0], rows)
    ours = None if config is None else reference(config)
    there = ours.at(share(config, now)) if config and ours else {}
    evidence, name = tuple(_evidence(now, start, there)), ours.name if ours else None
    at = int(now["step"])
    for rule in RULES_FOR_PIXELS if "feature_rank" in now else RULES:
        if rule.holds(signs) and not (rule.verdict == "shortcut" and half is now):
            keep = _best(rule.verdict, rows)
            return Diagnosis(rule.verdict, rule.because, evidence, rule.advice, at, keep, name)
    because = TOO_CLOSE if _has_learned(signs) else TOO_EARLY
    return Diagnosis("too early to say", because, evidence, (), at, None, name)


def measurements(metrics: Sequence[Row]) -> tuple[Row | None, list[Row]]:
    """That of the untrained network, if there is one, and those after it."""
    begun = [row["random_init"] for row in metrics if isinstance(row.get("random_init"), Mapping)]
    return (begun[0] if begun else None), [row for row in metrics if "target_rank" in row]


def _best(verdict: Verdict, rows: Sequence[Row]) -> int | None:
    """The step whose weights are worth keeping."""
    if verdict == "over-training":  # the most directions that images decide
        return int(max(rows, key=lambda r: r["target_rank"] * r["target_image_share"])["step"])
    return int(rows[-1]["step"]) if verdict == "healthy" else None


SHOWN = (
    ("target_rank", "effective rank of the targets", "above 0.5 of untrained"),
    ("target_spread", "spread of the targets", "above 0.5 of untrained"),
    ("target_image_share", "share of the targets that images decide", "above 0.02, rises"),
    ("predicted_image_share", "share of the predictions that images decide", "above 0.05"),
    ("predicted_mean_share", "share of the predictions that is the mean target", "falls"),
    ("skill", "predicted of what images decide", "above 0, rises"),
    ("noise_to_signal", "noise to signal of masked positions", "above 0 with StoP"),
    ("feature_rank", "effective rank of the features", "not judged"),
    ("neighbours", "two crops of an image find each other", "above 0.5"),
)


CONSTANT = ("target_rank", "target_spread", "target_image_share")  # where pixels are the targets


def _evidence(now: Row, start: Row | None, there: Row) -> list[Evidence]:
    knn = [(key, f"neighbours agree on {key[4:]}", "rises") for key in now if key[:4] == "knn_"]
    return [
        Evidence(
            name, float(now[key]), None if start is None else start.get(key), bar, there.get(key)
        )
        for key, name, bar in (*SHOWN, *knn)
        if key in now and not (key in CONSTANT and "feature_rank" in now)
    ]


# ------------------------------------------------------------------------------ a run, a checkpoint


class Watch:
    """The verdict on a run while it is trained, said whenever it changes."""

    def __init__(self, metrics: Sequence[Row]) -> None:
        self.rows = [row for row in metrics if "target_rank" in row or "random_init" in row]
        self.verdict = diagnose(self.rows).verdict

    def see(self, row: Row) -> str | None:
        """What to say after this line of metrics.jsonl, if there is something new."""
        if "target_rank" not in row and "random_init" not in row:
            return None
        self.rows.append(row)
        found, before = diagnose(self.rows), self.verdict
        self.verdict = found.verdict
        if found.verdict == before:
            return None
        advice = f"; {found.advice[0]}" if found.advice else ""
        return f"step {found.step}: {found.verdict}: {found.because}{advice}"


def examine(path: str | Path, data: str | None = None) -> Diagnosis:
    """The verdict on a run directory from its log; or, with `data`, on weights measured now.

    Args:
        path: a run directory; with `data` also a checkpoint, ours or of StoP's or I-JEPA's code.
        data: images to measure on, as `stopmim.data.open_images` takes them.
    """
    path = Path(path)
    if data is not None:
        return _examine_weights(path, data)
    if not (path / "run.json").exists():
        more = (
            "; a checkpoint is measured on --data IMAGES" if path.exists() else ": no such folder"
        )
        raise UserError(f"{path}: not a run directory{more}")
    run = Run(path)
    metrics = run.metrics
    if metrics and measurements(metrics) == (None, []):
        raise UserError(
            f"{path}: this run has measured nothing (runtime.health_every); give --data IMAGES"
        )
    return diagnose(metrics, run.config if "config" in run.about else None)


def _examine_weights(path: Path, data: str) -> Diagnosis:
    model = load_model(path)
    config, step = _config(path, model)
    health = Health(probe(open_images(data), config), torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        now = health.measure(model) | {"step": step or 0}
        fresh = INITIALISERS[model.target.start]
        for part in (model.encoder, model.target_encoder, model.predictor):
            if part is not None:
                part.apply(fresh)
    found = diagnose([{"step": 1, "random_init": health.measure(model)}, now])
    return dataclasses.replace(found, step=step, keep=None)  # one measurement prefers none


def _config(path: Path, model: MaskedImageModel) -> tuple[Config, int | None]:
    """The config that `model` was trained with and its step; for other people's files the usual."""
    if (path / "run.json").exists():
        path = Run(path).checkpoint
    if path.is_dir():
        state = checkpoint.state(path)
        return Config.model_validate_json(json.dumps(state["config"])), int(state["step"])
    patch, side = model.encoder.patch, model.encoder.side
    masks = MaskingConfig(kind="multiblock" if model.target.learned else "random")
    return Config(arch=f"vit_b{patch}", image_size=patch * side, masking=masks), None
