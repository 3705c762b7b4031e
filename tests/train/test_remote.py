"""Training from URLs is training from local files: through faults, kills, and a small cache."""

import io
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from test_tar import write
from test_urls import write_index

from faulty_server import FAULTS, impatient, serving
from ranks import together
from stopmim import Run, pretrain
from stopmim.base.errors import DataError
from stopmim.cli.run import main
from stopmim.data.remote import cache as remote_cache
from stopmim.data.remote import fetch
from stopmim.data.sources.indexed_tar import IndexedTar
from stopmim.data.sources.tar import Tar
from tiny import assert_same_run, tiny

IMAGES, SHARDS = 5, 16
PATTERN = f"train-{{00..{SHARDS - 1}}}.tar"
SECRET = "hunter2"


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (28, 32, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _windows() -> Iterator[None]:
    """An order that needs four shards at a time."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Tar, IndexedTar):
            patch.setattr(kind, "window", 3 * IMAGES)
            patch.setattr(f"{kind.__module__}.WINDOW", 3 * IMAGES)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), SHARDS)


def write_shards(root: Path, count: int) -> Path:
    for k in range(count):
        numbers = range(k * IMAGES, (k + 1) * IMAGES)
        write(root / f"train-{k:02}.tar", [(f"{i:03}.png", picture(i)) for i in numbers])
    write_index(root, count=IMAGES)
    return root


@pytest.fixture(scope="module")
def local(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(folder, tmp_path_factory.mktemp("local"), epochs(2, workers=0))


@pytest.fixture(autouse=True)
def _small(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short waits, and a cache that does not hold all shards."""
    monkeypatch.setattr(fetch, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(remote_cache, "_slack", 0)
    monkeypatch.delenv("STOPMIM_URLS", raising=False)
    room = 14 * (folder / "train-00.tar").stat().st_size / 1e9
    with impatient(tmp_path / "cache", STOPMIM_REMOTE_GB=str(room)):
        yield


def faults(count: int, seed: int = 0) -> list[str]:
    """That many faults of every kind, with good answers between them."""
    kinds = [FAULTS[i % len(FAULTS)] for i in range(count)]
    random.Random(seed).shuffle(kinds)
    return [kind for i, fault in enumerate(kinds) for kind in (fault, *[""] * (i % 2))]


def epochs(n: int, workers: int = 2, **runtime: Any) -> Any:
    return tiny(optim={"epochs": n}, runtime={"workers": workers, **runtime})


def test_faults_change_nothing(folder: Path, local: Run, tmp_path: Path) -> None:
    with serving(folder, faults(len(FAULTS))) as server:
        far = pretrain(server.url, tmp_path / "far", epochs(2))
        assert len(server.spent()) == len(FAULTS)  # all of them
    assert_same_run(local, far)
    assert not (far.path / "bad_files.jsonl").exists()
    taken = sum(path.stat().st_size for path in remote_cache.folder().glob("??/*"))
    assert taken <= remote_cache.budget()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_two_hundred_faults_change_nothing(tmp_path: Path, workers: int) -> None:
    """Every shard is fetched in every epoch: the cache has room for a third of them."""
    folder = write_shards(tmp_path / "many", 64)
    local = pretrain(folder, tmp_path / "local", epochs(6, workers=0))
    room = 22 * (folder / "train-00.tar").stat().st_size
    with (
        impatient(tmp_path / "cache", STOPMIM_REMOTE_GB=str(room / 1e9)),
        serving(folder, faults(200)) as server,
    ):
        far = pretrain(server.url, tmp_path / "far", epochs(6, workers=workers))
        assert len(server.spent()) == 200
    assert_same_run(local, far)
    assert not (far.path / "bad_files.jsonl").exists()


def killed(url: str, out: Path, at: int) -> None:
    """Trains in a child process until it is killed after `at` more updates."""
    child = os.fork()
    if child == 0:
        try:
            os.environ["STOPMIM_FAULT"] = f"step.end@{at}:kill"
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            pretrain(url, out, epochs(2))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(False, marks=pytest.mark.slow, id="with the cache"),
        pytest.param(True, id="without it"),
    ],
)
def test_a_killed_run_resumes_exactly(folder: Path, local: Run, tmp_path: Path, lose: bool) -> None:
    with serving(folder, faults(3)) as server:
        killed(server.url, tmp_path / "far", at=8)
        if lose:
            shutil.rmtree(remote_cache.folder())
        far = pretrain(server.url, tmp_path / "far", epochs(2))
    assert_same_run(local, far)
    assert len(far.about["starts"]) == 2


