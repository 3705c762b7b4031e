"""Has my run collapsed, and is it useful? A verdict with its evidence and advice.

Two questions, kept apart: whether the training has collapsed, which the log answers by the rules in
rules.py, and whether the encoder is useful, which only evaluations answer. `diagnose` is a pure
function of the lines of metrics.jsonl; only lines with a measurement of measure.py count. `examine`
is the command.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill, indent
from typing import NamedTuple

import torch

from stopmim.base.errors import CheckpointError, UserError
from stopmim.base.files import number
from stopmim.base.tables import aligned
from stopmim.config.schema import Config, MaskingConfig, override
from stopmim.data.pixels import RGB, stats_of
from stopmim.data.sources.open import open_images
from stopmim.data.survey import check_like
from stopmim.health.log import Logged, measurements
from stopmim.health.measure import Health
from stopmim.health.reference import find_reference, training_share
from stopmim.health.rules import EXIT_CODES, Signs, Verdict, fixed_targets, judge
from stopmim.method.encoder import INITIALISERS
from stopmim.runs import checkpoint
from stopmim.runs.identity import planned
from stopmim.runs.next_commands import how_to_evaluate
from stopmim.runs.run import Run
from stopmim.runs.verdict import Tally, of_run, tallies
from stopmim.weights.load import load_model


class Evidence(NamedTuple):
    name: str
    value: float
    start: float | None  # of the untrained network
    bar: str  # on which side of its threshold the value is
    reference: float | None = None  # of the reference run, at the same share of its training


# For a run that is over and healthy; a short one on few images often ends like that.
UNPROVEN = (
    "no evaluation shows that training helped: train longer or on more images, test on more, or "
    "start from a public encoder (docs/encoders.md)"
)


@dataclass(frozen=True)
class Diagnosis:
    verdict: Verdict  # on the training; `evaluations` say whether the encoder is useful
    because: str
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[str, ...] = ()
    step: int | None = None  # the verdict is about the run up to this step
    total: int | None = None  # updates of the whole run, if they are not all done
    keep: int | None = None  # the step with the best weights, if known
    reference: str | None = None  # name of the reference run, if there is one
    evaluations: tuple[Tally, ...] = ()  # one per data set
    evaluate: str = ""  # the command that evaluates the run, if it is not evaluated yet
    lost: tuple[str, ...] = ()  # lines of the logs that are damaged or missing

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def useful(self) -> bool:
        """Whether evaluations show the encoder above random init somewhere, and below nowhere."""
        shown = any(tally.above for tally in self.evaluations)
        return shown and not any(tally.below for tally in self.evaluations)

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        at += "" if self.step is None or self.total is None else f" of {self.total}"
        texts = [f"{self.verdict}{at}: {self.because}", *self.use]
        # A command stays in one piece.
        lines = [x if self.evaluate and x in self.use else _wrapped(x) for x in texts]
        table = [
            {"": e.name, "now": _text(e.value), "untrained": _text(e.start)}
            | {"reference": _text(e.reference) if self.reference else "", "bar": e.bar}
            for e in self.evidence
        ]
        if table:
            lines.append(indent(aligned(table, ("now", "untrained", "reference")), "  "))
        if self.reference:
            lines.append(f"  reference: {self.reference}, at the same share of its training")
        lines += [_wrapped(f"- {line}") for line in self.advice]
        if self.keep is not None:
            lines.append(f"keep the checkpoint of step {self.keep}, or the nearest one left")
        lines += [f"lost: {line}" for line in self.lost]
        return "\n".join(lines)

    @property
    def use(self) -> list[str]:
        """Usefulness of the encoder by its evaluations, or the command to evaluate it."""
        if self.evaluate:
            return [f"not evaluated yet: run {self.evaluate}"]
        lines = []
        for tally in self.evaluations:
            kind = "useful in part" if tally.below else "useful"
            where = f", on {tally.data}" if tally.data else ""
            lines.append(f"{kind if tally.above else 'evaluated'}: {tally}{where}")
        return lines

    def as_json(self) -> str:
        fields = asdict(self) | {"exit_code": self.exit_code}
        fields |= {"evidence": [e._asdict() for e in self.evidence]}
        return json.dumps(fields | {"evaluations": [t._asdict() for t in self.evaluations]})


def _wrapped(line: str) -> str:
    return fill(line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def diagnose(
    metrics: Sequence[Logged], config: Config | None = None, data: object = None
) -> Diagnosis:
    """The verdict on a run from the lines of its metrics.jsonl.

    With its `config` and `data`, as run.json has them, the evidence includes the values of a
    reference run of the same kind.
    """
    start, lines = measurements(metrics)
    if not lines:
        return Diagnosis("too early to say", "nothing has been measured yet")
    now = lines[-1]
    half = min(lines, key=lambda line: abs(line["step"] - now["step"] / 2))
    verdict, because, advice = judge(Signs(now, half, start or lines[0], lines))
    reference = None if config is None else find_reference(config, data)
    there = reference.at(training_share(config, now)) if config and reference else {}
    evidence, name = _evidence(now, start, there), reference.name if reference else None
    keep = int(now["step"]) if verdict == "not collapsed" else None
    if verdict == "over-training":  # the highest rank that comes from images
        best = max(lines, key=lambda x: x["target_rank"] * x["target_image_share"])
        keep = int(best["step"])
    return Diagnosis(
        verdict, because, evidence, advice, int(now["step"]), keep=keep, reference=name
    )


def diagnose_run(run: Run) -> Diagnosis:
    """The verdict from the log of a run, with what its evaluations say about its use."""
    about, evaluations = run.about, tuple(tallies(of_run(run.results)))
    found = diagnose(run.metrics, run.config if "config" in about else None, about.get("data"))
    todo = "" if evaluations else how_to_evaluate(run)
    found = replace(found, evaluations=evaluations, evaluate=todo, total=_unfinished(run))
    is_over = found.verdict == "not collapsed" and found.total is None
    if is_over and evaluations and not any(tally.above for tally in evaluations):
        found = replace(found, advice=(*found.advice, UNPROVEN))
    return replace(found, lost=tuple(run.lost_lines))


def _unfinished(run: Run) -> int | None:
    """Updates of the whole run, if it has not made them all."""
    total = planned(run.about)
    done = max((number(line.get("step")) or 0 for line in run.metrics[-1:]), default=0)
    return total if total and done < total else None


# Key, name, and the threshold above which the rules see no collapse: a number, or a share of the
# untrained network's value. None: no rule looks at it.
EVIDENCE = (
    ("target_rank", "targets: effective rank", 0.5, "untrained"),
    ("target_spread", "targets: spread", 0.05, ""),
    ("target_image_share", "targets: image share", 0.02, ""),
    ("predicted_image_share", "predictions: image share", 0.05, ""),
    ("predicted_mean_share", "predictions: mean share", None, ""),
    ("skill", "predictions: skill", 0, ""),
    ("noise_to_signal", "positions: noise", None, ""),
    ("feature_rank", "features: effective rank", None, ""),
    ("neighbours", "crops of an image match", 0.5, ""),
)
CONSTANT = ("target_rank", "target_spread", "target_image_share")  # if the targets are fixed


def _evidence(now: Logged, start: Logged | None, there: Logged) -> tuple[Evidence, ...]:
    knn = [(key, f"neighbours: {key[4:]}", None, "") for key in now if key[:4] == "knn_"]
    begun, found = start or {}, list[Evidence]()
    for key, name, least, of in (*EVIDENCE, *knn):
        if key not in now or (key in CONSTANT and fixed_targets(now)):
            continue
        value, untrained = float(now[key]), begun.get(key)
        bar = _bar(value, least, untrained if of else None)
        found.append(Evidence(name, value, untrained, bar, there.get(key)))
    return tuple(found)


def _bar(value: float, least: float | None, untrained: float | None) -> str:
    """Words for the side of its threshold that `value` is on."""
    if least is None:
        return "not judged"
    over = value > least * (1 if untrained is None else untrained)
    unit = "" if untrained is None else " x untrained"
    return f"{'over' if over else 'not over'} {least:g}{unit}"


# ------------------------------------------------------------------------------ a run, a checkpoint


JUDGED = {"target_rank", "random_init"}  # only lines with one of them change a verdict


class Watch:
    """The verdict on a run during training, announced whenever it changes."""

    def __init__(self, metrics: Sequence[Logged]) -> None:
        self.lines = [line for line in metrics if JUDGED & line.keys()]
        self.verdict = diagnose(self.lines).verdict

    def see(self, line: Logged) -> str | None:
        """The announcement after this line of metrics.jsonl, if there is news."""
        if not JUDGED & line.keys():
            return None
        self.lines.append(line)
        found, before = diagnose(self.lines), self.verdict
        self.verdict = found.verdict
        if found.verdict == before:
            return None
        advice = f"; {found.advice[0]}" if found.advice else ""
        return f"step {found.step}: {found.verdict}: {found.because}{advice}"


def examine(path: str | Path, data: str | None = None) -> Diagnosis:
    """The verdict on a run directory from its log; with `data`, on weights measured now.

    `data` are images as `stopmim.data.open_images` takes them. With them, `path` may also be a
    checkpoint, ours or a released one of StoP or I-JEPA.
    """
    path = Path(path)
    if data is not None:
        return _examine_weights(path, data)
    if not (path / "run.json").exists():
        hint = "; to measure a checkpoint, give --data IMAGES"
        hint = hint if path.exists() else ": no such folder"
        raise CheckpointError(f"{path}: not a run directory{hint}")
    run = Run(path)
    metrics = run.metrics
    if metrics and measurements(metrics) == (None, []):
        why = "this run has measured nothing (runtime.health_every)"
        if run.config.runtime.health_every != 0:
            why = "it has one image, which does not show how images differ"
        raise UserError(f"{path}: {why}; give --data IMAGES")
    return diagnose_run(run)


def _examine_weights(path: Path, data: str) -> Diagnosis:
    """The verdict on a model and its untrained twin, both measured now."""
    step = None
    if path.is_dir():  # a run or a checkpoint of ours
        model, state = checkpoint.read_newest(path, lambda x: (load_model(x), checkpoint.state(x)))
        config = Config.model_validate_json(json.dumps(state["config"]))
        step = int(state["step"])
    else:  # a file that names neither step nor masks
        model = load_model(path)
        patch, side = model.encoder.patch, model.encoder.side
        masks = MaskingConfig(kind="multiblock" if model.target.learned else "random")
        config = Config(arch=f"vit_b{patch}", image_size=patch * side, masking=masks)
        stats = getattr(model.encoder.transform, "stats", RGB)
        if stats != RGB:  # of an export
            config = override(config, {f"data.{key}": x for key, x in stats.tag().items()})
    images = open_images(data)
    check_like(images, stats_of(config), str(path))
    health = Health(images, config, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        now = health.measure(model) | {"step": step or 0}
        for part in (model.encoder, model.target_encoder, model.predictor):
            if part is not None:
                part.apply(INITIALISERS[model.target.start])
    found = diagnose([{"step": 1, "random_init": health.measure(model)}, now])
    return replace(found, step=step, keep=None)  # one measurement cannot prefer a step
