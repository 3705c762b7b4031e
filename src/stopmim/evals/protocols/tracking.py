"""Tracking of objects in videos; evals/tracking.py has the computation."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from stopmim.base.errors import DataError, check_least
from stopmim.evals.protocols.protocol import Inputs, Measured, Protocol
from stopmim.evals.recipes import Propagation

TRACKED = ("J&F", "J", "F")  # in the suite; recall and decay are left to `eval tracking`


@dataclass(frozen=True)
class VideoTracking(Protocol, Propagation):
    """Propagate object masks through videos: DAVIS, or rendered ones."""

    name = "tracking"
    needs = "videos"
    videos: Annotated[str | None, "VIDEOS"] = None
    """DAVIS folder, or scenes[:count[:size[:seed]]]; default: scenes, in suite only for scenes"""
    video_size: Annotated[int | None, "INT"] = None
    """shorter side of a frame in pixels; default: 480, or for scenes twice the encoder's size"""
    year: Annotated[Literal["2016", "2017"] | None, "2016|2017"] = None
    """DAVIS 2016, with one object per video, or 2017; default: the one that the folder lists"""
    pictures: Annotated[Path | None, "FOLDER"] = None
    """write the masks found, as PNGs for the DAVIS evaluation and as one sheet per video"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, video_size=1)

    @property
    def cacheable(self) -> bool:
        # Videos on disk may change under the same name, and a cached answer writes no pictures.
        return self.pictures is None and (self.videos or "scenes").split(":")[0] == "scenes"

    def source(self, inputs: Inputs) -> str | None:
        """The videos to track, or None."""
        from stopmim.data.sources.scenes import Scenes
        from stopmim.data.subset import underlying

        rendered = type(underlying(inputs.test)) is Scenes  # not Bands: videos are RGB
        return self.videos or ("scenes" if inputs.without_images or rendered else None)

    def facts(self, inputs: Inputs) -> dict[str, Any]:
        found = {"videos": self.source(inputs), "size": self.video_size}
        return {key: value for key, value in found.items() if value}

    def measure(self, inputs: Inputs, label: str) -> Iterator[Measured]:
        import torch

        from stopmim.data.channels import Form
        from stopmim.data.videos import open_videos
        from stopmim.evals.features import stats_for
        from stopmim.evals.tracking import Tracking, track

        source = self.source(inputs)
        if source is None:
            return
        if not (stats := stats_for(inputs.encoder)).is_picture:
            wanted = Form(stats.channels, stats.kind)
            raise DataError(f"tracking: videos are 8-bit RGB; the encoder takes images of {wanted}")
        size = self.video_size or Tracking.size
        if self.video_size is None and source.split(":")[0] == "scenes":
            size = 2 * inputs.size  # rendered at 64 px: 480 would be a blur
        names = [field.name for field in dataclasses.fields(Propagation)]
        options = Tracking(size=size, **{name: getattr(self, name) for name in names})
        videos = open_videos(source, self.year)
        # The masks of untrained encoders are of no interest.
        out = None if inputs.untrained else self.pictures
        precision = inputs.precision
        if inputs.request.precision == "auto" and precision is not None:
            precision = torch.float16  # bfloat16 has too few digits to rank similar patches
        device = inputs.device
        found = track(inputs.encoder, videos, options, device=device, precision=precision, out=out)
        for result in found:
            if inputs.without_images or result.name in TRACKED:
                yield Measured(result)
