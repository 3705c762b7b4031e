"""Hostile, damaged and mismatched files: one line, exit code 4, nothing executed, little memory."""

import argparse
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from hostile_files import ALSO
from hostile_runs import runs
from hostile_weights import (
    CANARY,
    Code,
    bytes_on_bytes,
    good,
    overlapping,
    torch_bytes,
    weights,
    write_fine,
)
from stopmim.base import sandbox as untrusted
from stopmim.base.errors import CheckpointError, ResourceError, StorageError

MEMORY = 1 << 30  # what a command may take beyond an idle process


# Every file to one of three commands in turn; test_hostile_files.py shows each to all, slowly.
COMMANDS = """
import contextlib, io, json, resource, sys
from stopmim.cli import main
import stopmim.weights.export, stopmim.evals.feature_files
import stopmim.weights.inspect, stopmim.method.model
memory = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (memory + int(sys.argv[1]),) * 2)
said = {}
for i, name in enumerate(sys.argv[2:]):
    commands = {
        "inspect": ["inspect", name],
        "export": ["export", name, "--to", "safetensors", "--out", "out " + name],
        "features": ["features", "scenes:4:16", "--encoder", name, "--out", f"{name}.npz"],
    }
    for command, words in list(commands.items())[i % 3 : i % 3 + 1]:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(words)
        said[f"{name}/{command}"] = code, err.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What commands say to every file, in one process with little memory."""
    root = tmp_path_factory.mktemp("hostile")
    for name, write in (weights() | {name: runs()[name] for name in RUNS}).items():
        write(root / name)
    write_fine(root / "fine.safetensors")
    names = [*weights(), *RUNS, "fine.safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(MEMORY), *names],
        cwd=root, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), root


# Checkpoints whose sums are right and whose config lies; hostile_runs.py has many more.
RUNS = [
    f"run with {what}"
    for what in ("a state with 300,000 blocks", "a state with images of 4096", "many blocks")
]


@pytest.mark.slow
def test_every_hostile_file_is_one_line_and_exit_code_4(
    answers: tuple[dict[str, Any], Path],
) -> None:
    said, _ = answers
    bad = {key: value for key, value in said.items() if not key.startswith("fine.")}
    assert len(bad) >= 150
    for key, (code, text) in bad.items():
        if key.split("/")[0] in ALSO and not code:
            continue  # of some the encoder is good
        assert code == 4, (key, code, text)
        assert text.startswith("stopmim: error: "), (key, text)
        assert len(text.splitlines()) == 1, (key, text)
        assert len(text) < 700, (key, text[:200])
        assert "internal error" not in text, (key, text)
        assert "weights_only" not in text, (key, text)  # torch's advice to trust the file
        name = key.split("/")[0]
        assert name in text or len(name) > 100 or not name.isprintable(), (key, text)


@pytest.mark.slow
def test_nothing_is_executed_and_nothing_is_written(answers: tuple[dict[str, Any], Path]) -> None:
    said, root = answers
    assert not (root / CANARY).exists()
    written = {path.name for pattern in ("out *", "*.npz") for path in root.glob(pattern)}
    good = ["fine.safetensors", *ALSO]
    assert written <= {x for name in good for x in (f"out {name}", f"{name}.npz")}
    assert all(code == 0 for key, (code, _) in said.items() if key.startswith("fine."))
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_a_kilobyte_gets_no_gigabytes_although_this_process_could_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted, "MEMORY", 1 << 26)
    (tmp_path / "a.pth").write_bytes(bytes_on_bytes())
    with pytest.raises(CheckpointError, match="bytes more than a file of"):
        untrusted.read_tree(tmp_path / "a.pth")


def test_a_file_that_takes_for_ever_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, readers = os.fork, list[int]()

    def counted() -> int:
        readers.append(fork())
        return readers[-1]

    monkeypatch.setattr(os, "fork", counted)
    size = (tmp_path / "a.pth").write_bytes(torch_bytes(good()))
    monkeypatch.setattr(untrusted, "SECONDS", 1e-4 - size / 1e7)  # a tenth of a millisecond
    with pytest.raises(CheckpointError, match="not read after"):
        untrusted.read_tree(tmp_path / "a.pth")
    [reader] = readers
    with pytest.raises(ChildProcessError):  # it is not left waiting to be buried
        os.waitpid(reader, os.WNOHANG)


def test_a_reader_that_the_system_kills_has_had_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    (tmp_path / "a.pth").write_bytes(torch_bytes(good()))
    with pytest.raises(ResourceError, match="the process that read it was killed"):
        untrusted.read_tree(tmp_path / "a.pth")


