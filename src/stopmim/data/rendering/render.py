"""Renders scenes to images and maps of body numbers, equal to the last bit on every machine.

Hence float64 throughout; only + - * / sqrt floor and comparisons (IEEE 754 rounds these correctly,
but not sin, exp or pow); no matrix product and no sum along an axis, whose order depends on the
width of the SIMD unit.

Shapes: B scenes, O bodies in all of them, K bodies in tiles of T x T rays, M rays that hit.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stopmim.data.rendering.scene import BALL, CUBE, CYLINDER, FOOT, SPHERE, Scene, rotation

GRID = 2  # a pixel is the mean of GRID x GRID rays; the median in `render_all` assumes 2
FILL = (0.62, 0.2, 0.76)  # direction of the second lamp; the first is the scene's own
TINT = (1.0, 0.99, 0.97)  # of the ground
GREYS = np.array([[int(v * t + 0.5) for t in TINT] for v in range(256)], np.uint8)
# sRGB of scene.COLOURS, from CLEVR's image_generation/data/properties.json, linearised by gamma 2.
_RED, _GREEN = (87, 173, 42, 29, 129, 129, 41, 255), (87, 35, 75, 105, 74, 38, 208, 238)
_BLUE = (87, 35, 215, 20, 25, 192, 208, 51)
PALETTE = np.array([[(v / 255.0) * (v / 255.0) for v in c] for c in (_RED, _GREEN, _BLUE)])

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Column = NDArray[Any]

# `ahead` and `down` are the cosine and sine of a camera's downward angle, `cos` and `sin` those of
# a body's turn. Bodies of a scene are numbered from 1.
VIEW = ("height", "ahead", "down", "spread", "light_x", "light_y", "light_z")
BODY = ("scene", "number", "shape", "colour", "metal", "half", "x", "y", "cos", "sin")


class _Table(SimpleNamespace):
    """Columns of equal shape: (B,) or (O,), or (K, 1, 1) to broadcast against tiles."""

    def __getitem__(self, index: Any) -> "_Table":
        return _Table(**{name: column[index] for name, column in vars(self).items()})


def _tables(scenes: Sequence[Scene]) -> tuple[_Table, _Table]:
    """VIEW of all scenes; BODY of all bodies, with the VIEW of their scenes."""
    cameras = [(s.height, *rotation(s.tilt), s.spread, *s.light) for s in scenes]
    bodies = [
        # The turn of a round body is invisible.
        (i, k, b.shape, b.colour, b.metal, b.half, b.x, b.y, *rotation(b.turn * (b.shape == CUBE)))
        for i, scene in enumerate(scenes)
        for k, b in enumerate(scene.bodies, 1)
    ]
    columns = np.array(bodies, np.float64).reshape(len(bodies), len(BODY)).T
    whole, real = columns[:5].astype(np.int64), columns[5:].copy()
    views = _Table(**dict(zip(VIEW, np.array(cameras, np.float64).T.copy(), strict=True)))
    body = dict(zip(BODY, [*whole, *real], strict=True))
    return views, _Table(**body, **vars(views[body["scene"]]))


def _tiles(
    b: _Table, x: Floats, y: Floats, z: Floats, radius: Floats, cells: int, step: int
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Squares around balls, in an image of cells x cells: index (K,), rows (K, T, 1), columns.

    T is a multiple of `step`, which leaves few groups, each processed as one array.
    """
    along = y * b.ahead + (b.height - z) * b.down
    above = y * b.down + (z - b.height) * b.ahead
    starts, sides = [], np.zeros(len(x))
    for across in (-above, x):
        # Exact tangents from the eye to the ball, so that no pixel of it is missed.
        root = radius * np.sqrt(across * across + along * along - radius * radius)
        scale = 0.5 * cells / (b.spread * (along * along - radius * radius))
        starts.append(np.floor((across * along - root) * scale + 0.5 * cells))
        stop = np.floor((across * along + root) * scale + 0.5 * cells) + 1.0
        sides = np.maximum(sides, stop - starts[-1])
    sides = np.minimum(-np.floor(-sides / step) * step, cells)
    for side in np.unique(sides):
        group = np.flatnonzero(sides == side)
        top, left = (np.clip(a[group], 0, cells - side).astype(np.int64) for a in starts)
        offset = np.arange(int(side))
        yield group, (top[:, None] + offset)[:, :, None], (left[:, None] + offset)[:, None, :]


