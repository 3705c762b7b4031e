"""What a table of the paper is: rows that can be trained, and lines that are quoted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stopmim.config import Config
from stopmim.errors import UserError

Changes = dict[str, Any]
Numbers = Mapping[str, float]
Asks = Literal["few labels", "all labels", "transfer", "tracking", "finetune"]


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
            raise UserError(f"--rows {unknown[0]}: no such row; there are {', '.join(known)}")
        return tuple(row for row in self.rows if not names or row.name in names)

    def quoted(self, name: str, arch: str = "") -> Numbers:
        """The paper's numbers for a row: of this architecture if it has that, else its smallest."""
        own = {row.name: row.paper for row in self.rows}.get(name)
        found = [p for p in self.published if name in (p.method, p.name)]
        same = [p for p in found if p.arch == arch]
        return own or next((p.numbers for p in same + found), {})
