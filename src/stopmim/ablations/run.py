"""``stopmim ablate TABLE``: plans every run of a table, carries them out, writes the table.

A run is identified by its config, data and seed, not by its table: equal rows train once, also
across tables in the same folder. Every run has a run directory and a process of its own (trial.py),
so that it can resume after a kill.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from stopmim.ablations.jobs import carry_out, last_update, on_gpu, places
from stopmim.ablations.paper import find_table
from stopmim.ablations.questions import Question, is_scenes, questions
from stopmim.ablations.record import write_records
from stopmim.ablations.report import terminal, write_report
from stopmim.ablations.trial import Outcome, Plan, Trial
from stopmim.base.console import duration
from stopmim.base.errors import StorageError, UserError
from stopmim.base.files import own_folder
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, override
from stopmim.data.loading import steps_per_epoch
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import keep_outside, open_images
from stopmim.data.sources.scenes import parse_scenes
from stopmim.data.workers import default_workers
from stopmim.method.build import configure
from stopmim.runs.lock import claimed
from stopmim.runs.run import Run

SCENES = 4096  # to pretrain on, by default
MOST_SEEDS = 1000  # per row: --seeds 20260101 is a seed, and not how many


class Finished(NamedTuple):
    """Outcomes of an ablation, its page, and its main tables as text."""

    outcomes: list[Outcome]
    page: Path
    text: str

    @property
    def failed(self) -> list[str]:
        return [f"{run.run}: {run.problem}" for run in self.outcomes if run.problem]


def plan(name: str, **options: Any) -> Plan:
    """Plans all runs of a table; trains nothing, but checks every config and opens all data.

    `name` and `options` are those of `Ablation`.
    """
    return Ablation(name, **options).plan()


def ablate(planned: Plan, jobs: int | None = None) -> Finished:
    """Carries out a plan, `jobs` runs at a time, and writes the table to `out`/`name`.

    Resumes existing runs. A run that fails does not stop the others. The table is written again
    whenever a run has ended.
    """
    with claimed(planned.out):
        own_folder(planned.out / "runs")
        for path in filter(Path.is_symlink, planned.runs):
            raise StorageError(f"{path}: is a link, so nothing is written there; remove it")
        free = places(planned.base, jobs)
        for problems in carry_out(f"ablate {planned.name}", planned.runs, free):
            found = [Outcome.of_trial(t, problems.get(t.path, "")) for t in planned.trials]
            page = write_report(planned, found)
            write_records(planned, found)
    return Finished(found, page, terminal(planned, found))


# ------------------------------------------------------------------------------ planning


@dataclass(frozen=True)
class Ablation:
    """Request of an ablation: a table, and what all its rows share.

    Args:
        name: table of the paper, or a YAML file with a table of your own.
        data: to pretrain on; by default scenes of the preset's size.
        preset: config that the rows change.
        seeds: number of seeds per row, starting from the preset's; 0: checkpoints alone.
        rows: names of rows; all if empty.
        out: folder for the table and for all runs.
        evals: ``[NAME=]DATA``, labelled images or videos to evaluate on; see `questions`.
        few: number of labelled images per class, or a file that lists them, for protocols with
            few labels.
        video_size: shorter edge of the frames for tracking; None: as published.
        options: options of the protocols, as ``{"selection": "paper", "views": 28}``.
        checkpoints: ``NAME=FILE``, further encoders to evaluate.
        changes: config keys to change in all rows.
    """

    name: str
    data: str | None = None
    preset: str | Path | Config = "tiny_cpu_quick"
    seeds: int = 1
    rows: Sequence[str] = ()
    out: str | Path = "runs/ablate"
    evals: Sequence[str] = ()
    few: str = "25"
    video_size: int | None = None
    options: Mapping[str, Any] | None = None
    checkpoints: Sequence[str] = ()
    changes: Mapping[str, Any] | None = None

    def plan(self) -> Plan:
        """Plans all runs; trains nothing, but checks every config and opens all data."""
        table, out = find_table(self.name), Path(self.out)
        chosen = table.choose(tuple(self.rows))
        if not (0 if self.checkpoints else 1) <= self.seeds <= MOST_SEEDS:
            expected = f"a number of seeds, 1 to {MOST_SEEDS}, or 0 with --checkpoint"
            raise UserError(f"--seeds {self.seeds}: expected {expected}")
        if self.video_size is not None and self.video_size < 1:
            raise UserError(f"--video-size {self.video_size}: expected 1 or more")
        base = configure(self.preset, dict(self.changes or {}))
        data, skip = self.data or f"scenes:{SCENES}:{base.image_size}", base.data.skip
        key, count, workers = _images(data, skip, out)
        size, asks = base.image_size, table.asks
        asked = questions(
            asks, data, size, self.evals, self.few, self.video_size, skip, self.options
        )
        runs, folders = out / "runs", dict[str, Path]()
        trials, problems = list[Trial](), list[str]()
        for row, seed in itertools.product(chosen, range(self.seeds)):
            try:
                config = configure(base, row.of(base) | {"seed": base.seed + seed})
                updates = config.optim.epochs * steps_per_epoch(range(count), config)
            except UserError as error:
                problems += [f"{row.name}: {message}" for message in error.args]
                continue
            run = identity(config, key)
            # Equal rows share the directory, which is named after the first of them; another table
            # may have made it under another name.
            known = sorted(p for p in runs.glob(f"*-{config.seed}-{run}") if p.is_dir())
            new = runs / f"{row.name}-{config.seed}-{run}"
            folders.setdefault(run, known[0] if known else new)
            config = _side_by_side(config, workers)
            trials.append(Trial(folders[run], data, config, asked, row=row.name, updates=updates))
        if problems:
            raise UserError(*dict.fromkeys(problems))
        trials += [_given(text, runs, data, asked) for text in self.checkpoints]
        shown = self.preset.arch if isinstance(self.preset, Config) else str(self.preset)
        return Plan(Path(self.name).stem, table, shown, base, data, tuple(trials), out)


def identity(config: Config, data: str) -> str:
    """Hash that is equal for equal runs: without the table and `runtime`, which do not matter."""
    tree = config.model_dump(mode="json", exclude={"runtime"})
    text = json.dumps([tree, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _images(data: str, skip: str | None, out: Path) -> tuple[str, int, int]:
    """Fingerprint of the images to pretrain on, their number, and workers to read them with."""
    if is_scenes(data):
        count, size, seed = parse_scenes(data)
        return f"scenes:{count}:{size}:{seed}", count, 0
    if not (out / "runs").exists():
        keep_outside(out, data)
    images = without_skipped(open_images(data), skip)
    return images.fingerprint, len(images), default_workers(images)


def _side_by_side(config: Config, workers: int) -> Config:
    """Shares the workers between runs; on a CPU always one thread, so that rounding is equal."""
    changes: dict[str, Any] = {}
    if not on_gpu(config) and config.runtime.threads is None:
        changes["runtime.threads"] = 1
    if workers and config.runtime.workers is None:
        changes["runtime.workers"] = max(1, workers // len(places(config, None)))
    return override(config, changes)


def _given(text: str, runs: Path, data: str, asked: tuple[Question, ...]) -> Trial:
    """Trial of ``NAME=FILE``, or of the newest checkpoint if FILE is a run."""
    name, _, file = text.partition("=")
    if not name or not file or not Path(file).exists():
        raise UserError(f"--checkpoint {text}: expected NAME=FILE, with a file that exists")
    if (Path(file) / "run.json").exists():
        file = str(Run(file).checkpoint)  # a run keeps its path when it resumes
    state = Path(file).stat()
    key = f"{Path(file).resolve()} {state.st_size} {state.st_mtime_ns}"
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name)
    folder = runs / f"checkpoint-{slug}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"
    return Trial(folder, data, None, asked, file, name)


# ------------------------------------------------------------------------------ dry run


def describe(planned: Plan, jobs: int | None = None) -> str:
    """Lists the runs of a plan, and estimates how long they take."""
    trials = planned.runs.values()
    known = [trial for trial in trials if trial.answers() is not None]
    left = sum(trial.updates - last_update(trial.path) for trial in trials)
    side = len(places(planned.base, jobs))
    lines = wrap(f"{planned.name}: {planned.table.about}", 80)
    lines += [f"preset {planned.preset}, {planned.data}"] if planned.trains else []
    lines += wrap(planned.table.note, 80)
    lines += [
        f"  {t}: {t.updates:,} updates in {t.path.name}" if t.config else f"  {t}: {t.encoder}"
        for t in planned.trials
    ]
    lines += [
        f"{len(trials)} runs, {len(known)} of them done, {left:,} updates left, {side} at a time"
    ]
    started = [outcome for outcome in map(Outcome.of_trial, trials) if outcome.seconds]
    if rates := sorted(outcome.updates / outcome.seconds for outcome in started):
        seconds = left / rates[len(rates) // 2] / min(side, max(1, len(trials) - len(known)))
        lines.append(f"about {duration(seconds)}, by the runs in {planned.out}")
    elif left and (preset := PRESETS.get(planned.preset)) and preset.cost.is_known:
        text = f"one run of {preset.name} takes {preset.cost.text}, on the data it was made for"
        lines.append(text)
    return "\n".join(lines)