def _rays(view: _Table, rows: Ints, columns: Ints, cells: int) -> tuple[Floats, Floats, Floats]:
    """x, y, z of rays through cells, scaled to depth 1: a ray's parameter is a depth."""
    right = ((2 * columns + 1) / cells - 1.0) * view.spread
    up = (1.0 - (2 * rows + 1) / cells) * view.spread
    return right, view.ahead + up * view.down, up * view.ahead - view.down


def _slab(half: Floats, eye: Floats, ray: Floats) -> tuple[Floats, Floats]:
    """Depths at which rays enter and leave ``-half < coordinate < half``."""
    inverse = 1.0 / ray
    middle, reach = eye * -inverse, half * np.abs(inverse)
    return middle - reach, middle + reach


def _round(a: Floats, b: Floats, c: Floats) -> tuple[Floats, Floats]:
    """Depths at which rays enter and leave ``a t t + 2 b t + c < 0``; equal if they miss."""
    root = np.sqrt(np.maximum(b * b - a * c, 0.0))
    return (-b - root) / a, (root - b) / a


def _power(x: Floats, doublings: int) -> Floats:
    for _ in range(doublings):
        x = x * x
    return x


def _hits(shape: int, those: Ints, bodies: _Table, size: int) -> Iterator[tuple[Column, ...]]:
    """Yields rays that hit these bodies, hidden or not: body, cell, depth, x, y, z, each (M,).

    The rays of a pixel are adjacent: cell // GRID**2 is the pixel.
    """
    cells = size * GRID
    bodies = bodies[those]
    radius = bodies.half * BALL[shape]
    for group, rows, columns in _tiles(bodies, bodies.x, bodies.y, bodies.half, radius, cells, 16):
        b = bodies[group, None, None]
        x, y, z = _rays(b, rows, columns, cells)  # (K, 1, T), (K, T, 1), (K, T, 1)
        ex, ey, ez = -b.x, -b.y, b.height - b.half  # the eye, relative to the body's centre
        if shape == SPHERE:
            c = ex * ex + ey * ey + ez * ez - b.half * b.half
            enter, leave = _round(x * x + (y * y + z * z), x * ex + (y * ey + z * ez), c)
        else:
            enter, leave = _slab(b.half, ez, z)
            if shape == CYLINDER:
                c = ex * ex + ey * ey - b.half * b.half
                walls = [_round(x * x + y * y, x * ex + y * ey, c)]
            else:
                turned = (ex * b.cos + ey * b.sin, x * b.cos + y * b.sin)
                across = (ey * b.cos - ex * b.sin, y * b.cos - x * b.sin)
                walls = [_slab(b.half, *turned), _slab(b.half, *across)]
            for low, high in walls:
                enter, leave = np.maximum(enter, low), np.minimum(leave, high)
        hit = np.flatnonzero(enter < leave)  # into (K, T, T)
        row = hit // rows.shape[1]  # into (K, T, 1)
        body = row // rows.shape[1]
        column = hit + (body - row) * rows.shape[1]  # into (K, 1, T)
        line = b.scene * (cells * cells) + rows // GRID * (cells * GRID) + rows % GRID * GRID
        place = columns // GRID * (GRID * GRID) + columns % GRID
        cell = line.ravel()[row] + place.ravel()[column]
        ray = (x.ravel()[column], y.ravel()[row], z.ravel()[row])
        yield those[group[body]], cell, enter.ravel()[hit], *ray


