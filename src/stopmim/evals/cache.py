"""Cache on disk for features, and for the answers of protocols.

Files lie next to the indexes of images, see data/index_cache.py. A file is named by the hash of
everything it depends on, is written to a temporary name and renamed, and contains its own hash:
damaged files are computed again. Any of them may be deleted.
"""

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stopmim.base.console import warn
from stopmim.base.errors import StorageError
from stopmim.base.faults import faultpoint
from stopmim.base.files import open_to_read, replaced
from stopmim.base.sandbox import BYTES
from stopmim.data.images import Images, stamp
from stopmim.data.index_cache import folder
from stopmim.data.workers import cores

# Code under src/stopmim that features and answers depend on. A protocol does not change features.
ENCODERS = ("gpu", "method", "weights", "base/pictures.py")
FEATURES = (
    *(*ENCODERS, "data", "base/random_keys.py"),
    *("evals/features.py", "evals/showing.py", "evals/views.py"),
)
ANSWERS = (
    *(*ENCODERS, "data", "evals", "base/random_keys.py", "base/schedules.py"),
    *("config/architectures.py", "health"),
)
LIBRARIES = ("torch", "numpy", "PIL", "simplejpeg")  # compute, draw and decode
PIECE = 2**19  # bytes that are hashed at once
INSTALLED = {"site-packages", "dist-packages"}  # folders of libraries


def key(*parts: object) -> str:
    """Hash of `parts`; different parts must have different `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def covers(encoder: object) -> TypeGuard[nn.Module]:
    """Whether weights and code determine `encoder`; not if its code is in no file."""
    if not isinstance(encoder, nn.Module) or not getattr(encoder, "cacheable", True):
        return False
    return all(files or _version(name) for name, files in _foreign_code(encoder).items())


def of_encoder(encoder: nn.Module) -> str:
    """Hash of all weights, of all plain attributes of modules, and of foreign code.

    Our own code is hashed by `of_code`.
    """
    digest = hashlib.sha256()
    # The statistics that normalise images are no weights, but change features too.
    digest.update(repr(getattr(getattr(encoder, "transform", None), "stats", None)).encode())
    for package, files in sorted(_foreign_code(encoder).items()):
        digest.update(repr((package, _version(package), len(files))).encode())
        for file in files:
            digest.update(file.read_bytes())
    for name, module in encoder.named_modules():
        values = sorted((key, value) for key, value in vars(module).items() if key != "training")
        plain = {key: v for key, v in values if isinstance(v, int | float | str | tuple)}
        digest.update(repr((name, type(module).__qualname__, plain)).encode())
    _add(digest, encoder.state_dict())
    return digest.hexdigest()


def _foreign_code(encoder: nn.Module) -> dict[str, list[Path]]:
    """Packages, besides ours, that define classes of `encoder`, and the files that may change.

    For a package in development these are all its loaded files. An installed one, such as torch,
    has none: its version is enough.
    """
    classes = {base for module in encoder.modules() for base in type(module).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in classes}
    found: dict[str, list[Path]] = {}
    for package in packages - {"stopmim", *sys.stdlib_module_names}:
        loaded = [m for name, m in sys.modules.items() if name.partition(".")[0] == package]
        files = {Path(file) for m in loaded if (file := getattr(m, "__file__", None))}
        installed = any(INSTALLED & {*file.parts} for file in files)
        found[package] = [] if installed else sorted(file for file in files if file.is_file())
    return found


def _version(package: str) -> str:
    """Version of a library that is loaded, or ""."""
    return str(getattr(sys.modules.get(package), "__version__", ""))


def of_images(images: Images, labels: Sequence[str] = ()) -> str:
    """Hash of the images, which changes if their files are rewritten, and of these labels."""
    about = (images.fingerprint, stamp(images), len(images))
    if not labels:
        return key(about)
    classes = getattr(images, "classes", [])  # they match the labels of train and test
    return key(about, classes, *((name, images.labels[name].tobytes()) for name in labels))


def of_code(*parts: str) -> str:
    """Hash of these files and folders of the package: other code may have other results."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    digest.update(repr([_version(library) for library in LIBRARIES]).encode())
    for part in parts:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def load(kind: str, key: str) -> tuple[dict[str, Tensor], str] | None:
    """Tensors and text stored under `key`; None if there are none or they are damaged."""
    if (path := _path(kind, key)) is None:
        return None
    try:
        open_to_read(path, BYTES).close()  # a pipe would block forever
        with safe_open(path, framework="pt") as file:
            # Not a dictionary: `in file` alone does not work.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except (OSError, SafetensorError, KeyError):
        return None
    text = about.get("text", "")
    return (tensors, text) if about.get("sha256") == _digest(key, tensors, text) else None


def store(kind: str, key: str, tensors: dict[str, Tensor], text: str = "") -> None:
    """Stores tensors and text; a cache that cannot be written is only worth a warning."""
    if (path := _path(kind, key)) is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            save_file(tensors, temporary, {"text": text, "sha256": _digest(key, tensors, text)})
            faultpoint("cache.written")
    except (OSError, StorageError, SafetensorError) as error:
        _complain(path.parents[1], str(error).removeprefix(f"{path}: cannot write: "))


@functools.cache  # a full disk is so for every file
def _complain(place: Path, why: str) -> None:
    warn(f"{place}: cannot write to the cache: {why}")


def _path(kind: str, key: str) -> Path | None:
    where = folder()
    return where and where / kind / f"{key}.safetensors"


def _digest(key: str, tensors: dict[str, Tensor], text: str) -> str:
    """Hash of a file: of its content and its key, since files can be swapped."""
    digest = hashlib.sha256(repr((key, text)).encode())
    _add(digest, tensors)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", tensors: Mapping[str, Tensor]) -> None:
    """Adds names, shapes, types and content of `tensors`, in any order, to `digest`.

    Content is hashed in pieces, on all cores: hashing the features of 50,000 images on one core
    would take longer than a GPU takes to compute them.
    """
    with ThreadPoolExecutor(cores()) as pool:
        for name in sorted(tensors):
            tensor, whole = tensors[name], _bytes(tensors[name])
            digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
            pieces = [whole[i : i + PIECE] for i in range(0, len(whole), PIECE)]
            for found in pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces):
                digest.update(found)


def _bytes(tensor: Tensor) -> memoryview:
    # As bytes, since numpy has no bfloat16.
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
