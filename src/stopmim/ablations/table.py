"""Tables of an ablation: rows to train, published numbers, and the reader of tables in YAML."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from stopmim.base.errors import UserError, did_you_mean
from stopmim.config.schema import Config
from stopmim.config.yaml_text import parse_yaml, read_yaml

Changes = dict[str, Any]
PresetChanges = Callable[[Config], Changes]
Numbers = Mapping[str, float]
Asks = Literal[
    "few labels", "all labels", "transfer", "tracking", "finetune", "quick", "everything"
]


@dataclass(frozen=True)
class Row:
    """A model to train: changes to a preset, which may depend on the preset."""

    name: str
    changes: Changes | PresetChanges
    paper: Numbers = field(default_factory=dict)
    line: str = ""  # of the figure; a row with an x and no line is a point of every line
    x: float | None = None

    def of(self, base: Config) -> dict[str, Any]:
        """Changes to the preset `base`."""
        return dict(self.changes(base) if callable(self.changes) else self.changes)


@dataclass(frozen=True)
class Published:
    """A line of a table in the paper."""

    method: str
    arch: str
    numbers: Numbers
    epochs: int | None = None  # of pretraining, if the paper gives them

    @property
    def name(self) -> str:
        return f"{self.method} {self.arch}"


@dataclass(frozen=True)
class Table:
    about: str
    source: str  # where it is in the paper
    rows: tuple[Row, ...]
    baseline: str = ""  # row that the others are compared with; by default the first
    asks: Asks = "few labels"
    note: str = ""
    axes: Mapping[str, str] = field(default_factory=dict)  # meaning of `Row.x`, by `Row.line`
    measures: tuple[str, ...] = ()  # of health, which matter here as much as accuracy
    published: tuple[Published, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "baseline", self.baseline or self.rows[0].name)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the published numbers."""
        given = [row.paper for row in self.rows] + [p.numbers for p in self.published]
        return tuple(dict.fromkeys(name for numbers in given for name in numbers))

    def choose(self, names: tuple[str, ...]) -> tuple[Row, ...]:
        """Rows called `names`, in the order of the table; all rows if `names` is empty."""
        known = [row.name for row in self.rows]
        if unknown := [name for name in names if name not in known]:
            near = did_you_mean(unknown[0], known)
            raise UserError(f"--rows {unknown[0]}: no such row; {near}there are {', '.join(known)}")
        return tuple(row for row in self.rows if not names or row.name in names)

    def quoted(self, name: str, arch: str = "") -> Numbers:
        """Published numbers of a row: for `arch` if the paper has it, else for its smallest."""
        own = {row.name: row.paper for row in self.rows}.get(name)
        found = [p for p in self.published if name in (p.method, p.name)]
        same = [p for p in found if p.arch == arch]
        return own or next((p.numbers for p in same + found), {})


# ------------------------------------------------------------------------------ tables in YAML

KEYS = ("about", "baseline", "asks", "rows")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{,99}")  # of a row; becomes part of file names
MOST_ROWS = 1000
SHARED = ("seed", "runtime")  # keys and sections that cannot differ between rows


def read_table(path: Path) -> Table:
    """Reads a table from a YAML file with `KEYS`; only rows are required (docs/ablations.md)."""
    tree = parse_yaml(read_yaml(path), str(path))
    if not isinstance(tree, dict) or not isinstance(tree.get("rows"), dict) or not tree["rows"]:
        raise UserError(f"{path}: a table needs rows, each as NAME: {{config key: value}}")
    if unknown := [key for key in tree if key not in KEYS]:
        raise UserError(f"{path}: {unknown[0]}: unknown key; there are {', '.join(KEYS)}")
    if len(tree["rows"]) > MOST_ROWS:
        raise UserError(f"{path}: {len(tree['rows'])} rows; at most {MOST_ROWS} make a table")
    rows = tuple(_row(path, name, changes) for name, changes in tree["rows"].items())
    names = [row.name for row in rows]
    baseline, asks = tree.get("baseline", names[0]), tree.get("asks", "few labels")
    if baseline not in names:
        raise UserError(f"{path}: baseline {baseline}: no such row; there are {', '.join(names)}")
    if asks not in get_args(Asks):
        raise UserError(f"{path}: asks {asks}: must be one of {', '.join(get_args(Asks))}")
    return Table(str(tree.get("about", path.stem)), "not in the paper", rows, baseline, asks)


def _row(path: Path, name: object, changes: object) -> Row:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(
            f"{path}: row {name}: a name consists of letters, digits and . _ - +, starts with "
            f"a letter or a digit, has at most 100, and needs quotes if it is a number"
        )
    if not isinstance(changes, dict) or not all(isinstance(key, str) for key in changes):
        raise UserError(f"{path}: row {name}: expected {{config key: value}}, or {{}} for none")
    if shared := [key for key in changes if key.split(".")[0] in SHARED]:
        raise UserError(
            f"{path}: row {name}: {shared[0]} is the same for all rows; remove it here, and "
            f"pass it to the command"
        )
    return Row(name, changes)
