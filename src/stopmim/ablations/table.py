"""What a table is: rows that can be trained, and lines of the paper; and a reader of your own."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from stopmim.base.errors import UserError, meant
from stopmim.config.schema import Config, parse_yaml

Changes = dict[str, Any]
Numbers = Mapping[str, float]
Asks = Literal[
    "few labels", "all labels", "transfer", "tracking", "finetune", "quick", "everything"
]


@dataclass(frozen=True)
class Row:
    """What is trained: a preset with changes, which may depend on the preset."""

    name: str
    changes: Changes | Callable[[Config], Changes]
    paper: Numbers = field(default_factory=dict)
    line: str = ""  # of the figure; with an x and no line it is a point of all of them
    x: float | None = None

    def of(self, base: Config) -> dict[str, Any]:
        """All that it changes in `base`."""
        return dict(self.changes(base) if callable(self.changes) else self.changes)


@dataclass(frozen=True)
class Published:
    """A line of a table of the paper, trained by others or at a scale of its own."""

    method: str
    arch: str
    numbers: Numbers

    @property
    def name(self) -> str:
        return f"{self.method} {self.arch}"


@dataclass(frozen=True)
class Table:
    about: str
    source: str  # where in the paper
    rows: tuple[Row, ...]
    baseline: str  # the row that the others are compared with
    asks: Asks = "few labels"
    note: str = ""
    axis: str = ""  # what x is
    published: tuple[Published, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the paper's numbers."""
        given = [row.paper for row in self.rows] + [p.numbers for p in self.published]
        return tuple(dict.fromkeys(name for numbers in given for name in numbers))

    def choose(self, names: tuple[str, ...]) -> tuple[Row, ...]:
        """The rows called `names`, in the order of the table; all if there are none."""
        known = [row.name for row in self.rows]
        if unknown := [name for name in names if name not in known]:
            near = meant(unknown[0], known)
            raise UserError(f"--rows {unknown[0]}: no such row; {near}there are {', '.join(known)}")
        return tuple(row for row in self.rows if not names or row.name in names)

    def quoted(self, name: str, arch: str = "") -> Numbers:
        """The paper's numbers for a row: of this architecture if it has that, else its smallest."""
        own = {row.name: row.paper for row in self.rows}.get(name)
        found = [p for p in self.published if name in (p.method, p.name)]
        same = [p for p in found if p.arch == arch]
        return own or next((p.numbers for p in same + found), {})


# ------------------------------------------------------------------------------ tables of others

KEYS = ("about", "baseline", "asks", "rows")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # of a row: files are called so
SHARED = ("seed", "runtime")  # sections and keys that tell no row from another


def read(path: Path) -> Table:
    """The table in a YAML file: `KEYS`, of which only rows are needed; see docs/ablations.md."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot read this table: {error.strerror}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict) or not isinstance(tree.get("rows"), dict) or not tree["rows"]:
        raise UserError(f"{path}: a table needs rows, each as NAME: {{key of the config: value}}")
    if unknown := [key for key in tree if key not in KEYS]:
        raise UserError(f"{path}: {unknown[0]}: unknown key; there are {', '.join(KEYS)}")
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
            f"{path}: row {name}: a name is made of letters, digits and . _ - +, "
            f"begins with one of the first two, and is in quotes if it is a number"
        )
    if not isinstance(changes, dict) or not all(isinstance(key, str) for key in changes):
        raise UserError(f"{path}: row {name}: expected {{key of the config: value}}; {{}}: none")
    if shared := [key for key in changes if key.split(".")[0] in SHARED]:
        raise UserError(
            f"{path}: row {name}: {shared[0]} is the same for all rows; leave it out, "
            f"and give it to the command"
        )
    return Row(name, changes)
