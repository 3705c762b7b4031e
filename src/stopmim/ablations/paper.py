"""Tables and figures of the StoP paper (ICML 2024), which are data in paper.yaml, by name."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any

from stopmim.ablations.table import Changes, Numbers, Published, Row, Table, read_table
from stopmim.base.errors import UserError, did_you_mean
from stopmim.config import schema
from stopmim.config.schema import Config
from stopmim.config.yaml_text import parse_yaml

TOP1 = "IN-1k, 1 %"  # accuracy of a linear classifier, which all ablations of the paper report


def find_table(name: str) -> Table:
    """Returns the table called `name`, or reads it if `name` is a YAML file."""
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        if name not in TABLES:
            raise UserError(
                f"ablate {name}: no such table; {did_you_mean(name, TABLES)}there are "
                f"{', '.join(TABLES)}, and tables of your own, as mine.yaml"
            )
        return TABLES[name]
    if file.stem in TABLES or file.stem == "runs":
        raise UserError(f"{name}: the name {file.stem} is taken; rename the file")
    return read_table(file)


def listing(name: str | None = None) -> str:
    """Lists all tables, or the rows of one, with the published numbers, in 80 columns."""
    lines = []
    for one, table in TABLES.items() if name is None else [(Path(name).stem, find_table(name))]:
        lines += wrap(f"{one}: {table.about} ({table.source})", 80, subsequent_indent="    ")
        shown = {row.name: _listed(table.quoted(row.name)) for row in table.rows}
        if name is not None and table.published:
            shown = dict.fromkeys(shown, "")
            shown |= {p.name: _listed(p.numbers, p.epochs) for p in table.published}
        width = max(map(len, shown))
        for row, paper in shown.items():
            text = f"  {row:{width}}  {paper}".rstrip()
            lines += wrap(text, 80, subsequent_indent=" " * (width + 4), break_on_hyphens=False)
        if table.note and name is not None:
            lines += wrap(table.note, 80, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _listed(numbers: Numbers, epochs: int | None = None) -> str:
    found = ", ".join(f"{value:.1f} ({what})" for what, value in numbers.items())
    return f"{epochs} epochs: {found}" if epochs else found


# ------------------------------------------------------------------------------ paper.yaml


def scaled(base: Config, factor: float) -> Changes:
    """Scales the whole learning rate schedule."""
    names = ("lr", "start_lr", "final_lr")
    return {f"optim.{name}": factor * getattr(base.optim, name) for name in names}


def ramped(base: Config, share: float) -> Changes:
    """Lets sigma grow over a share of the epochs."""
    return {"positions.ramp": share * base.optim.epochs}


def roomy(base: Config, _: bool) -> Changes:
    """Enlarges targets to at least 3x3 patches if the preset's are smaller."""
    least = 13 / base.side**2
    small = base.masking.target_scale[0] < least
    return {"masking.target_scale": [least, 1.25 * least]} if small else {}


RELATIVE = {"times lr": scaled, "ramp over": ramped, "roomy": roomy}  # to the preset


def changes_of(written: Changes, base: Config) -> Changes:
    """The changes to `base` of a row as written in paper.yaml."""
    found: Changes = {}
    for key, value in written.items():
        if key in RELATIVE:
            found |= RELATIVE[key](base, value)
        elif key in ("positions", "masking") and isinstance(value, str):
            found[key] = schema.type_of(key)(kind=value).model_dump(mode="json")
        else:
            found[key] = value
    return found


def rows_of(name: str, written: Changes, paper: float | None) -> Iterator[Row]:
    """The row `name`, or all rows of a line of a figure."""
    x = written.get("x")
    rest = {key: value for key, value in written.items() if key != "x"}
    if not isinstance(x, dict):
        yield Row(name, partial(changes_of, rest), {TOP1: paper} if paper else {}, x=x)
        return
    ((key, values),) = x.items()
    for value in values:
        own = f"{name}-{'x' if key in RELATIVE else ''}{value:g}"
        yield Row(own, partial(changes_of, rest | {key: value}), line=name, x=value)


def table_of(
    rows: dict[str, Changes], all: Changes, paper: Numbers, published: list[list[Any]], **rest: Any
) -> Table:
    found = (rows_of(name, all | written, paper.get(name)) for name, written in rows.items())
    head, *lines = published
    made = tuple(chain.from_iterable(found))
    if axis := rest.pop("axis", ""):
        rest["axes"] = {row.line: axis for row in made if row.line}
    return Table(
        rows=made,
        published=tuple(_published(dict(zip(head, line, strict=True))) for line in lines),
        **rest,
    )


def _published(line: dict[str, Any]) -> Published:
    method, arch, epochs = line.pop("method"), line.pop("architecture"), line.pop("epochs", None)
    return Published(method, arch, {name: n for name, n in line.items() if n}, epochs)


TEXT = Path(__file__).with_name("paper.yaml").read_text(encoding="ascii")
NOTHING: dict[str, Any] = {"all": {}, "paper": {}, "published": [["method", "architecture"]]}
TABLES = {name: table_of(**NOTHING | tree) for name, tree in parse_yaml(TEXT, "paper.yaml").items()}
