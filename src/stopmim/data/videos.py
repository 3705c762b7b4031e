"""Videos with object masks: DAVIS from its folder, and short ones rendered from scenes.

In rendered videos bodies slide over the ground on straight lines, turn, and bounce off one another
and off the edges of the view, while the camera zooms. They are equal to the last bit on every
machine; rendering/render.py says how.
"""

import io
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stopmim.base.errors import DataError, UserError
from stopmim.base.files import read_regular, replaced
from stopmim.base.random_keys import seed_of
from stopmim.data.decode import BadImageError, decode
from stopmim.data.rendering.render import render
from stopmim.data.rendering.scene import FARTHEST, FOOT, NEAREST, Body, Scene, rotation, uniforms
from stopmim.data.rendering.scene import sample as sample_scene
from stopmim.data.sources.scenes import parse_scenes

Bytes = NDArray[np.uint8]
Year = Literal["2016", "2017"]

VOID = 255  # in DAVIS-2017: neither object nor background; its evaluation counts it as background
RENDERED = (30, 64, 0)  # default count, size and seed of rendered videos
MAX_FRAME = 2**24  # pixels of a frame, of which AHEAD are held: twice those of 4K
MAX_LIST = 10_000_000  # bytes of a list of videos
MOST_RENDERED = 10_000
LENGTH = 20  # frames of a rendered video
AHEAD = 16  # frames read before they are asked for
BODIES = 4  # maximum per scene; the mean is about two, as in DAVIS
SPEED, SPIN, ZOOM = 0.2, 0.03, 0.004  # maxima per frame: lengths; half tangents; fractions
SEEN = 400  # a body that covers less than 1 in 400 pixels of the first frame is not tracked

# Per object number: the colours of DAVIS, which are those of PASCAL VOC with 191 instead of 192,
# and greys from the 22nd on. They only serve viewing: the numbers count.
PALETTE: Bytes = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
PALETTE[:22] = [
    [min(128 * (i >> c & 1) + 64 * (i >> c + 3 & 1), 191) for c in range(3)] for i in range(22)
]


class Video(Protocol):
    """Frames in order, of which at least the first has a mask; several threads read them."""

    name: str
    annotated: bool  # every frame has a mask, so that tracking can be scored

    def __len__(self) -> int: ...

    def stem(self, i: int) -> str:
        """File name of frame `i`, without suffix."""

    def frame(self, i: int) -> Bytes:
        """Frame `i`, (H, W, 3)."""

    def mask(self, i: int) -> Bytes:
        """Object number of each pixel of frame `i`, (H, W); 0 for the background."""


def open_videos(source: str | Path, year: Year | None = None) -> Sequence[Video]:
    """Opens a folder of DAVIS, or renders ``scenes[:count[:size[:seed]]]``.

    The default `year` of the DAVIS challenge is 2017 if the folder has its list, else 2016.
    """
    if str(source).split(":")[0] == "scenes":
        count, size, seed = parse_scenes(str(source), RENDERED)
        if count > MOST_RENDERED or size**2 > MAX_FRAME:
            most = f"{MOST_RENDERED:,} of {math.isqrt(MAX_FRAME)} pixels a side"
            raise UserError(f"{source}: expected scenes[:count[:size[:seed]]], at most {most}")
        return [SceneVideo(seed, i, size) for i in range(count)]
    if year is None:
        year = "2017" if (Path(source) / "ImageSets" / "2017").is_dir() else "2016"
    return Davis(source, year)


class ReadAhead:
    """A video whose next frames and masks the threads of `pool` read before they are used.

    Masks are kept, a frame only until the next one is used: older frames are read again.
    """

    def __init__(self, video: Video, pool: Executor) -> None:
        self.video, self.name, self.annotated = video, video.name, video.annotated
        self._pool, self._begun = pool, 0
        self._frames: dict[int, Future[Bytes]] = {}
        self._masks: dict[int, Future[Bytes]] = {}
        self._read_to(AHEAD)

    def __len__(self) -> int:
        return len(self.video)

    def stem(self, i: int) -> str:
        return self.video.stem(i)

    def frame(self, i: int) -> Bytes:
        self._read_to(i + 1 + AHEAD)
        self._frames.pop(i - 1, None)
        return self._frames[i].result() if i in self._frames else self.video.frame(i)

    def mask(self, i: int) -> Bytes:
        return self._masks[i].result() if i in self._masks else self.video.mask(i)

    def _read_to(self, end: int) -> None:
        for i in range(self._begun, min(end, len(self))):
            self._frames[i] = self._pool.submit(self.video.frame, i)
            if self.annotated or i == 0:
                self._masks[i] = self._pool.submit(self.video.mask, i)
            self._begun = i + 1


