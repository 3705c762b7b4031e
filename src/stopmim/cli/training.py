"""``stopmim demo``, ``check``, ``pretrain``, ``repair`` and ``ablate``."""

import shlex
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from stopmim.base.console import busy, is_first_rank, say
from stopmim.base.errors import (
    CheckpointError,
    DataError,
    InterruptedRunError,
    RowsFailedError,
    UserError,
)
from stopmim.base.signals import interrupting
from stopmim.base.tables import counted
from stopmim.cli.options import Changes, DataSource, PresetOrFile, PresetOrNothing, option
from stopmim.evals.protocols import Linear, Lowshot, Protocol


@dataclass(frozen=True)
class Demo:
    """Pretrain, evaluate and report on rendered scenes: five minutes on two CPU cores."""

    out: Path = Path("runs/demo")
    """run directory"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.cli.demo import demo

        demo(self.out, self.changes)


@dataclass(frozen=True)
class Check:
    """Look for broken images and duplicates, and recommend a command to train with."""

    data: DataSource
    preset: PresetOrNothing = None
    fix_list: Annotated[Path | None, option("FILE.jsonl")] = None
    """write a list of broken and leaked images, for pretrain --data.skip and eval --skip"""
    limit: Annotated[int | None, option("INT")] = None
    """read only this many images of each split, evenly spaced"""
    verify: bool = False
    """only prove that shards are, byte for byte, those that `stopmim pack` wrote"""
    against: Annotated[Path | None, option("RUN|FILE.jsonl")] = None
    """compare the content of all images with what was recorded there; record it the first time"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        if self.verify:
            from stopmim.data.sources.packed import verify_shards

            index = verify_shards(self.data)
            images = sum(shard.images for shard in index.shards)
            shards = counted(len(index.shards), "shard")
            print(f"{self.data}: intact, {counted(images, 'image')} in {shards}")
            return
        from stopmim.data.checks.check import check
        from stopmim.train.advice import recommend
        from stopmim.train.plan import plan_for

        plan = plan_for(self.data, self.preset, self.changes)
        report = check(
            self.data, plan.config, fix_list=self.fix_list, limit=self.limit, against=self.against
        )
        print(report.text())
        if report.problem and not (self.fix_list and report.only_broken):
            raise DataError(report.problem)
        if self.fix_list:
            count = len(report.bad) + len(report.test_bad)
            print(f"\nwrote {self.fix_list}: {count:,} images to leave out, with")
            name = shlex.quote(str(self.fix_list))
            print(f"pretrain --data.skip {name} and eval --skip {name}")
        # The list solves the problem, but a recommended command would have to name it.
        if report.problem or plan.facts.count == 1:
            return
        print(f"\n{recommend(self.data, plan, chosen=self.preset is None)}")


