"""The protocols on images, as a person asks for them; what is kept; fine-tuning; comparison."""

import dataclasses
import errno
import importlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from browser import Browser
from stopmim import Run, pretrain
from stopmim.base.errors import DataError, UserError
from stopmim.base.files import read_jsonl
from stopmim.base.random_keys import numpy_generator
from stopmim.bench import probe
from stopmim.cli import main
from stopmim.config.architectures import SIZES
from stopmim.data.images import Images
from stopmim.data.index_cache import folder
from stopmim.data.sources.open import open_images
from stopmim.data.sources.scenes import Scenes
from stopmim.data.subset import Subset
from stopmim.evals import cache, lowshot, table
from stopmim.evals.compare import Comparison, compare
from stopmim.evals.features import frozen
from stopmim.evals.finetune import Classifier, erase, finetune, groups, mix, rate
from stopmim.evals.inputs import Inputs, open_encoder, open_pair, untrained
from stopmim.evals.knn import choose_k, knn_predict
from stopmim.evals.lowshot import classify, fit_logistic, per_class, standardise
from stopmim.evals.paired import beside_random_init, bootstrap, mcnemar
from stopmim.evals.protocols import Finetune, Knn, Linear, Lowshot, Protocol, RankMe, VideoTracking
from stopmim.evals.randaugment import ALL, rand_augment
from stopmim.evals.recipes import TASKS, TUNINGS, TaskName, Tuning
from stopmim.evals.request import ImageRequest
from stopmim.evals.results import Measured, Result
from stopmim.evals.showing import Showing
from stopmim.evals.suite import _warn_of_copies as once
from stopmim.evals.suite import measure, suite
from stopmim.evals.views import TrainView, View
from stopmim.method.build import build, configure
from stopmim.method.encoder import VisionTransformer
from tiny import NoiseImages, tiny, write_parts

RANDOM = "random:vit_micro6@24"
COLOURS = np.array([[150, 0, 0], [0, 150, 0], [0, 0, 150], [150, 150, 150]], np.uint8)


class Coloured:
    """Images whose colour says the class, with `noise` of it at random."""

    def __init__(self, n: int, seed: int = 0, classes: int = 4, noise: int = 20) -> None:
        rng = np.random.default_rng(seed)
        self.labels = {"class": rng.integers(classes, size=n)}
        self.pixels = rng.integers(0, noise + 1, (n, 24, 30, 3), dtype=np.uint8)
        self.pixels += COLOURS[self.labels["class"]][:, None, None]
        self.fingerprint = f"coloured-{n}-{seed}-{classes}-{noise}"

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, i: int) -> np.ndarray:
        return self.pixels[i]

    def name(self, i: int) -> str:
        return f"part/{i:03}.png"


class Planted(nn.Module):
    """An encoder whose features are the mean colour: it knows the class."""

    width, side, patch = 3, 4, 6
    pool: Literal["mean", "cls"] = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []  # sizes of batches; no plain number, so not in the hash

    def forward(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        return images.flatten(2).transpose(1, 2)

    def features(self, images: Tensor, layers: int = 1, pool: str = "mean") -> Tensor:
        self.calls.append(len(images))
        colour = images.flatten(2).mean(dim=2)
        return torch.cat([colour] * layers, dim=1) + torch.tensor([0.1, 0.2, 0.3] * layers)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("a") / "run", tiny(), stop_at=1)


@pytest.fixture
def run(trained: Run) -> Run:
    """Without the results of other tests."""
    (trained.path / "results.jsonl").unlink(missing_ok=True)
    return trained


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOPMIM_CACHE", str(tmp_path / "cache"))


# ------------------------------------------------------------------------------ features, kept


def test_features_are_computed_once_and_come_back_with_the_same_bits() -> None:
    encoder, images = Planted(), Coloured(10)
    first = frozen(encoder, images, View(24, 24))
    assert encoder.calls == [10]
    encoder.calls.clear()
    again = frozen(encoder, images, View(24, 24))
    assert not encoder.calls
    assert first.dtype == again.dtype == torch.float16
    assert torch.equal(first, again)
    assert first.shape == (10, 4 * 3)


@pytest.mark.parametrize("what", ["images", "view", "weights", "heads", "draw", "precision"])
def test_whatever_changes_features_changes_their_key(what: str) -> None:
    """Heads are in no weight and no shape; a changed order of the same images is another set."""
    encoder = VisionTransformer(24, 6, width=12, depth=2, heads=2)
    images, view, options = Coloured(6), TrainView(24), dict[str, Any]()
    frozen(encoder, images, view)
    other, (kept,) = encoder, list((folder() or Path()).rglob("*.safetensors"))
    if what == "images":
        images = Coloured(6, seed=1)
    elif what == "view":
        view = TrainView(24, mode="bicubic")
    elif what == "weights":
        other.norm.bias.data[0] += 1e-3
    elif what == "heads":
        other = VisionTransformer(24, 6, width=12, depth=2, heads=3)
        other.load_state_dict(encoder.state_dict())
    elif what == "draw":
        options = {"draw": (0, 1)}
    else:
        options = {"precision": torch.bfloat16}
    frozen(other, images, view, **options)
    assert len(list(kept.parent.iterdir())) == 2


@pytest.mark.parametrize("kind", ["folder", "list", "tar", "parquet"])
def test_files_overwritten_by_others_of_their_size_are_asked_again(
    kind: str, tmp_path: Path
) -> None:
    """Uncompressed: the fingerprint, which is that of a run, knows names and sizes alone."""
    first, second = Coloured(40, noise=90), Coloured(40, seed=1, noise=90)
    source = overwrite(kind, tmp_path / "images", first)

    def opened() -> Subset:
        """A subset of a subset, without two images."""
        return Subset(Subset(open_images(source), range(39)), range(38))

    test, before, known = Coloured(20, seed=2), opened(), Planted()
    features = frozen(known, before, View(24, 24))
    (answer,) = measure(Inputs(known, before, test), [Knn()])
    known.calls.clear()
    assert torch.equal(frozen(known, opened(), View(24, 24)), features)
    measure(Inputs(known, opened(), test), [Knn()])
    assert not known.calls
    overwrite(kind, tmp_path / "images", second)
    after = opened()
    assert after.fingerprint == before.fingerprint
    assert not torch.equal(frozen(known, after, View(24, 24)), features)
    (other,) = measure(Inputs(known, after, test), [Knn()])
    assert answer.correct is not None
    assert other.correct is not None
    assert not torch.equal(other.correct, answer.correct)


