"""Features in a file, one row per image, for scikit-learn, pandas or a search index."""

import csv
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stopmim.base.errors import StorageError, UserError
from stopmim.base.files import replaced
from stopmim.data.images import Images
from stopmim.data.skip import without_skipped
from stopmim.data.sources.open import open_images
from stopmim.data.survey import check_like
from stopmim.evals.features import extract, stats_for
from stopmim.gpu.devices import choose_device, choose_precision
from stopmim.method.encoder import Encoder
from stopmim.weights.load import load_encoder


def write_features(
    data: str | Path | Images,
    encoder: str | Path | Encoder,
    out: str | Path,
    *,
    layers: int = 1,
    pool: Literal["auto", "mean", "cls"] = "auto",
    size: int | None = None,
    skip: str | Path | None = None,
    device: str = "auto",
) -> Path:
    """Writes names, features and labels of all images of `data` to `out`, by its suffix.

    An .npz has `names` (n,), `features` (n, layers * D) in float32, and `label_NAME` (n,) for every
    label; a .parquet file has the same as columns `name`, `feature` (a list), `label_NAME`; a .csv
    file has columns `name`, `label_NAME`, and one per number, `feature_0` and so on.

    Args:
        data: a source of images (docs/data.md).
        encoder: an encoder, or anything `load_encoder` reads.
        pool: "auto" is the encoder's own.
        size: edge of the view shown to the encoder, the same as in evaluations; by default its own.
        skip: list of images to leave out, as written by ``stopmim check --fix-list``.
    """
    out = Path(out)
    if out.suffix not in WRITERS:
        raise UserError(f"{out}: --out must end in {', '.join(WRITERS)}")
    if not out.absolute().parent.is_dir():
        raise StorageError(f"{out.parent}: no such folder")
    # An Encoder that also has `side` and `blocks`.
    network: Any = load_encoder(encoder) if isinstance(encoder, str | Path) else encoder
    _check(network, layers, pool, size)
    images, where = without_skipped(open_images(data), skip), choose_device(device)
    check_like(images, stats_for(network))
    network.to(where)
    features = extract(
        network,
        images,
        size=size or network.side * network.patch,
        layers=layers,
        pool=network.pool if pool == "auto" else pool,
        device=where,
        precision=choose_precision("auto", where),
    )
    names = [images.name(i) for i in range(len(images))]
    labels = {f"label_{name}": values for name, values in images.labels.items()}
    with replaced(out) as temporary:
        WRITERS[out.suffix](temporary, names, features.numpy(), labels)
    return out


def _check(encoder: Any, layers: int, pool: str, size: int | None) -> None:
    """Raises UserError for options that do not fit the encoder, before images are read."""
    depth = len(encoder.blocks)
    if not 1 <= layers <= depth:
        raise UserError(f"--layers: {layers}, but the encoder has {depth} blocks")
    if pool == "cls" and encoder.pool != "cls":
        raise UserError("--pool cls: this encoder has no class token; use --pool mean")
    if size is not None and (size < 1 or size % encoder.patch):
        raise UserError(f"--size: {size} does not divide into patches of {encoder.patch}")


Labels = dict[str, Any]  # columns of numbers


def _write_npz(path: Path, names: list[str], features: np.ndarray, labels: Labels) -> None:
    np.savez(path, names=np.array(names), features=features, **labels)


def _write_csv(path: Path, names: list[str], features: np.ndarray, labels: Labels) -> None:
    # File names need not be valid text; their bytes are kept.
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        table = csv.writer(file)
        table.writerow(["name", *labels, *(f"feature_{i}" for i in range(features.shape[1]))])
        for name, *values, feature in zip(names, *labels.values(), features, strict=True):
            # Nine digits are enough to read every float32 back exactly.
            table.writerow([name, *values, *(f"{x:.9g}" for x in feature)])


def _write_parquet(path: Path, names: list[str], features: np.ndarray, labels: Labels) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f'{path}: {error}; pip install "stopmim[shards]"') from None
    values = pyarrow.array(features.reshape(-1))
    vectors = pyarrow.FixedSizeListArray.from_arrays(values, features.shape[1])
    table = pyarrow.table({"name": names, "feature": vectors, **labels})
    pyarrow.parquet.write_table(table, path)


WRITERS = {".npz": _write_npz, ".csv": _write_csv, ".parquet": _write_parquet}  # by suffix
