"""The benchmark of arrays reports every variant. Speeds depend on the machine: not tested."""

import io

import numpy as np
import pytest
import tifffile

from stopmim.bench import rasters
from stopmim.data.rasters.open import open_bytes


def test_its_files_are_those_that_others_read() -> None:
    image = np.random.default_rng(0).integers(0, 9999, (20, 30, 5), np.uint16)
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    ways = {
        "pixels": rasters.write_tiff([image]),
        "bands": rasters.write_tiff([planes], separate=True),
        "pages": rasters.write_tiff([plane[:, :, None] for plane in planes]),
    }
    for name, data in ways.items():
        theirs = np.squeeze(tifffile.imread(io.BytesIO(data), key=None))
        np.testing.assert_array_equal(theirs, image if name == "pixels" else planes)
        np.testing.assert_array_equal(open_bytes(data).read(), image)


def test_every_variant_has_a_rate_and_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FILES", 2), ("LARGE", 1500), ("CROPS", 2)):
        monkeypatch.setattr(rasters, name, value)
    lines = {line["bench"]: line for line in rasters.bench_rasters(rounds=1)}
    for name in ("pixels / numpy", "bands / numpy", "pages / numpy", "npy / numpy"):
        assert lines[name]["speed"] > 0
    assert lines["crop / whole"]["speed"] > 0
    assert lines["memory of crops"]["mebibytes"] >= 0
