"""Runs on images that are not 8-bit RGB: what is settled when they start, and kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stopmim import Run, pretrain
from stopmim.base.errors import DataError, UserError
from stopmim.base.files import read_jsonl
from stopmim.cli import main
from stopmim.data.crops import normalise
from stopmim.data.loading import Crops
from stopmim.data.pixels import RGB, stats_of
from stopmim.data.sources.arrays import Arrays
from stopmim.runs.identity import sealed
from tiny import NoiseImages, assert_same_run, tiny, tiny_mae

NULLS = ("channels", "kind", "channel_names", "normalise", "low", "high", "mean", "std")


def many(n: int = 40, channels: int = 12, kind: Any = np.uint16) -> Arrays:
    rng = np.random.default_rng(3)
    coarse = rng.integers(0, 60_000, (n, 4, 4, channels)).repeat(8, 1).repeat(8, 2)
    return Arrays(coarse.astype(kind), {"class": rng.integers(0, 2, n)}, [], "many")


def data_of(run: Run) -> dict[str, Any]:
    return run.about["config"]["data"]


def test_pictures_settle_nothing(tmp_path: Path) -> None:
    run = pretrain(NoiseImages(), tmp_path / "run", tiny(), stop_at=1)
    assert [data_of(run)[key] for key in NULLS] == [None] * len(NULLS)
    assert stats_of(run.config) == RGB


@pytest.mark.parametrize("config", [tiny, tiny_mae])
@pytest.mark.parametrize("kind", [np.uint16, np.int16, np.float32])
def test_channels_and_statistics_are_found_and_kept(
    tmp_path: Path, config: Any, kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    images = many(kind=kind)
    run = pretrain(images, tmp_path / "run", config(), stop_at=2)
    word = {"uint16": "16 bit", "int16": "16 bit signed", "float32": "float"}[kind.__name__]
    said = f"12 channels, {word}; normalised by the mean and deviation per channel, measured on 40"
    assert said in capsys.readouterr().err
    found = data_of(run)
    assert (found["channels"], found["kind"]) == (12, kind.__name__)
    values = images.pixels.reshape(-1, 12).astype(float)
    np.testing.assert_allclose(found["mean"], values.mean(0), rtol=0.02, atol=200)
    assert run.encoder().patch_embed.proj.in_channels == 12  # type: ignore[attr-defined]
    assert np.isfinite([line["loss"] for line in run.metrics]).all()


def test_a_run_of_many_channels_resumes_with_what_it_measured(tmp_path: Path) -> None:
    whole = pretrain(many(), tmp_path / "whole", tiny())
    part = pretrain(many(), tmp_path / "part", tiny(), stop_at=4)
    about = json.loads((part.path / "run.json").read_text())
    about["config"]["data"]["mean"][0] += 1000.0  # as another version might have measured
    shutil.rmtree(part.path / "checkpoints")  # they know what was measured
    (part.path / "run.json").write_text(json.dumps(sealed(about)))
    assert pretrain(many(), tmp_path / "part", tiny()).config.data.mean != whole.config.data.mean
    again = pretrain(many(), tmp_path / "again", tiny(), stop_at=4)
    assert_same_run(pretrain(many(), again.path, tiny()), whole)


def test_workers_change_nothing(tmp_path: Path) -> None:
    alone = pretrain(many(), tmp_path / "a", tiny())
    shared = pretrain(many(), tmp_path / "b", tiny(**{"runtime.workers": 2}))
    assert_same_run(alone, shared)


def test_pictures_may_be_normalised_by_their_own_statistics(tmp_path: Path) -> None:
    images = Arrays(NoiseImages().images // 4, {}, [], "dark")
    run = pretrain(images, tmp_path / "run", tiny(**{"data.normalise": "measured"}), stop_at=1)
    stats = stats_of(run.config)
    np.testing.assert_allclose(stats.mean, [31.5] * 3, atol=0.5)
    pixels = torch.from_numpy(images.pixels).permute(0, 3, 1, 2)
    shown = normalise(pixels, stats)
    assert shown.mean((0, 2, 3)).abs().max() < 0.02
    assert (shown.std((0, 2, 3)) - 1).abs().max() < 0.02


def test_each_image_may_be_normalised_by_itself(tmp_path: Path) -> None:
    config = tiny(**{"data.normalise": "per-image"})
    run = pretrain(many(), tmp_path / "run", config, stop_at=1)
    crop = Crops(many(), run.config)[0, 3].image
    assert crop is not None
    shown = normalise(crop[None], stats_of(run.config))
    assert shown.mean((2, 3)).abs().max() < 1e-4
    assert (shown.std((2, 3)) - 1).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("images", "changes", "error", "said"),
    [
        (many(), {"data.normalise": "imagenet"}, UserError, "imagenet is for 3 channels, 8 bit"),
        (many(), {"data.channels": 4}, DataError, "4 channels, 16 bit, but these images have 12"),
        (NoiseImages(), {"data.kind": "uint16"}, DataError, "16 bit, but these images have 3"),
    ],
)
def test_a_config_that_the_images_contradict_is_refused(
    tmp_path: Path, images: Any, changes: dict[str, Any], error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        pretrain(images, tmp_path / "run", tiny(**changes))
    assert not (tmp_path / "run").exists()


def test_an_image_of_other_channels_is_replaced_and_recorded(tmp_path: Path) -> None:
    class Mixed(NoiseImages):
        def read(self, i: int) -> np.ndarray:
            pixels = super().read(i)
            return pixels if i != 7 else pixels[..., :1]

    config = tiny(**{"data.max_bad": 0.1})
    run = pretrain(Mixed(), tmp_path / "run", config)
    (line,) = read_jsonl(run.path / "bad_files.jsonl")
    assert line["name"] == "noise 7"
    assert line["reason"] == "1 channel, 8 bit, where the others have 3 channels, 8 bit"


def test_grey_is_left_out_of_other_channels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(**{"data.augmentation": "released"})
    pretrain(many(), tmp_path / "many", config, stop_at=1)
    assert "12 channels are flipped and blurred only" in capsys.readouterr().err
    pretrain(NoiseImages(), tmp_path / "three", config, stop_at=1)
    assert "blurred only" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_for_a_run_of_many_channels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "x.npz", x=many().pixels, labels=many().labels["class"])
    data, run = str(tmp_path / "x.npz"), tmp_path / "run"
    pretrain(data, run, tiny(**{"runtime.health_every": 5}))
    assert main(["doctor", str(run)]) in (0, 10, 11, 12)
    assert main(["doctor", str(run), "--data", data]) in (0, 10, 11, 12)
    held = ["--data", data, "--hold-out", "0.3", "--random-inits", "1"]
    assert main(["eval", "suite", str(run), *held]) == 0
    capsys.readouterr()
    # Of other channels: one line, exit 3, whichever command.
    out = str(tmp_path / "f.npz")
    for words in (
        ["eval", "knn", str(run), "--data", "scenes:40:24"],
        ["eval", "tracking", str(run), "--videos", "scenes:1:24"],
        ["features", "scenes:4:24", "--encoder", str(run), "--out", out],
        ["doctor", str(run), "--data", "scenes:40:24"],
    ):
        assert main(words) == 3, words
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert "12 channels, 16 bit" in last
    assert main(["eval", "knn", str(run)]) == 2
    assert "--data is missing" in capsys.readouterr().err
