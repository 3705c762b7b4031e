"""Options that several commands share, and config keys as options: ``--optim.lr 1e-3``."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from tyro.conf import Positional, Suppress, arg

from stopmim.base.errors import UserError
from stopmim.config.schema import takes_text, type_of
from stopmim.config.yaml_text import parse_yaml


def option(metavar: str, text: str | None = None) -> Any:
    """An option that may be left out: the name of its value, and its help text.

    The help text states the default; tyro's "(default: None)" would repeat it.
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
PresetOrNothing = Annotated[
    str | None,
    option(
        "NAME|FILE",
        "a name from `stopmim presets`, or a YAML file; default: what suits images and machine",
    ),
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


def split_changes(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Separates the options that are config keys from the other words."""
    rest, changes, words = list[str](), dict[str, Any](), list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        # A bare section is no key: it may be a command's own option.
        known = "." in key or (type_of(key) and not hasattr(type_of(key), "model_fields"))
        if not word.startswith("--") or not known:
            rest.append(word)
            continue
        values = [value] if equals else []
        while len(values) < _arity(key) and words and not "".join(values).startswith("["):
            if words[0].startswith("--") or values == ["null"]:  # the next option, or no pair
                break
            values.append(words.pop(0))
        if not values:
            raise UserError(f"--{name}: a value is missing")
        if takes_text(key) and values[0] != "null":
            changes[key] = values[0]  # as YAML, "runs/first #2" would end before the #
            continue
        parsed = [parse_yaml(v, f"--{name}") for v in values]
        if _arity(key) == 2 and len(parsed) == 1 and isinstance(parsed[0], int | float):
            both = f"--{name} {values[0]} {values[0]}"
            raise UserError(f"--{name} {values[0]}: expected two values, such as {both}")
        changes[key] = parsed if _arity(key) == 2 and len(parsed) == 2 else parsed[0]
    return rest, changes


def _arity(key: str) -> int:
    """Number of words that a key takes: two for a pair, as ``--optim.ema 0.996 1``."""
    kinds = (type_of(key), *get_args(type_of(key)))  # a pair may be null too
    pairs = (get_args(kind) for kind in kinds if get_origin(kind) is tuple)
    return 2 if any(len(pair) == 2 and ... not in pair for pair in pairs) else 1
