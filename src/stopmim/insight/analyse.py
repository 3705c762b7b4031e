"""Analyses of runs as figures, one PNG each; ``stopmim analyse`` calls `analyse`.

One module of figures/ per analysis: it computes arrays and draws them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never, get_args

from matplotlib.figure import Figure

from stopmim.base.errors import StorageError, UserError
from stopmim.base.files import own_folder, replaced
from stopmim.data.images import Images
from stopmim.data.sources.open import open_images
from stopmim.insight import What
from stopmim.insight.figures import (
    curves,
    masks,
    neighbours,
    pca,
    prediction,
    similarity,
    theory,
)
from stopmim.insight.figures.subject import images_of, load, views
from stopmim.runs.run import Run

IMAGES = 8  # shown per figure
DPI = 160


def analyse(
    what: What | Literal["all"],
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    data: str | Path | Images | None = None,
    show: Sequence[str] = (),
) -> list[Path]:
    """Writes one PNG per analysis and returns their paths.

    Args:
        what: one of the analyses, or all of them.
        runs: run directories; several are compared if the figure can. `collapse` and
            `smoothing` need none: they are about the method.
        out: folder for the figures; default: the folder `figures` of the first run.
        data: the images; default: those the runs were trained on.
        show: channels for red, green and blue of pictures, by number from 0 or by name; or one.
    """
    of_the_method = what in ("collapse", "smoothing")
    if not runs and not (of_the_method and out is not None):
        hint = ", or a folder for the figure with --out" if of_the_method else ", as runs/first"
        raise UserError(f"analyse {what}: name a run directory{hint}")
    folder = Path(out) if out is not None else own_folder(Path(runs[0]) / "figures")
    found = [Run(run) for run in runs]
    images = None if data is None else open_images(data)
    if what == "all" and images is None:
        images = images_of(found[0])  # once: rendering thousands of scenes takes time
    paths = []
    for one in get_args(What) if what == "all" else (what,):
        picture = figure_of(one, found, images, show)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replaced(folder / f"{one}.png") as temporary:
                picture.savefig(temporary, dpi=DPI)
        except OSError as error:
            raise StorageError(f"{folder}: cannot write here: {error.strerror}") from None
        paths.append(folder / f"{one}.png")
    return paths


def figure_of(
    what: What, runs: list[Run], images: Images | None, show: Sequence[str] = ()
) -> Figure:
    """Draws the figure of one analysis."""
    match what:
        case "noise":
            return curves.norms(runs)
        case "similarity":
            model, seed, context = runs[0].model(), runs[0].config.seed, None
            if model.predictor.positions.conditioned:
                context = similarity.seen(load(runs[:1], images, 1)[0])
            found = similarity.of_model(model, seed, context=context)
            picture = similarity.figure(found)
            picture.supxlabel(found.caption, size=8.5)
            return picture
        case "prediction":
            return prediction.heat_maps(load(runs, images, 4 * IMAGES, show))
        case "collapse":
            return theory.collapse(runs)
        case "smoothing":
            return theory.smoothing()
        case "pca":
            return pca.figure(load(runs, images, 2 * IMAGES, show))
        case "masks":
            return masks.figure(views(runs[0], images, IMAGES, show), runs[0].config)
        case "uncertainty":
            return prediction.uncertainty_maps(load(runs[:1], images, IMAGES, show)[0])
        case "neighbours":
            return neighbours.figure(neighbours.find(runs, images, show))
        case unknown:
            assert_never(unknown)
