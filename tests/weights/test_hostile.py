"""Hostile, damaged and mismatched files: one line, exit code 4, nothing executed, little memory."""

import argparse
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

import stopmim
from stopmim.base import sandbox as untrusted
from stopmim.base.errors import CheckpointError
from stopmim.method.encoder import VisionTransformer
from tiny import NoiseImages, tiny

MEMORY = 1 << 30  # what a command may take beyond an idle process
CANARY = "canary"


class Code:
    """Runs a command when it is unpickled the careless way."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def good() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(VisionTransformer(16, 8, 96, 2, 3).state_dict())


def torch_bytes(tree: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer, **options)
    return buffer.getvalue()


def flipped(data: bytes, where: int) -> bytes:
    return data[:where] + bytes([data[where] ^ 0x10]) + data[where + 1 :]


def repacked(data: bytes, method: int) -> bytes:
    """The zip file `data` with every record compressed by `method`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    return buffer.getvalue()


def with_pickle(content: bytes) -> bytes:
    """What torch.save writes, with `content` as the pickle in it."""
    buffer, data = io.BytesIO(), torch_bytes({"a": torch.zeros(1)})
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for record in old.infolist():
            is_pickle = record.filename.endswith("data.pkl")
            new.writestr(record.filename, content if is_pickle else old.read(record))
    return buffer.getvalue()


def bytes_on_bytes() -> bytes:
    """A gigabyte of zeros and fifty copies of it, all of which the restricted unpickler makes."""
    size = b"\x8a\x04" + (10**9).to_bytes(4, "little")
    first = b"\x80\x02c__builtin__\nbytearray\nq\x00" + size + b"\x85Rq\x01"
    return with_pickle(first + b"](" + 50 * b"h\x00h\x01\x85R" + b"e.")


def lists_in_lists() -> bytes:
    """Six levels of a thousand times the same: 20 kB, and 10 ** 18 values to walk through."""
    tree: list[Any] = [torch.zeros(1)]
    for _ in range(6):
        tree = [tree] * 1000
    return torch_bytes({"model": tree})


def header(tree: object, data: bytes = b"", pad: int = 0) -> bytes:
    text = json.dumps(tree).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def resaved(tree: dict[str, Tensor]) -> bytes:
    return save({key: value.contiguous() for key, value in tree.items()})


