"""The page ``stopmim ablate --page RECORDS``: every row of the paper's tables beside our runs.

The paper's numbers come from paper.yaml, ours from the records, and costs from the presets.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stopmim.ablations.left import PAPER_PRESET, Left, Scale, hours_of, paper_hours, preset_of
from stopmim.ablations.paper import TABLES
from stopmim.ablations.record import read_records
from stopmim.ablations.recorded import NOT_RUN, Cells, Setting, evaluated, recorded, settings
from stopmim.ablations.report import decimal
from stopmim.ablations.table import Published, Row, Table
from stopmim.base.errors import UserError
from stopmim.base.tables import markdown
from stopmim.config.architectures import printed
from stopmim.config.presets import PRESETS
from stopmim.config.schema import Config, resolve
from stopmim.evals.recipes import TASKS

HEAD = """\
# The paper beside ours

Every row of every table of the paper beside our runs, and what the paper only draws or states.
`make tables` writes this page with `stopmim ablate --page results`. The paper's numbers come from
`src/stopmim/ablations/paper.yaml`, ours from the [records](../results/README.md), and costs from
the presets. No number of ours is typed by hand, and a test fails if the page is out of date.

Our runs are small: other networks, other images and fewer updates than the paper's. Compare
differences between rows, not numbers. Ours are percentages, as means over seeds with 95 % intervals
(Student's t; none for a single seed) and, in brackets, the paired difference from the baseline row,
which has none. The columns: `lowshot` is the paper's classifier with few labels; `linear` has all
labels, on the last layer; `linear last4` on the last four; `linear best depth` on the better of the
two; `(paper)`: chosen on the test images. Each row is shown in the setting with the longest
training and, among equals, the paper's sigma; [Results](results.md) has all settings. Rows that
have not been run have a command and a cost instead. A cost names the rows it includes that were run
in another setting or measured otherwise.
"""
# How the number in a line of a main table is measured; DATA: images with a train and a test split.
MEASURE = {
    "downstream": "--eval imagenet=DATA --few 1percent.txt --selection paper --views 28",
    "transfer": "--eval cifar100=DATA --selection paper --views 28",
    "tracking": "--eval DAVIS",
    "finetune": "--eval DATA --few 1percent.txt --selection both",
}
VIEWS = ", ".join(f"{x} ({TASKS[x].recipe.epochs})" for x in TASKS if "imagenet" not in x)
LARS = f"`--eval imagenet_lars=DATA` and `--views {TASKS['imagenet_lars'].recipe.epochs}`"
MORE = {
    "downstream": f" The classifiers of ViT-H are trained by LARS: {LARS}.",
    "transfer": f" Views are as many as the recipe has epochs: {VIEWS}.",
}
SEE = {  # runs that come close to rows which have not been run
    "masks": " [Results](results.md#masks-and-covariance) has corrected masks that differ from "
    "these in the number of patches seen, 20 or 11."
}
FIGURES = """\
## Figures

| in the paper | ours |
| --- | --- |
| Figure 1, the idea, and linear probing on ImageNet | [`downstream`](#downstream) |
| Figure 2, a drawing of the method | nothing to measure |
| Figure 3, accuracy against sigma | [`covariance`](#covariance) |
| Figure 4, norms against sigma | [`norms`](#norms), and `stopmim analyse noise RUN ...` |
| Figure 5, similarity of positions | `stopmim analyse similarity RUN` |
| Figure 6, what a prediction resembles | `stopmim analyse prediction RUN ...` |

[Inspect a run](analyse.md#figures-5-and-6-of-the-paper) has Figures 5 and 6 from our runs, what
one should see in them, and what one does not.
"""


def page(folder: Path) -> str:
    """The page for the records in `folder`, as Markdown."""
    records = read_records(folder)
    if not (runs := recorded(records)):
        raise UserError(f"{folder}: no records here; name a folder with TABLE/ROW-SEED.json files")
    scale = Scale.of(runs)
    # The main tables come first, as in the paper.
    names = sorted(TABLES, key=lambda name: not TABLES[name].published)
    found = {name: settings(TABLES[name], runs) for name in names}
    parts = [HEAD, overview(found, scale), pretraining()]
    for name in names:
        others = evaluated(records, TABLES[name]) if TABLES[name].published else {}
        parts += section(name, found[name], scale, others)
    return "\n\n".join(part.strip() for part in [*parts, FIGURES]) + "\n"


def overview(found: Mapping[str, Sequence[Setting]], scale: Scale) -> str:
    rows = []
    for name, several in found.items():
        table, left = TABLES[name], Left.of(name, several, scale)
        rows.append(
            {
                "in the paper": table.source,
                "table": f"[`{name}`](#{name})",
                "rows": str(len(table.rows)),
                "run": str(len(table.rows) - len(left.rows)),
                "what is left takes": scale.minutes(left.needed) if left.needed else "-",
                "at the paper's size": f"{hours_of(table):,} GPU hours",
            }
        )
    return f"## Overview\n\n{markdown(rows)}\n\n{_about_costs(scale)}"


def _about_costs(scale: Scale) -> str:
    cost = PRESETS[scale.preset].cost
    return (
        f"What is left: {scale.seeds} seeds of `{scale.preset}` per row, {cost.text} each "
        f"({cost.note}). "
        f"At the paper's size: one seed of every row, or of every line of I-JEPA and StoP, on one "
        f"H200, from the [measured time of a step](scale.md). Evaluation comes on top."
    )


def section(
    name: str, found: Sequence[Setting], scale: Scale, others: Mapping[str, str]
) -> Iterator[str]:
    """The parts of the page about one table; `others` are the numbers of given checkpoints."""
    table, left = TABLES[name], Left.of(name, found, scale)
    others = {f"{r} {s.arch}": "below" for s in found for r in s.rows} | dict(others)
    yield f"## {name}\n\n{table.source[0].upper()}{table.source[1:]}: {table.about}. {table.note}"
    if table.published:
        yield markdown([_published(table, line, others) for line in table.published])
        yield _about_published(name)
    for i, setting in enumerate(found):
        rows = [r for r in table.rows if r.name in setting.rows or (r in left.rows and i == 0)]
        yield f"**Ours:** {setting}."
        yield markdown([_paper(table, row) | setting.cells(row) for row in rows])
    if not found and not table.published:
        yield markdown([_paper(table, row) | {"ours": NOT_RUN} for row in table.rows])
    if left.needed:
        what = ", ".join([*(row.name for row in left.rows), *left.columns])
        again = [row.name for row in left.needed if row not in left.rows]
        included = f", {' and '.join(again)} included" if again else ""
        cost = f"takes {scale.minutes(left.needed)} of training{included}"
        yield f"Not run: {what}. `{left.command}` {cost}.{SEE.get(name, '')}"
    if not table.published:
        size = f"stopmim ablate {name} --preset {PAPER_PRESET} --data imagenet --few 1percent.txt"
        yield f"At the paper's size: `{size}`, {hours_of(table):,} GPU hours."


def _paper(table: Table, row: Row) -> Cells:
    """The name of a row and, unless they are in a table of their own, the paper's numbers."""
    if table.published:
        return {"row": row.name}
    base, cells = table.quoted(table.baseline), {"row": row.name}
    for column in table.columns:
        value = row.paper.get(column)
        gain = "" if value is None or row.name == table.baseline else value - base[column]
        cells[f"paper: {column}"] = decimal(value) + (f" ({gain:+.1f})" if gain != "" else "")
    return cells


def _published(table: Table, line: Published, others: Mapping[str, str]) -> Cells:
    cells = {"method": line.method, "architecture": line.arch}
    cells |= {"epochs": str(line.epochs)} if line.epochs else {}
    cells |= {column: decimal(line.numbers.get(column)) for column in table.columns}
    preset = preset_of(line)
    cost = f"`{preset}`, {paper_hours(preset):,} GPU hours" if preset else "a public checkpoint"
    return cells | {"ours, of this size": others.get(line.name, f"{NOT_RUN}: {cost}")}


def _about_published(name: str) -> str:
    return (
        f"To run a line of I-JEPA or StoP: `stopmim pretrain imagenet/train --preset PRESET --out "
        f'RUN`, then `stopmim ablate {name} --seeds 0 --checkpoint "METHOD ARCHITECTURE=RUN" '
        f"{MEASURE[name]}`, which trains nothing and shows it beside the line of that name. In "
        f"place of RUN, name a public checkpoint for a line of another method.{MORE.get(name, '')}"
    )


# ------------------------------------------------------------------------------ Tables 9 to 12

PRETRAINING = {9: PAPER_PRESET, 10: "vit_b16_stop", 11: "vit_l16_stop", 12: "vit_h14_stop"}
PRINTED: dict[str, tuple[Any, Any, Any, Any]] = {
    "optimizer": ("AdamW", "AdamW", "AdamW", "AdamW"),
    "epochs": (300, 600, 600, 600),
    "learning rate": (1e-3, 8e-4, 8e-4, 1e-3),
    "weight decay": ((0.04, 0.4), (0.04, 0.4), (0.04, 0.4), (0.04, 0.4)),
    "batch size": (2048, 2048, 2048, 2048),
    "learning rate schedule": ("cosine decay", "cosine decay", "cosine decay", "cosine decay"),
    "warmup epochs": (15, 15, 15, 40),
    "encoder arch.": ("ViT-B", "ViT-B", "ViT-L", "ViT-H"),
    "predicted targets": (4, 4, 4, 4),
    "predictor depth": (6, 6, 12, 12),
    "predictor attention heads": (12, 12, 16, 16),
    "predictor embedding dim.": (384, 384, 384, 384),
    "sigma": (0.25, 0.25, 0.25, 0.2),
}


def ours(config: Config) -> dict[str, Any]:
    """A config in the words of the paper's tables."""
    config = resolve(config)
    optim, predictor = config.optim, config.predictor
    return {
        "optimizer": "AdamW",
        "epochs": optim.epochs,
        "learning rate": optim.lr,
        "weight decay": optim.weight_decay,
        "batch size": optim.batch_size,
        "learning rate schedule": "cosine decay",
        "warmup epochs": optim.warmup_epochs,
        "encoder arch.": printed(config.arch).split("/")[0],
        "predicted targets": config.masking.targets,
        "predictor depth": predictor.depth,
        "predictor attention heads": predictor.heads,
        "predictor embedding dim.": predictor.width,
        "sigma": config.positions.sigma,
    }


def pretraining() -> str:
    """Tables 9 to 12 beside our presets."""
    presets = {number: ours(PRESETS[preset]()) for number, preset in PRETRAINING.items()}
    rows = []
    for key, values in PRINTED.items():
        cells = {"config": key}
        for value, (number, preset) in zip(values, PRETRAINING.items(), strict=True):
            cells |= {f"Table {number}": _text(value), f"`{preset}`": _text(presets[number][key])}
        rows.append(cells)
    return (
        f"## Pretraining\n\nTables 9 to 12: the settings of the paper beside our presets.\n\n"
        f"{markdown(rows)}\n\nTable 12 gives 600 epochs, its caption and the text 300, as ours."
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
