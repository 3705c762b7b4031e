"""The tables and figures of the paper as data: a row is a name and what it changes.

`TABLES` also has what the paper leaves open. Numbers are quoted from the paper (ICML 2024); where
it has a figure without numbers, only what its text states is quoted, as a note.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stopmim.arch import parse_arch
from stopmim.config import Config, PositionsConfig, flatten
from stopmim.errors import UserError
from stopmim.published import DOWNSTREAM, FOLLOWED, TRANSFERRED, TUNED, Numbers, Published

Changes = Mapping[str, Any]
Asks = Literal["few labels", "all labels", "transfer", "tracking", "finetune"]

SIGMAS = (0.0625, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0)
ONE_PERCENT = "IN-1k, 1 %"  # top-1 of a linear classifier, as in all ablations of the paper


@dataclass(frozen=True)
class Row:
    """What is trained: a preset with `changes`."""

    name: str
    changes: Changes = field(default_factory=dict)
    paper: Numbers = field(default_factory=dict)
    scaled: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """key -> another key of the preset and a factor: the value is their product"""
    line: str = ""  # of the figure; with an x and no line it is a point of all of them
    x: float | None = None

    def of(self, base: Config) -> dict[str, Any]:
        """All that it changes in `base`."""
        known = dict(flatten(base.model_dump(mode="json")))
        return dict(self.changes) | {k: known[of] * by for k, (of, by) in self.scaled.items()}


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


def find(name: str) -> Table:
    if name not in TABLES:
        raise UserError(f"ablate {name}: no such table; there are {', '.join(TABLES)}")
    return TABLES[name]


def printed(arch: str) -> str:
    """An architecture as the paper prints it: vit_b16 is ViT-B/16."""
    _, patch = parse_arch(arch)
    return f"ViT-{arch.removeprefix('vit_').removesuffix(str(patch)).capitalize()}/{patch}"


# ------------------------------------------------------------------------------ what is changed

# Whole sections, so that a row is the same row whatever the preset has there.
SINCOS = {"positions": PositionsConfig(kind="sincos").model_dump(mode="json")}
LEARNED = {"positions": PositionsConfig(kind="learned").model_dump(mode="json")}
STOP = {"positions.kind": "stochastic"}  # with the preset's sigma


def stop(**positions: Any) -> Changes:
    return STOP | {f"positions.{key}": value for key, value in positions.items()}


def top1(value: float) -> Numbers:
    return {ONE_PERCENT: value}


CERTAIN = Row("sine-cosine", SINCOS, top1(54.3))
USUAL = Row("StoP", STOP, top1(57.8))
SIGMA = "sigma, the variance of the noise"


def at_sigmas(line: str, covariance: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{line}-{s:g}", stop(sigma=s, covariance=covariance), line=line, x=s) for s in SIGMAS
    )


# Without noise it is the same model whatever carries the noise: one run, for both lines.
NO_SIGMA = Row("sigma-0", SINCOS, x=0.0)

TWINS = (Row("I-JEPA", SINCOS), Row("StoP", STOP))

RATE = ("optim.lr", "optim.start_lr", "optim.final_lr")


def at_rates(row: Row, factors: tuple[float, ...]) -> tuple[Row, ...]:
    """`row` with the whole schedule of the learning rate times each factor."""
    return tuple(
        Row(
            f"{row.name}-x{f:g}",
            row.changes,
            scaled={key: (key, f) for key in RATE},
            line=row.name,
            x=f,
        )
        for f in factors
    )


# ------------------------------------------------------------------------------ all of them

TABLES = {
    "positions": Table(
        "what the predictor is told about places",
        "Table 6",
        (CERTAIN, Row("learned", LEARNED, top1(54.4)), USUAL),
        "sine-cosine",
    ),
    "covariance": Table(
        "noise of a learned covariance sigma A A^T against sigma I",
        "Figure 3",
        (NO_SIGMA, *at_sigmas("learned", "tied"), *at_sigmas("fixed", "fixed")),
        "sigma-0",
        axis=SIGMA,
        note="The paper draws this without numbers and states: learned with sigma 0.25 is 3.5 "
        "points better than sigma 0, fixed ones gain less.",
    ),
    "norms": Table(
        "what sigma does to the norms of A and of the mask token",
        "Figure 4",
        (NO_SIGMA, *at_sigmas("learned", "tied")),
        "sigma-0",
        axis=SIGMA,
        note="The paper draws this without numbers and states: with sigma the norm of A falls "
        "and that of the mask token grows.",
    ),
    "tokens": Table(
        "the tokens at uncertain places",
        "Table 7",
        (
            Row("none", SINCOS, top1(54.3)),
            Row("context", stop(tokens="context"), top1(55.1)),
            Row("both", stop(tokens="both"), top1(56.8)),
            Row("masked", stop(tokens="masked"), top1(57.8)),
        ),
        "none",
    ),
    "tie": Table(
        "the matrix of the noise: that of the context, or its own",
        "section 3 and appendix A",
        (Row("tied", stop(covariance="tied")), Row("untied", stop(covariance="untied"))),
        "tied",
        note="The paper states that A on its own shrinks to nothing. |A| is the norm of the matrix "
        "that carries the noise.",
    ),
    "masks": Table(
        "the corrected sampler against the released one",
        "not in the paper",
        (
            Row("corrected", {"masking.compat": "none"}),
            Row("released", {"masking.compat": "released"}),
        ),
        "corrected",
    ),
    "augmentation": Table(
        "random crops as I-JEPA's against the released flip, greyscale and blur",
        "not in the paper",
        (
            Row("crop", {"data.augmentation": "crop"}),
            Row("released", {"data.augmentation": "released"}),
        ),
        "crop",
    ),
    "lr": Table(
        "the learning rate times a factor",
        "not in the paper",
        at_rates(CERTAIN, (0.5, 1, 2, 4, 8)) + at_rates(USUAL, (0.5, 1, 2, 4, 8)),
        "sine-cosine-x1",
        axis="learning rate, over the preset's",
        note="The paper states that StoP is more sensitive to high learning rates.",
    ),
    "downstream": Table(
        "linear classifiers on few labels and on all, last layer and last four",
        "Tables 1, 2 and 14",
        TWINS,
        "I-JEPA",
        asks="all labels",
        published=DOWNSTREAM,
    ),
    "transfer": Table(
        "linear classifiers on other data sets",
        "Tables 4 and 13",
        TWINS,
        "I-JEPA",
        asks="transfer",
        published=TRANSFERRED,
    ),
    "tracking": Table(
        "objects followed through videos (DAVIS 2017)",
        "Tables 3 and 15",
        TWINS,
        "I-JEPA",
        asks="tracking",
        published=FOLLOWED,
    ),
    "finetune": Table(
        "the whole encoder trained with few labels",
        "Tables 5 and 16",
        TWINS,
        "I-JEPA",
        asks="finetune",
        published=TUNED,
    ),
}


def listing(name: str | None = None) -> str:
    """The tables, or the rows of one, with the numbers of the paper."""
    lines = []
    for one, table in TABLES.items() if name is None else [(name, find(name))]:
        lines += [f"{one}: {table.about} ({table.source})"]
        wide = max(len(p.name) for p in (*table.rows, *table.published))
        shown = [(row.name, table.quoted(row.name)) for row in table.rows]
        if name is not None:
            shown += [(p.name, p.numbers) for p in table.published]
        for row, numbers in shown:
            paper = ", ".join(f"{value:.1f} ({what})" for what, value in numbers.items())
            lines.append(f"  {row:{wide}}  {paper}".rstrip())
        lines += [f"  {table.note}"] if table.note and name is not None else []
    return "\n".join(lines)