def test_a_machine_without_memory_is_not_the_fault_of_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.pth").write_bytes(torch_bytes(good()))

    def load(*_: Any, **__: Any) -> None:  # a reader that has freed memory may find room in it
        raise RuntimeError("can't allocate memory: you tried to allocate 67108864 bytes")

    monkeypatch.setattr(torch, "load", load)

    def few(_: int) -> tuple[int, int]:
        """Of the reader, at that moment: this process may have given memory back since."""
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return now + (40 << 20), resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", few)
    with pytest.raises(ResourceError, match="out of memory while it is read"):
        untrusted.read_tree(tmp_path / "a.pth")


def test_more_than_any_honest_file_asks_for_is_refused_however_little_memory_there_is() -> None:
    asks = RuntimeError("can't allocate memory: you tried to allocate 4000 bytes")
    assert untrusted._code_of(asks, True, 4000) == untrusted.NO_MEMORY
    assert untrusted._code_of(asks, True, 3999) == 0
    assert untrusted._code_of(asks, False, 4000) == 0  # our own limit


def test_the_header_of_a_file_is_read_without_mapping_the_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(3)}, file, {"b": "c"})

    def mapped(*_: object) -> None:
        raise RuntimeError("unable to mmap 99 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr(safetensors, "safe_open", mapped)
    assert untrusted.metadata(file) == {"b": "c"}
    monkeypatch.setattr(untrusted, "load_file", mapped)
    with pytest.raises(ResourceError):
        untrusted.read_tree(file)


@pytest.mark.parametrize("what", ["values", "tensors"])
def test_a_full_temporary_folder_is_not_the_fault_of_a_pickle(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the child: the limit on the size of a file gives EFBIG, which is like a full disk."""
    values = ["x" * 200_000] if what == "values" else []
    weights = torch.zeros(1 if values else 100_000)
    torch.save({"a": weights, "b": values}, tmp_path / "a.pth")
    load, limit = torch.load, resource.RLIMIT_FSIZE

    def loaded(*args: Any, **options: Any) -> Any:
        resource.setrlimit(limit, (100_000, resource.getrlimit(limit)[1]))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", loaded)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(StorageError, match="set TMPDIR"):
        untrusted.read_tree(tmp_path / "a.pth")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_zip_of_overlapping_records_is_refused_without_reading_them(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(overlapping(5000, 1_000_000))
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="its records overlap"):
        untrusted.read_tree(tmp_path / "a.pth")
    (tmp_path / "a.pth").write_bytes(overlapping(60_000, 1))
    with pytest.raises(CheckpointError, match="60000 records, more than 20000"):
        untrusted.read_tree(tmp_path / "a.pth")
    assert time.process_time() - begin < 5


READS = """
import sys, time, torch
from pathlib import Path
from stopmim.base import sandbox
torch.load = lambda *_, **__: [Path("reading").touch(), time.sleep(600)]
sandbox.read_tree(Path("a.pth"))
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_a_reader_ends_with_its_parent_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "a.pth").write_bytes(torch_bytes(good()))
    (tmp_path / "tmp").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", READS], cwd=tmp_path, stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "reading").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    parent.wait(30)
    while _is_alive(parent.pid):  # any process of its group
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((tmp_path / "tmp").iterdir()) == []


def _is_alive(group: int) -> bool:
    """Whether a process of `group` runs; those that nobody has buried yet do not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(of) == group and state != "Z":
            return True
    return False


def test_an_honest_pickle_comes_through_as_it_is(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    tree: dict[str, Any] = {
        "z first": {"columns": x.T, "same": x, "half": x.half(), "part": x[1:, 2:]},
        "a last": [1, 2.5, None, True, ("text", torch.zeros(0), torch.tensor(7))],
        "args": argparse.Namespace(lr=0.1),
        "opt": {"state": {0: {"exp_avg": x}}},  # not needed, and most of a released file
    }
    torch.save(tree, tmp_path / "a.pth")
    found = untrusted.read_tree(tmp_path / "a.pth")
    assert list(found) == ["z first", "a last", "args"]
    assert list(found["z first"]) == ["columns", "same", "half", "part"]
    for name, value in found["z first"].items():
        torch.testing.assert_close(value, tree["z first"][name], rtol=0, atol=0)
    assert found["a last"][:4] == [1, 2.5, None, True]
    assert found["a last"][4][0] == "text"
    assert found["a last"][4][2].item() == 7


def test_the_careless_way_would_have_executed_them(tmp_path: Path) -> None:
    """The canary works: the same files, read by pickle in a child process, run their command."""
    (tmp_path / "code.pth").write_bytes(pickle.dumps({"model": Code()}, protocol=2))
    code = "import pickle; pickle.load(open('code.pth', 'rb'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / CANARY).exists()
