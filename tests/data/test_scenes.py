import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from stopmim.data.rendering.render import BANDS, render, render_all, render_bands
from stopmim.data.rendering.scene import (
    CUBE,
    CYLINDER,
    LABELS,
    SHAPES,
    SPHERE,
    Body,
    Scene,
    labels_of,
    sample,
)
from stopmim.data.sources import scenes
from stopmim.data.sources.scenes import Bands, Scenes

MANY = [sample(0, i) for i in range(512)]
LIGHT = (-0.5, -0.1, math.sqrt(0.74))


def scene_of(*bodies: Body) -> Scene:
    return Scene(bodies, height=7.2, tilt=0.355, spread=0.37, light=LIGHT)


def body_at(x: float, y: float, shape: int = SPHERE, half: float = 0.6, colour: int = 1) -> Body:
    return Body(shape, colour, metal=False, half=half, x=x, y=y, turn=0.2)


def camera(scene: Scene) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Eye, then the unit vectors to the right, up and forward."""
    angle = 2.0 * math.atan(scene.tilt)
    c, s = math.cos(angle), math.sin(angle)
    vectors = ([0, 0, scene.height], [1, 0, 0], [0, s, c], [0, c, -s])
    eye, right, up, forward = (np.array(v, float) for v in vectors)
    return eye, right, up, forward


def inside(body: Body, points: np.ndarray) -> np.ndarray:
    """Which of the points (..., 3) are in the body."""
    x, y, z = np.moveaxis(points - [body.x, body.y, body.half], -1, 0)
    if body.shape == SPHERE:
        return x**2 + y**2 + z**2 < body.half**2
    if body.shape == CYLINDER:
        return (x**2 + y**2 < body.half**2) & (abs(z) < body.half)
    angle = 2.0 * math.atan(body.turn)
    a = x * math.cos(angle) + y * math.sin(angle)
    b = y * math.cos(angle) - x * math.sin(angle)
    return np.maximum(np.maximum(abs(a), abs(b)), abs(z)) < body.half


def test_pixels_and_labels_are_the_same_on_every_machine() -> None:
    made = Scenes(48)
    images = hashlib.sha256(made.pixels.tobytes()).hexdigest()
    labels = hashlib.sha256(b"".join(made.labels[k].tobytes() for k in LABELS)).hexdigest()
    assert images == "c5533b9c0fb68d6941b0fcde9f04eef42a423543181e45daebc596952fcb9802"
    assert labels == "0d23292b3958601003fb0912660a7b51b287bc7d5415ed70c33f91fd6efbf749"


def assert_equal(a: Scenes, b: Scenes) -> None:
    assert np.array_equal(a.pixels, b.pixels)
    for name in LABELS:
        assert np.array_equal(a.labels[name], b.labels[name])


def test_a_scene_does_not_depend_on_how_many_are_made() -> None:
    few, many = Scenes(10, size=32), Scenes(75, size=32)
    many.pixels = many.pixels[:10]
    many.labels = {name: values[:10] for name, values in many.labels.items()}
    assert_equal(few, many)


def test_neither_threads_nor_the_size_of_the_pieces_change_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Scenes(100, size=32, threads=1)
    monkeypatch.setattr(scenes, "PIXELS", 7 * 32 * 32)
    for batch in (23, 100):
        monkeypatch.setattr(scenes, "BATCH", batch)
        for threads in (1, 3):
            assert_equal(whole, Scenes(100, size=32, threads=threads))


def test_a_scene_looks_the_same_alone_and_among_others() -> None:
    images, ids = render_all(MANY[:20], 40)
    for i, scene in enumerate(MANY[:20]):
        image, body = render(scene, 40)
        assert np.array_equal(image, images[i])
        assert np.array_equal(body, ids[i])


def test_another_seed_gives_other_scenes() -> None:
    assert sample(0, 0) != sample(1, 0) != sample(1, 1)
    names = {Scenes(*key).fingerprint for key in [(2, 16, 0), (3, 16, 0), (2, 17, 0), (2, 16, 1)]}
    assert len(names) == 4


def test_images_can_be_read_by_number() -> None:
    made = Scenes(13, size=24)
    assert len(made) == 13
    assert made.pixels.shape == (13, 24, 24, 3)
    image = made.read(12)
    assert image.dtype == np.uint8
    assert image.shape == (24, 24, 3)
    assert image.flags.c_contiguous
    assert made.name(12) == "scene 00000012"
    assert set(made.labels) == set(LABELS)
    assert all(v.dtype == np.int64 and v.shape == (13,) for v in made.labels.values())


def test_no_scenes_and_empty_scenes_are_possible() -> None:
    assert len(Scenes(0)) == 0
    image, ids = render(scene_of(), 16)
    assert ids.max() == 0
    assert image.min() > 60


def test_labels_say_what_is_in_the_scene() -> None:
    made = Scenes(200, size=8)
    for i, scene in enumerate(MANY[:200]):
        eye, _, _, forward = camera(scene)
        depth = [float(np.dot([b.x, b.y, b.half] - eye, forward)) for b in scene.bodies]
        nearest = scene.bodies[int(np.argmin(depth))]
        assert made.labels["count"][i] == len(scene.bodies) - 3
        assert made.labels["distance"][i] == np.searchsorted([8, 8.5, 9, 9.5, 10], min(depth))
        assert made.labels["shape"][i] == nearest.shape
        assert made.labels["colour"][i] == nearest.colour


@pytest.mark.parametrize("k", range(5))
def test_a_depth_on_a_threshold_belongs_to_the_nearer_class(k: int) -> None:
    limit = [8.0, 8.5, 9.0, 9.5, 10.0][k]
    level = replace(scene_of(body_at(0.0, limit), body_at(3.0, 20.0)), tilt=0.0)  # depth = y
    assert labels_of(level)["distance"] == k
    beyond = replace(level, bodies=(body_at(0.0, math.nextafter(limit, 11.0)),))
    assert labels_of(beyond)["distance"] == k + 1


def test_classes_are_balanced() -> None:
    made = [labels_of(sample(5, i)) for i in range(4000)]
    for name, total in LABELS.items():
        share = np.bincount([c[name] for c in made], minlength=total) / len(made)
        assert len(share) == total
        if name == "distance":
            assert share.min() > 0.08
            assert share.max() < 0.25
        else:  # five standard deviations
            assert abs(share - 1 / total).max() < 5 * math.sqrt(1 / total / len(made)), name


def test_count_and_distance_are_not_tied() -> None:
    made = [labels_of(sample(6, i)) for i in range(2000)]
    count, distance = ([c[name] for c in made] for name in ("count", "distance"))
    assert abs(np.corrcoef(count, distance)[0, 1]) < 0.1


def gaps(scene: Scene) -> list[float]:
    foot = [b.half * (math.sqrt(2.0) if b.shape == CUBE else 1.0) for b in scene.bodies]
    return [
        math.hypot(a.x - b.x, a.y - b.y) - foot[i] - foot[j]
        for i, a in enumerate(scene.bodies)
        for j, b in enumerate(scene.bodies[:i])
    ]


def test_bodies_never_touch() -> None:
    assert min(min(gaps(scene)) for scene in MANY) > 0.1


def test_there_is_a_place_for_ten_even_if_no_try_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopmim.data.rendering.scene.TRIES", 0)
    made = [sample(0, i) for i in range(50)]
    assert max(len(scene.bodies) for scene in made) == 10
    assert min(min(gaps(scene)) for scene in made) > 0.1


def test_every_body_is_in_the_picture_and_visible() -> None:
    _, ids = render_all(MANY, 64)
    seen = [
        np.bincount(m.ravel(), minlength=len(s.bodies) + 1) for s, m in zip(MANY, ids, strict=True)
    ]
    pixels = np.concatenate([counts[1:] for counts in seen])
    assert np.mean(pixels >= 6) > 0.99
    assert pixels.min() > 0
    border = np.concatenate([ids[:, 0], ids[:, -1], ids[:, :, 0], ids[:, :, -1]])
    assert border.max() == 0


def test_hardly_anything_hides_the_nearest_body() -> None:
    _, together = render_all(MANY, 48)
    _, alone = render_all([replace(scene, bodies=scene.bodies[:1]) for scene in MANY], 48)
    visible = (together == 1).sum(axis=(1, 2)) / (alone == 1).sum(axis=(1, 2))
    assert visible.min() > 0.9


def test_the_map_agrees_with_a_slow_march_along_the_rays() -> None:
    size = 40
    for scene in MANY[:4]:
        eye, right, up, forward = camera(scene)
        u = (2 * (np.arange(size) + 0.5) / size - 1) * scene.spread
        rays = forward + u[None, :, None] * right - u[:, None, None] * up  # (size, size, 3)
        slow = np.zeros((size, size), np.uint8)
        for t in np.arange(17.0, 6.0, -0.02):  # from afar, so that the nearest is written last
            for k, body in enumerate(scene.bodies, 1):
                slow[inside(body, eye + t * rays)] = k
        _, fast = render(scene, size)
        padded = np.pad(slow, 1, mode="edge")
        shifts = [padded[r : r + size, c : c + size] for r in range(3) for c in range(3)]
        away_from_edges = np.all([shift == slow for shift in shifts], axis=0)
        assert len(np.unique(slow[away_from_edges])) > 2
        assert np.array_equal(slow[away_from_edges], fast[away_from_edges])
        assert np.mean(slow != fast) < 0.04


@pytest.mark.parametrize("shape", range(3), ids=SHAPES)
def test_a_nearer_body_hides_a_farther_one_whatever_their_order(shape: int) -> None:
    near, far = body_at(0.0, 7.0, shape, half=0.9), body_at(0.1, 8.6, SPHERE, half=0.4)
    image, ids = render(scene_of(near, far), 48)
    swapped, numbers = render(scene_of(far, near), 48)
    assert np.array_equal(image, swapped)
    assert np.mean(ids != np.array([0, 2, 1])[numbers]) < 0.01  # but for rays two against two
    _, unhidden = render(scene_of(far), 48)
    overlap = (unhidden == 1) & (render(scene_of(near), 48)[1] == 1)
    assert overlap.sum() > 5
    assert np.all(ids[overlap] == 1)


def test_the_light_moves_shadows_but_not_bodies() -> None:
    scene = MANY[1]
    moved = replace(scene, light=(-scene.light[0], *scene.light[1:]))
    (before, ids), (after, same) = render(scene, 64), render(moved, 64)
    assert np.array_equal(ids, same)
    changed = np.any(before != after, axis=-1)
    assert changed[ids > 0].mean() > 0.5
    assert 0.02 < changed[ids == 0].mean() < 0.6


def test_another_body_changes_only_itself_and_its_shadow() -> None:
    first = body_at(1.6, 8.0, CUBE)
    for shape in range(3):
        before, _ = render(scene_of(first), 64)
        after, ids = render(scene_of(first, body_at(-1.6, 8.0, shape)), 64)
        assert np.array_equal(before[:, 34:], after[:, 34:])
        assert np.any(ids == 2)
        assert np.all(np.any(before != after, axis=-1)[ids == 2])
        rows, columns = np.nonzero(ids == 2)
        ground = np.ones((64, 64), bool)
        ground[rows.min() - 1 : rows.max() + 2, columns.min() - 1 : columns.max() + 2] = False
        difference = after[ground].astype(int) - before[ground]
        assert difference.max() == 0  # a shadow never makes brighter
        assert difference.min() < -20


def test_a_body_outside_the_picture_is_not_drawn() -> None:
    lone = body_at(0.0, 8.0)
    before, ids = render(scene_of(lone), 32)
    after, same = render(scene_of(lone, body_at(-9.0, 8.0, CUBE), body_at(0.0, 60.0)), 32)
    assert np.array_equal(before, after)
    assert np.array_equal(ids, same)


def test_a_turn_of_a_round_body_cannot_be_seen() -> None:
    for shape in range(3):
        body = body_at(0.5, 8.0, shape)
        before, _ = render(scene_of(body), 32)
        after, _ = render(scene_of(replace(body, turn=-0.3)), 32)
        assert np.array_equal(before, after) == (shape != CUBE)


def test_colours_and_materials_can_be_told_apart() -> None:
    looks = []
    for colour in range(LABELS["colour"]):
        for metal in (False, True):
            body = replace(body_at(0.0, 8.0, colour=colour), metal=metal)
            image, ids = render(scene_of(body), 48)
            looks.append(image[ids == 1].astype(float))
    for i, a in enumerate(looks):
        for b in looks[:i]:
            assert abs(a - b).mean() > 5


# ----------------------------------------------------------------------- in bands


def test_bands_are_the_same_on_every_machine() -> None:
    made = Bands(24, 32)
    assert hashlib.sha256(made.pixels.tobytes()).hexdigest()[:16] == "d60d9f8e74da627c"
    assert (made.channels, made.kind, made.channel_names) == (12, "uint16", [*BANDS])
    plain = Scenes(24, 32)
    for name in LABELS:
        np.testing.assert_array_equal(made.labels[name], plain.labels[name])


def test_noise_depends_on_the_scene_alone() -> None:
    many, few = Bands(40, 16, seed=5), Bands(3, 16, seed=5, threads=1)
    np.testing.assert_array_equal(many.pixels[:3], few.pixels)
    assert (Bands(3, 16, seed=6).pixels != few.pixels).mean() > 0.9


def test_noise_is_standard() -> None:
    noise = scenes._noise(7, 200_000)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert 3 < abs(noise).max() <= 3.47  # four uniform numbers have no long tails


def test_bands_without_noise_are_the_geometry_of_the_scene() -> None:
    ball = body_at(0.2, 8.0)
    scene = scene_of(ball)
    bands = dict(zip(BANDS, np.moveaxis(render_bands([scene], 64)[0], -1, 0), strict=True))
    image, ids = render(scene, 64)
    for i, name in enumerate(("red", "green", "blue")):  # the picture, before rounding
        shown = np.sqrt(np.minimum(bands[name], 1)) * 255
        assert abs(shown - image[..., i]).max() < 1.0
    np.testing.assert_allclose(bands["disparity"] * bands["depth"], 1, atol=0.02)
    inner = (ids == 1) & (np.roll(ids, 1, 0) == 1) & (np.roll(ids, -1, 0) == 1)
    inner &= (np.roll(ids, 1, 1) == 1) & (np.roll(ids, -1, 1) == 1)
    ground = ids == 0
    normal = np.stack([bands[f"normal_{axis}"] for axis in "xyz"])
    assert abs(np.linalg.norm(normal, axis=0)[inner] - 1).max() < 0.05
    np.testing.assert_array_equal(bands["metal"], 0)
    assert bands["height"][inner].min() > 0
    assert bands["height"].max() <= 2 * ball.half
    # A point of the ball: its eye, ray and depth give its height and normal.
    row, column = np.argwhere(inner)[len(np.argwhere(inner)) // 2]
    eye, right, up, forward = camera(scene)
    u, v = (2 * column + 1) / 64 - 1, 1 - (2 * row + 1) / 64
    point = eye + bands["depth"][row, column] * (forward + scene.spread * (u * right + v * up))
    assert abs(point[2] - bands["height"][row, column]) < 0.02
    away = (point - [ball.x, ball.y, ball.half]) / ball.half
    np.testing.assert_allclose(away, normal[:, row, column], atol=0.05)
    far = ground & (bands["shadow"] == 0)
    assert 0.5 < far.mean() < 1
    np.testing.assert_allclose(bands["normal_z"][far & (bands["height"] == 0)], 1)
    assert 0.5 < bands["shadow"].max() <= 1


def test_bands_of_a_metal_body_say_so() -> None:
    bands = render_bands([scene_of(replace(body_at(0, 8), metal=True))], 48)[0]
    assert bands[..., BANDS.index("metal")].max() == 1
