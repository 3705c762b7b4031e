"""Hostile, damaged and mismatched files of weights, and folders that look like models."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from stopmim.method.encoder import VisionTransformer

CANARY = "canary"
Write = Callable[[Path], object]
State = dict[str, Tensor]


class Code:
    """Runs a command when it is unpickled the careless way."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {CANARY}",)


@cache
def good() -> State:
    torch.manual_seed(0)
    return dict(VisionTransformer(16, 8, 96, 2, 3).state_dict())


def write_fine(path: Path) -> None:
    """An encoder that every command takes."""
    save_file(good(), path)


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


def overlapping(entries: int, size: int) -> bytes:
    """A zip file whose `entries` all lie on the same `size` bytes, each with a right checksum."""
    data = bytes(size)
    crc = zipfile.crc32(data)  # type: ignore[attr-defined]
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 33, crc, size, size, 1, 0) + b"a"
    parts = [local, data]
    for i in range(entries):
        name = b"archive/data/%d" % i
        parts.append(
            struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 33, crc, size, size,
                        len(name), 0, 0, 0, 0, 0, 0)
            + name
        )  # fmt: skip
    directory = sum(map(len, parts[2:]))
    count = min(entries, 0xFFFF)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, directory, len(local) + size, 0)
    return b"".join([*parts, end])


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


def tuples_as_keys() -> bytes:
    """A key whose hash takes 2 ** 60 steps."""
    pickled = b"\x80\x02})" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60))
    return with_pickle(pickled + b"K\x01s.")


def header(tree: object, data: bytes = b"", pad: int = 0) -> bytes:
    text = json.dumps(tree).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def resaved(tree: State, tags: dict[str, str] | None = None) -> bytes:
    return save({key: value.contiguous() for key, value in tree.items()}, tags)


def many_blocks(blocks: int, prefix: str = "blocks.{}.norm1.weight") -> bytes:
    """A ViT with so many blocks, each of which has one empty tensor."""
    rest = {"patch_embed.proj.weight": [96, 3, 8, 8], "pos_embed": [1, 4, 96]}
    rest |= {"blocks.0.mlp.fc1.weight": [384, 96]}
    tree, at = dict[str, Any](), 0
    for name, shape in rest.items():
        size = 4 * torch.Size(shape).numel()
        tree[name], at = entry(shape, at, at + size), at + size
    tree |= {prefix.format(i): entry([0], at, at) for i in range(blocks)}
    return header(tree, bytes(at))


def tagged(heads: str = '{"heads": 3, "eps": 1e-6}', **others: str) -> bytes:
    """Good weights with a tag of ours that is not."""
    names = {f"stopmim.{name}": text for name, text in others.items()}
    return resaved(good(), {"stopmim.encoder": heads} | names)


@cache
def stop() -> dict[str, Any]:
    """A small file in the layout of I-JEPA, as `export` writes it."""
    from stopmim.config.schema import resolve
    from stopmim.method.build import build
    from stopmim.method.predictor import Predictor
    from tiny import tiny

    model = build(resolve(tiny()))
    predictor: Predictor = model.predictor
    parts = {"encoder": model.encoder, "target_encoder": model.branch(), "predictor": predictor}
    tree: dict[str, Any] = {k: dict(part.state_dict()) for k, part in parts.items()}
    tags = {"stopmim.encoder": {"heads": 3, "eps": 1e-6}, "stopmim.predictor": predictor.tag()}
    return tree | tags


def retagged(**changes: Any) -> bytes:
    """That file with another tag of the predictor."""
    tree = stop()
    return torch_bytes(tree | {"stopmim.predictor": tree["stopmim.predictor"] | changes})


def weights() -> dict[str, Write]:
    """Name to writer, for each file and folder."""
    contents = _damaged() | _code() | _bombs() | _unfit() | _tags() | _headers()
    found: dict[str, Write] = {
        name: partial(_write_bytes, content) for name, content in contents.items()
    }
    return found | _places() | _hub()