def files() -> dict[str, bytes]:
    """Name to content."""
    state, whole = good(), torch_bytes(good())
    jit = io.BytesIO()
    with zipfile.ZipFile(jit, "w") as archive:
        archive.writestr("x/constants.pkl", b"\x80\x02).")
        archive.writestr("x/data.pkl", b"\x80\x02}.")
        archive.writestr("x/version", b"3\n")
    wide = torch.zeros(1).expand(200_000, 3, 8, 8)
    one = torch.zeros(1)
    big = {
        "patch_embed.proj.weight": wide,
        "pos_embed": one.expand(1, 4, 200_000),
        "blocks.0.mlp.fc1.weight": one.expand(800_000, 200_000),
    }
    storage = torch_bytes({"a": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    return {
        "empty.pth": b"",
        "text.pth": b"not a checkpoint\n",
        "zeros.pth": bytes(64),
        "picture.pth": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "truncated.pth": whole[: len(whole) // 3],
        "cut at the end.pth": whole[:-3],
        "flipped in the data.pth": flipped(whole, len(whole) // 2),
        "flipped in the pickle.pth": flipped(whole, whole.index(b"_rebuild_tensor_v2") + 3),
        **{f"code {p}.pth": pickle.dumps({"model": Code()}, protocol=p) for p in range(6)},
        "code in a zip.pth": torch_bytes(state | {"epoch": Code()}),
        "code nested.pth": torch_bytes({"model": state, "args": {"a": [Code()]}}),
        "code in the old form.pth": torch_bytes(
            {"model": state, "args": Code()}, _use_new_zipfile_serialization=False
        ),
        "code before a zip.pth": pickle.dumps(Code()) + whole,
        "torchscript.pth": jit.getvalue(),
        "bomb.pth": repacked(
            torch_bytes(state | {"x": torch.zeros(5_000_000)}), zipfile.ZIP_DEFLATED
        ),
        "one value seen as many.pth": torch_bytes(state | big),
        "storage of a terabyte.pth": storage.replace(b"K\x03Ntq", b"J\xff\xff\xff\x7fNtq"),
        "key of a megabyte.pth": torch_bytes(state | {"k" * 1_000_000: torch.zeros(1)}),
        "lists in lists.pth": lists_in_lists(),
        "list.pth": torch_bytes([state]),
        "resnet.pth": torch_bytes({"model": {"conv1.weight": torch.zeros(8, 3, 7, 7)}}),
        "missing key.pth": torch_bytes({k: v for k, v in state.items() if k != "norm.bias"}),
        "extra key.pth": torch_bytes(state | {"blocks.0.ls1.gamma": torch.ones(96)}),
        "wrong size.pth": torch_bytes(state | {"norm.bias": torch.zeros(97)}),
        "other patch.pth": torch_bytes(
            state | {"patch_embed.proj.weight": torch.zeros(96, 3, 8, 7)}
        ),
        "no square.pth": torch_bytes(state | {"pos_embed": torch.zeros(1, 5, 96)}),
        "integers.pth": torch_bytes(state | {"norm.bias": torch.zeros(96, dtype=torch.int64)}),
        "not finite.safetensors": resaved(state | {"norm.bias": torch.full((96,), torch.nan)}),
        "rows swapped.safetensors": resaved(
            state | {"pos_embed": state["pos_embed"][:, [0, 2, 1, 3]]}
        ),
        "no header.safetensors": b"\x01",
        "header of exabytes.safetensors": (2**62).to_bytes(8, "little") + b"{}",
        "header of spaces.safetensors": header({}, pad=20_000_000),
        "header of nonsense.safetensors": b"\x04\0\0\0\0\0\0\0}}{{",
        "shape of a terabyte.safetensors": header({"a": entry([10**6, 10**6], 0, 4)}, bytes(4)),
        "overlapping.safetensors": header(
            {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)
        ),
        "ten thousand tensors.safetensors": header(
            {f"t{i}": entry([0], 0, 0) for i in range(10_000)}
        ),
        "pickle by another name.safetensors": pickle.dumps(Code()),
        "tag of nonsense.safetensors": save(
            {k: v.contiguous() for k, v in state.items()}, {"stopmim.encoder": "[[["}
        ),
        "tag of no heads.safetensors": save(
            {k: v.contiguous() for k, v in state.items()}, {"stopmim.encoder": '{"heads": 0}'}
        ),
    }  # fmt: skip


def folders(root: Path) -> None:
    """Directories that look like models."""
    (root / "empty folder").mkdir()
    os.mkfifo(root / "pipe.pth")
    (root / "loop.pth").symlink_to(root / "loop.pth")
    for name, config in {
        "hub nonsense": "{",
        "hub deep": "[" * 100_000,
        "hub list": "[]",
        "hub swin": '{"model_type": "swin", "num_attention_heads": 3}',
        "hub no weights": '{"model_type": "vit", "num_attention_heads": 3}',
    }.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(config)
    (root / "hub code").mkdir()
    (root / "hub code" / "config.json").write_text(
        '{"model_type": "vit", "num_attention_heads": 3}'
    )
    (root / "hub code" / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    run = stopmim.pretrain(NoiseImages(), root / "run damaged", tiny(), stop_at=1)
    step = run.checkpoint
    forge(root / "run giant", step, arch="vit_g1", image_size=4096)
    forge(root / "run unknown", step, arch="resnet50")
    forge(root / "run other", step, arch="vit_s4")
    weights = step / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), 5000))
    (root / "run begun").mkdir()
    (root / "run begun" / "run.json").write_text("{}")


def forge(out: Path, step: Path, **config: Any) -> None:
    """A checkpoint whose sums are right and whose config lies."""
    out.mkdir()
    for file in step.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    state = json.loads((out / "state.json").read_text())
    state["config"] |= config
    (out / "state.json").write_text(json.dumps(state))
    manifest = json.loads((out / "manifest.json").read_text())
    data = (out / "state.json").read_bytes()
    manifest["files"]["state.json"] = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }
    (out / "manifest.json").write_text(json.dumps(manifest))


# Every file to `inspect`, and to one of the two others in turn: all three would take seconds more.
COMMANDS = """
import contextlib, io, json, resource, sys
from stopmim.cli import main
import stopmim.weights.export, stopmim.evals.feature_files
import stopmim.weights.inspect, stopmim.method.model
memory = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (memory + int(sys.argv[1]),) * 2)
said = {}
for i, name in enumerate(sys.argv[2:]):
    other = {
        "export": ["export", name, "--to", "safetensors", "--out", "out " + name],
        "features": ["features", "scenes:4:16", "--encoder", name, "--out", f"{name}.npz"],
    }
    if not name.startswith("fine"):
        del other[["export", "features"][i % 2]]
    for command, words in {"inspect": ["inspect", name], **other}.items():
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(words)
        said[f"{name}/{command}"] = code, err.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What commands say to every file, in one process with little memory."""
    root = tmp_path_factory.mktemp("hostile")
    for name, content in files().items():
        (root / name).write_bytes(content)
    folders(root)
    save_file(good(), root / "fine.safetensors")
    names = sorted(path.name for path in root.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(MEMORY), *names],
        cwd=root, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), root


def test_every_hostile_file_is_one_line_and_exit_code_4(
    answers: tuple[dict[str, Any], Path],
) -> None:
    said, _ = answers
    bad = {key: value for key, value in said.items() if not key.startswith("fine.")}
    assert len(bad) >= 2 * 50
    for key, (code, text) in bad.items():
        assert code == 4, (key, code, text)
        assert text.startswith("stopmim: error: "), (key, text)
        assert len(text.splitlines()) == 1, (key, text)
        assert len(text) < 700, (key, text[:200])
        assert "internal error" not in text, (key, text)
        assert "weights_only" not in text, (key, text)  # torch's advice to trust the file
        assert key.split("/")[0] in text, (key, text)


def test_nothing_is_executed_and_nothing_is_written(answers: tuple[dict[str, Any], Path]) -> None:
    said, root = answers
    assert not (root / CANARY).exists()
    assert [path.name for path in root.glob("out *")] == ["out fine.safetensors"]
    assert [path.name for path in root.glob("*.npz")] == ["fine.safetensors.npz"]
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


def test_a_reader_that_is_killed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    (tmp_path / "a.pth").write_bytes(torch_bytes(good()))
    with pytest.raises(CheckpointError, match="ended with -9"):
        untrusted.read_tree(tmp_path / "a.pth")


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
