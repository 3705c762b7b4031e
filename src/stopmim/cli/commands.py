"""``stopmim``: parse, call one library function, print. No logic lives here.

torch is imported inside the commands that need it, so that ``--help`` and a typo answer at once.
"""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, Suppress, arg, subcommand

from stopmim._version import __version__
from stopmim.base.errors import DataError, RowsFailedError, UserError
from stopmim.cli.evaluate import Eval, option
from stopmim.cli.words import one_line, printable, split_changes

Changes = Suppress[dict[str, Any]]
PATIENCE = 3.0  # seconds for a rank to say what is wrong
PAPER = (12_811, 768, 1000)  # images, features and classes of the 1 % protocol with a ViT-B


@dataclass(frozen=True)
class Demo:
    """Pretrain, evaluate and report on embedded data: five minutes on two CPU cores."""

    out: Path = Path("runs/demo")
    """run directory"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.cli.demo import demo

        demo(self.out, self.changes)


@dataclass(frozen=True)
class Pretrain:
    """Train an encoder on unlabelled images, or go on with a run that was stopped.

    Any key of the config may follow as an option: --optim.epochs 100 --positions.sigma 0.1.
    --dry-run shows all keys with their meaning; its output can be saved, edited and given as
    --preset FILE.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """a folder, tar shards, Parquet, .npz, FOLDER@LIST, or scenes[:count[:size[:seed]]]"""
    out: Annotated[Path | None, option("RUN")] = None
    """run directory; if a run is in it already, go on with that"""
    preset: Annotated[str, arg(metavar="NAME|FILE")] = "vit_b16_stop"
    """what the other options change: see `stopmim presets`, or a YAML file"""
    dry_run: bool = False
    """print the resolved config and the size of the model, or with --slurm the script, and stop"""
    slurm: Annotated[str | None, option("NODESxGPUS")] = None
    """train in a SLURM job on so many nodes with so many GPUs each, as 2x8"""
    sbatch: Annotated[str, option("OPTIONS")] = ""
    """with --slurm: further options of sbatch, as "partition=gpu time=24:00:00" """
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        if self.sbatch and not self.slurm:
            raise UserError("pretrain: --sbatch has no effect without --slurm NODESxGPUS")
        if self.dry_run and not self.slurm:
            from stopmim.method.build import configure, describe

            print(describe(configure(self.preset, self.changes)), end="")
            return
        if self.out is None:
            raise UserError(
                "pretrain: --out is missing: name the run directory, as --out runs/first"
            )
        if self.slurm:
            from stopmim.train.slurm import script, submit

            text = script(self.data, self.out, self.preset, self.changes, self.slurm, self.sbatch)
            print(text if self.dry_run else f"job {submit(text, self.out)}, log in {self.out}")
            return
        from stopmim.train.loop import pretrain

        run = pretrain(self.data, self.out, self.preset, **self.changes)
        if _is_first():
            print(f"{run.checkpoint}")