def _write_bytes(content: bytes | Callable[[], bytes], path: Path) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content())


Contents = dict[str, bytes | Callable[[], bytes]]


def _damaged() -> Contents:
    whole = torch_bytes(good())
    return {
        "empty.pth": b"",
        "text.pth": b"not a checkpoint\n",
        "zeros.pth": bytes(64),
        "picture.pth": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "truncated.pth": whole[: len(whole) // 3],
        "cut at the end.pth": whole[:-3],
        "flipped in the data.pth": flipped(whole, len(whole) // 2),
        "flipped in the pickle.pth": flipped(whole, whole.index(b"_rebuild_tensor_v2") + 3),
    }


def _code() -> Contents:
    state, whole, jit = good(), torch_bytes(good()), io.BytesIO()
    with zipfile.ZipFile(jit, "w") as archive:
        archive.writestr("x/constants.pkl", b"\x80\x02).")
        archive.writestr("x/data.pkl", b"\x80\x02}.")
        archive.writestr("x/version", b"3\n")
    return {
        **{f"code {p}.pth": pickle.dumps({"model": Code()}, protocol=p) for p in range(6)},
        "code in a zip.pth": torch_bytes(state | {"epoch": Code()}),
        "code nested.pth": torch_bytes({"model": state, "args": {"a": [Code()]}}),
        "code in the old form.pth": torch_bytes(
            {"model": state, "args": Code()}, _use_new_zipfile_serialization=False
        ),
        "code before a zip.pth": pickle.dumps(Code()) + whole,
        "torchscript.pth": jit.getvalue(),
        "pickle by another name.safetensors": pickle.dumps(Code()),
    }


def _bombs() -> Contents:
    state, one = good(), torch.zeros(1)
    big = {
        "patch_embed.proj.weight": one.expand(200_000, 3, 8, 8),
        "pos_embed": one.expand(1, 4, 200_000),
        "blocks.0.mlp.fc1.weight": one.expand(800_000, 200_000),
    }
    storage = torch_bytes({"a": torch.zeros(3)}, _use_new_zipfile_serialization=False)
    return {
        "bomb.pth": repacked(
            torch_bytes(state | {"x": torch.zeros(5_000_000)}), zipfile.ZIP_DEFLATED
        ),
        "bomb by LZMA.pth": repacked(torch_bytes(state), zipfile.ZIP_LZMA),
        "one value seen as many.pth": torch_bytes(state | big),
        "storage of a terabyte.pth": storage.replace(b"K\x03Ntq", b"J\xff\xff\xff\x7fNtq"),
        "bytes on bytes.pth": bytes_on_bytes,
        "lists in lists.pth": lists_in_lists,
        "tuples as keys.pth": tuples_as_keys,
        "overlapping entries.pth": lambda: overlapping(60_000, 4_000_000),
        "many entries.pth": lambda: overlapping(60_000, 1),
        "many blocks.safetensors": lambda: many_blocks(100_000),
        "some blocks.safetensors": lambda: many_blocks(15_000),
        "blocks of long names.safetensors": lambda: many_blocks(900, "blocks.{:09999}.norm1.w"),
        "layers of the hub.safetensors": lambda: many_blocks(15_000, "encoder.layer.{}.x.weight"),
        "many tensors.pth": lambda: torch_bytes({f"blocks.{i}.a": one for i in range(120_000)}),
        "dictionary of a million.pth": lambda: torch_bytes(dict.fromkeys(range(1_000_000), 0)),
        "meta tensor.pth": torch_bytes(state | {"x": torch.empty(10**9, device="meta")}),
        "integer of a million digits.pth": torch_bytes(state | {"epoch": 1 << 3_000_000}),
    }


def _unfit() -> Contents:
    state = good()
    floats = [("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")]
    bias = "norm.bias"
    return {
        "list.pth": torch_bytes([state]),
        "resnet.pth": torch_bytes({"model": {"conv1.weight": torch.zeros(8, 3, 7, 7)}}),
        "missing key.pth": torch_bytes({k: v for k, v in state.items() if k != bias}),
        "extra key.pth": torch_bytes(state | {"blocks.0.ls1.gamma": torch.ones(96)}),
        "wrong size.pth": torch_bytes(state | {bias: torch.zeros(97)}),
        "other patch.pth": torch_bytes(
            state | {"patch_embed.proj.weight": torch.zeros(96, 3, 8, 7)}
        ),
        "too many patches.pth": lambda: torch_bytes(
            state | {"pos_embed": torch.zeros(1, 257**2, 96)}
        ),
        "too many distances.pth": lambda: torch_bytes(
            state | {"rel_pos_bias.relative_position_bias_table": torch.zeros(399**2 + 3, 1)}
        ),
        "no square.pth": torch_bytes(state | {"pos_embed": torch.zeros(1, 5, 96)}),
        "positions of one axis.pth": torch_bytes(state | {"pos_embed": torch.zeros(4)}),
        "a number for a tensor.pth": torch_bytes(state | {"blocks.0.mlp.fc1.weight": 3}),
        "integers.pth": torch_bytes(state | {bias: torch.zeros(96, dtype=torch.int64)}),
        "complex.pth": torch_bytes(state | {bias: torch.zeros(96, dtype=torch.complex64)}),
        "sparse.pth": torch_bytes(state | {bias: torch.zeros(96).to_sparse()}),
        **{
            f"{name}.{suffix}": (torch_bytes if suffix == "pth" else resaved)(
                {k: v.to(getattr(torch, name)) for k, v in state.items()}
            )
            for name, _ in floats
            for suffix in ("pth", "safetensors")
        },
        "float8 in a decoder.safetensors": resaved(
            state | {"decoder_pos_embed": torch.zeros(1, 5, 96).to(torch.float8_e5m2)}
        ),
        "infinite as half.safetensors": resaved(
            state | {bias: torch.full((96,), torch.inf, dtype=torch.float16)}
        ),
        "beyond float32.safetensors": resaved(
            state | {bias: torch.full((96,), 1e300, dtype=torch.float64)}
        ),
        "not finite.safetensors": resaved(state | {bias: torch.full((96,), torch.nan)}),
        "rows swapped.safetensors": resaved(
            state | {"pos_embed": state["pos_embed"][:, [0, 2, 1, 3]]}
        ),
        "key of a megabyte.pth": torch_bytes(state | {"k" * 1_000_000: torch.zeros(1)}),
        "keys of lines.pth": torch_bytes(
            {"a\nstopmim: error: forged\r\x1b[2J\u202e\x07": torch.zeros(1), "patch_embed.proj": 1}
        ),
        "keys of lines.safetensors": header(
            {"x\nstopmim: error: forged\x1b[31m": entry([0], 0, 0)}
        ),
        "lone surrogate.pth": with_pickle(b"\x80\x02}X\x03\0\0\0\xed\xa0\x80K\x01s."),
    }


def _tags() -> Contents:
    sigmas = {"infinite": float("inf"), "not a number": float("nan"), "negative": -1.0}
    tree = stop()
    return {
        "tag of nonsense.safetensors": tagged("[[["),
        "tag nested.safetensors": tagged("[" * 100_000),
        "tag empty.safetensors": tagged(""),
        "tag of no heads.safetensors": tagged('{"heads": 0}'),
        "tag of infinite heads.safetensors": tagged('{"heads": Infinity, "eps": 1e-6}'),
        "tag of heads that are no number.safetensors": tagged('{"heads": NaN, "eps": 1e-6}'),
        "tag of huge heads.safetensors": tagged('{"heads": 1' + "0" * 4000 + ', "eps": 1e-6}'),
        "tag of an absurd epsilon.safetensors": tagged('{"heads": 3, "eps": 1e308}'),
        "tag of no epsilon.safetensors": tagged('{"heads": 3, "eps": NaN}'),
        "tag is a tensor.pth": torch_bytes(good() | {"stopmim.encoder": torch.zeros(3)}),
        "tag of tensors.pth": torch_bytes(
            good() | {"stopmim.encoder": {"heads": torch.zeros(2), "eps": torch.zeros(2)}}
        ),
        "tag of an infinite tensor.pth": torch_bytes(
            good() | {"stopmim.encoder": {"heads": torch.tensor(torch.inf), "eps": 1e-6}}
        ),
        **{f"{name} sigma.pth.tar": retagged(sigma=value) for name, value in sigmas.items()},
        "share of infinity.pth.tar": retagged(share=float("inf")),
        "infinite predictor heads.pth.tar": retagged(heads=float("inf")),
        "unknown tokens.pth.tar": retagged(tokens="none"),
        "tokens are a list.pth.tar": retagged(tokens=[1]),
        "positions are a tensor.pth.tar": retagged(positions=torch.zeros(3)),
        "bias of nothing.pth.tar": retagged(bias=None),
        "predictor tag is a tensor.pth.tar": torch_bytes(
            tree | {"stopmim.predictor": torch.zeros(2)}
        ),
        "predictor tag is a list.pth.tar": torch_bytes(tree | {"stopmim.predictor": [1]}),
        "predictor is a tensor.pth.tar": torch_bytes(tree | {"predictor": torch.zeros(2)}),
        "deep predictor.pth.tar": lambda: torch_bytes(
            tree
            | {
                "predictor": tree["predictor"]
                | {f"predictor_blocks.{i}.x": torch.zeros(0) for i in range(30_000)}
            }
        ),
    }


def _headers() -> Contents:
    return {
        "no header.safetensors": b"\x01",
        "header of exabytes.safetensors": (2**62).to_bytes(8, "little") + b"{}",
        "header of spaces.safetensors": header({}, pad=20_000_000),
        "header of nonsense.safetensors": b"\x04\0\0\0\0\0\0\0}}{{",
        "header nested.safetensors": (10**6).to_bytes(8, "little") + b"[" * 10**6,
        "shape of a terabyte.safetensors": header({"a": entry([10**6, 10**6], 0, 4)}, bytes(4)),
        "shape beyond 64 bits.safetensors": header({"a": entry([2**40, 2**40], 0, 4)}, bytes(4)),
        "shape below zero.safetensors": header({"a": entry([-1], 0, 4)}, bytes(4)),
        "unknown type.safetensors": header({"a": entry([1], 0, 4, "F33")}, bytes(4)),
        "overlapping.safetensors": header(
            {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)
        ),
        "ten thousand tensors.safetensors": header(
            {f"t{i}": entry([0], 0, 0) for i in range(10_000)}
        ),
        "metadata of megabytes.safetensors": header(
            {"__metadata__": {"stopmim.encoder": "x" * 5_000_000}, "a": entry([0], 0, 0)}
        ),
    }


# ------------------------------------------------------------------------------ not plain files


def link(target: str) -> Write:
    return lambda path: path.symlink_to(target)


def sparse(size: int, start: bytes = b"") -> Write:
    """A file of `size` bytes that takes no room, with `start` at its start."""

    def write(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return write


def _places() -> dict[str, Write]:
    terabyte = header({"pos_embed": entry([1, 4, 2**36], 0, 2**40)})
    holes = header({"pos_embed": entry([1, 4, 2**30], 0, 2**34)})
    return {
        "pipe.pth": os.mkfifo,
        "pipe.safetensors": os.mkfifo,
        "loop.pth": link("loop.pth"),
        "nowhere.pth": link("not there"),
        "endless.pth": link("/dev/zero"),
        "endless.safetensors": link("/dev/zero"),
        "terabyte of zeros.pth": sparse(2**40),
        "terabyte of zeros.safetensors": sparse(2**40),
        "terabyte of a tensor.safetensors": sparse(2**40 + len(terabyte), terabyte),
        "16 GB of holes.safetensors": sparse(2**34 + len(holes), holes),
        "16 GB of holes.pth": sparse(2**34, b"\x80\2"),
        "empty folder": lambda path: path.mkdir(),
        "folder.pth": lambda path: path.mkdir(),
        "n" * 300 + ".pth": lambda path: None,  # no file can have this name
        "é" * 200 + ".safetensors": lambda path: None,
        "name\nstopmim: error: forged\x1b[2J.pth": lambda path: path.write_bytes(b"x"),
    }


def _hub() -> dict[str, Write]:
    """Folders of Hugging Face."""

    def folder(config: str | Write, **files: bytes | Write) -> Write:
        def write(path: Path) -> None:
            path.mkdir()
            names = {"bin": "pytorch_model.bin", "weights": "model.safetensors"}
            for name, content in {"config.json": config, **files}.items():
                file = path / names.get(name, name)
                if isinstance(content, str):
                    file.write_text(content)
                elif isinstance(content, bytes):
                    file.write_bytes(content)
                else:
                    content(file)

        return write

    def vit(**changes: str) -> str:
        given = {"model_type": '"vit"', "num_attention_heads": "3"} | changes
        return "{" + ", ".join(f'"{key}": {text}' for key, text in given.items()) + "}"

    fine = resaved(hub_state())
    heads: tuple[str, ...] = (
        "0",
        "-3",
        "Infinity",
        "-Infinity",
        "NaN",
        "1e400",
        "5",
        "[3]",
        '"three"',
        "true",
    )
    heads = (*heads, "null", "1" + "0" * 4000)
    epsilons = ("NaN", "Infinity", "-1", "1e308", "2", "[]", '"x"')
    return {
        **{f"hub heads {t[:12]!r}": folder(vit(num_attention_heads=t), weights=fine)
           for t in heads},
        "hub heads of 5,000 digits": folder(vit(num_attention_heads="1" * 5000), weights=fine),
        **{f"hub eps {t!r}": folder(vit(layer_norm_eps=t), weights=fine) for t in epsilons},
        "hub type is a list": folder(vit(model_type="[1]"), weights=fine),
        "hub type of lines": folder(vit(model_type='"a\\nstopmim: error: b"'), weights=fine),
        "hub type of megabytes": folder(vit(model_type=f'"{"a" * 5_000_000}"'), weights=fine),
        "hub act is a dictionary": folder(vit(hidden_act='{"a": 1}'), weights=fine),
        "hub nonsense": folder("{"),
        "hub deep": folder("[" * 100_000),
        "hub deep inside": folder(vit(x="[" * 50_000 + "]" * 50_000)),
        "hub list": folder("[]"),
        "hub swin": folder('{"model_type": "swin", "num_attention_heads": 3}'),
        "hub no weights": folder(vit()),
        "hub code": folder(vit(), bin=pickle.dumps(Code())),
        "hub config is a pipe": folder(os.mkfifo, weights=fine),
        "hub config is endless": folder(link("/dev/zero"), weights=fine),
        "hub config of a terabyte": folder(sparse(2**40), weights=fine),
        "hub weights are a pipe": folder(vit(), weights=os.mkfifo),
        "hub weights are endless": folder(vit(), weights=link("/dev/zero")),
        "hub weights are a folder": folder(vit(), weights=lambda path: path.mkdir()),
        "hub pickle is endless": folder(vit(), bin=link("/dev/zero")),
        "hub many layers": folder(vit(), weights=many_blocks(15_000, "encoder.layer.{}.a.weight")),
        "hub float8": folder(vit(), weights=resaved(
            {k: v.to(torch.float8_e5m2) for k, v in hub_state().items()}
        )),
    }  # fmt: skip


@cache
def hub_state() -> State:
    from stopmim.weights.formats.huggingface import to_huggingface

    return to_huggingface(good())
