"""Tracking by label propagation: as DINO's code and the DAVIS evaluation were recorded to do it."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import GOLDEN, golden, golden_about, seeded
from stopmim.base.errors import DataError, NonFiniteError, StorageError, UserError
from stopmim.data.pixels import MEAN, STD
from stopmim.data.videos import Bytes, open_videos, read_mask
from stopmim.evals import propagation, tracking
from stopmim.evals.inputs import Inputs
from stopmim.evals.protocols import VideoTracking
from stopmim.evals.regions import sheet, summary
from stopmim.evals.request import ImageRequest
from stopmim.evals.results import Result
from stopmim.evals.tracking import (
    Scores,
    Tracking,
    boundary_f,
    follow,
    frame_size,
    jaccard,
    labels_of,
    propagate,
    resize_ids,
    results,
    score,
    track,
)
from stopmim.method.encoder import VisionTransformer

SHADE = 25  # difference in brightness between two objects of a painted video
SEQUENCES = ("big", "small", "void_fewer")


@dataclass
class Painted:
    """A video whose pixels say which object they belong to."""

    masks: Sequence[Bytes]
    name: str = "painted"
    annotated: bool = True

    def __len__(self) -> int:
        return len(self.masks)

    def stem(self, i: int) -> str:
        return f"{i:05d}"

    def frame(self, i: int) -> Bytes:
        return np.repeat(self.masks[i][..., None] * np.uint8(SHADE), 3, axis=2)

    def mask(self, i: int) -> Bytes:
        return self.masks[i]


class Planted:
    """Knows the objects of painted videos: the feature of a patch is the object in its middle."""

    width = 8
    pool: Literal["mean", "cls"] = "mean"

    def __init__(self, patch: int, class_token: bool = False) -> None:
        self.patch, self.class_token = patch, class_token
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        self.seen.append(tuple(images.shape))
        middle = images[:, 0, self.patch // 2 :: self.patch, self.patch // 2 :: self.patch]
        ids = ((middle * STD[0] + MEAN[0]) * 255 / SHADE).round().long()
        tokens = F.one_hot(ids, self.width).flatten(1, 2).float()
        first = torch.full_like(tokens[:, :1], 3.0)
        return torch.cat([first, tokens], dim=1) if self.class_token else tokens

    def features(
        self, images: Tensor, layers: int = 1, pool: Literal["mean", "cls"] = "mean"
    ) -> Tensor:
        return self(images).mean(dim=1)


def moving(step: int, frames: int = 6, height: int = 64, width: int = 96) -> Painted:
    """Two boxes of 24 x 24 that slide apart by `step` pixels a frame."""
    masks = np.zeros((frames, height, width), np.uint8)
    for i, mask in enumerate(masks):
        mask[8:32, 40 - i * step : 64 - i * step] = 1
        mask[36:60, 24 + i * step : 48 + i * step] = 2
    return Painted(list(masks))


def named(found: list[Result]) -> dict[str, float]:
    return {result.name: result.value for result in found}


# ------------------------------------------------------------------------------ metric


@pytest.mark.parametrize("name", SEQUENCES)
def test_j_and_f_of_every_object_and_frame_are_the_recorded_ones(name: str) -> None:
    masks, recorded = np.load(GOLDEN / "davis_masks.npz"), golden_about("davis")["float64_J_F"]
    truth, found = masks[f"{name}.gt"], masks[f"{name}.res"]
    for k, (j, f) in enumerate(zip(recorded[f"{name}.J"], recorded[f"{name}.F"], strict=True), 1):
        pairs = list(zip(found == k, truth == k, strict=True))
        assert [jaccard(*pair) for pair in pairs] == pytest.approx(j, abs=1e-9)
        assert [boundary_f(*pair) for pair in pairs] == pytest.approx(f, abs=1e-9)


def test_aggregates_are_the_recorded_ones_pooled_over_objects() -> None:
    masks, about = np.load(GOLDEN / "davis_masks.npz"), golden_about("davis")
    scores: list[Scores] = []
    for name in SEQUENCES:
        truth = masks[f"{name}.gt"]
        video = Painted(list(np.where(truth == 255, 0, truth)), name)
        scores += score(video, torch.from_numpy(masks[f"{name}.res"]))
        for s, recorded in zip(
            [s for s in scores if s.video == name],
            about["sequences"][name]["per_object"],
            strict=True,
        ):
            assert s.number == recorded["object"]
            for values, kind in ((s.j, "J"), (s.f, "F")):
                assert summary(values) == pytest.approx(tuple(recorded[kind].values()), abs=1e-9)
    found, recorded = named(results(scores)), about["aggregate"]
    for kind in ("J", "F"):
        assert found[kind] == pytest.approx(recorded[f"{kind}-Mean"], abs=1e-9)
        assert found[f"{kind} recall"] == pytest.approx(recorded[f"{kind}-Recall"], abs=1e-9)
        assert found[f"{kind} decay"] == pytest.approx(recorded[f"{kind}-Decay"], abs=1e-9)
    assert found["J&F"] == pytest.approx(recorded["J&F-Mean"], abs=1e-9)


def test_empty_and_full_masks_are_scored_as_recorded() -> None:
    empty, full, box = np.zeros((64, 64), bool), np.ones((64, 64), bool), np.zeros((64, 64), bool)
    box[20:38, 20:39] = True
    edge = np.zeros((64, 64), bool)
    edge[:20, :30] = True
    assert (jaccard(empty, empty), boundary_f(empty, empty)) == (1, 1)
    assert (jaccard(box, empty), boundary_f(box, empty)) == (0, 0)
    assert (jaccard(empty, box), boundary_f(empty, box)) == (0, 0)
    assert (jaccard(edge, edge), boundary_f(edge, edge)) == (1, 1)
    assert (jaccard(full, full), boundary_f(full, full)) == (1, 1)
    assert jaccard(box, full) == 18 * 19 / 64**2
    assert boundary_f(box, full) == 0  # along the frame there is no boundary
    strip = np.zeros((3, 625), bool)  # less high than the disc within which boundaries match
    strip[:, 100:200] = True
    assert boundary_f(np.roll(strip, 5, axis=1), strip) == 1


def test_f_forgives_a_shift_up_to_the_radius_and_not_beyond() -> None:
    radius = math.ceil(0.008 * math.hypot(240, 427))
    truth = np.zeros((240, 427), bool)
    truth[100:140, 100:160] = True
    assert radius == 4
    assert boundary_f(np.roll(truth, radius, axis=1), truth) == 1
    assert boundary_f(np.roll(truth, radius + 1, axis=1), truth) < 1
    assert boundary_f(np.roll(truth, (3, 3), axis=(0, 1)), truth) < 1  # a disc, not a square


def test_masks_of_different_size_are_not_compared() -> None:
    for measure in (jaccard, boundary_f):
        with pytest.raises(ValueError, match="equal size"):
            measure(np.zeros((4, 4)), np.zeros((4, 5)))


def test_tensors_and_numbers_are_masks_too() -> None:
    a = torch.zeros(16, 16, dtype=torch.uint8)
    a[4:9, 4:9] = 255
    assert jaccard(a, (a > 0).numpy()) == boundary_f(a, a.tolist()) == 1


def test_the_interval_is_over_objects_and_absent_for_one() -> None:
    one = Scores("a", 1, np.full(4, 0.5), np.full(4, 0.7))
    assert all(result.interval is None and result.n == 1 for result in results([one]))
    low, high = (Scores("b", k, np.full(4, v), np.full(4, v)) for k, v in ((1, 0.0), (2, 1.0)))
    j_and_f = results([low, high])[0]
    assert (j_and_f.name, j_and_f.protocol, j_and_f.n) == ("J&F", "tracking", 2)
    assert (j_and_f.value, j_and_f.interval) == (0.5, (0.0, 1.0))
    many = [Scores("c", k, np.full(4, k % 2), np.full(4, k % 2)) for k in range(100)]
    interval = results(many)[0].interval
    assert interval == pytest.approx((0.4, 0.6), abs=0.011)  # 0.5 -+ 1.96 / 20


# ------------------------------------------------------------------------------ propagation


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        ("published", {}),
        ("queue1", {"n_last_frames": 1}),
        ("nonbhd", {"neighbourhood": 0}),
    ],
)
@pytest.mark.parametrize("tile", [3, 10, 64])
def test_labels_propagate_as_recorded_whatever_the_tiles(
    run: str, changes: dict[str, int], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propagation, "TILE", tile)
    recorded = golden("labelprop")
    options = Tracking(**({"neighbourhood": 3} | changes))  # type: ignore[arg-type]
    soft = propagate(recorded["features"], recorded["first_onehot"][0], options)
    torch.testing.assert_close(soft, recorded[f"{run}.soft"], atol=1e-5, rtol=0)
    if run != "nonbhd":
        found = labels_of(soft, 8, (100, 131))
        assert (found == recorded[f"{run}.segmentation"]).float().mean() >= 0.995


def dense(features: Tensor, first: Tensor, options: Tracking) -> Tensor:
    """All patches against all, and most of that thrown away: the formulation of the protocol."""
    classes, height, width = first.shape
    row, col = torch.arange(height * width) // width, torch.arange(height * width) % width
    r = options.neighbourhood or 1000
    window = ((row[:, None] - row).abs() <= r) & ((col[:, None] - col).abs() <= r)
    features = F.normalize(features, dim=-1)
    labels = [first.flatten(1)]
    for t in range(1, len(features)):
        used = [0, *range(max(1, t - options.n_last_frames), t)]
        affinity = torch.cat(
            [(features[t] @ features[i].T / options.temperature).exp() * window for i in used], 1
        )
        last = affinity.topk(options.topk, dim=1).values[:, -1:]
        affinity = torch.where(affinity < last, 0, affinity)
        affinity = affinity / affinity.sum(dim=1, keepdim=True)
        labels.append(torch.cat([labels[i] for i in used], dim=1) @ affinity.T)
    return torch.stack(labels[1:]).view(-1, classes, height, width)


@pytest.mark.parametrize(
    "options",
    [
        Tracking(),
        Tracking(neighbourhood=1, topk=40),  # more than a corner has neighbours
        Tracking(neighbourhood=2, topk=1, n_last_frames=0),
        Tracking(neighbourhood=30, temperature=0.3, n_last_frames=2),
    ],
)
def test_tiles_give_the_numbers_of_the_dense_formulation(options: Tracking) -> None:
    features = torch.randn(6, 17 * 23, 16, generator=seeded())
    first = F.one_hot(torch.randint(3, (17, 23), generator=seeded(1))).permute(2, 0, 1).float()
    found = propagate(iter(features), first, options)
    torch.testing.assert_close(found, dense(features, first, options), atol=2e-6, rtol=0)


@pytest.mark.parametrize("topk", [1, 5, 40])
def test_a_gpu_takes_by_a_product_what_a_cpu_takes_one_by_one(topk: int) -> None:
    like = torch.randn(30, 60, generator=seeded()).round(decimals=1)  # with many ties
    like[:, 20:] = -torch.inf  # and for 40 not enough within reach
    given = torch.rand(3, 60, generator=seeded(1))
    best = like.topk(topk, dim=1).values
    assert topk == 40 or (like >= best[:, -1:]).sum() > 30 * topk
    found, expected = (
        take(like.clone(), best, given, 0.1)
        for take in (propagation.take_dense, propagation.take_sparse)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("old", "new"), [((480, 832), (480, 854)), ((30, 52), (480, 832)), ((47, 33), (5, 98))]
)
def test_object_numbers_are_resized_as_pillow_does(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    ids = torch.randint(256, (2, *old), generator=seeded(), dtype=torch.uint8)
    for given, found in zip(ids, resize_ids(ids, new), strict=True):
        image = Image.fromarray(given.numpy()).resize(new[::-1], Image.Resampling.NEAREST)
        assert np.array_equal(found, np.asarray(image))


def test_a_small_temperature_does_not_overflow() -> None:
    features = torch.randn(3, 12, 8, generator=seeded())
    first = torch.zeros(2, 3, 4)
    first[0] = 1
    soft = propagate(features, first, Tracking(temperature=1e-3))
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(2, 3, 4))


def test_a_channel_that_is_the_same_everywhere_gives_no_nan() -> None:
    soft = torch.zeros(3, 4, 4)
    soft[2] = 1.0  # one object fills the frame: no least and largest to scale by
    assert (labels_of(soft[None], 4, (16, 16)) == 2).all()


# ------------------------------------------------------------------------------ videos


@pytest.mark.parametrize("step", [0, 3])
def test_perfect_features_follow_any_motion_perfectly_pixel_by_pixel(step: int) -> None:
    masks = np.zeros((5, 40, 40), np.uint8)
    for i, mask in enumerate(masks):
        mask[4:14, 20 - i * step : 30 - i * step] = 1
        mask[18:30, 4 + i * step : 16 + i * step] = 2
    found = track(Planted(1), [Painted(list(masks))], Tracking(size=40))
    assert named(found)["J&F"] == named(found)["J recall"] == 1
    assert named(found)["J decay"] == 0
    assert all(result.n == 2 for result in found)


def test_perfect_features_of_patches_are_near_perfect_masks() -> None:
    video = moving(4, height=64, width=64)
    found = named(track(Planted(4), [video], Tracking(size=64)))
    assert found["J&F"] > 0.95
    assert found["J recall"] == found["F recall"] == 1
    assert abs(found["J decay"]) < 0.02


def test_identity_features_keep_a_still_video_as_it_is() -> None:
    """Every patch is like itself only; with pixels as patches nothing is lost to the grid."""
    still = Painted([moving(0, 1, 24, 24).masks[0]] * 5)
    still.masks[0][3:9, 3:9] = 1

    class Identity(Planted):
        def __call__(self, images: Tensor, index: Tensor | None = None) -> Tensor:
            count = images.shape[-1] * images.shape[-2]
            return torch.randn(count, 64, generator=seeded()).expand(len(images), -1, -1)

    found = named(track(Identity(1), [still], Tracking(size=24)))
    assert found["J&F"] == found["J"] == found["F"] == 1


def test_a_class_token_is_dropped_and_nothing_else_is() -> None:
    video, options = moving(4, height=64, width=64), Tracking(size=64)
    plain, with_class = (
        torch.cat(list(follow(Planted(4, class_token), video, options)))
        for class_token in (False, True)
    )
    assert plain.equal(with_class)
    with pytest.raises(ValueError, match=r"\d+ tokens for a grid of 8 x 8"):
        list(follow(_Wrong(4), video, options))


class _Wrong(Planted):
    """Says its patches are larger than they are."""

    def __init__(self, patch: int) -> None:
        super().__init__(patch)
        self.inner, self.patch = Planted(patch), 2 * patch

    def __call__(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        return self.inner(images)


def test_neither_the_batch_nor_other_videos_change_what_is_found() -> None:
    torch.manual_seed(0)
    encoder = VisionTransformer(32, 8, 24, 2, 3)
    videos = open_videos("scenes:2:64:5")
    options = Tracking(size=64)
    together = track(encoder, videos, options, batch_size=7)
    one = [score(v, torch.cat([*follow(encoder, v, options, batch_size=1)])) for v in videos]
    assert results(one[0] + one[1]) == together


@pytest.mark.parametrize(
    ("shape", "patch", "compat", "expected"),
    [
        ((480, 854), 16, None, (480, 832)),
        ((480, 854), 8, None, (480, 832)),
        ((480, 854), 16, "released", (480, 832)),
        ((480, 910), 16, None, (480, 896)),
        ((480, 1152), 16, None, (480, 1152)),
        ((1080, 1920), 16, None, (480, 832)),
        ((854, 480), 16, None, (832, 480)),
        ((480, 854), 14, None, (476, 826)),
        ((480, 854), 14, "released", (480, 832)),
    ],
)
def test_frames_have_the_size_of_the_protocol_or_whole_patches(
    shape: tuple[int, int], patch: int, compat: Literal["released"] | None, expected: object
) -> None:
    assert frame_size(shape, Tracking(compat=compat), patch) == expected


def test_small_frames_keep_their_shape_rather_than_vanish() -> None:
    assert frame_size((48, 48), Tracking(size=48), 6) == (48, 48)
    assert frame_size((30, 50), Tracking(size=4), 8) == (8, 8)


def test_patch_14_lies_where_it_should_and_is_stretched_when_released() -> None:
    """A box of whole patches in a frame of 98 pixels: seven patches, or 96 with six and a rest."""
    mask = np.zeros((98, 98), np.uint8)
    mask[28:84, 14:70] = 1
    video = Painted([mask] * 4)
    aligned, cut = Planted(14), Planted(14)
    exact = torch.cat(list(follow(aligned, video, Tracking(size=96))))
    released = torch.cat(list(follow(cut, video, Tracking(size=96, compat="released"))))
    assert aligned.seen[0][2:] == (98, 98)
    assert cut.seen[0][2:] == (84, 84)  # of 96: the rest is left out
    assert jaccard(exact[2], mask) > 0.97
    assert jaccard(released[2], mask) < 0.95


def test_an_object_that_leaves_the_frame_and_comes_back_is_scored_all_the_way() -> None:
    masks = np.zeros((7, 32, 32), np.uint8)
    for mask, left in zip(masks, (20, 28, 32, 32, 28, 20, 12), strict=True):
        mask[8:20, left : left + 12] = 1
    found = track(Planted(1), [Painted(list(masks))], Tracking(size=32))
    assert named(found)["J"] > 0.9
    assert found[0].n == 1


def test_an_object_that_falls_through_the_grid_counts_and_scores_nothing() -> None:
    masks = np.zeros((4, 64, 64), np.uint8)
    masks[:, 8:40, 8:40] = 1
    masks[:, 50:52, 49:51] = 2  # between the middles of patches
    found = track(Planted(8), [Painted(list(masks))], Tracking(size=64))
    assert found[0].n == 2
    assert named(found)["J"] == pytest.approx(jaccard_of_first(masks) / 2)


def jaccard_of_first(masks: Bytes) -> float:
    alone = np.where(masks == 2, 0, masks)
    return named(track(Planted(8), [Painted(list(alone))], Tracking(size=64)))["J"]


def test_objects_of_all_videos_are_pooled_not_averaged_by_video() -> None:
    still = Painted([moving(0, 1, 64, 64).masks[0]] * 4, "two")
    lost = np.zeros((4, 64, 64), np.uint8)
    lost[0, 50:52, 49:51] = 1
    lost[1:, 8:40, 8:40] = 1
    both = track(Planted(8), [still, Painted(list(lost), "one")], Tracking(size=64))
    alone = track(Planted(8), [still], Tracking(size=64))
    assert both[0].n == 3
    assert named(both)["J"] == pytest.approx(named(alone)["J"] * 2 / 3)


def test_a_video_that_is_not_square_works_with_positions_of_a_square(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = VisionTransformer(32, 8, 24, 2, 3).train()
    found = track(encoder, [moving(4, 4, 64, 128)], Tracking(size=64), out=tmp_path)
    assert encoder.training
    assert 0 < named(found)["J"] < 1
    assert not any(math.isnan(value) for value in named(found).values())


@pytest.mark.parametrize(
    ("video", "says"),
    [
        (Painted(moving(4, 2).masks, "short"), "short: 2 frames"),
        (Painted([np.zeros((32, 32), np.uint8)] * 4, "void"), "void: no object"),
        (Painted(moving(4).masks, "half", annotated=False), "half: only its first frame"),
    ],
)
def test_a_video_that_cannot_be_scored_is_named_in_one_line(video: Painted, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        track(Planted(4), [video])
    assert len(str(caught.value).splitlines()) == 1


class _Reading(Painted):
    """Counts how often a mask is read."""

    reads = 0

    def mask(self, i: int) -> Bytes:
        self.reads += 1
        return super().mask(i)


def test_a_mask_is_read_once_to_be_checked_and_once_to_be_used() -> None:
    """Of a PNG, that is the time of a frame."""
    video = _Reading(moving(4).masks)
    track(Planted(4), [video], Tracking(size=64))
    assert video.reads == 1 + len(video)


def test_features_that_are_not_finite_are_refused() -> None:
    encoder = VisionTransformer(32, 8, 24, 1, 3)
    encoder.norm.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="painted"):
        track(encoder, [moving(4)], Tracking(size=64))


class _Overflowing(Planted):
    """Returns what is beyond the range of half precision, and counts how often it is asked."""

    def __call__(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        in_half = torch.is_autocast_enabled("cpu")
        return super().__call__(images) * (torch.inf if in_half else 1.0)


def test_what_half_precision_cannot_hold_is_done_again_without_it() -> None:
    videos, options = [moving(4), moving(2)], Tracking(size=64)
    encoder = _Overflowing(4)
    found = track(encoder, videos, options, precision=torch.bfloat16, batch_size=6)
    assert found == track(Planted(4), videos, options)
    assert len(encoder.seen) == 3  # the second video was not tried in vain


class _Noting(VisionTransformer):
    """Notes whether it is asked in half precision."""

    def forward(self, images: Tensor, index: Tensor | None = None, **options: Any) -> Tensor:
        self.in_half = torch.is_autocast_enabled("cpu")
        return super().forward(images, index, **options)


def test_precision_is_what_was_asked_for_and_float32_on_a_cpu() -> None:
    encoder, protocol = _Noting(32, 8, 24, 1, 3), VideoTracking(videos="scenes:1:32")
    asked: dict[Literal["auto", "bf16"], bool] = {"auto": False, "bf16": True}
    for name, in_half in asked.items():
        inputs = Inputs(encoder, request=ImageRequest(precision=name, device="cpu"))
        assert len(list(protocol.measure(inputs, ""))) == 7
        assert encoder.in_half == in_half


@pytest.mark.gpu
def test_a_gpu_in_half_precision_finds_what_a_cpu_finds() -> None:
    torch.manual_seed(0)
    encoder = VisionTransformer(64, 8, 192, 4, 3)
    videos, options = open_videos("scenes:8:64"), Tracking(size=128)
    expected = track(encoder, videos, options)
    found = track(encoder, videos, options, device="cuda", precision=torch.float16)
    assert named(found)["J&F"] == pytest.approx(named(expected)["J&F"], abs=5e-4)


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def test_tiles_are_made_on_their_device() -> None:
    """A copy from unpinned memory waits for a GPU: for the first frames of every video."""
    expected = list(propagation.cut((23, 31), 4, torch.device("cpu")))
    with Operations() as operations:
        found = list(propagation.cut((23, 31), 4, torch.device("meta")))
    assert "_to_copy.default" not in operations.names
    assert [tile.far.shape for tile in found] == [tile.far.shape for tile in expected]


@pytest.mark.gpu
def test_an_upload_neither_waits_for_the_gpu_nor_for_busy_cores() -> None:
    """`pin_memory` copies with a thread of torch per core; those are busy with decoding."""
    array = np.arange(2**20, dtype=np.uint8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Operations() as operations:
            there = tracking._upload(array, torch.device("cuda"))
            array[:] = 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.cpu().numpy().tolist() == list(range(256)) * 2**12
    assert not {"pin_memory.default", "_pin_memory.default"} & {*operations.names}


@pytest.mark.gpu
def test_propagation_never_waits_for_the_gpu() -> None:
    features = torch.randn(4, 40 * 52, 64, device="cuda")
    first = torch.ones(2, 40, 52, device="cuda")
    labels = propagation.propagate_each(features, first, Tracking())
    next(labels)  # tiles are cut once
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = labels_of(torch.stack(list(labels)), 16, (480, 854))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.shape == (2, 480, 854)


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 0), ("n_last_frames", -1), ("topk", 0), ("temperature", 0.0), ("compat", "paper")],
)
def test_options_that_cannot_be_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value}"):
        Tracking(**{name: value})  # type: ignore[arg-type]


def test_the_defaults_are_those_of_dino() -> None:
    assert Tracking() == Tracking(7, 12, 5, 0.1, None, 480)


# ------------------------------------------------------------------------------ what is written


def test_masks_are_written_as_davis_reads_them_with_the_annotation_first(tmp_path: Path) -> None:
    video, options = moving(4, 4), Tracking(size=64)
    found = track(Planted(4), [video], options, out=tmp_path)
    files = sorted((tmp_path / "painted").iterdir())
    assert [path.name for path in files] == [f"{i:05d}.png" for i in range(4)]
    masks = [read_mask(path) for path in files]
    assert np.array_equal(masks[0], video.mask(0))
    assert np.array_equal(masks, torch.cat(list(follow(Planted(4), video, options))))
    with Image.open(files[1]) as image:
        assert image.mode == "P"
    with (tmp_path / "objects.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["object"] for line in lines] == ["1", "2"]
    assert np.mean([float(line["J"]) for line in lines]) == pytest.approx(named(found)["J"])


def test_without_annotations_masks_are_written_and_nothing_is_claimed(tmp_path: Path) -> None:
    video = Painted(moving(4, 4).masks, annotated=False)
    assert track(Planted(4), [video], Tracking(size=64), out=tmp_path) == []
    assert len(list((tmp_path / "painted").iterdir())) == 4
    assert not (tmp_path / "objects.csv").exists()


def test_a_sheet_shows_frames_with_the_objects_in_their_colours(tmp_path: Path) -> None:
    video = moving(2, 20, 64, 96)
    track(Planted(4), [video], Tracking(size=64), out=tmp_path)
    with Image.open(tmp_path / "sheets" / "painted.png") as image:
        assert image.size == (4 * 240, 3 * 160)
        first = np.array(image)[:160, :240].astype(int)
    red, green = first[:80, :, 0] - first[:80, :, 1], first[80:, :, 1] - first[80:, :, 0]
    assert (red > 60).sum() > 2000
    assert (green > 60).sum() > 2000
    assert not first[:15].any()  # background stays as it was
    assert sheet(moving(2, 5), moving(2, 5).masks).size == (4 * 240, 2 * 160)


@pytest.mark.parametrize("name", ["sheets", "painted"])
def test_a_folder_of_masks_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    (victim := tmp_path / "victim").mkdir()
    (out := tmp_path / "out").mkdir()
    (out / name).symlink_to(victim)
    with pytest.raises(StorageError, match="is a link"):
        track(Planted(4), [moving(3, 3)], Tracking(size=64), out=out)
    assert not list(victim.iterdir())
