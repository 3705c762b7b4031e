"""What a run has learned, as arrays and as figures: nothing here is needed by training.

One module per family of figures; `analyse` is what ``stopmim analyse`` calls.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, assert_never, get_args

from stopmim.base.errors import StorageError, UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stopmim.data.images import Images

What = Literal[
    "noise", "similarity", "prediction", "collapse", "smoothing", "pca", "masks", "uncertainty"
]
IMAGES = 8  # that are shown
DPI = 160


def analyse(
    what: What | Literal["all"],
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    data: "str | Path | Images | None" = None,
) -> list[Path]:
    """Writes one PNG per analysis and returns their paths.

    Args:
        what: one of the analyses, or all of them.
        runs: run directories; several are compared where the figure can. `collapse` and
            `smoothing` need none: they are about the method.
        out: folder for the figures; the folder `figures` of the first run without it.
        data: the images; those the runs were trained on without it.
    """
    of_the_method = what in ("collapse", "smoothing")
    if not runs and not (of_the_method and out is not None):
        hint = ", or a folder for the figure with --out" if of_the_method else ", as runs/first"
        raise UserError(f"analyse {what}: name a run directory{hint}")
    from stopmim.insight.figures.subject import images_of
    from stopmim.runs.run import Run

    folder = Path(out) if out is not None else Path(runs[0]) / "figures"
    if what == "all" and runs and data is None:
        data = images_of(Run(runs[0]))  # once: drawing thousands of scenes takes time
    paths = []
    for one in get_args(What) if what == "all" else (what,):
        picture = draw(one, [Path(run) for run in runs], data)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            picture.savefig(folder / f"{one}.png", dpi=DPI)
        except OSError as error:
            raise StorageError(f"{folder}: cannot write here: {error.strerror}") from None
        paths.append(folder / f"{one}.png")
    return paths


def draw(what: What, paths: list[Path], data: "str | Path | Images | None" = None) -> "Figure":
    """The figure of one analysis."""
    from stopmim.data.sources.open import open_images
    from stopmim.insight.figures import (
        collapse,
        masks,
        norms,
        pca,
        prediction,
        similarity,
        smoothing,
        uncertainty,
    )
    from stopmim.insight.figures.subject import load, views
    from stopmim.runs.run import Run

    images = None if data is None else open_images(data)
    runs = [Run(path) for path in paths]
    match what:
        case "noise":
            return norms.figure([norms.norms(run) for run in runs])
        case "similarity":
            model, seed, context = runs[0].model(), runs[0].config.seed, None
            if model.predictor.positions.conditioned:
                context = similarity.seen(load(paths[0], images, 1))
            return similarity.figure(similarity.of_model(model, seed, context=context))
        case "prediction":
            subjects = [load(path, images, IMAGES) for path in paths]
            # The same images under the same masks for all: those of the first.
            same = [subject._replace(views=subjects[0].views) for subject in subjects]
            return prediction.figure([prediction.predict(subject) for subject in same])
        case "collapse":
            toys = [collapse.toy(tied=tied) for tied in (True, False)]
            return collapse.figure(toys, [collapse.of_run(run) for run in runs])
        case "smoothing":
            return smoothing.figure(smoothing.smoothing())
        case "pca":
            subjects = [load(path, images, 2 * IMAGES) for path in paths]
            same = [subject._replace(views=subjects[0].views) for subject in subjects]
            return pca.figure([pca.maps(subject) for subject in same])
        case "masks":
            config = runs[0].config
            return masks.figure(views(runs[0], images, IMAGES), masks.coverage(config))
        case "uncertainty":
            return uncertainty.figure(uncertainty.uncertainty(load(paths[0], images, IMAGES)))
        case unknown:
            assert_never(unknown)
