"""A run over thousands of damaged files finishes, names each once, and resumes exactly."""

import json
import random
from pathlib import Path

import pytest
from test_decode import damaged, encoded, oriented, picture

from stopmim import pretrain
from stopmim.data.decode import BadImageError, decode
from stopmim.data.sources.folder import Folder
from tiny import assert_same_run, tiny

FORMATS: dict[str, tuple[str, dict[str, object]]] = {
    "jpg": ("JPEG", {}),
    "jpeg": ("JPEG", {"progressive": True, "exif": oriented(6)}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {}),
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tif": ("TIFF", {}),
    "tiff": ("TIFF", {"compression": "tiff_deflate"}),
    "ppm": ("PPM", {}),
}


def write_damaged(root: Path, count: int) -> set[str]:
    """`count` files, every one mutated; returns the names of those that cannot be decoded."""
    rng = random.Random(count)
    root.mkdir()
    sources = {
        suffix: encoded(picture(), kind, **options) for suffix, (kind, options) in FORMATS.items()
    }
    refused = set()
    for i in range(count):
        suffix = [*FORMATS][i % len(FORMATS)]
        data = damaged(sources[suffix], rng)
        wrong = rng.random() < 0.05
        name = f"{i:05}.{rng.choice([*FORMATS]) if wrong else suffix}"
        (root / name).write_bytes(data)
        try:
            decode(data)
        except BadImageError:
            refused.add(name)
    return refused


def run_over_damaged_files(tmp_path: Path, count: int, batch: int) -> None:
    refused = write_damaged(tmp_path / "images", count)
    assert 0.2 * count < len(refused) < 0.9 * count
    assert len(Folder(tmp_path / "images")) == count == count // batch * batch
    config = tiny(
        optim={"epochs": 1, "batch_size": batch},
        data={"max_bad": 0.95},
        runtime={"workers": 2, "save_every": 1000},
    )
    whole = pretrain(tmp_path / "images", tmp_path / "whole", config)
    lines = (whole.path / "bad_files.jsonl").read_text().splitlines()
    names = [json.loads(line)["name"] for line in lines]
    assert len(names) == len(set(names))  # each once
    assert set(names) == refused  # and all, since an epoch reads every file
    pretrain(tmp_path / "images", tmp_path / "cut", config, stop_at=count // batch // 2)
    alone = tiny(**{**config.model_dump(mode="json"), "runtime.workers": 0})
    assert_same_run(pretrain(tmp_path / "images", tmp_path / "cut", alone), whole)
    again = (tmp_path / "cut" / "bad_files.jsonl").read_text().splitlines()
    assert sorted(again) == sorted(lines)


def test_a_run_over_damaged_files_finishes_and_names_each_once(tmp_path: Path) -> None:
    run_over_damaged_files(tmp_path, 180, 20)


@pytest.mark.slow
def test_a_run_over_2000_damaged_files_finishes_and_names_each_once(tmp_path: Path) -> None:
    run_over_damaged_files(tmp_path, 2000, 50)


def test_workers_keep_the_complaints_of_image_libraries_to_themselves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    rng = random.Random(0)
    good = encoded(picture(), "TIFF", compression="tiff_deflate")
    for i in range(40):
        data = damaged(good, rng) if i % 2 else good
        (tmp_path / "images" / f"{i}.tif").write_bytes(data)
    config = tiny(data={"max_bad": 0.9}, runtime={"workers": 1, "log_every": 100})
    pretrain(tmp_path / "images", tmp_path / "run", config)
    said = capfd.readouterr()
    assert "ZIPDecode" not in said.err + said.out
    assert (tmp_path / "run" / "bad_files.jsonl").exists()
