"""``stopmim ablate TABLE``: plan every run of a table, carry them out, write the table.

A run is known by its config, its data and its seed, not by its table: two rows that are the same
train once, and so do two tables in the same folder. Each run is a process of `trial.py` in a run
directory of its own, so that whatever is killed goes on where it was.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stopmim.ablations import record
from stopmim.ablations import report as ablation
from stopmim.ablations.jobs import Entry, carried, carry_out, places, updates_of
from stopmim.ablations.paper import find
from stopmim.ablations.table import Table
from stopmim.ablations.trial import Answer, Question, Trial, identity, questions
from stopmim.base.console import duration
from stopmim.base.errors import UserError
from stopmim.base.files import read_jsonl
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config
from stopmim.data.loading import default_workers, steps_per_epoch
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import keep_outside, open_images, parse_scenes
from stopmim.health.doctor import diagnose
from stopmim.insight.figures.curves import training_seconds
from stopmim.method.build import configure
from stopmim.runs.run import Run, claimed

SCENES = 4096  # to pretrain on, if nothing is given
NO_SEED = -1  # of an encoder that others trained
UNFINISHED = "not finished"  # in place of a verdict, until it is


@dataclass(frozen=True)
class Plan:
    name: str
    table: Table
    preset: str
    base: Config  # what the rows change
    data: str
    entries: tuple[Entry, ...]
    out: Path

    @property
    def trials(self) -> dict[Path, Entry]:
        """Every run once, by its directory; the first seed of all rows comes first."""
        found: dict[Path, Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.seed):
            found.setdefault(entry.trial.path, entry)
        return found


class Ablation(NamedTuple):
    """What was found, run by run; the page about it; and its main table as text."""

    outcomes: list["Outcome"]
    page: Path
    text: str

    @property
    def failed(self) -> list[str]:
        return [f"{run.run}: {run.problem}" for run in self.outcomes if run.problem]


@dataclass(frozen=True)
class Outcome:
    """What became of one run; `problem` says why it has no answers."""

    row: str
    seed: int
    run: str
    answers: Sequence[Answer]
    problem: str
    verdict: str
    norms: tuple[float, float] | None  # of A and m~, at the end
    updates: int
    seconds: float
    rank: float | None = None  # RankMe, at the end

    @property
    def ended(self) -> bool:
        return self.problem != UNFINISHED

    @classmethod
    def of_record(cls, tree: Mapping[str, Any]) -> "Outcome":
        """As it was when `record.write` wrote this, but for rounding."""
        names = ("row", "seed", "run", "answers", "problem", "verdict", "updates", "seconds")
        return cls(**{name: tree[name] for name in names}, **_at_the_end(tree["curve"]))


def ablate(planned: Plan, jobs: int | None = None) -> Ablation:
    """Carries out what was planned, `jobs` runs at a time, and writes the table to `out`/`name`.

    Goes on with whatever is there already. A run that fails does not stop the others. The table is
    written anew whenever a run has ended, with what there is.
    """
    with claimed(planned.out):
        free = places(planned.base, jobs)
        for problems in carry_out(f"ablate {planned.name}", planned.trials, free):
            found = [so_far(entry, problems) for entry in planned.entries]
            page = ablation.write(planned, found)
            record.write(planned, found)
    return Ablation(found, page, ablation.terminal(planned, found))


def so_far(entry: Entry, problems: Mapping[Path, str]) -> "Outcome":
    unknown = "" if entry.trial.answers() is not None else UNFINISHED
    return outcome(entry, problems.get(entry.trial.path, unknown))


def plan(
    name: str,
    *,
    data: str | None = None,
    preset: str | Path | Config = "tiny_cpu_quick",
    seeds: int = 1,
    rows: Sequence[str] = (),
    out: str | Path = "runs/ablate",
    evals: Sequence[str] = (),
    few: str = "25",
    video_size: int | None = None,
    checkpoints: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Plan:
    """All runs of a table, every config proved to work and all data to be there; trains nothing.

    Args:
        name: of a table of the paper, or a YAML file with one of your own.
        data: to pretrain on; without it, scenes of the preset's size.
        seeds: of every row, from the preset's on.
        rows: names of rows; none: all.
        evals: ``[NAME=]DATA``, labelled images (or videos) to evaluate on; see `questions`.
        few: labelled images per class, or a list of their names, where a protocol has few labels.
        video_size: edge of the shorter side of the frames that tracking sees; None: as published.
        checkpoints: ``NAME=FILE``, encoders of others that are evaluated beside.
        changes: of config keys, for all rows.
    """
    table, out = find(name), Path(out)
    chosen = table.choose(tuple(rows))
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: at least one is needed")
    if video_size is not None and video_size < 1:
        raise UserError(f"--video-size {video_size}: expected 1 or more")
    base = configure(preset, dict(changes or {}))
    data = data or f"scenes:{SCENES}:{base.image_size}"
    skip = base.data.skip
    key, count, workers = _stock(data, skip, out)
    asked = questions(table.asks, data, base.image_size, evals, few, video_size, skip)
    folders, entries, problems = dict[str, Path](), list[Entry](), list[str]()
    for row, seed in itertools.product(chosen, range(seeds)):
        try:
            config = configure(base, row.of(base) | {"seed": base.seed + seed})
            updates = config.optim.epochs * steps_per_epoch(range(count), config)
        except UserError as error:
            problems += [f"{row.name}: {line}" for line in str(error).splitlines()]
            continue
        run = identity(config, key)
        # Rows that are the same share the name that the run is first met under.
        folders.setdefault(run, _folder(out / "runs", row.name, config.seed, run))
        trial = Trial(folders[run], data, carried(config, workers), asked)
        entries.append(Entry(row.name, config.seed, trial, updates))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    entries += [_borrowed(given, out / "runs", data, asked) for given in checkpoints]
    shown = preset.arch if isinstance(preset, Config) else str(preset)
    return Plan(Path(name).stem, table, shown, base, data, tuple(entries), out)


def _stock(data: str, skip: str | None, out: Path) -> tuple[str, int, int]:
    """What tells these images from others, how many there are, and readers that they need."""
    if data.split(":")[0] == "scenes":
        count, size, seed = parse_scenes(data)
        return f"scenes:{count}:{size}:{seed}", count, 0
    if not (out / "runs").exists():
        keep_outside(out, data)
    images = without_skipped(open_images(data), skip)
    return images.fingerprint, len(images), default_workers(images)


def _folder(runs: Path, row: str, seed: int, key: str) -> Path:
    """Where a run is, under whatever name another table gave it, or where it will be."""
    known = sorted(path for path in runs.glob(f"*-{seed}-{key}") if path.is_dir())
    return known[0] if known else runs / f"{row}-{seed}-{key}"


def _borrowed(given: str, runs: Path, data: str, asked: tuple[Question, ...]) -> Entry:
    """The encoder of ``NAME=FILE``, or of the newest checkpoint of a run, to be asked the same."""
    name, _, file = given.partition("=")
    if not name or not file or not Path(file).exists():
        raise UserError(f"--checkpoint {given}: expected NAME=FILE, with a file that exists")
    if (Path(file) / "run.json").exists():
        file = str(Run(file).checkpoint)  # the folder of a run stays as it is when the run goes on
    state = Path(file).stat()
    key = f"{Path(file).resolve()} {state.st_size} {state.st_mtime_ns}"
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name)
    folder = runs / f"checkpoint-{slug}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    return Entry(name, NO_SEED, Trial(folder, data, None, asked, file), 0)


def outcome(entry: Entry, problem: str) -> Outcome:
    """What is known of a run once it has ended."""
    trial = entry.trial
    metrics = list(read_jsonl(trial.path / "metrics.jsonl"))
    last = metrics[-1] if metrics else {}
    batch = trial.config.optim.batch_size if trial.config else 1
    return Outcome(
        row=entry.row,
        seed=entry.seed,
        run=trial.path.name,
        answers=trial.answers() or [],
        problem=problem,
        verdict=diagnose(metrics).verdict if metrics else "-",
        updates=last.get("step", 0),
        seconds=training_seconds(metrics, batch),
        **_at_the_end(metrics),
    )


def _at_the_end(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of an outcome, what the last lines of metrics.jsonl tell."""
    last = metrics[-1] if metrics else {}
    measured = ([row for row in metrics if "target_rank" in row] or [{}])[-1]
    return {
        "norms": (last["norm_A"], last["norm_mask_token"]) if "norm_A" in last else None,
        "rank": measured.get("feature_rank", measured.get("target_rank")),  # not that of pixels
    }


