"""Analyses of runs as figures, one PNG each; ``stopmim analyse`` calls `analyse`.

One module of figures/ per analysis: it computes arrays and draws them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never, get_args

from matplotlib.figure import Figure

from stopmim.base.errors import StorageError, UserError
from stopmim.data.images import Images
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
from stopmim.insight.figures.subject import Subject, images_of, load, views
from stopmim.runs.run import Run

What = Literal[
    "noise", "similarity", "prediction", "collapse", "smoothing", "pca", "masks", "uncertainty"
]
IMAGES = 8  # shown per figure
DPI = 160


def analyse(
    what: What | Literal["all"],
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    data: str | Path | Images | None = None,
) -> list[Path]:
    """Writes one PNG per analysis and returns their paths.

    Args:
        what: one of the analyses, or all of them.
        runs: run directories; several are compared where the figure can. `collapse` and
            `smoothing` need none: they are about the method.
        out: folder for the figures; default: the folder `figures` of the first run.
        data: the images; default: those the runs were trained on.
    """
    of_the_method = what in ("collapse", "smoothing")
    if not runs and not (of_the_method and out is not None):
        hint = ", or a folder for the figure with --out" if of_the_method else ", as runs/first"
        raise UserError(f"analyse {what}: name a run directory{hint}")
    folder = Path(out) if out is not None else Path(runs[0]) / "figures"
    if what == "all" and data is None:
        data = images_of(Run(runs[0]))  # once: rendering thousands of scenes takes time
    paths = []
    for one in get_args(What) if what == "all" else (what,):
        picture = figure_of(one, [Path(run) for run in runs], data)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            picture.savefig(folder / f"{one}.png", dpi=DPI)
        except OSError as error:
            raise StorageError(f"{folder}: cannot write here: {error.strerror}") from None
        paths.append(folder / f"{one}.png")
    return paths


def figure_of(what: What, paths: list[Path], data: str | Path | Images | None = None) -> Figure:
    """Draws the figure of one analysis."""
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
            subjects = _same_views(paths, images, IMAGES)
            return prediction.figure([prediction.predict(subject) for subject in subjects])
        case "collapse":
            toys = [collapse.toy(tied=tied) for tied in (True, False)]
            return collapse.figure(toys, [collapse.of_run(run) for run in runs])
        case "smoothing":
            return smoothing.figure(smoothing.smoothing())
        case "pca":
            subjects = _same_views(paths, images, 2 * IMAGES)
            return pca.figure([pca.maps(subject) for subject in subjects])
        case "masks":
            config = runs[0].config
            return masks.figure(views(runs[0], images, IMAGES), masks.coverage(config))
        case "uncertainty":
            return uncertainty.figure(uncertainty.uncertainty(load(paths[0], images, IMAGES)))
        case unknown:
            assert_never(unknown)


def _same_views(paths: list[Path], images: Images | None, count: int) -> list[Subject]:
    """The runs with the same images under the same masks: those of the first."""
    subjects = [load(path, images, count) for path in paths]
    return [subject._replace(views=subjects[0].views) for subject in subjects]
