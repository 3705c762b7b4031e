"""Opens the images of a run, and explains errors in terms of the run."""

from pathlib import Path

from stopmim.base.console import busy
from stopmim.base.errors import DataError, ResourceError
from stopmim.base.memory import shortage
from stopmim.config.schema import Config
from stopmim.data.images import Images
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import open_images, source_of
from stopmim.runs.run import Run


def open_for_run(data: str | Path | Images, config: Config, path: Path) -> tuple[Images, str]:
    """The images that the run at `path` is trained on, and their name in run.json."""
    try:
        with busy(f"reading {data}"):
            images = open_images(data)
    except MemoryError as error:
        what = f"{data}: out of memory while it is read: {shortage(error)}"
        raise ResourceError(f"{what}; use fewer images, or single files in a folder") from None
    source = source_of(data, images)
    try:
        return without_skipped(images, config.data.skip), source
    except DataError as error:
        if not (path / "run.json").exists():
            raise
        begun = Run(path).about["data"]["source"]
        what = f"the run there is trained on {begun}, or with another list"
        raise DataError(f"{path}: {error}; {what}: choose another --out") from None
