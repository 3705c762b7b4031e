"""A checkpoint that ranks write in pieces is that of one rank, for any number of readers."""

import functools
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stopmim
from ranks import together
from stopmim import Run, pretrain
from stopmim.base.errors import CheckpointError
from stopmim.cli import main
from stopmim.config.schema import Config
from stopmim.runs import checkpoint, shards
from stopmim.train import loop
from tiny import NoiseImages, assert_same_run, tiny

PARTS = {"parallel": "fsdp", "checkpoints": "sharded"}


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stopmim.train.distributed.GRACE", 1.0)


def job(out: Path, config: Config, stop_at: int | None, _: int) -> None:
    pretrain(NoiseImages(), out, config, stop_at=stop_at)


def on_two(out: Path, config: Config, stop_at: int | None = None) -> Run:
    ended = together(2, out.with_name("logs"), functools.partial(job, out, config, stop_at))
    assert [rank.code for rank in ended] == [0, 0], ended
    return Run(out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Four updates on two ranks, saved whole and in pieces."""
    root = tmp_path_factory.mktemp("runs")
    whole = on_two(root / "whole", tiny(runtime={"parallel": "fsdp"}), 4)
    return whole, on_two(root / "pieces", tiny(runtime=PARTS), 4)


def test_pieces_are_the_whole(runs: tuple[Run, Run]) -> None:
    whole, pieces = (run.checkpoint for run in runs)
    names = {path.name for path in pieces.iterdir()} - {path.name for path in whole.iterdir()}
    assert names == {"model.1.safetensors", "optimizer.1.safetensors"}
    for name in shards.NAMES:
        want, found = load_file(whole / f"{name}.safetensors"), dict(shards.read(pieces, name))
        assert want.keys() == found.keys()
        assert all(torch.equal(want[key], found[key]) for key in want)
        first = load_file(pieces / f"{name}.safetensors")
        assert any(first[key].numel() < want[key].numel() for key in want)  # it is in pieces


def test_every_reader_takes_pieces(runs: tuple[Run, Run], tmp_path: Path) -> None:
    whole, pieces = (str(run.path) for run in runs)
    images = torch.randint(0, 256, (2, 3, 24, 24), dtype=torch.uint8)
    a, b = (stopmim.load_encoder(path).features(images) for path in (whole, pieces))
    assert torch.equal(a, b)
    for run, out in ((whole, "a"), (pieces, "b")):
        words = ["--to", "safetensors", "--out", str(tmp_path / out)]
        assert main(["export", run, *words]) == 0
        assert main(["inspect", run]) == 0
    x, y = (load_file(tmp_path / out / "model.safetensors") for out in "ab")
    assert all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.slow
def test_one_and_two_ranks_continue_with_pieces(runs: tuple[Run, Run], tmp_path: Path) -> None:
    ends = []
    for i, run in enumerate(runs):
        shutil.copytree(run.path, tmp_path / f"two{i}")
        config = tiny(runtime=PARTS if i else {"parallel": "fsdp"})
        ends.append(on_two(tmp_path / f"two{i}", config))
        shutil.copytree(run.path, tmp_path / f"one{i}")
        ends.append(pretrain(NoiseImages(), tmp_path / f"one{i}", config))
    for a, b in ((ends[0], ends[2]), (ends[1], ends[3])):
        x, y = a.model().state_dict(), b.model().state_dict()
        assert all(torch.equal(x[name], y[name]) for name in x)
        assert [line["loss"] for line in a.metrics] == [line["loss"] for line in b.metrics]


def test_three_pieces_of_uneven_size_are_put_together(tmp_path: Path) -> None:
    whole = {"a": torch.arange(14.0).reshape(7, 2), "b": torch.ones(1), "n": torch.tensor(3.0)}
    for rank in range(3):
        cut = {name: x.chunk(3) for name, x in whole.items() if x.ndim}
        own = {name: x[rank].contiguous() for name, x in cut.items() if rank < len(x)}
        own |= {"n": whole["n"]} if rank == 0 else {}
        save_file(own, tmp_path / f"model{f'.{rank}' if rank else ''}.safetensors")
    seal(tmp_path)
    found = shards.read(tmp_path, "model")
    assert sorted(found) == sorted(whole)
    assert all(torch.equal(found[name], x) for name, x in whole.items())


def seal(folder: Path, *left_out: str) -> None:
    """Writes a manifest that confirms all files of `folder` but those that are `left_out`."""
    files = {
        path.name: {"sha256": checkpoint.sha256(path), "bytes": path.stat().st_size}
        for path in folder.iterdir()
        if path.name not in (*left_out, "manifest.json")
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.tensor(3.0), torch.tensor(3.0), r"float32 \(\) and torch.float32 \(\)"),
        (torch.ones(2, 3), torch.ones(2), r"float32 \(2, 3\) and torch.float32 \(2,\)"),
        (torch.ones(2, 3), torch.ones(2, 4), r"float32 \(2, 3\) and torch.float32 \(2, 4\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.bool), r"float32 \(2,\) and torch.bool \(2,\)"),
    ],
    ids=["numbers", "dimensions", "shapes", "kinds"],
)
def test_pieces_that_do_not_fit_together_are_one_line(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, said: str
) -> None:
    save_file({"x": a}, tmp_path / "model.safetensors")
    save_file({"x": b}, tmp_path / "model.1.safetensors")
    seal(tmp_path)
    with pytest.raises(CheckpointError, match=f"pieces of x do not fit: torch.{said}"):
        shards.read(tmp_path, "model")["x"]


@pytest.mark.parametrize("name", ["model.1", "optimizer.1", "optimizer.7", "model.x"])
@pytest.mark.parametrize("kind", ["pipe", "tensor", "junk"])
def test_a_piece_that_the_manifest_does_not_list_is_damage_and_never_read(
    tmp_path: Path, name: str, kind: str
) -> None:
    """A pipe would never end."""
    for own in ("model", "optimizer"):
        save_file({"x": torch.ones(2)}, tmp_path / f"{own}.safetensors")
    (tmp_path / "state.json").write_text("{}")
    file = tmp_path / f"{name}.safetensors"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "tensor":
            save_file({"x": torch.ones(2)}, file)
        case _:
            file.write_bytes(b"junk")
    seal(tmp_path, file.name)
    assert checkpoint.verify(tmp_path) == f"{file}: manifest.json does not list it"
    for own in shards.NAMES:  # should it have come after that
        assert torch.equal(shards.read(tmp_path, own)["x"], torch.ones(2))
    file.unlink()
    assert checkpoint.verify(tmp_path) is None


def test_a_piece_that_is_missing_or_damaged_is_noticed(
    runs: tuple[Run, Run], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(runs[1].checkpoint, tmp_path / "lost"))
    (path / "model.1.safetensors").unlink()
    assert "model.1.safetensors" in (checkpoint.verify(path) or "")
    with pytest.raises(CheckpointError, match=r"model\.1\.safetensors"):
        checkpoint.load_model(path)


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "save.shard@3"),
        *(
            pytest.param(rank, point, marks=pytest.mark.slow)
            for rank, point in ((0, "save.begin@2"), (0, "save.staged@2"), (1, "save.shard@4"))
        ),
    ],
)
def test_a_kill_between_pieces_loses_nothing(
    tmp_path: Path, rank: int, point: str, runs: tuple[Run, Run]
) -> None:
    """At the second save, of step 4; the first is of step 2."""
    config = tiny(runtime={**PARTS, "save_every": 2})

    def fatal(here: int) -> None:
        if here == rank:
            os.environ["STOPMIM_FAULT"] = f"{point}:kill"
        pretrain(NoiseImages(), tmp_path / "run", config, stop_at=4)

    ended = together(2, tmp_path / "logs", fatal)
    assert ended[rank].code == -signal.SIGKILL
    assert Run(tmp_path / "run").checkpoint.name == "step-00000002"
    run = on_two(tmp_path / "run", config, 4)
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]
    assert_same_run(run, runs[1])


@pytest.mark.parametrize("how", [pytest.param("moved", marks=pytest.mark.slow), "removed"])
def test_pieces_follow_a_run_that_is_moved_or_removed(
    tmp_path: Path, how: str, runs: tuple[Run, Run]
) -> None:
    """Only rank 0 knows; what the other one wrote was lost with the old path."""
    out, config, made = tmp_path / "run", tiny(runtime={**PARTS, "save_every": 4}), Counter[str]()

    def gone(name: str) -> None:
        made[name] += 1
        if made["step.end"] == 2 and name == "step.end":
            shutil.rmtree(out) if how == "removed" else out.rename(tmp_path / "run.moved")

    def fatal(here: int) -> None:
        if here == 0:
            loop.__dict__["faultpoint"] = gone
        pretrain(NoiseImages(), out, config, stop_at=4)

    assert together(2, tmp_path / "logs", fatal)[0].code == 5
    assert not out.exists()
    (place,) = tmp_path.glob("run.*")
    assert [path.name for path in (place / "checkpoints").iterdir()] == ["step-00000004"]
    for name in shards.NAMES:
        found, want = (dict(shards.read(run.checkpoint, name)) for run in (Run(place), runs[1]))
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key], want[key]) for key in want)