@dataclass(frozen=True)
class Repair:
    """Find what is damaged in a run directory, and restore what can be restored.

    Damaged files are moved to RUN/damaged, never deleted. Exit code 4: the run
    cannot be resumed.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """a run directory that nothing is training in"""
    dry_run: bool = False
    """say what would be done"""

    def __call__(self) -> int:
        from stopmim.runs.repair import repair

        found = repair(self.run, dry_run=self.dry_run)
        print(found)
        return 0 if found.resumes_at is not None else CheckpointError.exit_code


@dataclass(frozen=True)
class Pack:
    """Write images to shards that are faster to read, with an index and checksums; or resume."""

    data: DataSource
    out: Annotated[Path, arg(metavar="SHARDS")]
    """folder for the shards and index.json"""
    size: Annotated[int | None, option("PIXELS")] = None
    """make larger images smaller: their shorter side gets this long; default: keep all bytes"""
    quality: int = 90
    """of the JPEGs that --size writes, 1 to 100"""
    format: Literal["tar", "parquet"] = "tar"
    """parquet: keeps all labels, tar: the class"""
    shard_mib: int = 256
    """about how large a shard becomes"""
    shuffle: Annotated[bool | None, option("BOOL")] = None
    """mix the images, since runs mix only neighbours; default: if there are more than 16,384"""
    workers: Annotated[int | None, option("INT")] = None
    """processes that read and encode; default: one per core"""

    def __call__(self) -> None:
        from stopmim.data.pack import pack

        options: Any = {field.name: getattr(self, field.name) for field in fields(self)}
        options["kind"] = options.pop("format")
        try:
            index = pack(**options)
        except KeyboardInterrupt:
            raise InterruptedRunError(interrupting(), f"{self.out}: stopped") from None
        images = sum(shard.images for shard in index.shards)
        mib = sum(shard.bytes for shard in index.shards) / 2**20
        run, shards = Path("runs") / self.out.resolve().name, counted(len(index.shards), "shard")
        print(
            f"{self.out}: {counted(images, 'image')} in {shards}, {mib:,.0f} MiB\n"
            f"prove them with   {shlex.join(['stopmim', 'check', str(self.out), '--verify'])}\n"
            f"train with        "
            f"{shlex.join(['stopmim', 'pretrain', str(self.out), '--out', str(run)])}"
        )


@dataclass(frozen=True)
class Pretrain:
    """Train an encoder on unlabelled images, or resume a run that was stopped.

    Config keys are options too: --optim.epochs 100 --positions.sigma 0.1;
    --dry-run prints all of them.
    """

    data: DataSource
    out: Annotated[Path | None, option("RUN")] = None
    """run directory; a run that is already there is resumed"""
    preset: PresetOrNothing = None
    dry_run: bool = False
    """print every config key with its meaning, as a file for --preset, or the SLURM script"""
    slurm: Annotated[str | None, option("NODESxGPUS")] = None
    """submit a SLURM job on that many nodes with that many GPUs each, for example 2x8"""
    sbatch: Annotated[str, option("OPTIONS")] = ""
    """more options for sbatch, for example "partition=gpu time=24:00:00" """
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        if self.sbatch and not self.slurm:
            raise UserError("pretrain: --sbatch has no effect without --slurm NODESxGPUS")
        if self.dry_run and not self.slurm:
            from stopmim.method.build import describe
            from stopmim.train.plan import dry_config

            print(describe(dry_config(self.data, self.preset, self.changes)), end="")
            return
        if self.out is None:
            raise UserError("pretrain: --out is missing; name the run directory: --out runs/first")
        if self.slurm and self.preset is None:
            raise UserError(
                "pretrain: --slurm needs --preset: the choice would be made for this machine; "
                "`stopmim presets` lists them"
            )
        if self.slurm and self.preset:
            from stopmim.train.slurm import script, submit

            text = script(self.data, self.out, self.preset, self.changes, self.slurm, self.sbatch)
            print(text if self.dry_run else f"job {submit(text, self.out)}, log in {self.out}")
            return
        with busy("loading torch"):
            from stopmim.runs.next_commands import next_commands
            from stopmim.train.loop import pretrain

        run = pretrain(self.data, self.out, self.preset, **self.changes)
        if is_first_rank():
            say(*next_commands(run).splitlines())
            print(run.checkpoint)


SET_BY_ABLATE = ("layers", "recipe", "per_class", "list")  # by the table, --eval and --few


def _passed_on(*kinds: type[Protocol]) -> Any:
    """The options of `kinds` that `ablate` passes on: all that it does not set itself."""
    known = {f.name: f for kind in kinds for f in fields(kind)}  # type: ignore[arg-type]
    hidden = [
        (name, known[name].type, field(default=known[name].default, init=False))
        for name in SET_BY_ABLATE
    ]
    body = {"__post_init__": lambda self: None}  # protocols check their own fields
    return make_dataclass("Evaluation", hidden, bases=kinds, namespace=body, frozen=True)


Evaluation: Any = _passed_on(Linear, Lowshot)


@dataclass(frozen=True)
class Ablate:
    """Train and evaluate the rows of a table, the paper's or your own, or resume.

    Config keys are options too, for all rows. Exit code 9: some runs failed.
    """

    table: Annotated[Positional[str], option("[TABLE|FILE.yaml]")] = ""
    """a name from --list, or a file with your own table: see docs/ablations.md"""
    list: bool = False
    """show the tables, or the rows of one, with the paper's numbers"""
    page: Annotated[Path | None, option("RECORDS")] = None
    """print a page with every row of the paper beside the records in this folder, as Markdown"""
    data: Annotated[str | None, option("DATA")] = None
    """images to pretrain on; default: scenes:4096 of the preset's size"""
    preset: PresetOrFile = "tiny_cpu_quick"
    seeds: int = 1
    """runs per row; 0: train nothing, evaluate what --checkpoint names"""
    rows: Annotated[tuple[str, ...], option("ROW ...")] = ()
    """rows to run; default: all"""
    eval: Annotated[tuple[str, ...], option("[RECIPE=]DATA ...")] = ()
    """labelled images or videos to evaluate on, with a recipe of eval linear; default: --data"""
    few: Annotated[str, arg(metavar="N|FILE")] = "25"
    """labelled images per class in low-shot protocols, or a file with their names"""
    video_size: Annotated[int | None, option("INT")] = None
    """shorter edge of the frames for tracking; default: as eval tracking"""
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Annotated[tuple[str, ...], option("NAME=FILE ...")] = ()
    """other encoders to evaluate in the same table"""
    jobs: Annotated[int | None, option("INT")] = None
    """runs at a time; default: one per GPU, or per core without a GPU"""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/ablate")
    """tables go to OUT/TABLE/, runs of all tables to OUT/runs/"""
    dry_run: bool = False
    """show the runs and about how long they take"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        if self.page is not None:
            from stopmim.ablations.page import page

            if self.table:
                raise UserError(f"ablate {self.table}: --page is about all tables; name none")
            print(page(self.page), end="")
            return
        if self.list or not self.table:
            from stopmim.ablations.paper import listing

            print(listing(self.table or None))
            return
        from stopmim.ablations.run import Ablation, ablate, describe

        names = ("data", "preset", "seeds", "rows", "few", "video_size", "out", "changes")
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        same["options"] = {
            f.name: value
            for f in fields(self.evaluation)
            if f.init and (value := getattr(self.evaluation, f.name)) != f.default
        }
        wanted = Ablation(self.table, evals=self.eval, checkpoints=self.checkpoint, **same)
        planned = wanted.plan()
        if self.dry_run:
            print(describe(planned, self.jobs))
            return
        found = ablate(planned, self.jobs)
        print(f"{found.text}\n\n{found.page}")
        if found.failed:
            raise RowsFailedError(f"{len(found.failed)} runs failed, first {found.failed[0]}")
