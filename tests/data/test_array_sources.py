"""Sources of arrays: found by looking, grouped by a pattern, cropped without reading them whole."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from PIL import Image

from stopmim.base.errors import DataError, UserError
from stopmim.config.schema import Config
from stopmim.data.crops import Box
from stopmim.data.decode import BadImageError
from stopmim.data.images import Images, open_image
from stopmim.data.loading import Crops, loader, steps_per_epoch
from stopmim.data.rasters import windows
from stopmim.data.sources.folder import Folder
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.subset import Subset

SHAPE = (40, 50, 12)


def image(i: int, kind: str = "uint16", shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 250, shape).astype(kind)


def write_bands(root: Path, names: list[str], **options: Any) -> None:
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, image(i, **options), photometric="minisblack", planarconfig="contig")


def write_picture(path: Path, kind: str = "uint8", channels: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = image(7, kind, (*SHAPE[:2], channels))
    Image.fromarray(pixels if channels > 1 else pixels[:, :, 0]).save(path)


def form(images: Images) -> tuple[int, str]:
    return getattr(images, "channels", 3), getattr(images, "kind", "uint8")


# ------------------------------------------------------------------------------ found by looking


def test_a_folder_of_bands_is_found_by_looking(tmp_path: Path) -> None:
    write_bands(tmp_path, ["a/1.tif", "a/2.tif", "b/3.tif"])
    images = open_images(tmp_path)
    assert form(images) == (12, "uint16")
    assert images.labels["class"].tolist() == [0, 0, 1]
    for i in range(3):
        np.testing.assert_array_equal(images.read(i), image(i))
    pictures = open_images(f"pictures:{tmp_path}")
    assert form(pictures) == (3, "uint8")
    assert pictures.fingerprint != images.fingerprint
    with pytest.raises(BadImageError):
        pictures.read(0)


@pytest.mark.parametrize("ending", ["npy", "npz", "zarr"])
def test_a_folder_of_arrays_alone(ending: str, tmp_path: Path) -> None:
    for i, name in enumerate(["cat/x", "cat/y", "dog/z"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path = tmp_path / f"{name}.{ending}"
        if ending == "npy":
            np.save(path, image(i))
        elif ending == "npz":
            np.savez(path, image(i))
        else:
            zarr.create_array(str(path), data=image(i), chunks=(16, 16, 12))
    images = open_images(tmp_path)
    assert form(images) == (12, "uint16")
    assert [images.name(i) for i in range(3)] == [
        f"{n}.{ending}" for n in ("cat/x", "cat/y", "dog/z")
    ]
    assert images.classes == ["cat", "dog"]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(images.read(2), image(2))


@pytest.mark.parametrize("name", ["x.zarr", "x.npy"])
def test_a_stack_of_images_is_told_from_an_image(name: str, tmp_path: Path) -> None:
    stack = np.zeros((5, 4, 32, 32), np.uint16)
    if name == "x.npy":
        np.save(tmp_path / name, stack)
    else:
        made = zarr.create_array(str(tmp_path / name), shape=stack.shape, dtype=stack.dtype)
        made[:] = stack
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(BadImageError, match=r"\(5, 4, 32, 32\) is not an image .* per image"):
            open_images(source).read(0)


def test_arrays_beside_pictures_are_not_images(tmp_path: Path) -> None:
    write_picture(tmp_path / "x.png")
    np.save(tmp_path / "depth.npy", image(0))
    zarr.create_array(str(tmp_path / "y.zarr"), data=image(0))
    images = Folder(tmp_path)
    assert len(images) == 1
    assert images.others == {"npy": 1, "zarr": 1}
    assert form(images) == (3, "uint8")


def test_a_few_unusual_pictures_do_not_change_the_others(tmp_path: Path) -> None:
    for i in range(3):
        write_picture(tmp_path / f"{i}.png")
    before = Folder(tmp_path)
    write_picture(tmp_path / "deep.png", "uint16", 1)
    write_bands(tmp_path, ["bands.tif"])
    images = Folder(tmp_path)
    assert form(images) == (3, "uint8")
    np.testing.assert_array_equal(images.read(0), before.read(0))
    assert images.name(4) == "deep.png"
    assert images.read(4).shape == (*SHAPE[:2], 3)  # scaled to 8 bits, as ever


def test_eight_bit_pictures_stay_rgb_whatever_their_mode(tmp_path: Path) -> None:
    write_picture(tmp_path / "grey.png", channels=1)
    write_picture(tmp_path / "alpha.png", channels=4)
    write_picture(tmp_path / "colour.tif")
    tifffile.imwrite(tmp_path / "pages.tif", image(0, "uint8")[..., :3], metadata=None)
    assert form(open_images(tmp_path)) == (3, "uint8")
    (tmp_path / "grey").mkdir()
    for i in range(3):
        write_picture(tmp_path / "grey" / f"{i}.png", channels=1)
    assert form(open_images(tmp_path / "grey")) == (3, "uint8")
    assert form(open_images(f"arrays:{tmp_path / 'grey'}")) == (1, "uint8")


def test_images_of_two_forms_are_named(tmp_path: Path) -> None:
    write_bands(tmp_path, ["a.tif", "b.tif"])
    write_bands(tmp_path, ["c.tif"], kind="float32")
    with pytest.raises(
        DataError, match=r"a\.tif has 12 channels, 16 bit, but c\.tif has 12 channels, float"
    ):
        open_images(tmp_path)
    (tmp_path / "c.tif").unlink()
    write_picture(tmp_path / "d.png")
    with pytest.raises(DataError, match=r"a\.tif has .*, but d\.png is an ordinary picture"):
        open_images(tmp_path)


def test_an_image_unlike_the_others_is_broken(tmp_path: Path) -> None:
    write_bands(tmp_path, [f"{i:02}.tif" for i in range(80)])
    images = open_images(tmp_path)
    write_bands(tmp_path, ["01.tif"], shape=(40, 50, 5))
    with pytest.raises(BadImageError, match="5 channels, 16 bit, where the others have 12"):
        images.read(1)


def test_lists_and_splits_of_arrays(tmp_path: Path) -> None:
    write_bands(tmp_path, ["train/a/1.tif", "train/b/2.tif", "val/b/3.tif"])
    test = open_test(str(tmp_path))
    assert test is not None
    assert test.labels["class"].tolist() == [1]
    assert form(test) == (12, "uint16")
    listed = tmp_path / "list.csv"
    listed.write_text("file,water\ntrain/b/2.tif,1\nval/b/3.tif,0\n")
    images = open_images(listed)
    assert images.labels["class"].tolist() == [1, 0]
    np.testing.assert_array_equal(images.read(0), image(1))


def test_arrays_in_tar_shards(tmp_path: Path) -> None:
    def shard(name: str, members: dict[str, bytes]) -> Images:
        with tarfile.open(tmp_path / name, "w") as tar:
            for member, data in members.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return open_images(tmp_path / name)

    def saved(i: int) -> bytes:
        file = io.BytesIO()
        np.save(file, image(i))
        return file.getvalue()

    arrays = shard("a.tar", {"0.npy": saved(0), "0.cls": b"4", "1.npy": saved(1), "1.cls": b"2"})
    assert form(arrays) == (12, "uint16")
    assert arrays.labels["class"].tolist() == [4, 2]
    np.testing.assert_array_equal(arrays.read(1), image(1))
    picture = io.BytesIO()
    Image.fromarray(image(0, "uint8", (8, 8, 3))).save(picture, "PNG")
    mixed = shard("b.tar", {"0.npy": saved(0), "0.png": picture.getvalue(), "1.npy": saved(1)})
    assert form(mixed) == (3, "uint8")
    assert [mixed.name(i) for i in range(len(mixed))] == ["b.tar/0.png"]


def test_arrays_in_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = []
    for i in range(3):
        file = io.BytesIO()
        tifffile.imwrite(file, image(i), photometric="minisblack", planarconfig="contig")
        rows.append({"bytes": file.getvalue(), "path": f"{i}.tif"})
    pyarrow.parquet.write_table(pyarrow.table({"image": rows}), tmp_path / "x.parquet")
    images = open_images(tmp_path / "x.parquet")
    assert form(images) == (12, "uint16")
    np.testing.assert_array_equal(images.read(2), image(2))


def test_a_missing_extra_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile.imwrite(tmp_path / "x.tif", image(0), compression="zstd", photometric="minisblack")
    monkeypatch.setitem(__import__("sys").modules, "imagecodecs", None)
    with pytest.raises(UserError, match=r'pip install "stopmim\[science\]"'):
        open_images(tmp_path)


# ------------------------------------------------------------------------------ groups


def write_groups(root: Path, names: list[str]) -> None:
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, image(i)[:, :, 0])


def test_files_of_one_channel_are_grouped(tmp_path: Path) -> None:
    names = ["a/p_1_DAPI.tif", "a/p_1_GFP.tif", "b/p_1_DAPI.tif", "b/p_1_GFP.tif"]
    write_groups(tmp_path, [*names, "b/p_2_GFP.tif", "b/notes.tif"])
    images = open_images(f"{tmp_path}@{{name}}_{{channel}}.tif")
    assert [images.name(i) for i in range(len(images))] == ["a/p_1", "b/p_1"]
    assert images.channel_names == ["DAPI", "GFP"]  # type: ignore[attr-defined]
    assert images.unreadable == ["b/p_2: no file of DAPI"]  # type: ignore[attr-defined]
    assert images.labels["class"].tolist() == [0, 1]
    planes = [image(2)[:, :, 0], image(3)[:, :, 0]]
    np.testing.assert_array_equal(images.read(1), np.stack(planes, axis=2))
    turned = open_images(f"{tmp_path}@{{name}}_{{channel:GFP,DAPI}}.tif")
    np.testing.assert_array_equal(turned.read(1), images.read(1)[:, :, ::-1])
    assert turned.fingerprint != images.fingerprint


def test_a_folder_for_each_image(tmp_path: Path) -> None:
    write_groups(tmp_path, ["wet/T1/B2.tif", "wet/T1/B3.tif", "dry/T2/B2.tif", "dry/T2/B3.tif"])
    images = open_images(f"{tmp_path}@{{name}}/{{channel}}.tif")
    assert [images.name(i) for i in range(2)] == ["dry/T2", "wet/T1"]
    assert images.classes == ["dry", "wet"]  # type: ignore[attr-defined]


def test_groups_that_do_not_fit(tmp_path: Path) -> None:
    write_groups(tmp_path, ["x_1.tif", "y_2.tif"])
    with pytest.raises(DataError, match="no image has all of the channels 1, 2; x: no file of 2"):
        open_images(f"{tmp_path}@{{name}}_{{channel}}.tif")
    with pytest.raises(DataError, match="does the pattern fit"):
        open_images(f"{tmp_path}@{{name}}-{{channel}}.tif")
    with pytest.raises(DataError, match="once each"):
        open_images(f"{tmp_path}@{{channel}}.tif")
    tifffile.imwrite(tmp_path / "x_2.tif", image(0, shape=(9, 9, 1))[:, :, 0])
    with pytest.raises(DataError, match="x: 2 has 9x9 pixels and 1 channels; expected 50x40"):
        open_images(f"{tmp_path}@{{name}}_{{channel}}.tif")


# ------------------------------------------------------------------------------ crops


def config(**data: Any) -> Config:
    stats = {"mean": (100.0,) * 12, "std": (50.0,) * 12}
    changes: dict[str, Any] = {
        "optim": {"epochs": 3, "batch_size": 4, "warmup_epochs": 0},
        "data": {"channels": 12, "kind": "uint16", **stats, **data},
        "runtime": {"workers": 0},
        "seed": 3,
    }
    return Config.model_validate(changes)


def loaded(images: Images, settings: Config, start: int = 0, workers: int = 0) -> torch.Tensor:
    runtime = settings.runtime.model_copy(update={"workers": workers})
    settings = settings.model_copy(update={"runtime": runtime})
    batches = loader(images, settings, start, device=torch.device("cpu"))
    return torch.stack([batch.images for batch in batches])


@pytest.fixture
def bands(tmp_path: Path) -> Images:
    write_bands(tmp_path, [f"{i}.tif" for i in range(8)])
    return open_images(tmp_path)


def test_several_crops_of_an_opening_are_those_of_several_epochs(bands: Images) -> None:
    once, often = config(), config(crops_per_image=3)
    assert (steps_per_epoch(bands, once), steps_per_epoch(bands, often)) == (2, 6)
    opened = list[int]()

    class Counted(Subset):
        def open(self, i: int) -> Any:
            opened.append(i)
            return super().open(i)

    counted = Counted(bands, range(8))
    crops = loaded(counted, often)
    assert crops.shape[:2] == (18, 4)
    # The boundary of a batch falls into the crops of at most one image.
    assert len(opened) <= 3 * (8 + 6)
    first = crops[:6].flatten(0, 1)
    assert not any(torch.equal(first[0], other) for other in first[1:])
    single = Crops(bands, once)
    number = opened[1]  # the very first opening only looks at the size
    for j in range(3):
        wanted = single[j, number].image
        assert wanted is not None
        assert torch.equal(first[j], wanted)


def test_crops_do_not_depend_on_workers_or_where_a_run_resumes(bands: Images) -> None:
    settings = config(crops_per_image=3, crop_pixels=(10, 20))
    whole = loaded(bands, settings)
    assert torch.equal(loaded(bands, settings, workers=2), whole)
    assert torch.equal(loaded(bands, settings, start=7), whole[7:])


def test_a_box_in_pixels() -> None:
    from stopmim.data.crops import crop_box, crop_scale

    data = config(crop_pixels=(100, 200)).data
    rng = np.random.default_rng(0)
    boxes = [crop_box(rng, 5000, 20_000, crop_scale(data, 5000, 20_000)) for _ in range(300)]
    sides = [(box.height * box.width) ** 0.5 for box in boxes]
    assert 99 < min(sides) < 110
    assert 190 < max(sides) < 201
    assert crop_scale(data, 50, 50) == (1.0, 1.0)
    with pytest.raises(ValueError, match="smallest comes first"):
        config(crop_pixels=(5, 4))


@pytest.mark.parametrize("codec", [None, "zlib"])
def test_a_crop_of_a_large_image_is_the_same_but_reads_little(
    codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = image(0, shape=(900, 1000, 12))
    for i in range(4):
        tifffile.imwrite(
            tmp_path / f"{i}.tif", pixels, tile=(64, 64), compression=codec,
            photometric="minisblack", planarconfig="contig",
        )  # fmt: skip
    images, settings = open_images(tmp_path), config(crop_pixels=(40, 80))
    read_whole = loaded(images, settings)
    monkeypatch.setattr("stopmim.data.loading.LARGE", 0)
    sizes = list[int]()
    read_view = windows.read_view

    def counted(raster: Any, box: Box, size: int) -> np.ndarray:
        sizes.append(box.height * box.width)
        return read_view(raster, box, size)

    monkeypatch.setattr("stopmim.data.loading.read_view", counted)
    assert torch.equal(loaded(images, settings), read_whole)
    assert len(sizes) == 12
    assert max(sizes) <= 80 * 80


def test_one_large_file_is_a_source(tmp_path: Path) -> None:
    write_bands(tmp_path, ["mosaic.tif"])
    images = open_images(tmp_path / "mosaic.tif")
    assert len(images) == 1
    assert steps_per_epoch(images, config(crops_per_image=40)) == 10
    zarr.create_array(str(tmp_path / "cube.zarr"), data=image(0))
    cube = open_images(tmp_path / "cube.zarr")
    np.testing.assert_array_equal(cube.read(0), images.read(0))
    opened = open_image(Subset(cube, [0]), 0)
    assert opened is not None
    np.testing.assert_array_equal(opened.read(Box(3, 4, 5, 6)), image(0)[3:8, 4:10])


def test_an_archive_whose_numbers_grow_when_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stopmim.data.sources.arrays.MAX_EXPANDED", 200_000)
    for kind, is_read in (("bool", True), ("uint8", True), ("int8", False), ("float16", False)):
        pixels = np.zeros((50, 32, 32, 3), kind)[: 25 if kind == "float16" else 50]
        np.savez_compressed(tmp_path / "a.npz", images=pixels)
        if is_read:
            assert open_images(tmp_path / "a.npz").read(0).shape == (32, 32, 3)
            continue
        with pytest.raises(DataError, match="expands to 307200 bytes; STOPMIM_MAX_BYTES=307200"):
            open_images(tmp_path / "a.npz")