def read_ahead(videos: Sequence[Video], pool: Executor) -> Iterator[ReadAhead]:
    """Yields `videos` such that the beginning of the next is read during the end of each."""
    readers = (ReadAhead(video, pool) for video in videos)
    for reader, _ in pairwise(chain(readers, (None,))):
        assert reader is not None
        yield reader


@dataclass
class _Moving:
    """A body in motion."""

    body: Body
    x: float
    y: float
    dx: float  # per frame
    dy: float
    spin: float


class SceneVideo:
    """Video `index` of `seed`: 20 frames of size x size, rendered on demand."""

    annotated = True

    def __init__(self, seed: int, index: int, size: int = 64) -> None:
        self.name, self.size = f"scene-{seed}-{index:04d}", size
        self.scenes = sample(seed, index)

    def __len__(self) -> int:
        return len(self.scenes)

    def stem(self, i: int) -> str:
        return f"{i:05d}"

    def frame(self, i: int) -> Bytes:
        return render(self.scenes[i], self.size)[0]

    def mask(self, i: int) -> Bytes:
        return self._numbers[render(self.scenes[i], self.size)[1]]

    @cached_property
    def _numbers(self) -> Bytes:
        """Body number -> object number, (256,); 0 for bodies not visible in the first frame."""
        pixels = np.bincount(render(self.scenes[0], self.size)[1].ravel(), minlength=256)
        seen = pixels * SEEN >= self.size * self.size
        seen[0] = False
        return np.where(seen, np.cumsum(seen), 0).astype(np.uint8)


def sample(seed: int, index: int, length: int = LENGTH) -> list[Scene]:
    """Scenes of video `index` of `seed`, one per frame, disjoint from those of `Scenes`."""
    scene = sample_scene(seed_of("videos", seed), index)
    draw = uniforms("motion", seed, index).__next__
    moving = [
        _Moving(body, body.x, body.y, *((2.0 * draw() - 1.0) * v for v in (SPEED, SPEED, SPIN)))
        for body in scene.bodies[: 1 + int(BODIES * draw())]
    ]
    zoom = (2.0 * draw() - 1.0) * ZOOM
    c, s = rotation(scene.tilt)
    frames = []
    for i in range(length):
        bodies = tuple(replace(m.body, x=m.x, y=m.y, turn=m.body.turn + i * m.spin) for m in moving)
        frames.append(replace(scene, bodies=bodies, spread=scene.spread * (1.0 + zoom * i)))
        for m in moving:
            # A body that has half left the view, or is too near or too far, turns back.
            depth = m.y * c + (scene.height - m.body.half) * s
            edge = scene.spread * depth
            if (m.x < -edge and m.dx < 0.0) or (m.x > edge and m.dx > 0.0):
                m.dx = -m.dx
            if (depth < NEAREST[0] and m.dy < 0.0) or (depth > FARTHEST and m.dy > 0.0):
                m.dy = -m.dy
            # On a collision both turn and this body waits. So bodies never touch, which the
            # renderer relies on: it does not support bodies inside bodies.
            if not any([_bounce(m, other) for other in moving if other is not m]):
                m.x, m.y = m.x + m.dx, m.y + m.dy
    return frames


def _bounce(a: _Moving, b: _Moving) -> bool:
    """Exchanges approach velocities if the next step of `a` would touch `b`; returns whether."""
    x, y = a.x + a.dx - b.x, a.y + a.dy - b.y
    apart = a.body.half * FOOT[a.body.shape] + b.body.half * FOOT[b.body.shape]
    square = x * x + y * y
    if square >= apart * apart:
        return False
    part = ((a.dx - b.dx) * x + (a.dy - b.dy) * y) / square
    if part < 0.0:  # they approach
        a.dx, a.dy, b.dx, b.dy = a.dx - part * x, a.dy - part * y, b.dx + part * x, b.dy + part * y
    return True