def _normals(
    shape: int, bodies: _Table, hits: list[Column]
) -> tuple[Floats, Floats, Floats, Floats]:
    """x, y, z of the normals where rays end, and the light that the ground leaves, each (M,)."""
    body, _, depth, x, y, z = hits
    scale = (1.0 / bodies.half)[body]
    nx = (x * depth - bodies.x[body]) * scale
    ny = (y * depth - bodies.y[body]) * scale
    nz = (z * depth + (bodies.height - bodies.half)[body]) * scale
    contact = np.minimum(1.0 + 0.4 * nz, 1.0)  # less light near the ground
    # The normal of a sphere is the hit point itself; high powers of it give flat sides with
    # rounded edges, as on CLEVR's bodies.
    if shape == CYLINDER:
        bend = _power(nx * nx + ny * ny, 3)
        nx, ny, nz = nx * bend, ny * bend, nz * _power(nz, 3)
    elif shape == CUBE:
        c, s = bodies.cos[body], bodies.sin[body]
        nx, ny = nx * c + ny * s, ny * c - nx * s
        nx, ny, nz = nx * _power(nx, 3), ny * _power(ny, 3), nz * _power(nz, 3)
        nx, ny = nx * c - ny * s, ny * c + nx * s
    scale = 1.0 / np.sqrt(nx * nx + ny * ny + nz * nz)
    return nx * scale, ny * scale, nz * scale, contact


def _shade(shape: int, metal: bool, bodies: _Table, hits: list[Column]) -> list[Floats]:
    """Linear red, green and blue of rays that end on bodies of one shape and material, (M,)."""
    body, _, _, x, y, z = hits
    nx, ny, nz, contact = _normals(shape, bodies, hits)
    scale = 1.0 / np.sqrt(x * x + y * y + z * z)
    x, y, z = x * scale, y * scale, z * scale
    facing = x * nx + y * ny + z * nz  # -1: straight at the eye
    twice = 2.0 * facing
    x, y, z = x - twice * nx, y - twice * ny, z - twice * nz  # mirrored

    lx, ly, lz = bodies.light_x[body], bodies.light_y[body], bodies.light_z[body]
    key = np.maximum(nx * lx + ny * ly + nz * lz, 0.0)
    glint = _power(np.maximum(x * lx + y * ly + z * lz, 0.0), 3)
    rim = _power(1.0 + facing, 2)
    if metal:  # reflects a dark sky, a bright horizon, the ground and two lamps
        horizon, ground = np.maximum(1.0 - 1.6 * np.abs(z), 0.0), np.maximum(-z, 0.0)
        light = 0.1 + 0.25 * horizon + 0.55 * ground * contact + 0.35 * key
        second = _power(np.maximum(x * FILL[0] + y * FILL[1] + z * FILL[2], 0.0), 5)
        # An edge is thinner than the spacing of rays: a full glint would be a dotted line.
        strength = 1.2 if shape == SPHERE else 0.5
        shine = strength * (_power(glint, 2) + 0.35 * second) + 0.1 * rim
    else:
        fill = np.maximum(nx * FILL[0] + ny * FILL[1] + nz * FILL[2], 0.0)
        light = (0.16 + 0.14 * nz) * contact + 0.78 * key + 0.16 * fill
        shine = 0.1 * glint + 0.04 * rim
    return [PALETTE[i, bodies.colour][body] * light + shine for i in range(3)]