@dataclass(frozen=True)
class Ablate:
    """Train and measure the rows of a table of the paper or of your own, or go on with that.

    Any key of the config may follow, and then holds for all rows. Exit code 9: a row failed; the
    table has the others.
    """

    table: Annotated[Positional[str], option("[TABLE|FILE.yaml]")] = ""
    """see --list; or a file with a table of your own, see docs/ablations.md"""
    list: bool = False
    """show the tables, or the rows of one, with the numbers of the paper"""
    data: Annotated[str | None, option("DATA")] = None
    """to pretrain on; default: scenes:4096 of the preset's size"""
    preset: Annotated[str, arg(metavar="NAME|FILE")] = "tiny_cpu_quick"
    """what the rows change: see `stopmim presets`, or a YAML file"""
    seeds: int = 1
    """of every row"""
    rows: Annotated[tuple[str, ...], option("ROW ...")] = ()
    """some of the rows; default: all"""
    eval: Annotated[tuple[str, ...], option("[RECIPE=]DATA ...")] = ()
    """labelled images with a train and a test part, or videos, to evaluate on; the recipe is one of
    `eval linear`; default: --data"""
    few: Annotated[str, arg(metavar="N|FILE")] = "25"
    """labelled images per class where labels are few, or a file with their names"""
    video_size: Annotated[int | None, option("INT")] = None
    """edge of the shorter side of the frames that tracking sees; default: as `eval tracking`"""
    checkpoint: Annotated[tuple[str, ...], option("NAME=FILE ...")] = ()
    """encoders of others, to be evaluated beside"""
    jobs: Annotated[int | None, option("INT")] = None
    """runs at a time; default: one per GPU, or per core if there is none"""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/ablate")
    """OUT/TABLE/table.html and the like; runs are in OUT/runs, for all tables"""
    dry_run: bool = False
    """show the runs and about how long they take, and stop"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        if self.list or not self.table:
            from stopmim.ablations.paper import listing

            print(listing(self.table or None))
            return
        from stopmim.ablations.run import Ablation, ablate, describe

        planned = Ablation(
            name=self.table,
            data=self.data,
            preset=self.preset,
            seeds=self.seeds,
            rows=self.rows,
            out=self.out,
            evals=self.eval,
            few=self.few,
            video_size=self.video_size,
            checkpoints=self.checkpoint,
            changes=self.changes,
        ).plan()
        if self.dry_run:
            print(describe(planned, self.jobs))
            return
        found = ablate(planned, self.jobs)
        print(f"{found.text}\n\n{found.page}")
        if found.failed:
            raise RowsFailedError(f"{len(found.failed)} runs failed, as {found.failed[0]}")


@dataclass(frozen=True)
class Check:
    """Look at every image: broken ones, copies, sizes, kinds, and what training would take."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """a folder of images, or scenes[:count[:size[:seed]]]"""
    preset: Annotated[str, arg(metavar="NAME|FILE")] = "vit_b16_stop"
    """what the images are meant for: see `stopmim presets`, or a YAML file"""
    fix_list: Annotated[Path | None, option("FILE.jsonl")] = None
    """write the broken images there; pretrain --data.skip FILE.jsonl and eval --skip FILE.jsonl
    leave them out"""
    limit: Annotated[int | None, option("INT")] = None
    """look at this many of each part, evenly spread, instead of all"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.data.check import check

        report = check(
            self.data, self.preset, self.changes, fix_list=self.fix_list, limit=self.limit
        )
        print(report.text())
        if report.problem:
            raise DataError(report.problem)


@dataclass(frozen=True)
class Doctor:
    """Say whether a run is healthy, why, what to change and which checkpoint to keep.

    Exit code 0: healthy, or too early to say; 10: partial collapse; 11: collapse; 12: shortcut;
    13: over-training.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """a run directory; or a checkpoint, which is then measured on --data"""
    data: Annotated[str | None, option("DATA")] = None
    """measure now, on these images, instead of reading what training logged"""
    json: bool = False
    """the diagnosis as one line of JSON"""

    def __call__(self) -> int:
        from stopmim.health.doctor import examine

        diagnosis = examine(self.run, self.data)
        print(diagnosis.as_json() if self.json else diagnosis)
        return diagnosis.exit_code


@dataclass(frozen=True)
class Analyse:
    """Draw the analyses of the paper, from runs: one PNG each."""

    what: Positional[
        Literal[
            "noise",
            "similarity",
            "prediction",
            "collapse",
            "smoothing",
            "pca",
            "masks",
            "uncertainty",
            "all",
        ]
    ]
    """noise: sigma against |A| and |m~|; similarity: of positions; prediction: heat maps;
    collapse: why A is tied; smoothing: the best predictor; pca: feature maps; masks: their
    preview; uncertainty: error, and spread over noise"""
    runs: Annotated[Positional[tuple[Path, ...]], option("[RUN ...]")] = ()
    """run directories; several are compared"""
    out: Annotated[Path | None, option("FOLDER")] = None
    """folder for the figures; default: RUN/figures"""
    data: Annotated[str | None, option("DATA")] = None
    """images to look at; default: those the run was trained on"""

    def __call__(self) -> None:
        from stopmim.insight.analyse import analyse

        for path in analyse(self.what, self.runs, self.out, self.data):
            print(path)


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run, or about several to compare."""

    runs: Annotated[Positional[tuple[Path, ...]], option("RUN [RUN ...]")]
    """run directories; the first is the subject, the others are set beside it"""
    out: Annotated[Path | None, option("FILE")] = None
    """where to write; default: RUN/report.html"""
    data: Annotated[str | None, option("DATA")] = None
    """images to show; default: those the run was trained on"""

    def __call__(self) -> None:
        from stopmim.data.sources.open import open_images
        from stopmim.insight.report.page import write_report
        from stopmim.runs.run import Run

        if not self.runs:
            raise UserError("report: name a run directory, as runs/first")
        images = None if self.data is None else open_images(self.data)
        first, *others = map(Run, self.runs)
        print(write_report(first, images, others=others, out=self.out))