def test_a_run_that_loses_its_images_is_saved(folder: Path, local: Run, tmp_path: Path) -> None:
    rare = epochs(2, save_every=1000)
    with serving(folder) as server:
        server.limit = 14  # of shards
        with (
            impatient(tmp_path / "cache", STOPMIM_REMOTE_PATIENCE="0.5"),
            pytest.raises(DataError, match=r"train-\d\d\.tar: unavailable for \d+ s, last error: "),
        ):
            pretrain(server.url, tmp_path / "far", rare)
        saved = int(Run(tmp_path / "far").checkpoint.name.removeprefix("step-"))
        assert saved == len(Run(tmp_path / "far").metrics) > 0  # every update is logged
        server.limit = None
        far = pretrain(server.url, tmp_path / "far", rare)
    assert_same_run(local, far)


@pytest.mark.slow
def test_two_ranks_share_the_cache(folder: Path, tmp_path: Path) -> None:
    with impatient(tmp_path / "cache", STOPMIM_REMOTE_GB="1"):
        config = epochs(3)
        local = together(2, tmp_path / "a", lambda _: pretrain(folder, tmp_path / "l", config))
        with serving(folder) as server:
            url = server.url
            far = together(2, tmp_path / "b", lambda _: pretrain(url, tmp_path / "f", config))
            assert [ended.code for ended in local + far] == [0] * 4, far
            fetched = [server.fetched(f"train-{k:02}.tar") for k in range(SHARDS)]
        assert fetched == [1] * SHARDS
    assert_same_run(Run(tmp_path / "l"), Run(tmp_path / "f"))


# ------------------------------------------------------------------------------ credentials


def holds_secret(path: Path) -> list[Path]:
    return [f for f in path.rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]


def test_credentials_are_nowhere(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = tmp_path / "tiny.yaml"
    out = tmp_path / "far"
    with serving(folder) as server:
        server.login = f"me:{SECRET}"
        url = f"{server.url.replace('://', f'://me:{SECRET}@')}/{PATTERN}?token={SECRET}"
        words = ["pretrain", url, "--out", str(out), "--preset", str(preset)]
        write_preset(preset)
        monkeypatch.setattr(sys, "argv", ["stopmim", *words])
        assert main() == 0
        assert main(["check", url, "--preset", str(preset)]) == 0
        assert main(["report", str(out)]) == 0
        server.login = "me:another"
        monkeypatch.setattr(sys, "argv", ["stopmim", *words])
        shutil.rmtree(remote_cache.folder())
        assert main() == 3  # access refused
    said = "".join(capfd.readouterr())
    assert f"{server.url}/train-" in said
    assert "access refused (HTTP 401)" in said
    assert SECRET not in said
    assert holds_secret(out) == []
    assert holds_secret(remote_cache.folder()) == []
    assert Run(out).about["data"]["source"] == f"{server.url}/{PATTERN}"


def write_preset(path: Path) -> None:
    path.write_text(yaml.safe_dump(epochs(1).model_dump(mode="json")))


@pytest.mark.slow
def test_another_signature_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as server:
        pretrain(f"{server.url}/{PATTERN}?sig=1", tmp_path / "far", epochs(1), stop_at=2)
        fetched = sum(server.fetched(f"train-{k:02}.tar") for k in range(SHARDS))
        assert fetched < SHARDS  # what the updates need, and no sample of all shards
        run = pretrain(f"{server.url}/{PATTERN}?sig=2", tmp_path / "far", epochs(1))
    assert len(run.metrics) == 10


@pytest.mark.slow
def test_workers_fetch_what_replaces_a_broken_image(folder: Path, tmp_path: Path) -> None:
    """A replacement may be in any shard, also in one that nothing ahead has asked for."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "train-03.tar").unlink()
    write(broken / "train-03.tar", [(f"{i:03}.png", b"junk") for i in range(IMAGES)])
    write_index(broken, count=IMAGES)
    config = tiny(optim={"epochs": 1}, data={"max_bad": 0.2}, runtime={"workers": 1})
    local = pretrain(broken, tmp_path / "local", config)
    with serving(broken) as server:
        far = pretrain(server.url, tmp_path / "far", config)
    assert_same_run(local, far)
    names = [(run.path / "bad_files.jsonl").read_text() for run in (local, far)]
    assert names[0] == names[1] != ""