def _ground(views: _Table, bodies: _Table, size: int) -> tuple[Floats, Floats]:
    """Linear grey of the ground with its shadows, and how much of it they leave lit.

    Both (B * size * size,); 0 is dark.
    """
    view, offset = views[:, None, None], np.arange(size)
    x, y, z = _rays(view, offset[:, None], offset, size)
    y = y * view.height / -z - 7.0  # relative to the centre of a pool of light
    pool = 1.0 / ((1.0 + y * y / 90.0) * (1.0 + (x + 0.1) * (x + 0.1)))  # (B, size, size)

    lit = np.ones(pool.size)
    # A shadow is the foot of the body swept along the path (wx, wy) of the light from its top to
    # the ground. The higher the part that casts it, the softer the edge.
    wx, wy = -2.0 * bodies.light_x / bodies.light_z, -2.0 * bodies.light_y / bodies.light_z
    x, y = bodies.x + 0.5 * wx * bodies.half, bodies.y + 0.5 * wy * bodies.half
    radius = bodies.half * (0.5 + 0.5 * np.sqrt(wx * wx + wy * wy))
    bodies.wx = wx * bodies.cos + wy * bodies.sin  # as the body sees it, like `wy`
    bodies.wy = wy * bodies.cos - wx * bodies.sin
    for shape in range(3):
        those = np.flatnonzero(bodies.shape == shape)
        reach = (radius + bodies.half * FOOT[shape])[those]
        here = bodies[those]
        for group, rows, columns in _tiles(here, x[those], y[those], 0.0 * reach, reach, size, 8):
            b = here[group, None, None]
            light = _shadow(shape, b, rows, columns, size)
            cell = b.scene * (size * size) + rows * size + columns
            np.minimum.at(lit, cell.ravel(), light.ravel())
    return pool.ravel() * (0.2 + 0.34 * lit), lit


def _shadow(shape: int, b: _Table, rows: Ints, columns: Ints, size: int) -> Floats:
    """Share of the first lamp's light that passes a body and reaches the ground, (K, T, T)."""
    x, y, z = _rays(b, rows, columns, size)
    scale = 1.0 / b.half
    t = b.height * -scale / z  # (K, T, 1)
    x, y = x * t - b.x * scale, y * t - b.y * scale  # (K, T, T), (K, T, 1)
    if shape == CUBE:
        x, y = x * b.cos + y * b.sin, y * b.cos - x * b.sin
    square = b.wx * b.wx + b.wy * b.wy + 1e-9
    part = x * (b.wx / square) + y * (b.wy / square)  # 0: bottom of the body, 1: top
    # A sphere casts its shadow with the parts around its middle.
    low, high = (0.35, 0.65) if shape == SPHERE else (0.0, 1.0)
    part = np.minimum(np.maximum(part, low), high)
    dx, dy = x - part * b.wx, y - part * b.wy
    if shape == CUBE:
        dx, dy = np.abs(dx) - 1.0, np.abs(dy) - 1.0
        px, py = np.maximum(dx, 0.0), np.maximum(dy, 0.0)
        away = np.sqrt(px * px + py * py) + np.minimum(np.maximum(dx, dy), 0.0)
    else:
        away = np.sqrt(dx * dx + dy * dy) - 1.0
    edge = np.minimum(np.maximum(away / (0.3 + 0.7 * part) + 0.5, 0.0), 1.0)
    under = np.maximum(1.0 - 0.4 * (x * x + y * y), 0.0)
    return edge * edge * (3.0 - 2.0 * edge) * (1.0 - under * under)


def _front(bodies: _Table, size: int, cells: int) -> Iterator[tuple[int, bool, list[Column]]]:
    """Yields the rays that end on bodies, in the form of `_hits`, by shape and material."""
    nearest = np.full(cells, np.inf)
    kinds = []
    for shape, metal in product(range(3), (False, True)):
        those = np.flatnonzero((bodies.shape == shape) & (bodies.metal == metal))
        if tiles := list(_hits(shape, those, bodies, size)):
            hits = [np.concatenate(columns) for columns in zip(*tiles, strict=True)]
            np.minimum.at(nearest, hits[1], hits[2])
            kinds.append((shape, metal, hits))
    for shape, metal, hits in kinds:
        front = np.flatnonzero(hits[2] == nearest[hits[1]])
        yield shape, metal, [column[front] for column in hits]


