"""``stopmim doctor``, ``analyse`` and ``report``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from stopmim.base.errors import DataError, StorageError, UserError
from stopmim.cli.options import choices, option
from stopmim.insight import What

Figure = Annotated[
    Literal[What, "all"],
    choices(
        "FIGURE",
        noise="sigma against the norms of A and the mask token",
        similarity="similarity of positions",
        prediction="heat maps of predictions",
        collapse="why A is tied; needs no run",
        smoothing="the optimal predictor under noise; needs no run",
        pca="feature maps",
        masks="a preview of masks",
        uncertainty="prediction error, and variation over noise",
        neighbours="most similar images, before and after training",
        all="every one of them",
    ),
]
ImagesToShow = Annotated[
    str | None, option("DATA", "images to show; default: those the run was trained on")
]
Show = Annotated[
    tuple[str, ...],
    option(
        "CHANNEL ...",
        "three channels to show as red, green, blue, or one: numbers from 0, or names",
    ),
]


@dataclass(frozen=True)
class Doctor:
    """Diagnose a run: has it collapsed, is it useful, what to change.

    Exit codes: 0 not collapsed or too early to say, 10 partial collapse,
    11 collapse, 12 shortcut, 13 over-training.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """a run directory, or a checkpoint to measure on --data"""
    data: Annotated[str | None, option("DATA")] = None
    """measure now on these images instead of reading what training logged"""
    json: bool = False
    """print the diagnosis as one line of JSON"""

    def __call__(self) -> int:
        from stopmim.health.doctor import examine

        diagnosis = examine(self.run, self.data)
        print(diagnosis.as_json() if self.json else diagnosis)
        return diagnosis.exit_code


@dataclass(frozen=True)
class Analyse:
    """Draw analyses of runs, those of the paper and more: one PNG each."""

    what: Positional[Figure]
    runs: Annotated[Positional[tuple[Path, ...]], option("[RUN ...]")] = ()
    """run directories; several are compared"""
    out: Annotated[Path | None, option("FOLDER")] = None
    """folder for the figures; default: RUN/figures"""
    data: ImagesToShow = None
    show: Show = ()

    def __call__(self) -> None:
        from stopmim.insight.analyse import analyse

        try:
            paths = analyse(self.what, self.runs, self.out, self.data, self.show)
        except DataError as error:
            if self.data is not None or "--data" in str(error):
                raise
            moved = "if the images of the run have moved, give --data"
            raise DataError(f"{error}; {moved}") from None
        for path in paths:
            print(path)


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run, or to compare several."""

    runs: Annotated[Positional[tuple[Path, ...]], option("RUN [RUN ...]")]
    """run directories; the first is the subject, the others are compared with it"""
    out: Annotated[Path | None, option("FILE")] = None
    """file to write; default: RUN/report.html"""
    data: ImagesToShow = None
    show: Show = ()

    def __call__(self) -> None:
        from stopmim.data.sources.open import open_images
        from stopmim.insight.report.page import write_report
        from stopmim.runs.run import Run

        if not self.runs:
            raise UserError("report: name a run directory, for example runs/first")
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise StorageError(f"{self.out.parent}: no such folder")  # before any work
        images = None if self.data is None else open_images(self.data)
        first, *others = map(Run, self.runs)
        print(write_report(first, images, others=others, out=self.out, show=self.show))
