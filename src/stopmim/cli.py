"""``stopmim``: parse, call one library function, print. No logic lives here.

torch is imported inside the commands that need it, so that ``--help`` and a typo answer at once.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import tyro
from tyro.conf import Positional, Suppress, arg, subcommand

from stopmim._version import __version__
from stopmim.config import Config, Section, parse_yaml
from stopmim.errors import DataError, UserError

Changes = Suppress[dict[str, Any]]


@dataclass(frozen=True)
class Demo:
    """Pretrain, evaluate and report on embedded data: five minutes on two CPU cores."""

    out: Path = Path("runs/demo")
    """run directory"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.demo import demo

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
    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """run directory; if a run is in it already, go on with that"""
    preset: Annotated[str, arg(metavar="NAME|FILE")] = "vit_b16_stop"
    """what the other options change: see `stopmim presets`, or a YAML file"""
    dry_run: bool = False
    """print the resolved config and the size of the model, and stop"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        if self.dry_run:
            from stopmim.plan import configure, describe

            print(describe(configure(self.preset, self.changes)), end="")
            return
        if self.out is None:
            raise UserError(
                "pretrain: --out is missing: name the run directory, as --out runs/first"
            )
        from stopmim.train import pretrain

        run = pretrain(self.data, self.out, self.preset, **self.changes)
        print(f"{run.checkpoint}")


@dataclass(frozen=True)
class Check:
    """Look at every image: broken ones, copies, sizes, kinds, and what training would take."""

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """a folder of images, or scenes[:count[:size[:seed]]]"""
    preset: Annotated[str, arg(metavar="NAME|FILE")] = "vit_b16_stop"
    """what the images are meant for: see `stopmim presets`, or a YAML file"""
    fix_list: Annotated[Path | None, arg(metavar="FILE.jsonl")] = None
    """write the broken images there; pretrain --data.skip FILE.jsonl leaves them out"""
    limit: int | None = None
    """look at this many, evenly spread, instead of all"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim.check import check

        report = check(
            self.data, self.preset, self.changes, fix_list=self.fix_list, limit=self.limit
        )
        print(report.text())
        if report.problem:
            raise DataError(report.problem)


@dataclass(frozen=True)
class Bench:
    """Measure speed; one JSON line for each figure."""

    what: Positional[Literal["step", "masks", "growth", "loader"]]
    """step: forward, backward, update; masks: drawing them; growth: step time against its causes;
    loader: reading images, against the usual pipeline"""
    preset: str | None = None
    """default: vit_b16_stop on a GPU, tiny_cpu on a CPU, with the usual batch of one GPU"""
    masks: Literal["own", "published"] = "own"
    """step: shapes of the config's likeliest masks, or the mean token counts of released ones"""
    twin: bool = True
    """step: time the sine-cosine twin of a StoP preset too, in turn, and print the ratios"""
    rounds: int = 10
    """how often each is measured"""
    out: Path | None = None
    """folder for a dated Markdown file with the figures"""
    changes: Changes = field(default_factory=dict)

    def __call__(self) -> None:
        from stopmim import bench

        options: dict[str, Any] = {"rounds": self.rounds, "out": self.out}
        match self.what:
            case "step":
                options |= {"masks": self.masks, "twin": self.twin}
                print(bench.bench_step(self.preset, self.changes, **options))
            case "masks":
                print(bench.bench_masks(self.preset, self.changes, **options))
            case "growth":
                print(bench.bench_growth(self.changes, **options))
            case "loader":
                from stopmim.bench_loader import bench_loader

                print(bench_loader(**options))


@dataclass(frozen=True)
class Presets:
    """List the presets."""

    def __call__(self) -> None:
        from stopmim.presets import PRESETS

        for name, preset in PRESETS.items():
            print(f"{name:28} {str(preset.__doc__).splitlines()[0]}")


Command = (
    Annotated[Demo, subcommand("demo")]
    | Annotated[Pretrain, subcommand("pretrain")]
    | Annotated[Check, subcommand("check")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Presets, subcommand("presets")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; errors.py has the meaning of each."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words  # for us: a traceback instead of one line
    try:
        command = parse([word for word in words if word != "--debug"])
        if command is not None:
            command()
        return 0
    except UserError as error:
        if debug:
            raise
        for line in str(error).splitlines():
            print(f"stopmim: error: {printable(line)}", file=sys.stderr)
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


def parse(words: list[str]) -> Demo | Pretrain | Check | Bench | Presets | None:
    """The command that `words` ask for; None if they asked for help and got it."""
    if words == ["--version"]:
        print(f"stopmim {__version__}")
        return None
    words, changes = split_changes(words)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Any = tyro.cli(Command, prog="stopmim", args=words)
    except SystemExit as stop:
        if not stop.code:
            return None
        raise UserError(_one_line(said.getvalue(), words)) from None
    if changes and not hasattr(command, "changes"):
        raise UserError(f"{words[0]}: takes no config key, got --{next(iter(changes))}")
    if changes:
        command.changes.update(changes)
    return command


def _one_line(box: str, words: list[str]) -> str:
    """What tyro says in a titled box, as one line."""
    text = re.sub(r"[\u2500-\u257f]|-{3,}", " ", box)  # its lines and corners
    _, *lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    text = " ".join(lines).partition("For full helptext")[0]
    said, _, near = text.partition("Perhaps you meant:")
    hint = f'did you mean "{near.split()[0]}"?' if near else ""
    command = f" {words[0]}" if words and words[0] in text else ""
    return "; ".join(filter(None, [said.strip(" ."), hint, f"see stopmim{command} --help"]))


def split_changes(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes the options that are config keys (``--optim.lr 1e-3``) out of the command line."""
    rest, changes, words = [], {}, list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("--") or not ("." in key or key in Config.model_fields):
            rest.append(word)
            continue
        values = [value] if equals else []
        while len(values) < _arity(key) and words:
            values.append(words.pop(0))
            if values[0].startswith("["):
                break
        if not values:
            raise UserError(f"--{name}: a value is missing")
        parsed = [parse_yaml(v, f"--{name}") for v in values]
        changes[key] = parsed if _arity(key) == 2 and len(parsed) == 2 else parsed[0]
    return rest, changes


def _arity(key: str) -> int:
    """How many words a config key takes: two for a pair, as ``--optim.ema 0.996 1``."""
    node: Any = Config
    for name in key.split("."):
        if not (isinstance(node, type) and issubclass(node, Section)):
            return 1
        field_info = node.model_fields.get(name)
        node = field_info.annotation if field_info else None
    return 2 if get_origin(node) is tuple else 1


def printable(text: str) -> str:
    """`text` without control characters or halves of characters, safe for a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


if __name__ == "__main__":
    sys.exit(main())
