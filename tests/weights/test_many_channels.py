"""Encoders of twelve channels: loaded, described and exported with what their numbers mean."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import load_file
from test_export import blocks_of, code_of, run_code
from torch import Tensor

import stopmim
from helpers import seeded
from stopmim.base.errors import CheckpointError, DataError
from stopmim.data.crops import normalise
from stopmim.data.pixels import RGB, PixelStats, from_tag, stats_of
from stopmim.data.sources.arrays import Arrays
from stopmim.data.transform import Transform, seeing
from stopmim.evals.feature_files import write_features
from stopmim.method.encoder import VisionTransformer
from stopmim.method.model import Pixels
from stopmim.runs.run import Run
from stopmim.weights.export import export
from stopmim.weights.filters import fitted
from stopmim.weights.inspect import identify
from stopmim.weights.load import apply_init
from stopmim.weights.vit import PIXELS_TAG, save_tagged, tags, weights_of
from tiny import NoiseImages, tiny, tiny_mae

NAMES = ["B1", "B2", "blue", "green", "red", *(f"B{i}" for i in range(6, 13))]
FILES = {
    "timm": "model.safetensors",
    "hf": ".",
    "ijepa": "model.pth.tar",
    "safetensors": "model.safetensors",
}


def bands(n: int = 40, kind: Any = np.uint16) -> Arrays:
    """Channels of very different means and ranges, so that no two can be taken for each other."""
    rng = np.random.default_rng(3)
    coarse = rng.random((n, 8, 8, 12)).repeat(4, 1).repeat(4, 2)
    pixels = (500.0 + coarse * 2000) * np.arange(1, 13)
    return Arrays(pixels.astype(kind), {}, [], "band", channel_names=NAMES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three updates, so that target and context encoder differ."""
    out = tmp_path_factory.mktemp("run") / "run"
    changes = {"optim.lr": 0.01, "optim.start_lr": 0.01, "optim.ema": [0.5, 0.5]}
    return stopmim.pretrain(bands(), out, tiny(), stop_at=3, **changes)


