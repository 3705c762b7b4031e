"""The tables and figures of the paper as data: a row is a name and what it changes.

`TABLES` also has what the paper leaves open. Numbers are quoted from the paper (ICML 2024); where
it has a figure without numbers, only what its text states is quoted, as a note.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stopmim.ablations.published import DOWNSTREAM, FOLLOWED, TRANSFERRED, TUNED
from stopmim.ablations.table import Changes, Numbers, Row, Table, read
from stopmim.base.errors import UserError, meant
from stopmim.config.architectures import parse_arch
from stopmim.config.schema import Config, MaskingConfig, OptimConfig, PositionsConfig

SIGMAS = (0.0625, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0)
ONE_PERCENT = "IN-1k, 1 %"  # top-1 of a linear classifier, as in all ablations of the paper


def find(name: str) -> Table:
    """The table of that name; or that of a YAML file, which is called as the file is."""
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        if name not in TABLES:
            raise UserError(
                f"ablate {name}: no such table; {meant(name, TABLES)}there are "
                f"{', '.join(TABLES)}, and tables of your own, as mine.yaml"
            )
        return TABLES[name]
    if file.stem in TABLES or file.stem == "runs":
        raise UserError(f"{name}: the name {file.stem} is taken; rename the file")
    return read(file)


def printed(arch: str) -> str:
    """An architecture as the paper prints it: vit_b16 is ViT-B/16."""
    _, patch = parse_arch(arch)
    return f"ViT-{arch.removeprefix('vit_').removesuffix(str(patch)).capitalize()}/{patch}"


# ------------------------------------------------------------------------------ what is changed

# Whole sections, so that a row is the same row whatever the preset has there.
SINCOS: Changes = {"positions": PositionsConfig(kind="sincos").model_dump(mode="json")}
LEARNED: Changes = {"positions": PositionsConfig(kind="learned").model_dump(mode="json")}
STOP: Changes = {"positions.kind": "stochastic"}  # with the preset's sigma


def stop(**positions: Any) -> Changes:
    return STOP | {f"positions.{key}": value for key, value in positions.items()}


def top1(value: float) -> Numbers:
    return {ONE_PERCENT: value}


SIGMA = "sigma, the variance of the noise"


def at_sigmas(line: str, covariance: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{line}-{s:g}", stop(sigma=s, covariance=covariance), line=line, x=s) for s in SIGMAS
    )


# Without noise it is the same model whatever carries the noise: one run, for both lines.
NO_SIGMA = Row("sigma-0", SINCOS, x=0.0)

TWINS = (Row("I-JEPA", SINCOS), Row("StoP", STOP))


def at_rates(row: str, changes: Changes) -> tuple[Row, ...]:
    """The whole schedule of the learning rate times a factor."""

    def scaled(factor: float) -> Callable[[Config], Changes]:
        names = ("lr", "start_lr", "final_lr")
        return lambda base: (
            changes | {f"optim.{name}": factor * getattr(base.optim, name) for name in names}
        )

    return tuple(Row(f"{row}-x{f:g}", scaled(f), line=row, x=f) for f in (0.5, 1, 2, 4, 8))


def at_weights(norm: str, weights: tuple[float, ...]) -> tuple[Row, ...]:
    """Certain places, and a penalty on A."""
    return tuple(
        Row(f"{norm}-{w:g}", SINCOS | {f"optim.penalty_{norm}": w}, line=norm, x=w) for w in weights
    )


def jittered(sigma: float) -> Row:
    changes = {"positions": SINCOS["positions"] | {"kind": "jitter", "sigma": sigma}}
    return Row(f"jitter-{sigma:g}", changes, line="jitter", x=sigma)


# Pixels of patches that are hidden at random; what has no effect then is at its default.
MAE: Changes = {
    "target": "pixels",
    "masking": MaskingConfig(kind="random").model_dump(mode="json"),
    "optim.ema": list(OptimConfig().ema),
}


def ramped(base: Config) -> Changes:
    return MAE | STOP | {"positions.ramp": base.optim.epochs / 2}


def roomy(changes: Changes) -> Callable[[Config], Changes]:
    """`changes`, and targets of at least 3x3 patches where the preset's are smaller."""

    def of(base: Config) -> Changes:
        least = 13 / base.side**2
        if base.masking.target_scale[0] >= least:
            return changes
        return {"masking.target_scale": [least, 1.25 * least]} | changes

    return of


