"""What an encoder is shown: the same pixels however they are made, each read once."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from stopmim.base.errors import DataError, ResourceError, UserError
from stopmim.base.random_keys import numpy_generator
from stopmim.data.images import Images
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.open import open_images
from stopmim.data.subset import Subset
from stopmim.evals import showing
from stopmim.evals.features import extract
from stopmim.evals.inputs import Inputs
from stopmim.evals.protocols import Knn
from stopmim.evals.showing import Kept, Showing
from stopmim.evals.suite import suite
from stopmim.evals.views import TrainView, View
from stopmim.method.encoder import VisionTransformer

CPU = torch.device("cpu")
N = 23


def arrays(*shape: int) -> Arrays:
    pixels = np.random.default_rng(0).integers(0, 256, (N, *shape), dtype=np.uint8)
    return Arrays(pixels, {"class": np.arange(N) % 3}, [], "noise")


@pytest.fixture(params=[0, 3], ids=["threads", "processes"])
def files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Images:
    """Photographs of several sizes, read by threads or by three processes."""
    rng = np.random.default_rng(0)
    for i in range(N):
        pixels = rng.integers(0, 256, (30 + i, 50 - i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i:02}.png")
    monkeypatch.setattr(showing, "FEW", 4)
    monkeypatch.setenv("STOPMIM_WORKERS", str(request.param))
    monkeypatch.setenv("STOPMIM_CACHE", "")
    return open_images(tmp_path)


def shown(images: Images, view: View | TrainView, size: int, kept: Kept | None = None) -> Tensor:
    """All views; the encoder is slow, so that whatever may be overwritten is."""
    found = []
    for batch in (kept or Kept()).batches("key", Showing(images, view, (0, 1)), CPU, size):
        assert len(batch) <= size
        time.sleep(0.003)
        found.append(batch.clone())
    return torch.cat(found)


@pytest.mark.parametrize("shape", [(32, 32, 3), (48, 30, 3), (30, 40)])
@pytest.mark.parametrize(
    "view", [View(37, 32), View(32, 32, "bicubic"), View((20, 50), None), View(24, None)]
)
def test_images_shown_together_have_the_pixels_of_each_alone(
    view: View, shape: tuple[int, ...]
) -> None:
    for images in (arrays(*shape), Subset(arrays(*shape), range(2, N, 2))):
        alone = torch.stack([view(images.read(i)) for i in range(len(images))])
        assert torch.equal(shown(images, view, 5), alone)


@pytest.mark.parametrize("size", [1, 9, 100])
def test_whoever_reads_files_shows_them_in_order_and_whole(files: Images, size: int) -> None:
    view = View(28, 24)
    alone = torch.stack([view(files.read(i)) for i in range(N)])
    assert torch.equal(shown(files, view, size), alone)


def test_random_views_do_not_depend_on_who_draws_them(files: Images) -> None:
    view = TrainView(24)
    keys = [numpy_generator("view", 0, 1, i) for i in range(N)]
    alone = torch.stack([view(files.read(i), rng) for i, rng in enumerate(keys)])
    assert torch.equal(shown(files, view, 7), alone)


def test_a_damaged_file_is_named_whoever_reads_it(files: Images, tmp_path: Path) -> None:
    (tmp_path / "11.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(DataError, match=r"11\.png: [^\n]*images are never left out silently"):
        shown(files, View(28, 24), 4)


def test_a_process_that_dies_is_an_error_that_names_the_image(
    files: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPMIM_WORKERS", "2")
    whole = files.read
    monkeypatch.setattr(files, "read", lambda i: os._exit(3) if i == 7 else whole(i))
    with pytest.raises(ResourceError, match=r"07\.png \(exit code 3\).*STOPMIM_WORKERS=1"):
        shown(files, View(28, 24), 4)


@pytest.mark.parametrize("wrong", ["all", "-1", "9" * 5000], ids=["all", "-1", "digits"])
def test_a_number_of_processes_is_a_number(
    files: Images, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPMIM_WORKERS", wrong)
    with pytest.raises(UserError, match=f"STOPMIM_WORKERS={wrong}: expected a number"):
        shown(files, View(28, 24), 4)


class Counted(Arrays):
    """Images that are read one by one, and how often."""

    reads = 0

    def read(self, i: int) -> np.ndarray:
        self.reads += 1
        return super().read(i)

    def read_together(self, numbers: np.ndarray) -> None:
        return None


def counted(n: int, seed: int) -> Counted:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 24, 24, 3), dtype=np.uint8)
    return Counted(pixels, {"class": np.arange(n) % 3}, [], "noise")


def test_untrained_networks_see_what_was_read_for_the_encoder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOPMIM_CACHE", str(tmp_path))
    train, test = counted(30, 0), counted(20, 1)
    inputs = Inputs(VisionTransformer(24, 6, width=12, depth=1, heads=2), train, test)
    assert inputs.random_inits == 8
    suite(inputs, [Knn()])
    assert (train.reads, test.reads) == (30, 20)  # the first of each too: it may be large


@pytest.mark.parametrize(("share", "again"), [(1.0, 0), (0.0, N)])
def test_views_are_kept_only_where_there_is_room(
    share: float, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showing, "SHARE", share)
    images, kept = counted(N, 0), Kept()
    first = shown(images, View(28, 24), 5, kept)
    images.reads = 0
    assert torch.equal(shown(images, View(28, 24), 5, kept), first)
    assert images.reads == again


def test_room_that_is_found_too_late_keeps_no_part_of_the_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next encoder is not shown the first images."""
    free = iter([0, *[2**40] * N])
    monkeypatch.setattr(showing, "_free", lambda _: next(free))
    images, kept = counted(N, 0), Kept()
    first = shown(images, View(28, 24), 5, kept)
    assert torch.equal(shown(images, View(28, 24), 5, kept), first)


def test_all_views_together_are_kept_in_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images, kept, view = arrays(24, 24, 3), Kept(), View(28, 24)
    size = N * 24 * 24 * 3
    memory = 10 * size
    monkeypatch.setattr(showing, "_free", lambda _: memory - len(kept.views) * size)
    for i in range(4):
        for _ in kept.batches(f"draw {i}", Showing(images, view), CPU):
            pass
    assert list(kept.views) == ["draw 0", "draw 1"]


def test_too_few_views_are_no_features() -> None:
    images, model = arrays(32, 32, 3), VisionTransformer(32, 8, width=16, depth=1, heads=2)
    views = shown(images, View(37, 32), N)
    with pytest.raises(ValueError, match=f"views of 20 images, expected {N}"):
        extract(model, images, size=views.split(10)[:2])


def test_views_may_be_given_instead_of_a_size() -> None:
    images, model = arrays(32, 32, 3), VisionTransformer(32, 8, width=16, depth=1, heads=2)
    views = shown(images, View(37, 32), N)
    torch.testing.assert_close(
        extract(model, images, size=views.split(10)), extract(model, images, size=32)
    )
