"""Scenes in the manner of CLEVR: their contents, labels and random sampling.

The camera stands above the origin and looks along +y and down; x points right, z up. Lengths are
CLEVR's, so that the thresholds of CLEVR/Dist apply unchanged. Sampling is equal to the last bit on
every machine; render.py says how.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np

from stopmim.base.random_keys import seed_of

SHAPES = ("cube", "sphere", "cylinder")
CUBE, SPHERE, CYLINDER = range(3)
COLOURS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
FEWEST, MOST = 3, 10  # bodies
THRESHOLDS = (8.0, 8.5, 9.0, 9.5, 10.0)  # of CLEVR/Dist, except its last (100), which none reaches
LABELS = {"count": 8, "distance": 6, "shape": 3, "colour": 8}  # name -> number of classes

NEAREST, FARTHEST = (7.65, 10.4), 14.6  # depths; the first range balances the six distance classes
SIZES, GAP = (0.4, 0.68), 0.15  # of bodies, and between their feet
# Per shape: half the height of a body of size 1 (for similar apparent bulk); then, in units of half
# the height, the radii of the disc it stands in and of its bounding ball.
HALF, FOOT, BALL = (0.8, 1.0, 0.92), (sqrt(2.0), 1.0, 1.0), (sqrt(3.0), 1.0, sqrt(2.0))
TRIES = 60  # candidate places per body


@dataclass(frozen=True)
class Body:
    """An object on the ground at (x, y), turned about the vertical by 2 atan(turn)."""

    shape: int
    colour: int
    metal: bool
    half: float  # half its height, which equals its width and depth
    x: float
    y: float
    turn: float


@dataclass(frozen=True)
class Scene:
    """Bodies, camera and light; `dataclasses.replace` moves any of them."""

    bodies: tuple[Body, ...]
    height: float  # of the camera, which is at (0, 0, height)
    tilt: float  # it looks down by 2 atan(tilt), far enough that the ground fills the image
    spread: float  # tangent of half the field of view
    light: tuple[float, float, float]  # direction to the first lamp, of length 1


def rotation(half_tangent: float) -> tuple[float, float]:
    """Cosine and sine of 2 atan(half_tangent)."""
    square = half_tangent * half_tangent
    return (1.0 - square) / (1.0 + square), 2.0 * half_tangent / (1.0 + square)


def depths(scene: Scene) -> list[float]:
    """Depth of each body's centre along the viewing axis, CLEVR's ``pixel_coords[2]``."""
    c, s = rotation(scene.tilt)
    return [body.y * c + (scene.height - body.half) * s for body in scene.bodies]


def labels_of(scene: Scene) -> dict[str, int]:
    """Number of bodies, and distance, shape and colour of the nearest one."""
    away = depths(scene)
    nearest = away.index(min(away))
    return {
        "count": len(away) - FEWEST,
        # Thresholds strictly below, as in vissl create_clevr_dist_data_files.py:58-80.
        "distance": [limit < away[nearest] for limit in THRESHOLDS].count(True),
        "shape": scene.bodies[nearest].shape,
        "colour": scene.bodies[nearest].colour,
    }


def uniforms(*key: str | int) -> Iterator[float]:
    """Yields an endless stream of numbers in [0, 1)."""
    bits = np.random.Philox(key=seed_of(*key))
    while True:
        yield from ((bits.random_raw(64) >> np.uint64(11)) * 2.0**-53).tolist()


def sample(seed: int, index: int) -> Scene:
    """Scene `index` of `seed`: the first body is the nearest, none touch, none is out of sight."""
    draw = uniforms("scenes", seed, index).__next__
    count = FEWEST + int((MOST + 1 - FEWEST) * draw())
    near = NEAREST[0] + (NEAREST[1] - NEAREST[0]) * draw()
    # The camera is higher for a far group: there is room for ten behind the nearest, and the
    # position in the image alone does not give the distance away.
    height = 6.88 + 0.35 * (near - 9.0) + 0.4 * draw()
    tilt, spread = 0.348 + 0.014 * draw(), 0.37 + 0.012 * draw()
    lx, ly = -0.9 + 0.4 * draw(), -0.5 + 0.6 * draw()
    norm = sqrt(lx * lx + ly * ly + 1.0)
    c, s = rotation(tilt)

    bodies: list[Body] = []
    place: tuple[float, ...]  # x, y, foot, depth; then u, v and a disc's radius in the image
    taken: list[tuple[float, ...]] = []
    for k in range(count):
        shape, colour, size = int(3.0 * draw()), int(8.0 * draw()), SIZES[int(2.0 * draw())]
        metal, turn = draw() < 0.5, (2.0 * draw() - 1.0) * 0.414  # up to 45 degrees either way
        half = size * HALF[shape]
        foot = half * FOOT[shape]
        sunk, lift = (height - half) * s, (half - height) * c
        limit, best, place = 0.98 * spread, -9.0, ()
        for _ in range(TRIES):
            depth = near + 0.05 + (FARTHEST - near) * draw() if k else near
            x = (2.0 * draw() - 1.0) * (limit * (depth - foot) - foot)
            y = (depth - sunk) / c
            u, v, disc = x / depth, (y * s + lift) / depth, size / depth
            room = 9.0  # smallest visible share of a disc, measured from its centre
            for x1, y1, foot1, depth1, u1, v1, disc1 in taken:
                dx, dy, apart = x - x1, y - y1, foot + foot1 + GAP
                if dx * dx + dy * dy < apart * apart:
                    room = -9.0
                    break
                du, dv = u - u1, v - v1
                front, back = (disc1, disc) if depth > depth1 else (disc, disc1)
                free = (sqrt(du * du + dv * dv) - front) / back
                if free < room:
                    room = free
            if room > best:
                best, place = room, (x, y, foot, depth, u, v, disc)
                if room > 0.1:
                    break
        if not place:  # fewer than one scene in 100,000; there is always room behind all others
            y = max((y1 + foot1 for _, y1, foot1, *_ in taken), default=near) + foot + GAP
            depth = y * c + sunk
            place = (0.0, y, foot, depth, 0.0, (y * s + lift) / depth, size / depth)
        taken.append(place)
        bodies.append(Body(shape, colour, metal, half, place[0], place[1], turn))
    return Scene(tuple(bodies), height, tilt, spread, (lx / norm, ly / norm, 1.0 / norm))
