"""Tables and figures of the StoP paper (ICML 2024) as data: rows to train, published numbers.

`TABLES` also covers questions that the paper leaves open. Where the paper prints no numbers, a
note quotes its text. Lines of the main tables, other methods included, are in published.yaml.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stopmim.ablations.table import (
    Asks,
    Changes,
    Numbers,
    PresetChanges,
    Published,
    Row,
    Table,
    read_table,
)
from stopmim.base.errors import UserError, did_you_mean
from stopmim.config import schema
from stopmim.config.schema import Config, PositionsConfig
from stopmim.config.yaml_text import parse_yaml


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
    """Lists all tables, or the rows of one, with the published numbers."""
    lines = []
    for one, table in TABLES.items() if name is None else [(Path(name).stem, find_table(name))]:
        lines += [f"{one}: {table.about} ({table.source})"]
        shown = {row.name: table.quoted(row.name) for row in table.rows}
        if name is not None and table.published:
            shown = {row: {} for row in shown} | {p.name: p.numbers for p in table.published}
        width = max(map(len, shown))
        for row, numbers in shown.items():
            paper = ", ".join(f"{value:.1f} ({what})" for what, value in numbers.items())
            lines.append(f"  {row:{width}}  {paper}".rstrip())
        lines += [f"  {table.note}"] if table.note and name is not None else []
    return "\n".join(lines)


# ------------------------------------------------------------------------------ changes of rows

# Whole sections, so that a row does not depend on the preset's positions.
SINCOS: Changes = {"positions": PositionsConfig(kind="sincos").model_dump(mode="json")}
LEARNED: Changes = {"positions": PositionsConfig(kind="learned").model_dump(mode="json")}
STOP: Changes = {"positions.kind": "stochastic"}  # with the preset's sigma

# Pixels of randomly masked patches; keys without effect then have their defaults.
MAE: Changes = {
    "target": "pixels",
    "masking": schema.MaskingConfig(kind="random").model_dump(mode="json"),
    "optim.ema": list(schema.OptimConfig().ema),
}


def stop(**positions: Any) -> Changes:
    return STOP | {f"positions.{key}": value for key, value in positions.items()}


def jitter(sigma: float) -> Changes:
    return {"positions": SINCOS["positions"] | {"kind": "jitter", "sigma": sigma}}


def scaled(factor: float, changes: Changes) -> PresetChanges:
    """Scales the whole learning rate schedule."""
    names = ("lr", "start_lr", "final_lr")
    return lambda base: (
        changes | {f"optim.{name}": factor * getattr(base.optim, name) for name in names}
    )


def roomy(changes: Changes) -> PresetChanges:
    """Adds targets of at least 3x3 patches where the preset's are smaller."""

    def of(base: Config) -> Changes:
        least = 13 / base.side**2
        if base.masking.target_scale[0] >= least:
            return changes
        return {"masking.target_scale": [least, 1.25 * least]} | changes

    return of


def sampler(compat: str) -> PresetChanges:
    # The released sampler rejects targets of up to ten patches and has no context length.
    return roomy({"masking.compat": compat, "masking.context_length": None})


# ------------------------------------------------------------------------------ rows and tables


def top1(value: float) -> Numbers:
    """Top-1 accuracy of a linear classifier, which all ablations of the paper report."""
    return {"IN-1k, 1 %": value}


def along(
    line: str, values: Sequence[float], change: Callable[[float], Changes]
) -> tuple[Row, ...]:
    """Rows of one line of a figure, one per value."""
    return tuple(Row(f"{line}-{v:g}", change(v), line=line, x=v) for v in values)


def main_table(name: str, about: str, source: str, asks: Asks) -> Table:
    """A main table of the paper: I-JEPA and StoP to train, and published lines of all methods."""
    (_, _, *columns), *rows = PUBLISHED[name]
    published = tuple(
        Published(method, arch, {c: n for c, n in zip(columns, numbers, strict=True) if n})
        for method, arch, *numbers in rows
    )
    trained = (Row("I-JEPA", SINCOS), Row("StoP", STOP))
    return Table(about, source, trained, asks=asks, published=published)


PUBLISHED = parse_yaml(
    Path(__file__).with_name("published.yaml").read_text(encoding="ascii"), "published.yaml"
)
SIGMAS = (0.0625, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0)
SIGMA = "sigma, the variance of the noise"
NO_SIGMA = Row("sigma-0", SINCOS, x=0.0)  # one run for both lines: the covariance has no effect
LEARNED_SIGMAS = along("learned", SIGMAS, lambda s: stop(sigma=s, covariance="tied"))
FIXED_SIGMAS = along("fixed", SIGMAS, lambda s: stop(sigma=s, covariance="fixed"))