def render_all(scenes: Sequence[Scene], size: int) -> tuple[Bytes, Bytes]:
    """Images (B, size, size, 3), and body numbers (B, size, size), 0 for the ground."""
    views, bodies = _tables(scenes)
    ground, _ = _ground(views, bodies, size)
    images = GREYS[(np.sqrt(ground) * 255.0 + 0.5).astype(np.int64)]  # (B * size * size, 3)
    rays = GRID * GRID
    owners = np.zeros(ground.size * rays, np.uint8)
    pixels, colours = [np.empty(0, np.int64)], [[np.empty(0)] * 3]
    for shape, metal, seen in _front(bodies, size, ground.size * rays):
        owners[seen[1]] = bodies.number[seen[0]]
        pixels.append(seen[1] // rays)
        colours.append(_shade(shape, metal, bodies, seen))
    pixel = np.concatenate(pixels)
    covered = np.bincount(pixel, minlength=ground.size)
    touched = np.flatnonzero(covered)
    bare = (rays - covered[touched]) * ground[touched]
    for i, parts in enumerate(zip(*colours, strict=True)):
        light = np.bincount(pixel, np.concatenate(parts), ground.size)[touched]
        linear = np.minimum((bare * (TINT[i] * TINT[i]) + light) / rays, 1.0)
        images[touched, i] = np.sqrt(linear) * 255.0 + 0.5
    # The upper median of four numbers: a body owns a pixel if it has half of its rays.
    a, b, c, d = owners.reshape(-1, rays).T
    low = np.maximum(np.minimum(a, b), np.minimum(c, d))
    ids = np.maximum(low, np.minimum(np.maximum(a, b), np.maximum(c, d)))
    return images.reshape(-1, size, size, 3), ids.reshape(-1, size, size)


BANDS = (
    *("red", "green", "blue", "lamp", "depth", "disparity"),
    *("normal_x", "normal_y", "normal_z", "height", "metal", "shadow"),
)


def render_bands(scenes: Sequence[Scene], size: int) -> Floats:
    """The BANDS of scenes, (B, size, size, 12): lengths as in the scene, the others 0 to 1.

    A band of a pixel is the mean over its rays; the ground has one ray per pixel.
    """
    views, bodies = _tables(scenes)
    ground, lit = _ground(views, bodies, size)
    offset, one = np.arange(size), np.ones(ground.size)
    _, _, down = _rays(views[:, None, None], offset[:, None], offset, size)
    depth = (views.height[:, None, None] / -down * np.ones(size)).ravel()  # where z is 0
    key = views.light_z[:, None, None] * np.ones((size, size))
    grey = [ground * (tint * tint) for tint in TINT]
    bands = [*grey, key.ravel() * lit, depth, 1.0 / depth, 0.0 * one, 0.0 * one, one]
    bands += [0.0 * one, 0.0 * one, 1.0 - lit]
    rays = GRID * GRID
    pixels = [np.empty(0, np.int64)]
    found = [[np.empty(0)] * len(BANDS)]
    for shape, metal, seen in _front(bodies, size, ground.size * rays):
        body, cell, away, _, _, z = seen
        nx, ny, nz, _ = _normals(shape, bodies, seen)
        light = nx * bodies.light_x[body] + ny * bodies.light_y[body] + nz * bodies.light_z[body]
        height = bodies.height[body] + z * away
        flat = np.zeros(len(body))
        pixels.append(cell // rays)
        found.append(
            [
                *_shade(shape, metal, bodies, seen),
                *(np.maximum(light, 0.0), away, 1.0 / away, nx, ny, nz, height),
                *(flat + metal, flat),
            ]
        )
    pixel = np.concatenate(pixels)
    covered = np.bincount(pixel, minlength=ground.size)
    for band, parts in zip(bands, zip(*found, strict=True), strict=True):
        band *= rays - covered
        band += np.bincount(pixel, np.concatenate(parts), ground.size)
        band /= rays
    return np.stack(bands, axis=1).reshape(-1, size, size, len(BANDS))


def render(scene: Scene, size: int) -> tuple[Bytes, Bytes]:
    """Image (size, size, 3), and body numbers (size, size), 0 for the ground."""
    images, ids = render_all([scene], size)
    return images[0], ids[0]