def overwrite(kind: str, root: Path, images: Coloured) -> str:
    """A source with these images as bitmaps, in files that are overwritten if they are there."""
    names = [f"{c}/{i}.bmp" for i, c in enumerate([0, 1] * (len(images) // 2))]
    files = []
    root.mkdir(exist_ok=True)
    for pixels in images.pixels:
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, "bmp")
        files.append(held.getvalue())
    if kind == "parquet":
        rows = pa.array([{"bytes": data, "path": None} for data in files])
        table = pa.table({"image": rows, "label": [i % 2 for i in range(len(images))]})
        pq.write_table(table, root / "a.parquet", compression="none", use_dictionary=False)
        return str(root / "a.parquet")
    if kind == "tar":
        with tarfile.open(root / "a.tar", "w") as tar:
            for i, data in enumerate(files):
                for name, content in ((f"{i}.bmp", data), (f"{i}.cls", b"%d" % (i % 2))):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        return str(root / "a.tar")
    for name, data in zip(names, files, strict=True):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    if kind == "folder":
        return str(root)
    (root / "list.txt").write_text("".join(f"{name}\n" for name in names))
    return str(root / "list.txt")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_features_are_computed_again(damage: str) -> None:
    encoder, images = Planted(), Coloured(6)
    first = frozen(encoder, images, View(24, 24))
    (path,) = (folder() or Path()).rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes({"cut": data[:-5], "flipped": data, "empty": b""}[damage]))
    encoder.calls.clear()
    assert torch.equal(frozen(encoder, images, View(24, 24)), first)
    assert len(encoder.calls) == 1
    assert torch.equal(frozen(encoder, images, View(24, 24)), first)
    assert len(encoder.calls) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing else is left behind


def test_a_full_cache_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "save_file", full)
    monkeypatch.setenv("STOPMIM_CACHE", str(tmp_path / "full"))
    for size in (4, 5, 6):
        frozen(Planted(), Coloured(size), View(24, 24))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    what = "cannot write to the cache: No space left on device"
    assert warnings == [f"stopmim: warning: {tmp_path / 'full'}: {what}"]


def test_a_cache_that_cannot_be_written_or_is_turned_off_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = frozen(Planted(), Coloured(4), View(24, 24))
    (tmp_path / "file").write_text("mine")
    for place, said in ((tmp_path / "file", "cannot write to the cache"), ("", "")):
        monkeypatch.setenv("STOPMIM_CACHE", str(place))
        assert torch.equal(frozen(Planted(), Coloured(4), View(24, 24)), first)
        assert said in capsys.readouterr().err


def test_last_and_last_four_are_of_one_extraction() -> None:
    encoder = VisionTransformer(24, 6, width=12, depth=5, heads=2).eval()
    kept = frozen(encoder, Coloured(5), View(24, 24))
    assert kept.shape == (5, 48)
    pixels = torch.stack([View(24, 24)(Coloured(5).read(i)) for i in range(5)])
    from stopmim.data.crops import normalise

    with torch.no_grad():
        last = encoder.features(normalise(pixels), layers=1)
    torch.testing.assert_close(kept[:, -12:].float(), last, rtol=2e-3, atol=2e-3)
    shallow = VisionTransformer(24, 6, width=12, depth=2, heads=2)
    assert frozen(shallow, Coloured(5), View(24, 24)).shape == (5, 24)


def test_features_too_large_for_half_precision_stay_whole() -> None:
    encoder = VisionTransformer(24, 6, width=12, depth=1, heads=2)
    encoder.norm.weight.data *= 1e6
    found = frozen(encoder, Coloured(3), View(24, 24))
    assert found.dtype == torch.float32
    assert found.isfinite().all()


def test_larger_and_oblong_images_than_the_encoder_was_made_for_have_features() -> None:
    encoder, images = VisionTransformer(24, 6, width=12, depth=1, heads=2), Coloured(3)
    assert images.read(0).shape[:2] == (24, 30)
    small, large = (frozen(encoder, images, View(size, size)) for size in (24, 48))
    assert small.shape == large.shape == (3, 12)
    assert not torch.equal(small, large)


def test_random_views_are_drawn_by_seed_number_and_image() -> None:
    view, encoder, images = TrainView(24), Planted(), Coloured(6, noise=50)
    one, two = (frozen(encoder, images, view, draw=(0, i)) for i in range(2))
    assert not torch.equal(one, two)
    showing, cpu = Showing(images, view, (0, 1)), torch.device("cpu")
    alone, together = (torch.cat([x.clone() for x in showing.batches(cpu, n)]) for n in (1, 6))
    assert torch.equal(alone, together)


# ------------------------------------------------------------------------------ protocols