Branch = Literal["target", "context"]


@dataclass(frozen=True)
class Inspect:
    """Say what a file is: whose, which network, how far trained, what can be loaded from it."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """a run, a checkpoint, a folder of Hugging Face, or a file of ours or of others"""
    heads: Annotated[int | None, option("INT")] = None
    """attention heads, of a width that is no known size"""

    def __call__(self) -> None:
        from stopmim.weights.inspect import identify

        print(identify(self.file, self.heads))


@dataclass(frozen=True)
class Export:
    """Write an encoder in the form others load, with a README.md that says how."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """what to export: anything that `stopmim inspect` knows"""
    to: Annotated[str, arg(metavar="FORMAT")]
    """timm, hf, onnx, safetensors; ijepa: encoder, target encoder and predictor, as I-JEPA's code
    saves them; mae: encoder and decoder under the names of MAE's code"""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """a new folder"""
    branch: Branch = "target"
    """target: the EMA encoder, which the papers evaluate; context: the trained one"""
    heads: Annotated[int | None, option("INT")] = None
    """attention heads, of a width that is no known size"""

    def __call__(self) -> None:
        from stopmim.weights.export import export

        print(export(self.file, self.to, self.out, branch=self.branch, heads=self.heads))


@dataclass(frozen=True)
class Features:
    """Write the features of images to a table: names, features, labels if there are any."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """a folder, tar shards, Parquet, .npz, FOLDER@LIST, or scenes[:count[:size[:seed]]]"""
    encoder: Annotated[str, arg(metavar="FILE")]
    """anything that `stopmim inspect` knows, or timm:NAME"""
    out: Annotated[Path, arg(metavar="FILE")]
    """.npz or .parquet"""
    layers: int = 1
    """that many of the last blocks, one after the other"""
    pool: Literal["auto", "mean", "cls"] = "auto"
    """mean over patches, or the class token; auto: the class token if there is one"""
    size: Annotated[int | None, option("INT")] = None
    """edge of the middle square that is shown; default: what the encoder was made for"""
    skip: Annotated[Path | None, option("FILE.jsonl")] = None
    """leave out the images that it lists: see `stopmim check --fix-list`"""
    branch: Branch = "target"
    """target: the EMA encoder, which the papers evaluate; context: the trained one"""
    heads: Annotated[int | None, option("INT")] = None
    """attention heads, of a width that is no known size"""
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __call__(self) -> None:
        from stopmim.evals.feature_files import write_features

        print(
            write_features(
                self.data,
                self.encoder,
                self.out,
                layers=self.layers,
                pool=self.pool,
                size=self.size,
                skip=self.skip,
                branch=self.branch,
                heads=self.heads,
                device=self.device,
            )
        )


# What each benchmark heeds, besides --out.
HEEDED = {
    "step": ("preset", "masks", "twin", "profile", "rounds", "changes"),
    "masks": ("preset", "rounds", "changes"),
    "growth": ("rounds", "changes"),
    "loader": ("rounds",),
    "index": ("rounds",),
    "probe": ("paper",),
}


@dataclass(frozen=True)
class Bench:
    """Measure speed; one JSON line for each figure."""

    what: Positional[Literal["step", "masks", "growth", "loader", "index", "probe"]]
    """step: forward, backward, update; masks: drawing them; growth: step time against its causes;
    loader: reading images, against the usual pipeline; index: finding them; probe: linear
    classifiers"""
    preset: Annotated[str | None, option("NAME|FILE")] = None
    """default: vit_b16_stop on a GPU, tiny_cpu on a CPU, with the usual batch of one GPU"""
    masks: Literal["own", "published"] = "own"
    """step: shapes of the config's likeliest masks, or the mean token counts of released ones"""
    paper: bool = False
    """probe: the size of ImageNet with 1 % of labels, 12,811 x 768 with 1,000 classes"""
    twin: bool = True
    """step: time the sine-cosine twin of a StoP preset too, in turn, and print the ratios"""
    profile: bool = False
    """step: what its time goes to, kernel by kernel"""
    rounds: int = 10
    """how often each is measured"""
    out: Annotated[Path | None, option("FOLDER")] = None
    """folder for a dated Markdown file with the figures, to which others of the day are added"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.bench import step as bench
        from stopmim.bench.timing import check_folder

        if self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: at least one is needed")
        for name in ("preset", "masks", "paper", "twin", "profile", "rounds"):
            if name not in HEEDED[self.what] and getattr(self, name) != getattr(Bench, name):
                raise UserError(f"bench {self.what}: --{name} has no effect")
        if self.changes and "changes" not in HEEDED[self.what]:
            raise UserError(f"bench {self.what}: --{next(iter(self.changes))} has no effect")
        if self.out is not None:
            check_folder(self.out)
        options: dict[str, Any] = {"rounds": self.rounds, "out": self.out}
        match self.what:
            case "step":
                options |= {"masks": self.masks, "twin": self.twin, "profile": self.profile}
                print(bench.bench_step(self.preset, self.changes, **options))
            case "masks":
                print(bench.bench_masks(self.preset, self.changes, **options))
            case "growth":
                from stopmim.bench.growth import bench_growth

                print(bench_growth(self.changes, **options))
            case "loader":
                from stopmim.bench.loader import bench_loader

                print(bench_loader(**options))
            case "index":
                from stopmim.bench.loader import bench_index

                print(bench_index(**options))
            case "probe":
                from stopmim.bench.probe import bench_probe

                print(bench_probe(*(PAPER if self.paper else ()), out=self.out))


@dataclass(frozen=True)
class Presets:
    """List the presets."""

    def __call__(self) -> None:
        from stopmim.config.presets import PRESETS

        for name, preset in PRESETS.items():
            print(f"{name:28} {str(preset.__doc__).splitlines()[0]}")


Command = (
    Annotated[Demo, subcommand("demo")]
    | Annotated[Pretrain, subcommand("pretrain")]
    | Annotated[Ablate, subcommand("ablate")]
    | Annotated[Check, subcommand("check")]
    | Annotated[Eval, subcommand("eval")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Analyse, subcommand("analyse")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Features, subcommand("features")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Presets, subcommand("presets")]
)


# `eval linear --data`, not `eval protocol:linear --protocol.data`.
FLAT = (OmitArgPrefixes, OmitSubcommandPrefixes)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; errors.py has the meaning of each."""
    # A rank that is lost is one line of ours, not also a C++ stack. For torch, before its import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words  # for us: a traceback instead of one line
    try:
        command = parse([word for word in words if word != "--debug"])
        return (command() or 0) if command is not None else 0
    except UserError as error:
        if debug:
            raise
        for line in str(error).splitlines():
            print(f"stopmim: error: {printable(line)}", file=sys.stderr)
        if not str(error):
            _leave_last(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `stopmim ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        text = printable(f"{type(error).__name__}: {error}")
        print(f"stopmim: error: internal error: {text}; --debug shows where", file=sys.stderr)
        return 1


def parse(words: list[str]) -> Callable[[], int | None] | None:
    """The command that `words` ask for; None if they asked for help and got it."""
    if words == ["--version"]:
        print(f"stopmim {__version__}")
        return None
    # Options of eval such as --data and --seed are its own.
    words, changes = (words, {}) if words[:1] == ["eval"] else split_changes(words)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Any = tyro.cli(Command, prog="stopmim", args=words, config=FLAT)
    except SystemExit as stop:
        if not stop.code:
            return None
        raise UserError(one_line(said.getvalue(), words) if _is_first() else "") from None
    if changes and not hasattr(command, "changes"):
        raise UserError(f"{words[0]}: takes no config key, got --{next(iter(changes))}")
    if changes:
        command.changes.update(changes)
    return command


def _is_first() -> bool:
    """Whether this is the process that speaks, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _leave_last(code: int) -> None:
    """Waits, as a rank that leaves the word to another: launchers end all when the first ends."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(PATIENCE)


if __name__ == "__main__":
    sys.exit(main())