def sampled(compat: str) -> Callable[[Config], Changes]:
    # The released sampler refuses targets of up to ten patches, and has no length of context.
    return roomy({"masking.compat": compat, "masking.context_length": None})


# ------------------------------------------------------------------------------ all of them

TABLES = {
    "positions": Table(
        "what the predictor is told about places",
        "Table 6",
        (
            Row("sine-cosine", SINCOS, top1(54.3)),
            Row("learned", LEARNED, top1(54.4)),
            Row("StoP", STOP, top1(57.8)),
        ),
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
    "lowres": Table(
        "uncertain places against targets of half the resolution",
        "Table 8",
        (
            Row("sine-cosine", roomy(SINCOS), top1(54.3)),
            Row("bilinear", roomy(SINCOS | {"lowres": "bilinear"}), top1(52.1)),
            Row("max", roomy(SINCOS | {"lowres": "max"}), top1(54.1)),
            Row("StoP", roomy(STOP), top1(57.8)),
        ),
        "sine-cosine",
        note="Targets have 3x3 patches or more, in all rows.",
    ),
    "penalty": Table(
        "StoP against a penalty on A with certain places",
        "section 4.3",
        (
            Row("none", SINCOS),
            *at_weights("l1", (1e-6, 1e-5, 1e-4)),
            *at_weights("l2", (1e-5, 1e-4, 1e-3)),
            Row("StoP", STOP),
        ),
        "none",
        axis="weight of the penalty",
        note="The paper gives neither numbers nor weights, and states: StoP is 2 points better "
        "than l1 and 2.1 better than l2.",
    ),
    "conditioned": Table(
        "noise of one matrix against noise made of the context",
        "left open in section 6",
        (Row("StoP", STOP), Row("conditioned", stop(covariance="conditioned"))),
        "StoP",
    ),
    "jitter": Table(
        "places moved by a few patches against StoP",
        "not in the paper",
        (
            Row("sine-cosine", SINCOS, x=0.0),
            *map(jittered, (0.25, 1.0, 4.0)),
            Row("StoP", STOP),
        ),
        "sine-cosine",
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
            Row("ramp", ramped),
        ),
        "MAE",
        note="The paper states that applying StoP to MAE was not successful. ramp: sigma grows "
        "over the first half of the epochs.",
    ),
    "masks": Table(
        "the corrected sampler against the released one",
        "not in the paper",
        (
            Row("corrected", sampled("none")),
            Row("released", sampled("released")),
        ),
        "corrected",
        note="Targets have 3x3 patches or more, in both rows: the released sampler takes no less.",
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
        at_rates("sine-cosine", SINCOS) + at_rates("StoP", STOP),
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
    for one, table in TABLES.items() if name is None else [(Path(name).stem, find(name))]:
        lines += [f"{one}: {table.about} ({table.source})"]
        shown = [(row.name, table.quoted(row.name)) for row in table.rows]
        if name is not None and table.published:
            shown = [(row.name, {}) for row in table.rows]
            shown += [(p.name, p.numbers) for p in table.published]
        wide = max(len(row) for row, _ in shown)
        for row, numbers in shown:
            paper = ", ".join(f"{value:.1f} ({what})" for what, value in numbers.items())
            lines.append(f"  {row:{wide}}  {paper}".rstrip())
        lines += [f"  {table.note}"] if table.note and name is not None else []
    return "\n".join(lines)