@pytest.fixture(scope="module")
def exports(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    return {to: export(run.path, to, folder / to) for to in (*FILES, "onnx")}


IMAGE = bands().read(0)[:29]  # not square, so that there is something to cut off


def close(found: Any, want: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.as_tensor(found), want, atol=atol, rtol=0)


# ------------------------------------------------------------------------------ who loads them


@pytest.mark.parametrize("to", FILES)
@torch.no_grad()
def test_statistics_come_with_the_weights(to: str, run: Run, exports: dict[str, Path]) -> None:
    stats = stats_of(run.config)
    assert (stats.channels, stats.kind, stats.names) == (12, "uint16", tuple(NAMES))
    encoder, want = stopmim.load_encoder(exports[to] / FILES[to]), run.encoder()
    assert encoder.transform == want.transform == Transform(24, stats)
    assert torch.equal(encoder.features(IMAGE), want.features(IMAGE))
    # As training sees it, up to the crop: zero mean and unit variance, in every channel.
    seen = torch.stack([want.transform(bands().read(i)) for i in range(40)])
    assert seen.mean((0, 2, 3)).abs().max() < 0.1
    assert (seen.std((0, 2, 3)) - 1).abs().max() < 0.25  # resized, which smooths


def test_models_and_both_branches_take_images(run: Run) -> None:
    for model in (run.model(), stopmim.load_model(run.path), stopmim.load_model(run.checkpoint)):
        for encoder in (model.encoder, model.branch()):
            assert encoder.transform == Transform(24, stats_of(run.config))
    assert run.encoder("context").features(IMAGE).shape == (1, 96)


def test_inspect_says_channels_type_and_statistics(run: Run, exports: dict[str, Path]) -> None:
    stats = stats_of(run.config)
    for path in (run.path, *(exports[to] / FILES[to] for to in FILES)):
        text = str(identify(path))
        assert re.search(r"^channels +12 of uint16$", text, re.M)
        line = next(line for line in text.splitlines() if line.startswith("channel 4 "))
        assert line.split(maxsplit=2)[2] == (
            f"red: {stats.low[4]:g} to {stats.high[4]:g}, "  # type: ignore[index]
            f"mean {stats.mean[4]:g}, deviation {stats.std[4]:g}"
        )


def test_a_wrong_tag_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    encoder, good = run.encoder(), stats_of(run.config).tag()
    wrong = (
        good | {"std": [0.0] * 12},
        good | {"mean": [1.0] * 5},
        {"mean": [1.0] * 3, "std": [1.0] * 3, "channels": 3},
        good | {"kind": "complex64"},
        good | {"mean": [float("nan")] * 12},
        good | {"more": 1},
        {"kind": "uint16", "channels": 12},
        [1, 2],
    )
    assert isinstance(encoder, VisionTransformer)
    for i, tag in enumerate(wrong):
        file = tmp_path / f"{i}.safetensors"
        save_tagged(weights_of(encoder), file, tags(encoder) | {PIXELS_TAG: tag})
        for load in (stopmim.load_encoder, identify):
            with pytest.raises(CheckpointError, match=r"stopmim\.pixels is not ours") as caught:
                load(file)
            assert len(str(caught.value).splitlines()) == 1


def test_statistics_survive_their_tag() -> None:
    for stats in (
        PixelStats((1.0,), (2.0,)),
        PixelStats((1.0, 2.0), (2.0, 3.0), (0.0, -1.0), (9.0, 9.5), "int16", names=("a", "b")),
        PixelStats((1.0,) * 64, (2.0,) * 64, kind="float32", per_image=True),
    ):
        assert from_tag(json.loads(json.dumps(stats.tag()))) == stats


# ------------------------------------------------------------------------------ others' code


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The array that the README makes of IMAGE, without stopmim."""
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    (code,) = [block for block in blocks if "def normalised" in block]
    assert "stopmim" not in code
    np.save(folder / "image.npy", IMAGE)
    return run_code(code, folder, monkeypatch)["images"]


@torch.no_grad()
def test_timm_gives_our_features(
    run: Run, exports: dict[str, Path], timm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, want = exports["timm"], run.encoder().features(IMAGE)
    images = torch.from_numpy(prepared(folder, monkeypatch))
    close(images, run.encoder().transform([IMAGE]))
    close(run_code(code_of(folder), folder, monkeypatch, images=images)["features"], want)
    # As from the hub: timm replaces filters of other channels by random ones if it is let.
    close(timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images), want)
    # Scaled to 0..1 as the README says, then normalised by what config.json says.
    about = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    low, high = np.array(stats_of(run.config).bounds)[:, :, None, None]
    mean, std = np.array([about["mean"], about["std"]])[:, :, None, None]
    scaled = (IMAGE.transpose(2, 0, 1).clip(low, high) - low) / (high - low)
    want = normalise(
        torch.from_numpy(np.float32(IMAGE)).permute(2, 0, 1)[None], stats_of(run.config)
    )[0]
    np.testing.assert_allclose((scaled - mean) / std, want, atol=1e-5)


@torch.no_grad()
def test_onnx_gives_our_features_and_carries_the_statistics(
    run: Run, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exports["onnx"]
    images = prepared(folder, monkeypatch)
    found = run_code(code_of(folder), folder, monkeypatch, images=images)
    close(found["features"], run.encoder().features(IMAGE))
    held = found["session"].get_modelmeta().custom_metadata_map[PIXELS_TAG]
    assert from_tag(json.loads(held)) == stats_of(run.config)
    assert found["session"].get_inputs()[0].shape[1:] == [12, 24, 24]


@torch.no_grad()
def test_hugging_face_gives_our_features_without_a_processor(
    run: Run, exports: dict[str, Path], transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exports["hf"]
    images = torch.from_numpy(prepared(folder, monkeypatch))
    found = run_code(code_of(folder), folder, monkeypatch, images=images)["features"]
    close(found, run.encoder().features(IMAGE))
    assert json.loads((folder / "config.json").read_text())["num_channels"] == 12
    assert not (folder / "preprocessor_config.json").exists()
    assert "no image processor" in (folder / "README.md").read_text()


def test_two_lines_of_every_card_use_it(
    run: Run, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for to in (*FILES, "onnx"):
        np.save(exports[to] / "image.npy", IMAGE)
        blocks = blocks_of(exports[to])
        if to != "onnx":
            code = blocks.pop(0)
            found = run_code(code, exports[to], monkeypatch)["features"]
            assert torch.equal(found, run.encoder().features(IMAGE))
        if to not in ("timm", "hf"):  # see above
            run_code("".join(blocks), exports[to], monkeypatch)


@pytest.mark.parametrize("kind", [np.float32, np.int16])
def test_mae_of_many_channels_goes_there_and_back(kind: Any, tmp_path: Path) -> None:
    config = tiny_mae(**{"data.normalise": "per-image"})
    run = stopmim.pretrain(bands(kind=kind), tmp_path / "run", config, stop_at=1)
    back = stopmim.load_model(export(run.path, "mae", tmp_path / "mae") / "model.safetensors")
    assert isinstance(back.target, Pixels)
    assert back.predictor.predictor_proj.out_features == 12 * 4 * 4
    assert back.encoder.transform == Transform(24, stats_of(run.config))
    image = bands(kind=kind).read(1)
    seen = back.encoder.transform(image)
    close(seen.mean((1, 2)), torch.zeros(12))
    assert torch.equal(back.encoder.features(image), run.encoder().features(image))


def test_pictures_with_statistics_of_their_own_are_still_pictures(tmp_path: Path) -> None:
    config = tiny(**{"data.normalise": "measured"})
    run = stopmim.pretrain(NoiseImages(), tmp_path / "run", config, stop_at=1)
    encoder = stopmim.load_encoder(export(run.path, "hf", tmp_path / "hf"))
    assert encoder.transform == run.encoder().transform != Transform(24)
    pixels = NoiseImages().read(0)
    assert torch.equal(encoder.features(Image.fromarray(pixels)), run.encoder().features(pixels))


def test_features_of_many_channels_are_written(run: Run, tmp_path: Path) -> None:
    table = np.load(write_features(bands(), run.path, tmp_path / "features.npz"))
    want = run.encoder().features(bands().read(3))
    close(table["features"][3], want[0])


def test_files_are_the_same_as_arrays(run: Run, tmp_path: Path) -> None:
    encoder = run.encoder()
    np.save(tmp_path / "a.npy", IMAGE)
    tifffile.imwrite(tmp_path / "a.tif", IMAGE.transpose(2, 0, 1), photometric="minisblack")
    for path in (tmp_path / "a.npy", str(tmp_path / "a.tif")):
        assert torch.equal(encoder.transform(path), encoder.transform(IMAGE))
    np.save(tmp_path / "b.npy", IMAGE[..., :5])
    (tmp_path / "c.npy").write_bytes(b"junk")
    for name, line in {
        "b.npy": "5 channels of uint16; this encoder takes 12 channels of uint16",
        "c.npy": "",
        "absent.npy": "No such file",
    }.items():
        with pytest.raises(DataError, match=f"{name}: {line}"):
            encoder.features(tmp_path / name)


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (IMAGE[..., :3], r"uint16 pixels: a tensor \(12, H, W\) or an array \(H, W, 12\); got"),
        (IMAGE.astype(np.float32), r"got \(29, 32, 12\) of float32"),
        (torch.zeros(29, 32, 12, dtype=torch.int16), r"got \(29, 32, 12\) of int16"),
        (Image.new("RGB", (9, 9)), r"a PIL image is 8-bit RGB; this encoder takes 12 channels of"),
    ],
)
def test_images_of_another_kind_are_refused_in_one_line(wrong: Any, line: str, run: Run) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        run.encoder().features(wrong)
    assert len(str(caught.value).splitlines()) == 1


def test_tensors_of_the_right_type_are_images_and_floats_are_normalised(run: Run) -> None:
    encoder = run.encoder()
    tensor = torch.from_numpy(IMAGE.transpose(2, 0, 1).copy())
    assert torch.equal(encoder.transform(tensor), encoder.transform(IMAGE))
    with pytest.raises(ValueError, match=r"floats up to \d+; expected pixels in their stored type"):
        encoder.features(torch.full((1, 12, 24, 24), 3e4))
    with pytest.raises(ValueError, match="images have 3 channels; expected 12"):
        encoder.features(torch.randn(1, 3, 24, 24))


def test_one_channel_may_be_a_plane() -> None:
    encoder = seeing(
        VisionTransformer(24, 6, 48, 1, 4, channels=1),
        PixelStats((100.0,), (10.0,), kind="int16"),
    )
    plane = np.arange(900, dtype=np.int16).reshape(30, 30)
    assert torch.equal(encoder.transform(plane), encoder.transform(plane[..., None]))


def test_a_file_that_does_not_say_its_statistics_takes_normalised_floats(
    timm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = VisionTransformer(24, 6, 192, 1, 3, channels=5)
    torch.save({"model": encoder.state_dict()}, tmp_path / "timm.pth")
    loaded = stopmim.load_encoder(tmp_path / "timm.pth")
    assert loaded.features(torch.randn(2, 5, 24, 24)).shape == (2, 192)
    with pytest.raises(ValueError, match="does not say how its 5 channels are normalised"):
        loaded.features(np.zeros((30, 30, 5), np.uint8))
    with pytest.raises(DataError, match="does not say how its 5 channels are normalised"):
        write_features(bands(), loaded, tmp_path / "features.npz")
    assert "channels      5; it is unknown" in str(identify(tmp_path / "timm.pth"))
    folder = export(tmp_path / "timm.pth", "timm", tmp_path / "timm")
    assert stopmim.load_encoder(folder).features(torch.randn(1, 5, 24, 24)).shape == (1, 192)
    assert "does not say how they were" in (folder / "README.md").read_text()
    for out in (folder, export(tmp_path / "timm.pth", "safetensors", tmp_path / "plain")):
        assert run_code("".join(blocks_of(out)), out, monkeypatch)["features"].shape == (1, 192)


def test_timm_models_of_other_channels_are_read(timm: Any) -> None:
    from stopmim.weights.formats.timm import from_timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, in_chans=7, depth=2)
    images = torch.randn(2, 7, 32, 32, generator=seeded())
    with torch.no_grad():
        close(from_timm(model)(images), model.eval().forward_features(images)[:, 1:])


# ------------------------------------------------------------------------------ --init


def filters(channels: int) -> Tensor:
    return torch.randn(8, channels, 4, 4, generator=seeded())


def stats(*names: str, kind: Any = "uint16") -> PixelStats:
    ones = (1.0,) * len(names)
    return PixelStats(ones, ones, kind=kind, names=names if names[0] else None)


@pytest.mark.parametrize(
    "own", [stats(*[""] * 12), stats(*NAMES), stats("nir", "red"), stats("R", "g", "x", "B"),
            stats("green")],
)  # fmt: skip
def test_equal_channels_keep_their_response(own: PixelStats) -> None:
    """A grey image: all channels the same, so only the sum over channels counts."""
    given = filters(3)
    found, said = fitted(given, RGB, own)
    assert found.shape == (8, own.channels, 4, 4)
    close(found.sum(1), given.sum(1), 1e-5)
    assert said.startswith(f"filters of 3 channels for {own.channels}: ")


def test_colours_go_by_name_and_others_take_the_mean() -> None:
    given = filters(3)
    found, said = fitted(given, RGB, stats(*NAMES))
    for name, theirs in {"red": given[:, 0], "green": given[:, 1], "B7": given.mean(1)}.items():
        close(found[:, NAMES.index(name)], theirs * 3 / 12, 1e-6)
    assert said.endswith("blue, green, red by name, the mean filter for the others, times 3/12")
    found, said = fitted(given, RGB, stats(*[""] * 6))
    close(found, given.mean(1, keepdim=True).expand(-1, 6, -1, -1) / 2, 1e-6)
    assert said.endswith("the mean filter for each, times 3/6")


def test_as_many_channels_are_taken_by_name_or_in_their_order() -> None:
    given = filters(4)
    found, said = fitted(given, stats("a", "b", "c", "d"), stats("D", "a", "b", "c"))
    assert torch.equal(found, given[:, [3, 0, 1, 2]])
    assert "by name" in said
    for theirs, own in (
        (stats(*[""] * 4), stats("a", "b", "c", "d")),
        (None, stats(*[""] * 4)),
        (stats("a", "b", "c", "d"), stats("a", "b", "c", "d")),
    ):
        assert fitted(given, theirs, own) == (given, "")
    assert "none has a name in common" in fitted(given, stats(*"abcd"), stats(*"wxyz"))[1]
    found, _ = fitted(given, stats(*"abcd"), stats(*"abcx"))
    close(found.sum(1), given.sum(1), 1e-5)


@pytest.mark.parametrize("own", [RGB, stats(*"abc"), stats(*"abcde")])
def test_other_channels_are_refused(own: PixelStats) -> None:
    with pytest.raises(ValueError, match=r"filters of 12 channels do not fit images of \d"):
        fitted(filters(12), stats(*NAMES), own)


def test_a_run_starts_from_an_rgb_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    rgb = VisionTransformer.from_arch("vit_micro4", 24)
    torch.save(rgb.state_dict(), tmp_path / "rgb.pth")
    config = tiny(init=str(tmp_path / "rgb.pth"))
    began = stopmim.pretrain(bands(), tmp_path / "run", config, stop_at=1)
    said = capsys.readouterr().err
    assert "filters of 3 channels for 12: blue, green, red by name" in said
    grey = torch.randn(2, 1, 24, 24, generator=seeded())
    model = apply_init(began.model(), began.config, tmp_path / "none")
    with torch.no_grad():
        close(model.encoder(grey.expand(-1, 12, -1, -1)), rgb(grey.expand(-1, 3, -1, -1)), 1e-5)
    weights = load_file(began.checkpoint / "model.safetensors")
    assert weights["encoder.patch_embed.proj.weight"].shape == (96, 12, 4, 4)
    with pytest.raises(CheckpointError, match=r"init: .*run: filters of 12 channels do not fit"):
        stopmim.pretrain(NoiseImages(), tmp_path / "back", tiny(init=str(run.path)), stop_at=1)
    same = stopmim.pretrain(bands(), tmp_path / "same", tiny(init=str(run.path)), stop_at=1)
    assert same.about["config"]["init"] == str(run.path)