TABLES = {
    "positions": Table(
        "positional embeddings of the masked tokens",
        "Table 6",
        (
            Row("sine-cosine", SINCOS, top1(54.3)),
            Row("learned", LEARNED, top1(54.4)),
            Row("StoP", STOP, top1(57.8)),
        ),
    ),
    "covariance": Table(
        "noise with the learned covariance sigma A A^T against sigma I",
        "Figure 3",
        (NO_SIGMA, *LEARNED_SIGMAS, *FIXED_SIGMAS),
        axis=SIGMA,
        note="The paper draws this without numbers and states: learned with sigma 0.25 is 3.5 "
        "points better than sigma 0, fixed gains less.",
    ),
    "norms": Table(
        "effect of sigma on the norms of A and of the mask token",
        "Figure 4",
        (NO_SIGMA, *LEARNED_SIGMAS),
        axis=SIGMA,
        note="The paper draws this without numbers and states: as sigma grows, the norm of A "
        "falls and that of the mask token grows.",
    ),
    "tokens": Table(
        "tokens with stochastic positions",
        "Table 7",
        (
            Row("none", SINCOS, top1(54.3)),
            Row("context", stop(tokens="context"), top1(55.1)),
            Row("both", stop(tokens="both"), top1(56.8)),
            Row("masked", stop(tokens="masked"), top1(57.8)),
        ),
    ),
    "tie": Table(
        "noise matrix tied to the context projection, or separate",
        "section 3 and appendix A",
        (Row("tied", stop(covariance="tied")), Row("untied", stop(covariance="untied"))),
        note="The paper states that a separate A shrinks to zero. |A| is the norm of the matrix "
        "that carries the noise.",
    ),
    "lowres": Table(
        "stochastic positions against targets of half the resolution",
        "Table 8",
        (
            Row("sine-cosine", roomy(SINCOS), top1(54.3)),
            Row("bilinear", roomy(SINCOS | {"lowres": "bilinear"}), top1(52.1)),
            Row("max", roomy(SINCOS | {"lowres": "max"}), top1(54.1)),
            Row("StoP", roomy(STOP), top1(57.8)),
        ),
        note="Targets have at least 3x3 patches in all rows.",
    ),
    "penalty": Table(
        "StoP against a penalty on A with sine-cosine positions",
        "section 4.3",
        (
            Row("none", SINCOS),
            *along("l1", (1e-6, 1e-5, 1e-4), lambda w: SINCOS | {"optim.penalty_l1": w}),
            *along("l2", (1e-5, 1e-4, 1e-3), lambda w: SINCOS | {"optim.penalty_l2": w}),
            Row("StoP", STOP),
        ),
        axis="weight of the penalty",
        note="The paper gives neither numbers nor weights, and states: StoP is 2 points better "
        "than l1 and 2.1 better than l2.",
    ),
    "conditioned": Table(
        "noise of one matrix against noise conditioned on the context",
        "left open in section 6",
        (Row("StoP", STOP), Row("conditioned", stop(covariance="conditioned"))),
    ),
    "jitter": Table(
        "positions jittered by a few patches against StoP",
        "not in the paper",
        (
            Row("sine-cosine", SINCOS, x=0.0),
            *along("jitter", (0.25, 1.0, 4.0), jitter),
            Row("StoP", STOP),
        ),
        axis="sigma of the jitter, in patches squared",
    ),
    "mae": Table(
        "StoP with pixels as targets",
        "left open in section 6",
        (
            Row("MAE", MAE | SINCOS),
            Row("MAE-StoP", MAE | STOP),
            Row("share-0.25", MAE | stop(share=0.25)),
            Row("share-0.5", MAE | stop(share=0.5)),
            Row("ramp", lambda base: MAE | stop(ramp=base.optim.epochs / 2)),
        ),
        note="The paper states that applying StoP to MAE was not successful. ramp: sigma grows "
        "over the first half of the epochs.",
    ),
    "masks": Table(
        "the corrected mask sampler against the released one",
        "not in the paper",
        (Row("corrected", sampler("none")), Row("released", sampler("released"))),
        note="Targets have at least 3x3 patches in both rows: the released sampler needs that.",
    ),
    "augmentation": Table(
        "random crops as in I-JEPA against the released flip, greyscale and blur",
        "not in the paper",
        (
            Row("crop", {"data.augmentation": "crop"}),
            Row("released", {"data.augmentation": "released"}),
        ),
    ),
    "lr": Table(
        "the learning rate times a factor",
        "not in the paper",
        tuple(
            Row(f"{line}-x{f:g}", scaled(f, changes), line=line, x=f)
            for line, changes in (("sine-cosine", SINCOS), ("StoP", STOP))
            for f in (0.5, 1, 2, 4, 8)
        ),
        baseline="sine-cosine-x1",
        axis="learning rate, relative to the preset's",
        note="The paper states that StoP is more sensitive to high learning rates.",
    ),
    "downstream": main_table(
        "downstream",
        "linear classifiers with few labels and with all, on the last layer and the last four",
        "Tables 1, 2 and 14",
        "all labels",
    ),
    "transfer": main_table(
        "transfer", "linear classifiers on other data sets", "Tables 4 and 13", "transfer"
    ),
    "tracking": main_table(
        "tracking", "objects tracked through videos (DAVIS 2017)", "Tables 3 and 15", "tracking"
    ),
    "finetune": main_table(
        "finetune", "the whole encoder fine-tuned with few labels", "Tables 5 and 16", "finetune"
    ),
}
