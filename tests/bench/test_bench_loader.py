"""The benchmark of the loader reports every variant. Speeds depend on the machine: not tested."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stopmim.bench import loader as bench_loader
from stopmim.data.decode import decode


def test_the_photos_are_the_size_of_photographs(tmp_path: Path) -> None:
    files = bench_loader.write_photos(tmp_path / "photos", 6, 4)
    sizes = [path.stat().st_size for path in files]
    assert 90_000 < np.mean(sizes) < 120_000
    assert len({path.read_bytes() for path in files}) == 4
    assert len(set(files)) == 6
    with Image.open(files[0]) as image:
        assert image.size == (500, 375)


def test_every_pipeline_has_a_rate_and_a_ratio_to_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_loader, "FILES", 4)
    monkeypatch.setattr(bench_loader, "BATCH", 2)
    lines = {line["bench"]: line for line in bench_loader.bench_loader(rounds=1)}
    for name in ("pillow / usual", "simplejpeg / usual", "two workers / one"):
        assert lines[name]["speed"] > 0
    assert lines["one thread, usual"]["images_per_s"] > 1
    one = lines["loader, workers 1"]["images_per_s"]
    paper = lines["cores for vit_b16_stop"]
    assert paper["of_gpu"] == pytest.approx(4260, rel=0.02)  # the hours it states, as a rate
    assert paper["workers"] - 1 < paper["of_gpu"] / one <= paper["workers"]


def test_a_gpu_has_a_core_per_worker_and_one_that_trains() -> None:
    line = bench_loader.feeding("a GPU", 1000.0, 400.0)
    assert (line["workers"], line["cores"], line["cores_for_8_gpus"]) == (3, 4, 32)
    exact = bench_loader.feeding("a GPU", 800.0, 400.0)
    assert exact["workers"] == 2


def test_an_index_is_timed_anew_and_kept_and_scenes_are_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("INDEXED", 200), ("RENDERED", 4), ("SETTLED_NS", 0)):
        monkeypatch.setattr(bench_loader, name, value)
    before = dict(os.environ)
    lines = list(bench_loader.bench_index(rounds=1))
    assert [line["bench"] for line in lines[1:3]] == ["200 files, anew", "200 files, kept"]
    assert lines[3]["images_per_s"] > 1
    assert dict(os.environ) == before


def test_without_the_fast_path_pillow_decodes(tmp_path: Path) -> None:
    (file,) = bench_loader.write_photos(tmp_path / "photos", 1, 1)
    pixels = decode(file.read_bytes(), fast=False)
    with Image.open(file) as image:
        np.testing.assert_array_equal(pixels, np.asarray(image))