@pytest.mark.parametrize("recipe", ["auto", "clevr_count"])
def test_an_encoder_that_knows_the_class_scores_more_than_99_percent(
    recipe: Literal["auto", "clevr_count"], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = dataclasses.replace(TASKS["clevr_count"].recipe, lr=1.0)
    monkeypatch.setitem(
        TASKS, "clevr_count", dataclasses.replace(TASKS["clevr_count"], recipe=quick)
    )
    inputs = Inputs(Planted(), Coloured(200), Coloured(150, seed=1))
    both = Linear("both", recipe=recipe)
    results = suite(inputs, [Knn("both"), both, Lowshot(per_class=20), RankMe()])
    scores = [r for r in results if r.name == "accuracy"]
    assert {r.protocol.split()[0] for r in scores} == {"knn", "linear", "lowshot"}
    for result in scores:
        assert result.value > 0.99, result
        assert result.n == 150
        assert result.interval
        assert result.random_init is None  # nobody knows how this one looked before
    # few: 20 of each of four classes
    assert {r.train for r in scores} == {200, 80}


@pytest.mark.parametrize("recipe", ["auto", "own"])
def test_the_best_depth_is_chosen_where_the_reading_says(recipe: Any) -> None:
    """An early block tells the class, but of test images it tells another: the last tells none."""
    inputs = Inputs(Planted(), Coloured(80), Coloured(120, seed=1))
    for name, shift in (("train", 0), ("test", 1)):
        y = inputs.labels_of("class")[name == "test"]
        x = torch.randn(len(y), 12, generator=torch.Generator().manual_seed(shift)) / 10
        x[:, :3] += 5 * torch.eye(4)[(y + shift) % 4, :3]
        vars(inputs)[f"{name}_x"] = x
    protocol = Linear("both", layers="best", recipe=recipe)
    results = [measured.result for measured in measure(inputs, [protocol])]
    held, paper = (
        {r.protocol: r for r in results if r.selection == reading}
        for reading in ("held-out", "paper")
    )
    best, other = held["linear best depth"], held["linear last4"]
    assert best.value == other.value < 0.05 < held["linear"].value
    assert best.setting == f"last4, {other.setting}"
    endings = ("", " best epoch") if recipe == "own" else ("",)
    for end in endings:
        both = [paper[f"{depth}{end}"].value for depth in ("linear", "linear last4")]
        assert paper[f"linear best depth{end}"].value == max(both)


def test_a_random_encoder_has_its_own_number_beside_it() -> None:
    images = Coloured(200, noise=100), Coloured(200, 1, noise=100)
    inputs = Inputs(open_encoder(RANDOM), *images, ImageRequest(label=("class",)))
    results = suite(inputs, [Knn(), RankMe()])
    assert [r.protocol for r in results] == ["knn", "rankme"]
    knn, rank = results
    assert knn.random_init == pytest.approx(knn.value, abs=0.05)  # the mean of four
    assert knn.difference is not None
    assert knn.difference[0] <= 0 <= knn.difference[1]
    assert rank.random_init == pytest.approx(rank.value)  # one is enough: it is not judged


def test_the_same_question_again_is_answered_from_the_cache() -> None:
    encoder, train, test = Planted(), Coloured(60), Coloured(40, seed=1)

    def ask(per_class: int = 5) -> list[Measured]:
        protocols = [Knn("both"), Linear("both"), Lowshot(per_class=per_class), RankMe()]
        return measure(Inputs(encoder, train, test), protocols)

    first = ask()
    encoder.calls.clear()
    again = ask()
    assert not encoder.calls
    assert [m.result for m in again] == [m.result for m in first]
    for a, b in zip(first, again, strict=True):
        assert (a.correct is None) == (b.correct is None)
        assert a.correct is None or b.correct is None or torch.equal(a.correct, b.correct)
    assert ask(6)[-2].result.train == 24  # another question
    train.labels["class"] = train.labels["class"][::-1].copy()
    assert ask()[0].result != first[0].result


def test_videos_are_asked_again_in_another_precision() -> None:
    encoder, tracking = open_encoder(RANDOM), VideoTracking(videos="scenes:1:32", video_size=32)
    asked: list[Literal["fp32", "bf16"]] = ["fp32", "bf16", "bf16"]
    kept = []
    for precision in asked:
        measure(Inputs(encoder, request=ImageRequest(precision=precision)), [tracking])
        kept.append(len(list((folder() or Path()).rglob("answers/*.safetensors"))))
    assert kept == [1, 2, 2]


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("data/decode.py", {"features", "images", "videos"}),
        ("data/sources/scenes.py", {"features", "images", "videos"}),
        ("data/videos.py", {"features", "images", "videos"}),
        ("method/encoder.py", {"features", "images", "videos"}),
        ("gpu/attention.py", {"features", "images", "videos"}),
        ("weights/formats/data2vec.py", {"features", "images", "videos"}),
        ("weights/vit.py", {"features", "images", "videos"}),
        ("base/pictures.py", {"features", "images", "videos"}),
        ("base/random_keys.py", {"features", "images", "videos"}),
        ("evals/views.py", {"features", "images", "videos"}),
        ("evals/features.py", {"features", "images", "videos"}),
        ("evals/showing.py", {"features", "images", "videos"}),
        ("evals/knn.py", {"images", "videos"}),
        ("evals/protocols/knn.py", {"images", "videos"}),
        ("health/measure.py", {"images", "videos"}),
        ("train/loop.py", set()),
        ("base/console.py", set()),
    ],
)
def test_what_other_code_found_is_found_again(
    file: str, changed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "stopmim"
    shutil.copytree(Path(cache.__file__).parents[1], ours)
    monkeypatch.setattr(cache, "__file__", str(ours / "evals" / "cache.py"))
    encoder, images = open_encoder(RANDOM), Coloured(20)
    inputs, tracking = Inputs(encoder, images, images), VideoTracking(videos="scenes:1:32")
    asked: dict[str, Callable[[], object]] = {
        "features": lambda: frozen(encoder, images, View(24, 24)),
        "images": lambda: measure(inputs, [Knn()]),
        "videos": lambda: measure(Inputs(encoder), [tracking]),
    }

    def new() -> set[str]:
        """Whose questions leave something that was not kept before."""
        found = set()
        for name, ask in asked.items():
            before = set((folder() or Path()).rglob("*.safetensors"))
            ask()
            if set((folder() or Path()).rglob("*.safetensors")) != before:
                found.add(name)
        return found

    assert new() == set(asked)
    assert not new()
    with (ours / file).open("a") as code:
        code.write("VERSION = 2\n")
    assert new() == changed


def test_what_another_version_of_a_network_found_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and values are the same: only the code, in a helper of its package, is not."""
    package, images = tmp_path / "my_networks", Coloured(8)
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "network.py").write_text(
        "from my_networks import scale\nfrom test_suite import Planted\n\n"
        "class Network(Planted):\n"
        "    def features(self, images, layers=1, pool='mean'):\n"
        "        return scale.TWICE * super().features(images, layers, pool)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for twice in ("2.0", "4.00"):
        (package / "scale.py").write_text(f"TWICE = {twice}\n")
        for name in [name for name in sys.modules if name.split(".")[0] == "my_networks"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        network = importlib.import_module("my_networks.network").Network()
        found.append(frozen(network, images, View(24, 24)))
        network.calls.clear()
        measure(Inputs(network, images, images), [Knn()])
        assert network.calls  # not once more what the other version answered
    assert torch.equal(found[1], 2 * found[0])


def test_a_network_whose_code_is_in_no_file_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a cell may be run again with other code."""
    monkeypatch.setattr(Planted, "__module__", "in_a_notebook")
    network = Planted()
    assert not cache.covers(network)
    frozen(network, Coloured(4), View(24, 24))
    frozen(network, Coloured(4), View(24, 24))
    assert len(network.calls) == 2


def test_k_is_chosen_without_the_sample_itself() -> None:
    """With itself among its neighbours every sample knows its label, and k = 1 is perfect."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 5, generator=generator), torch.randint(3, (200,), generator=generator)
    y[:150] = 0
    assert choose_k(x, y, 0, (1, 50)) == 50
    found = knn_predict(x, y, x, (1,), itself=torch.arange(200))[0]
    assert 0.3 < float((found == y).float().mean()) < 0.8


@pytest.mark.parametrize("n", [1, 3])
def test_few_labels_are_n_of_each_class_by_the_seed(n: int) -> None:
    y = torch.tensor([0] * 10 + [2] * 10 + [5] * 2)
    first = per_class(y, n, 0)
    assert [int((y[first] == c).sum()) for c in (0, 2, 5)] == [n, n, min(2, n)]
    assert first == per_class(y, n, 0)
    assert len({tuple(per_class(y, n, seed)) for seed in range(9)}) > 1
    # What is drawn of a class does not depend on the others.
    alone = [i for i in first if y[i] == 0]
    assert per_class(torch.where(y == 0, 0, -1)[:10], n, 0) == alone


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Three classes, told apart by colour; dogs and foxes have the same file names."""
    for part in ("train", "val"):
        for colour, kind in zip(COLOURS, ("cat", "dog", "fox"), strict=False):
            folder = tmp_path / "animals" / part / kind
            folder.mkdir(parents=True)
            for i in range(4):
                name = f"c{i}" if kind == "cat" else f"{i:04}"
                pixels = np.tile(colour + np.uint8(3 * i), (24, 24, 1))
                Image.fromarray(pixels).save(folder / f"{name}.png")
    return tmp_path / "animals"


def test_a_list_that_names_dogs_is_not_fitted_on_foxes(animals: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.txt"
    file.write_text("".join(f"cat/c{i}.png\ndog/{i:04}.png\n" for i in range(4)))
    train, test = open_images(str(animals), "train"), open_images(str(animals), "test")
    inputs = Inputs(Planted(), train, test)
    for protocol in (Lowshot(list=file), Finetune(list=file)):
        index, _ = protocol.choose(inputs, "class")
        assert {inputs.train.name(i) for i in index} == set(file.read_text().split())
    (found,) = measure(inputs, [Lowshot(list=file)])
    assert found.correct is not None
    assert found.correct.tolist() == [True] * 8 + [False] * 4


@pytest.mark.parametrize(
    "words",
    [
        "eval lowshot {encoder}",
        "eval suite {encoder}",
        "eval finetune {encoder}",
        "ablate positions --optim.batch_size 4 --out {out} --few {list}",
    ],
)
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("c1.png 0002.png", "0002.png could be dog/0002.png or fox/0002.png; write its whole path"),
        ("c1.png cat/c3", "its 2 images have one class: nothing to fit"),
    ],
)
def test_a_list_that_cannot_be_fitted_is_refused_in_one_line_before_any_work(
    words: str,
    names: str,
    said: str,
    animals: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "few.txt"
    file.write_text(names.replace(" ", "\n"))
    words = words.format(encoder=RANDOM, out=tmp_path / "out", list=file)
    words += "" if "--few" in words else f" --list {file}"
    assert main([*words.split(), "--data", str(animals)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"stopmim: error: {file}: {said}"


class Watched(Inputs):
    """Inputs that keep the views they have shown."""

    seen: ClassVar[list[View | TrainView]] = []

    def features(self, images: Images, view: View | TrainView, draw: int = 0) -> Tensor:
        self.seen.append(view)
        return super().features(images, view, draw)


@pytest.mark.parametrize("crops", [None, "imagenet", "clevr_count"])
def test_low_shot_has_a_view_of_its_own_whatever_the_recipe(crops: TaskName | None) -> None:
    """The class shows at the left and right edge, which it cuts off and the recipes do not."""
    train, test = Coloured(80, classes=2), Coloured(60, seed=1, classes=2)
    for images in (train, test):
        images.pixels[:, :, 3:-3] = 70
    inputs = Watched(Planted(), train, test, ImageRequest(crops=crops))
    Watched.seen.clear()
    alone = measure(inputs, [Lowshot()])[0]
    assert Watched.seen == [View(26, 24, "bilinear")] * 2  # 256 and 224, at this size
    linear, beside = measure(inputs, [Linear(layers="last"), Lowshot()])
    assert beside.result == alone.result
    assert beside.result.value < 0.8
    assert (linear.result.value == 1) == (crops is not None)


def test_crops_for_low_shot_alone_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "lowshot", RANDOM, "--data", "scenes:9:24", "--crops", "imagenet"]
    assert main(words) == 2
    assert "--crops imagenet: lowshot has a view of its own; leave" in capsys.readouterr().err


def test_lambda_is_an_option_and_noted(tmp_path: Path) -> None:
    words = ["--data", "scenes:48:24", "--label", "count", "--random-inits", "0"]
    words += ["--out", str(tmp_path)]
    for lambd in ("0.0025", "1e6"):
        assert main(["eval", "lowshot", RANDOM, *words, "--lambd", lambd]) == 0
    usual, strong = read_jsonl(tmp_path / "results.jsonl")
    assert usual["setting"].endswith("/class, lambda 0.0025")
    assert "options" not in usual
    assert strong["setting"].endswith("/class, lambda 1e+06")
    assert strong["options"] == {"lambd": 1e6}


def test_a_lambda_that_has_no_optimum_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^--lambd 0: expected a number from 1e-12 to 1e12$"):
        Lowshot(lambd=0)
    monkeypatch.setattr(lowshot, "ROUNDS", 1)
    with pytest.raises(UserError, match=r"^--lambd 1e-12: no optimum for l2 = .*use a larger l2"):
        measure(Inputs(Planted(), Coloured(20), Coloured(40, seed=1)), [Lowshot(lambd=1e-12)])


def test_lambda_over_the_number_of_samples_is_the_penalty() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator)
    y = (x[:, 0] + torch.randn(60, generator=generator) > 0).long()
    test = torch.randn(500, 5, generator=generator)
    for lambd in (0.0025, 3000.0):
        weights = fit_logistic(standardise(x, x), y, lambd / 60)
        expected = (standardise(test, x) @ weights.T).argmax(dim=1)
        assert torch.equal(classify(x, y, test, lambd), expected)


def test_the_released_reading_standardises_test_features_among_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(100) % 2
    x = torch.randn(100, 3, generator=generator) + 3 * y[:, None]
    shifted = x + 50  # the released reading does not see the shift
    for statistics, expected in (("train", 0.5), ("test", 0.98)):
        found = classify(x, y, shifted, 0.0025, statistics)  # type: ignore[arg-type]
        assert float((found == y).float().mean()) == pytest.approx(expected, abs=0.03)


def test_test_classes_go_by_name_and_not_by_number() -> None:
    train, test = Coloured(8), Coloured(8, seed=1)
    train.classes, test.classes = ["a", "b", "c", "d"], ["b", "c", "d", "e"]  # type: ignore[attr-defined]
    for part in (train, Subset(train, range(4))):
        _, test_y = Inputs(Planted(), part, test).labels_of("class")
        assert test_y.tolist() == (test.labels["class"] + 1).tolist()
    (shifted,) = measure(Inputs(Planted(), train, test), [Knn()])
    test.classes = train.classes  # type: ignore[attr-defined]
    (straight,) = measure(Inputs(Planted(), train, test), [Knn()])  # equal numbers, other classes
    assert straight.result.value > shifted.result.value


def test_a_class_that_training_does_not_know_is_refused_in_two_sources_as_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "images"
    for part, n in (("train", 5), ("val", 3)):
        for name in ("carp", "eel", "tench"):
            (root / part / name).mkdir(parents=True)
            for i in range(n):
                noise = np.random.default_rng(i).integers(0, 256, (24, 24, 3), dtype=np.uint8)
                Image.fromarray(noise).save(root / part / name / f"{i}.png")
    words = ["eval", "knn", RANDOM, "--random-inits", "0", "--train", str(root / "train")]
    val = root / "val"
    shutil.rmtree(val / "carp")  # a test set may lack some
    assert main([*words, "--test", str(val)]) == 0
    (val / "tench").rename(val / "Tench")
    for given in ([*words, "--test", str(val)], ["eval", "knn", RANDOM, "--data", str(root)]):
        capsys.readouterr()
        assert main(given) == 3
        said = f"stopmim: error: {val}: class Tench is not among those of training\n"
        assert capsys.readouterr().err == said


def test_chance_is_of_the_classes_in_the_test_set() -> None:
    train, test = Coloured(60), Coloured(40, seed=1)
    y, test_y = train.labels["class"], test.labels["class"]
    y[:], test_y[:] = np.repeat([0, 1, 2, 3], (30, 5, 15, 10)), np.repeat([1, 2], (30, 10))
    (found,) = measure(Inputs(Planted(), train, test), [Knn()])
    assert found.result.chance == 0.25  # class 2: 0 is nowhere, and 1 is rarer in training


def test_copies_of_training_images_in_the_test_set_are_warned_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = Coloured(40)
    test = Subset(train, range(10, 30))
    encoder, collapsed = open_encoder(RANDOM), open_encoder(RANDOM)
    torch.nn.init.zeros_(collapsed.norm.weight)  # type: ignore[attr-defined]
    for one in (collapsed, encoder, encoder):  # the last time from the cache
        measure(Inputs(one, train, test), [Knn()], aloud=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert "20 of 20 test images have exactly the features of a training image" in said[0]
    once.cache_clear()
    measure(Inputs(encoder, train, test), [Knn()], aloud=True)  # as in another process
    assert "20 of 20" in capsys.readouterr().err
    measure(Inputs(encoder, train, Coloured(20, seed=1)), [Knn()], aloud=True)
    assert "warning" not in capsys.readouterr().err


def test_as_many_labels_are_noted_as_there_were(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = Inputs(Planted(), Coloured(20), Coloured(40, seed=1))
    counts = np.bincount(Coloured(20).labels["class"])
    for _ in range(2):  # the second time from the cache
        (found,) = suite(inputs, [Lowshot(per_class=1000)])
        said = "lowshot: --per-class 1000, but the smallest class has fewer images (class "
        said += f"{counts.min()}), all of which are used"
        assert capsys.readouterr().err.count(said) == 1
    assert f"{counts.max()}/class" in str(found.setting)
    suite(inputs, [Lowshot(per_class=int(counts.min()))])
    assert "--per-class" not in capsys.readouterr().err


def test_few_test_images_are_said_to_tell_little_before_any_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    encoder = VisionTransformer(24, 6, width=12, depth=2, heads=2)
    for n, twins, said in ((20, 2, True), (20, 1, False), (700, 2, False)):
        test, request = Coloured(n, seed=1), ImageRequest(random_inits=twins)
        suite(Inputs(encoder, Coloured(20), test, request), [Knn()])
        first = capsys.readouterr().err.splitlines()[0]
        assert (
            "20 test images are few: differences to random init below about 29 points" in first
        ) is said


def test_a_rank_that_cannot_be_told_is_said_to_be_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few, encoder = Coloured(12), VisionTransformer(24, 6, 48, 1, 3)
    for _ in range(2):  # not once more for its untrained twin; and also of a kept answer
        assert len(suite(Inputs(encoder, Coloured(20), few), [Knn(), RankMe()])) == 1
        assert capsys.readouterr().err.count("rankme: left out, ") == 1
    with pytest.raises(DataError, match=r"^rankme: 12 test images cannot fill 48"):
        suite(Inputs(encoder, Coloured(20), few), [RankMe()])  # and nothing else


@pytest.mark.parametrize(
    ("train", "test", "labels", "said"),
    [
        (Coloured(20, classes=1), Coloured(20), (), "all 20 training images are of one class"),
        (NoiseImages(), NoiseImages(), (), "the images have no labels"),
        (Coloured(20), Coloured(20), ("count",), "no such label; there is class"),
    ],
)
def test_what_cannot_be_asked_is_one_line(train: Any, test: Any, labels: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*$"):
        suite(Inputs(open_encoder(RANDOM), train, test, ImageRequest(label=labels)))


def test_the_twin_of_an_encoder_is_untrained_and_the_same_every_time() -> None:
    encoder = VisionTransformer(24, 6, width=12, depth=2, heads=2)
    nn.init.constant_(encoder.norm.weight, 3.0)
    before = cache.of_encoder(encoder)
    torch.manual_seed(1)
    one = untrained(encoder, 0)
    torch.manual_seed(2)
    assert cache.of_encoder(untrained(encoder, 0)) == cache.of_encoder(one)
    assert cache.of_encoder(untrained(encoder, 1)) != cache.of_encoder(one)
    assert (one.norm.weight == 1).all()
    assert cache.of_encoder(encoder) == before


def test_the_twin_of_an_encoder_of_mae_begins_as_mae_does() -> None:
    """Its matrices are Xavier-uniform, some times as large as those of I-JEPA."""
    encoder = build(configure("tiny_cpu_mae")).branch()
    ours, twin = (
        float(e.state_dict()["blocks.0.attn.qkv.weight"].std())
        for e in (encoder, untrained(encoder, 0))
    )
    assert twin == pytest.approx(ours, rel=0.05)
    assert twin > 0.05


# ------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (1, 9, 22 / 1024), (0, 5, 2 / 32), (10, 2, 158 / 4096)],
)
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar(only_a, only_b) == pytest.approx(p)
    assert mcnemar(only_b, only_a) == pytest.approx(p)
    assert mcnemar(25_000, 25_000) == pytest.approx(1.0)


def test_the_interval_of_a_difference_is_that_of_pairs() -> None:
    low, high = bootstrap(40, 60, 1000, 0)
    spread = 2.576 * math.sqrt(0.1 - 0.02**2) / math.sqrt(1000)
    assert (low, high) == pytest.approx((0.02 - spread, 0.02 + spread), abs=2e-3)
    assert bootstrap(0, 0, 50, 0) == (0.0, 0.0)


def answers(accuracy: float, n: int, seed: int) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) < accuracy


def test_one_more_untrained_network_is_rarely_above_random_init_and_a_trained_one_is() -> None:
    """Their accuracies vary by 4 points, which the images alone do not explain: 1 point each."""
    rng, n = np.random.default_rng(0), 2500
    wrong = blind = right = 0
    for trial in range(200):
        draws = rng.normal(0.4, 0.04, 5)
        *before, null = (answers(p, n, 10 * trial + i) for i, p in enumerate(draws))
        low, high = beside_random_init(null, before)
        assert low < float(null.float().mean() - torch.stack(before).float().mean()) < high
        wrong += low > 0
        blind += beside_random_init(null, before[:1])[0] > 0
        right += beside_random_init(answers(0.8, n, 10 * trial + 9), before)[0] > 0
    assert wrong <= 3
    assert blind > 30  # beside one network alone, it would look trained
    assert right >= 150


def test_networks_that_do_not_differ_leave_the_paired_interval_over_images() -> None:
    ours, one = answers(0.6, 1000, 0), answers(0.5, 1000, 1)
    gain = ours.float() - one.float()
    half = 2.576 * float(gain.std(correction=0)) / math.sqrt(1000)
    low, high = beside_random_init(ours, [one, one, one])
    assert (high - low) / 2 == pytest.approx(half, rel=1e-3)
    assert (high + low) / 2 == pytest.approx(float(gain.mean()), abs=1e-6)
    assert beside_random_init(one, [one, one]) == (0.0, 0.0)


def test_an_encoder_that_knows_is_better_than_one_that_does_not_and_equal_to_itself() -> None:
    class Blind(Planted):
        def features(self, images: Tensor, layers: int = 1, pool: str = "mean") -> Tensor:
            return torch.randn(len(images), 3 * layers, generator=torch.Generator().manual_seed(0))

    images = Coloured(80), Coloured(60, seed=1)
    blind, planted = (Inputs(encoder, *images) for encoder in (Blind(), Planted()))
    protocols: list[Protocol] = [Knn(), Lowshot(per_class=5)]
    for found in compare(blind, planted, protocols):
        assert found.difference > 0.5
        assert found.interval[0] > 0.3
        assert found.p < 1e-6
    for found in compare(planted, planted, protocols):
        assert (found.difference, found.interval, found.p) == (0.0, (0.0, 0.0), 1.0)
    with pytest.raises(UserError, match="none of these protocols answers image by image"):
        compare(planted, planted, [RankMe()])


def test_images_that_nobody_named_are_rendered_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    encoder = open_encoder(RANDOM)
    train, _ = open_pair(encoder, ImageRequest())
    said = f"eval: no --data: fitted and tested on rendered scenes ({train})\n"
    assert capsys.readouterr().err == said
    open_pair(encoder, ImageRequest(data="scenes:8:24"))
    assert not capsys.readouterr().err


def test_untrained_networks_are_counted_with_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, request = Coloured(40), ImageRequest(random_inits=3)
    inputs = Inputs(open_encoder(RANDOM), images, images, request)
    for quiet, left in ((0.0, ", about 0:0\\d left"), (600.0, "")):  # moments are not worth it
        monkeypatch.setattr("stopmim.evals.suite.QUIET", quiet)
        suite(inputs, [Knn()])
        said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("random init")]
        assert said[0] == "random init, network 1 of 3"
        assert re.fullmatch(f"random init, network 3 of 3{left}", said[2])


# ------------------------------------------------------------------------------ fine-tuning


def test_layers_decay_as_published_and_one_dimensional_weights_and_positions_do_not() -> None:
    encoder = VisionTransformer(24, 6, width=12, depth=3, heads=2)
    model = Classifier(encoder, 5, 0.1)
    found = groups(model, TUNINGS["mae-base"])
    known = {id(p): (g["scale"], g["weight_decay"]) for g in found for p in g["params"]}
    assert len(known) == len(list(model.parameters()))
    names = dict(model.named_parameters())
    for name, scale, decay in [
        ("encoder.patch_embed.proj.weight", 0.65**4, 0.05),
        ("encoder.pos_embed", 0.65**4, 0.0),
        ("encoder.blocks.0.attn.qkv.weight", 0.65**3, 0.05),
        ("encoder.blocks.0.attn.qkv.bias", 0.65**3, 0.0),
        ("encoder.blocks.2.mlp.fc2.weight", 0.65, 0.05),
        ("fc_norm.weight", 1.0, 0.0),
        ("head.weight", 1.0, 0.05),
        ("head.bias", 1.0, 0.0),
    ]:
        assert known[id(names[name])] == pytest.approx((scale, decay)), name
    assert not any("encoder.norm" in name for name in names)  # MAE deletes it
    assert model.drop == pytest.approx([0.0, 0.05, 0.1])


def test_published_rates_of_fine_tuning() -> None:
    recipe = TUNINGS["one-percent"]
    assert [rate(recipe, step, 25) for step in (0, 25, 125, 1250)] == pytest.approx(
        [0, 6e-6, 3e-5, 1e-6]
    )
    large = TUNINGS["mae-large"]
    assert (large.lr, large.layer_decay, large.drop_path) == (4e-3, 0.75, 0.2)
    assert (large.mixup, large.cutmix, large.erase) == (0.8, 1.0, 0.25)
    assert (recipe.mixup, recipe.cutmix, recipe.erase, recipe.drop_path) == (0, 0, 0, 0)


def test_huge_encoders_are_fine_tuned_by_their_own_recipe() -> None:
    widths = {size: SIZES[size].width for size in ("s", "b", "l", "h", "g")}
    chosen = {size: Finetune().recipe_for(width) for size, width in widths.items()}
    assert chosen == {
        **dict.fromkeys(("s", "b", "l"), "one-percent"),
        **dict.fromkeys(("h", "g"), "one-percent-huge"),
    }
    assert (Finetune().tuning(1280).weight_decay, Finetune().tuning(1024).weight_decay) == (
        0.4,
        0.05,
    )
    assert Finetune(recipe="one-percent").tuning(1280).weight_decay == 0.05
    assert Finetune(weight_decay=0.1).tuning(1280).weight_decay == 0.1


def test_fine_tuning_learns_leaves_the_encoder_alone_and_is_the_same_again() -> None:
    encoder = open_encoder(RANDOM)
    assert isinstance(encoder, VisionTransformer)
    before = cache.of_encoder(encoder)
    recipe = Tuning(
        epochs=6, batch_size=16, lr=2e-3, warmup_epochs=1, drop_path=0.1, layer_decay=1.0
    )
    train, test = Coloured(96, classes=2), Coloured(100, seed=1, classes=2)
    stripes = np.zeros((2, 24, 30, 3), np.uint8) + 30
    stripes[0, ::4], stripes[1, :, ::4] = 220, 220  # across or along: crops and colours leave it
    for images in (train, test):
        images.pixels[:] = stripes[images.labels["class"]]

    def run(recipe: Tuning) -> list[int]:
        return finetune(Inputs(encoder, train, test), "class", recipe, every_epoch=True)

    correct = run(recipe)
    assert len(correct) == 6
    assert correct[-1] > 75
    assert finetune(Inputs(encoder, train, test), "class", recipe) == [0] * 5 + correct[-1:]
    assert cache.of_encoder(encoder) == before
    short = dataclasses.replace(recipe, epochs=1, mixup=0.8, cutmix=1.0, erase=0.25)
    once = run(short)
    torch.manual_seed(5)
    assert run(short) == once


@pytest.mark.parametrize("asked", [True, False])
def test_an_untrained_network_is_fine_tuned_and_announced_only_where_that_is_asked_for(
    asked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    images = Coloured(8, classes=2)
    inputs = Inputs(open_encoder(RANDOM), images, images)
    (found,) = suite(inputs, [Finetune(per_class=2, epochs=1, random_init=asked)])
    assert (found.random_init is not None) is asked
    assert ("random init, network" in "".join(capsys.readouterr())) is asked


def test_a_class_token_is_fine_tuned_with_the_rest_and_left_out_of_the_average() -> None:
    encoder = VisionTransformer(24, 6, width=12, depth=2, heads=2, class_token=True)
    model = Classifier(encoder, 3, 0.0)
    nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    encoder.norm = nn.Identity()  # type: ignore[assignment]
    expected = model.head(model.fc_norm(encoder(images).mean(dim=1)))
    assert torch.allclose(model(images), expected, atol=1e-6)
    model(images).square().sum().backward()
    assert model.encoder.cls_token is not None
    assert model.encoder.cls_token.grad is not None


def test_in_half_precision_gradients_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that begins at 2e-5 nothing would reach the encoder."""
    encoder = open_encoder(RANDOM)
    assert isinstance(encoder, VisionTransformer)
    zeros = list[float]()
    real = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: Any) -> Any:
        found = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        zeros.append(float(torch.cat([x.flatten() for x in found]).eq(0).float().mean()))
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train = Coloured(64)
    inputs = Inputs(encoder, train, train, ImageRequest(precision="fp16"))
    finetune(inputs, "class", Tuning(epochs=1, batch_size=64))
    assert zeros[0] < 0.1


def test_a_dropped_block_is_made_up_for_by_the_others() -> None:
    model = Classifier(VisionTransformer(24, 6, width=12, depth=2, heads=2), 3, 0.5)
    x = torch.ones(4000, 1, 1)
    kept = model._keep(x, 0.5, torch.Generator().manual_seed(0))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.08)
    assert torch.equal(model._keep(x, 0.5, None), x)


def test_mixed_labels_have_the_share_of_the_mixed_pixels() -> None:
    wanted = torch.eye(2)
    images = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)])
    for recipe in (Tuning(mixup=0.8), Tuning(cutmix=1.0)):
        for step in range(20):
            mixed, labels = mix(images, wanted, recipe, numpy_generator("t", step))
            assert labels.sum(dim=1).tolist() == pytest.approx([1, 1])
            torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), labels[:, 1], rtol=0, atol=1e-6)
    assert mix(images, wanted, Tuning(), numpy_generator("t")) == (images, wanted)


def test_a_quarter_of_the_images_have_a_part_erased() -> None:
    erased = erase(torch.zeros(400, 3, 16, 16), 0.25, numpy_generator("t"))
    share = (erased != 0).float().mean(dim=(1, 2, 3))
    assert int((share > 0).sum()) == pytest.approx(100, abs=25)
    assert share.max() < 0.42


def test_every_augmentation_keeps_the_shape_and_is_drawn_by_the_key() -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 26, 3), dtype=np.uint8)
    for operation in ALL:
        for strength in (0.0, 0.9, 1.0):
            changed = operation(Image.fromarray(image), strength, numpy_generator("t"))
            assert changed.size == (26, 20)
            assert changed.mode == "RGB"
    same = [np.array_equal(rand_augment(image, numpy_generator("r", i)), image) for i in range(200)]
    assert sum(same) == pytest.approx(50, abs=25)  # two operations, each left out half of the time
    assert np.array_equal(
        rand_augment(image, numpy_generator("r", 3)), rand_augment(image, numpy_generator("r", 3))
    )


# ------------------------------------------------------------------------------ what people see

RESULTS = [
    Result("accuracy", "knn", "<b>count|", 0.5, (0.4, 0.6), 1000, "held-out", 0, 0.25),
    Result("rankme", "rankme", "", 12.345, None, 1000, "none", 0, unit=""),
]


def test_tables_are_aligned_escaped_and_complete(tmp_path: Path) -> None:
    rows = table.rows(RESULTS)
    lines = table.text(rows).splitlines()
    cells = ["knn", "<b>count|", "25.0", "50.0", "+25.0", "\u00b1", "20.0", "above"]
    assert lines[1].split() == cells
    assert lines[0].index("value") + 1 == lines[1].index("50.0")
    page = table.write_pages(tmp_path, RESULTS, "What <x> knows", {"encoder": "a&b"})
    text = page.read_text()
    assert "&lt;b&gt;count|" in text
    assert "<b>count" not in text
    assert "What &lt;x&gt; knows" in text
    assert "a&amp;b" in text
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>count\\|" in (tmp_path / "evaluation.md").read_text()
    tree = json.loads((tmp_path / "evaluation.json").read_text())
    assert tree["results"][0]["random_init"] == 25.0
    assert "above random init in the one question" in text
    shown = table.compared([Comparison("knn", "count", "none", 0.5, 0.6, (0.05, 0.15), 0.01, 100)])
    assert "+10.0" in table.text(shown)


def test_scenes_are_tested_on_the_next_seed() -> None:
    train, test = open_pair(open_encoder(RANDOM), ImageRequest(data="scenes:6:24:3"))
    assert (str(train), str(test)) == ("scenes:6:24:3", "scenes:6:24:4")
    assert isinstance(train, Scenes)


def test_a_run_is_evaluated_and_every_number_noted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "scenes:48:24", "--seed", "1", "--label", "count"]
    assert main(["eval", "knn", str(run.path), *words]) == 0
    assert main(["eval", "lowshot", str(run.path), *words, "--per-class", "2"]) == 0
    out = capsys.readouterr().out
    assert "random" in out
    assert max(map(len, out.splitlines())) <= 80
    lines = run.results
    assert [(line["protocol"], line["label"]) for line in lines] == [
        ("knn", "count"), ("lowshot", "count"),
    ]  # fmt: skip
    assert lines[0]["test_data"] == "scenes:48:24:1 (48 images)"
    assert lines[0]["seed"] == lines[0]["step"] == 1
    assert "size" not in lines[0]
    assert (lines[0]["unit"], lines[0]["chance"]) == ("percent", pytest.approx(100 / 48, abs=30))
    assert 1 < lines[0]["random_init"] <= 100
    assert "options" not in lines[0]
    assert lines[1]["options"] == {"per_class": 2}
    tune = ["eval", "finetune", str(run.path), *words, "--epochs", "1", "--random-init"]
    assert main([*tune, "--selection", "both"]) == 0
    last, best = run.results[-2:]
    assert "random_init" in last
    assert last["setting"] == "8/class, 1 epochs"  # there are no 25
    assert (last["selection"], best["selection"]) == ("none", "paper")
    assert best["value"] >= last["value"]
    capsys.readouterr()
    assert main(["eval", "compare", str(run.path), RANDOM, *words, "--layers", "last"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"A: {run.path}, step 1\nB: {RANDOM}\n")
    announced = [line for line in err.splitlines() if line[:3] in ("A: ", "B: ")]
    assert announced == [f"A: {run.path}, step 1", f"B: {RANDOM}"]
    said = " ".join(out.split("\n\n")[-1].split())
    assert said.startswith(f"On scenes:48:24:1 (48 images), B ({RANDOM}) is ")
    assert said.replace("- ", "-").endswith(f"A is {run.path}.")  # a long path is wrapped


def test_a_line_says_of_which_step_and_size_it_is(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    longer = pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=2)
    older = longer.path / "checkpoints" / run.checkpoint.name
    out = ["--data", "scenes:48:24", "--label", "count", "--out", str(tmp_path / "run")]
    out += ["--random-inits", "1"]
    for name in (longer.path, older, RANDOM):
        assert main(["eval", "knn", str(name), "--size", "48", *out]) == 0
    films = ["--videos", "scenes:1:32", "--video-size", "32"]
    assert main(["eval", "tracking", str(longer.path), *films]) == 0
    knn = [line for line in longer.results if line["protocol"] == "knn"]
    assert [(line["step"], line["size"]) for line in knn] == [(2, 48), (1, 48), (None, 48)]
    assert (longer.results[-1]["step"], longer.results[-1]["size"]) == (2, 32)


def test_the_suite_is_a_table_in_the_terminal_and_pages_in_the_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--data",
        "scenes:100:24",
        "--label",
        "count",
        "--layers",
        "last",
        "--videos",
        "scenes:1:32",
        "--random-inits",
        "1",
    ]
    assert main(["eval", "suite", str(run.path), *words]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert out.splitlines()[-1] == str(run.path / "evaluation.html")
    shown = [line["protocol"] + " " + line["name"] for line in run.results]
    assert shown == [
        "knn accuracy", "linear accuracy", "lowshot accuracy", "rankme rankme", "tracking J&F",
        "tracking J", "tracking F",
    ]  # fmt: skip
    assert all("random_init" in line for line in run.results)
    # Only about tracking: k-NN without videos would be another line of the report.
    assert [line.get("videos") for line in run.results] == [None] * 4 + ["scenes:1:32"] * 3
    page = (run.path / "evaluation.html").read_text()
    for line in run.results[:-4]:
        assert f"{line['value']:.1f}" in page
    assert "tracking J&amp;F" in page


def test_the_suite_says_that_it_replaces_pages_about_other_data(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, words = tmp_path / "evaluation.html", ["--label", "count", "--random-inits", "0"]
    words += ["--videos", "scenes:1:24", "--layers", "last", "--out", str(tmp_path)]
    said = []
    for n in (30, 30, 40):
        assert main(["eval", "suite", str(run.path), "--data", f"scenes:{n}:24", *words]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    other = f"{path}, in place of the one on scenes:30:24:1 (30 images)"
    assert said == [str(path), str(path), other]


def test_the_page_of_a_suite_fits_a_laptop(tmp_path: Path) -> None:
    one = Result("accuracy", "linear last4", "distance", 0.5, (0.4, 0.6), 1000, "held-out", 0, 0.25)
    one = dataclasses.replace(one, train=9, setting="solved, l2 0.00316228", chance=0.2)
    page = table.write_pages(tmp_path, [dataclasses.replace(one, difference=(-0.1, 0.3))], "x", {})
    with Browser(tmp_path / "chromium", wide=1100) as browser:
        browser.open(page)
        wide = browser.ask(
            "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.scroll'))"
        )
    assert wide[0] <= wide[1]


def test_help_begins_with_the_images(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("suite", "knn", "finetune"):
        assert main(["eval", command, "--help"]) == 0
        found = re.findall(r"^\W*(--\w[\w-]*)", capsys.readouterr().out, re.MULTILINE)
        assert found[:3] == ["--data", "--train", "--test"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("eval", 2, "a command is missing; there are knn, linear"),
        ("eval knn", 2, "ENCODER"),
        ("eval knn random:vit_b16", 2, "expected random:ARCH@SIZE"),
        ("eval knn random:vit_micro6@25", 2, "patch 6 does not divide"),
        ("eval knn {random} --train x", 2, "--train and --test belong together"),
        ("eval knn {random} --data x --test y", 2, "--data names both splits"),
        ("eval knn {random} --data nowhere", 3, "no such folder"),
        ("eval knn {random} --data scenes:9:24 --label size", 2, "--label size: no such label"),
        ("eval knn {random} --data scenes:9:24 --size 25", 2, "not a multiple of the patch size"),
        ("eval knn {random} --data scenes:9:24 --size 0", 2, "--size 0: expected 1 or more"),
        ("eval tracking {random} --video-size 0", 2, "--video-size 0: expected 1 or more"),
        ("eval tracking {random} --neighbourhood 1" + "0" * 30, 2, "expected at most 9"),
        ("eval knn {random} --data scenes:9:24 --random-inits 1" + "0" * 30, 2, "expected at most"),
        ("eval linear {random} --views -1", 2, "--views -1: expected 0 or more"),
        (
            "eval finetune {random} --data scenes:99:24 --epochs 0",
            2,
            "--epochs 0: expected 1 or more",
        ),
        (
            "eval finetune {random} --data scenes:99:24 --batch-size 0",
            2,
            "--batch-size 0: expected 1",
        ),
        ("eval finetune {random} --data scenes:99:24 --lr -1", 2, "--lr -1.0: expected 0 or more"),
        ("eval knn nowhere.pth", 4, "no such file"),
        ("eval linear {random} --recipe mine", 2, "invalid choice 'mine'"),
        ("eval knn {random} --data scenes:9:24 --out {tmp}/file/x", 5, "cannot write here"),
    ],
)
def test_a_mistake_is_one_line(
    line: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert main(line.format(random=RANDOM, tmp=tmp_path).split()) == code
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_recipes_of_the_command_line_are_those_there_are() -> None:
    assert {*get_args(TaskName)} == {*TASKS}
    for protocol, names in ((Linear, {"auto", "own", *TASKS}), (Finetune, {"auto", *TUNINGS})):
        types = {field.name: field.type for field in dataclasses.fields(protocol)}
        assert {*get_args(types["recipe"])} == names


def test_help_of_evaluations_does_not_load_torch() -> None:
    code = (
        "import sys; from stopmim.cli import main\n"
        "assert main(['eval', '--help']) == 0 and main(['eval', 'suite', '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_probe_benchmark_says_who_got_how_near_to_the_optimum_in_what_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SMALL", "ON_GPU"):
        monkeypatch.setattr(probe, name, (60, 8, 3))
    ours, theirs, ratio, heads, *_ = probe.bench_probe()
    assert (ours["solver"], theirs["solver"]) == ("stopmim", "scikit-learn")
    assert ours["gap"] <= 1e-6
    assert theirs["gap"] <= 1e-6 or theirs["seconds"] > 4 * ours["seconds"]
    assert ratio["time"] == pytest.approx(theirs["seconds"] / ours["seconds"], rel=0.5)
    assert len(heads["accuracy"]) == 12


def test_tracking_writes_pictures_of_the_encoder_and_heeds_its_options(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", "tracking", str(run.path), "--videos", "scenes:1:32", "--video-size", "32"]
    assert main([*command, "--pictures", str(tmp_path / "a")]) == 0
    usual = capsys.readouterr().out
    assert main([*command, "--topk", "1", "--n-last-frames", "0"]) == 0
    assert capsys.readouterr().out != usual
    (video,) = (p for p in (tmp_path / "a").iterdir() if p.is_dir() and p.name != "sheets")
    assert len(list(video.glob("*.png"))) == 20
    assert (tmp_path / "a" / "sheets" / f"{video.name}.png").is_file()


# ------------------------------------------------------------------------------ broken images


@pytest.mark.parametrize(
    "words",
    [
        ["knn", RANDOM],
        ["suite", RANDOM, "--random-inits", "1"],
        ["finetune", RANDOM, "--epochs", "1", "--per-class", "0"],
        ["compare", RANDOM, "random:vit_micro8@24"],
    ],
    ids=lambda words: words[0],
)
def test_a_broken_image_is_named_with_the_way_out_and_left_out_of_both_parts(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, fixes = write_parts(tmp_path / "images"), tmp_path / "fixes.jsonl"
    command = ["eval", *words, "--data", str(root), "--out", str(tmp_path / "o.jsonl")]
    assert main(command) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "part0/003.png: not an image" in said
    assert "leave it out with --skip FILE, see stopmim check --fix-list" in said
    assert main(["check", str(root), "--preset", "tiny_cpu", "--fix-list", str(fixes)]) == 0
    assert main([*command, "--skip", str(fixes)]) == 0
    for line in (tmp_path / "o.jsonl").read_text().splitlines():
        facts = json.loads(line)
        assert facts["train_data"] == f"{root} (39 images)"
        assert facts["test_data"] == f"{root} (15 images)"