# ------------------------------------------------------------------------------ before the start


def describe(planned: Plan, jobs: int | None = None) -> str:
    """What `ablate` would do, and about how long it would take."""
    trials = planned.trials.values()
    known = [entry for entry in trials if entry.trial.answers() is not None]
    left = sum(entry.updates - updates_of(entry.trial.path) for entry in trials)
    side = len(places(planned.base, jobs))
    lines = [f"{planned.name}: {planned.table.about}", f"preset {planned.preset}, {planned.data}"]
    lines += [
        f"  {e}: {e.updates:,} updates in {e.trial.path.name}"
        if e.trial.config
        else f"  {e}: {e.trial.encoder}"
        for e in planned.entries
    ]
    lines += [
        f"{len(trials)} runs, {len(known)} of them done, {left:,} updates left, {side} at a time"
    ]
    if rate := _measured_rate(planned):
        seconds = left / rate / min(side, max(1, len(trials) - len(known)))
        lines.append(f"about {duration(seconds)}, by the runs in {planned.out}")
    elif cost := re.search(r"Cost: (.*?)\.\s", (PRESETS.get(planned.preset) or str).__doc__ or ""):
        lines.append(f"one run of {planned.preset} takes {cost[1]}, on the data it was made for")
    return "\n".join(lines)


def _measured_rate(planned: Plan) -> float:
    """Updates per second of the runs that are there; 0 if there is none."""
    rates = []
    for entry in planned.trials.values():
        found = outcome(entry, "")
        rates += [found.updates / found.seconds] if found.seconds else []
    return sorted(rates)[len(rates) // 2] if rates else 0.0