class DavisVideo:
    """One sequence of DAVIS, with folders of frames and of masks, read on demand."""

    def __init__(self, name: str, frames: Path, masks: Path, year: Year) -> None:
        self.name, self.year = name, year
        self._frames = sorted(frames.glob("*.jpg"))
        if not self._frames:
            raise DataError(f"{frames}: no frames, expected files 00000.jpg and so on")
        there = [masks / f"{frame.stem}.png" for frame in self._frames]
        missing = [mask for mask in there if not mask.is_file()]
        if missing and missing != there[1:]:
            raise DataError(
                f"{missing[0]}: no such file; either all frames or the first need a mask"
            )
        self.annotated = not missing
        self._masks = there[:1] if missing else there
        self.files = [*self._frames, *self._masks]

    def __len__(self) -> int:
        return len(self._frames)

    def stem(self, i: int) -> str:
        return self._frames[i].stem

    def frame(self, i: int) -> Bytes:
        try:
            return decode(read_regular(self._frames[i]), max_pixels=MAX_FRAME)
        except (BadImageError, OSError) as error:
            raise DataError(f"{self._frames[i]}: {error}; a video cannot lack a frame") from None

    def mask(self, i: int) -> Bytes:
        if i >= len(self._masks):
            raise DataError(f"{self.name}: only its first frame is annotated, not frame {i}")
        ids = read_mask(self._masks[i])
        # 2016: one object, stored as 255, or as several if the annotation is that of 2017.
        return (ids > 0).astype(np.uint8) if self.year == "2016" else np.where(ids == VOID, 0, ids)


class Davis(list[DavisVideo]):
    """The videos of one split of DAVIS, in the order of its list.

    Args:
        root: the folder that contains JPEGImages, Annotations and ImageSets.
        year: "2017" has several objects per video; "2016" one, everything but the background.
        resolution: "480p" is the usual one.
        split: "val", "train", or "test-dev", where only first frames are annotated.
    """

    def __init__(
        self, root: str | Path, year: Year = "2017", resolution: str = "480p", split: str = "val"
    ) -> None:
        if year not in ("2016", "2017"):
            raise UserError(f"DAVIS of {year!r}: expected 2016 or 2017")
        self.root, self.year = Path(root), year
        frames, masks = (self.root / part / resolution for part in ("JPEGImages", "Annotations"))
        for folder in (self.root, frames, masks):
            if not folder.is_dir():
                raise DataError(f"{folder}: no such folder; expected the folder of DAVIS {year}")
        # The download of 2017 also has a list of 2016, but elsewhere than the download of 2016.
        places = (year, resolution) if year == "2016" else (year,)
        lists = [self.root / "ImageSets" / place / f"{split}.txt" for place in places]
        path = next((path for path in lists if path.is_file()), None)
        if path is None:
            raise DataError(f"{lists[0]}: no such file; it lists the videos of the split {split}")
        try:
            lines = read_regular(path, MAX_LIST).decode().splitlines()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise DataError(f"{path}: cannot be read: {why}") from None
        words = [line.split()[0] for line in lines if line.strip()]
        # One video per line, or in the download of 2016 "/JPEGImages/480p/bear/00000.jpg /Anno...".
        names = dict.fromkeys(Path(word).parent.name if "/" in word else word for word in words)
        if not names:
            raise DataError(f"{path}: empty; expected the name of a video on every line")
        super().__init__(DavisVideo(name, frames / name, masks / name, year) for name in names)

    def __str__(self) -> str:
        return str(self.root)

    def files(self) -> Iterator[Path]:
        """Paths of all frames and masks."""
        return (file for video in self for file in video.files)


def read_mask(path: Path) -> Bytes:
    """Reads the object numbers (H, W) of an indexed or grey PNG."""
    try:
        data = io.BytesIO(read_regular(path))
        with Image.open(data, formats=("PNG",)) as image:
            if image.width * image.height > MAX_FRAME:
                raise DataError(f"{path}: more than {MAX_FRAME} pixels, too large for a video")
            if image.mode not in ("P", "L", "1"):
                raise DataError(f"{path}: an image of mode {image.mode}, expected an indexed PNG")
            return np.array(image).astype(np.uint8)
    except (OSError, SyntaxError, ValueError, Warning, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a mask: {error}") from None


def write_mask(ids: Bytes, path: Path) -> None:
    """Writes an indexed PNG with the colours of DAVIS, as its evaluation expects."""
    image = Image.fromarray(ids)
    image.putpalette(PALETTE.tobytes())
    with replaced(path) as temporary:
        image.save(temporary, "PNG")
