"""What was computed before: features, and answers made of them.

Files lie where indexes of images do, see data/cache.py. A name is the hash of all that went in. A
file is written aside and renamed, and has its own hash in it: a damaged one is computed again. Any
of them may be deleted.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stopmim.base.console import warn
from stopmim.data.images import Images
from stopmim.data.index_cache import folder
from stopmim.data.stamps import stamp


def key(*parts: object) -> str:
    """A name for what depends on `parts`, which must have a `repr` that tells them apart."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def of_encoder(encoder: nn.Module) -> str:
    """Changes with any weight, and with any plain value that a module is built from."""
    digest = hashlib.sha256()
    for name, module in encoder.named_modules():
        plain = {
            key: value
            for key, value in sorted(vars(module).items())
            if isinstance(value, int | float | str | tuple) and key != "training"
        }
        digest.update(repr((name, type(module).__qualname__, plain)).encode())
    for name, tensor in encoder.state_dict().items():
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def of_images(images: Images, labels: Sequence[str] = ()) -> str:
    """Changes with the images, if only their files were written anew, and with these labels."""
    about = (images.fingerprint, stamp(images), len(images))
    if not labels:
        return key(about)
    classes = getattr(images, "classes", [])  # by which numbers of two parts are paired
    return key(about, classes, *((name, images.labels[name].tobytes()) for name in labels))


def of_code(*packages: str) -> str:
    """Changes with these of our packages: what an older version found is not taken for ours.

    Answers depend on "evals" and "data": protocols, and what is read, drawn and cropped for them.
    """
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def load(kind: str, key: str) -> tuple[dict[str, Tensor], str] | None:
    """The tensors and the text stored under `key`; None if there are none, or damaged ones."""
    if (path := _path(kind, key)) is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            # keys() is no dictionary's: a plain `in file` would not do
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except (OSError, SafetensorError, KeyError):
        return None
    text = about.get("text", "")
    return (tensors, text) if about.get("sha256") == _digest(tensors, text) else None


def store(kind: str, key: str, tensors: dict[str, Tensor], text: str = "") -> None:
    if (path := _path(kind, key)) is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {"text": text, "sha256": _digest(tensors, text)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # a cache may fail; an evaluation need not
        with contextlib.suppress(OSError):
            temporary.unlink()
        warn(f"{path.parent}: nothing is kept there for the next time: {error}")


def _path(kind: str, key: str) -> Path | None:
    where = folder()
    return where and where / kind / f"{key}.safetensors"


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    # As bytes: numpy has no bfloat16.
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
