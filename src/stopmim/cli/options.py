"""Options that several commands share. Their texts are the help."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, Suppress, arg


def option(metavar: str, text: str | None = None) -> Any:
    """An option that may be left out: the name of its value, and its help text.

    The help text says what happens without it; tyro's "(default: None)" would say it again.
    """
    return arg(metavar=metavar, help=text, help_behavior_hint="")


def choices(metavar: str | None = None, **meanings: str) -> Any:
    """An option with fixed values: one line of help for each."""
    lines = [f"{name}: {meaning}" for name, meaning in meanings.items()]
    return arg(metavar=metavar, help=";\n".join(lines))


Changes = Suppress[dict[str, Any]]  # config keys among the options, as --optim.lr 1e-3
DataSource = Annotated[
    Positional[str],
    arg(
        metavar="DATA",
        help="a folder, tar shards, Parquet, .npz, FOLDER@LIST, or scenes[:count[:size[:seed]]]",
    ),
]
PresetOrFile = Annotated[
    str, arg(metavar="NAME|FILE", help="a name from `stopmim presets`, or a YAML file")
]
Branch = Annotated[
    Literal["target", "context"],
    arg(help="target: the EMA encoder, which papers evaluate; context: the trained one"),
]
Heads = Annotated[
    int | None, option("INT", "number of attention heads, if the width is not a standard size")
]
Skip = Annotated[
    Path | None,
    option("FILE.jsonl", "leave out the images on this list: see `stopmim check --fix-list`"),
]
Device = Literal["auto", "cpu", "cuda"]
