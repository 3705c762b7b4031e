"""Pictures of images that are no pictures: which channels are shown, how bright, and said where."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import stopmim
from stopmim.base.errors import UserError
from stopmim.cli import main
from stopmim.data.crops import normalise
from stopmim.data.pixels import RGB, PixelStats, stats_of
from stopmim.data.sources.arrays import Arrays
from stopmim.data.sources.scenes import Bands
from stopmim.insight.analyse import figure_of
from stopmim.insight.figures import neighbours
from stopmim.insight.figures.false_colour import FalseColour
from stopmim.insight.figures.subject import load, pixels
from stopmim.insight.report.page import write_report
from stopmim.runs.run import Run
from tiny import NoiseImages, tiny, tiny_mae


def stats(channels: int, **changes: object) -> PixelStats:
    ones = (1.0,) * channels
    return PixelStats(ones, ones, **{"kind": "uint16"} | changes)  # type: ignore[arg-type]


def test_pictures_are_shown_as_they_are() -> None:
    image = NoiseImages().read(0)
    shown = FalseColour.of(RGB)
    assert shown(image) is image
    assert shown.caption == ""
    assert FalseColour.of(stats(3, kind="uint8", names=("Red", "g", "BLUE")))(image) is image


@pytest.mark.parametrize(
    ("given", "chosen", "want"),
    [
        (stats(12), (), (0, 6, 11)),
        (stats(2), (), (0, 1, 1)),
        (stats(1), (), (0, 0, 0)),
        (stats(4, names=("nir", "blue", "Green", "red")), (), (3, 2, 1)),
        (stats(4, names=("nir", "blue", "green", "swir")), (), (0, 2, 3)),
        (stats(12), ("3", "2", "1"), (3, 2, 1)),
        (stats(12), ("7",), (7, 7, 7)),
        (stats(4, names=("nir", "blue", "green", "red")), ("nir", "red", "1"), (0, 3, 1)),
        (stats(3, names=("2", "0", "1")), ("2", "1", "0"), (0, 2, 1)),  # a name comes first
    ],
)
def test_the_rule(given: PixelStats, chosen: tuple[str, ...], want: tuple[int, ...]) -> None:
    assert FalseColour.of(given, chosen).shown == want


def test_channels_are_scaled_from_their_own_range_to_black_and_white() -> None:
    given = stats(3, low=(0.0, 1000.0, -5.0), high=(100.0, 3000.0, 5.0), kind="float32")
    image = np.array([[[0, 1000, -5], [100, 3000, 5], [50, 2000, 0], [-9, 9e9, -99]]], np.float32)
    want = [[0, 0, 0], [255, 255, 255], [128, 128, 128], [0, 255, 0]]
    assert FalseColour.of(given)(image)[0].tolist() == want
    assert FalseColour.of(stats(1))(np.full((2, 2, 1), 65535, np.uint16)).min() == 255
    # Floats of an unknown range, and a channel that is constant.
    around = FalseColour.of(stats(1, kind="float32"))(np.array([[[1.0]]], np.float32))
    assert around.ravel().tolist() == [128] * 3
    flat = stats(1, low=(7.0,), high=(7.0,))
    assert FalseColour.of(flat)(np.full((1, 1, 1), 7, np.uint16)).ravel().tolist() == [0] * 3


def test_captions_name_the_channels() -> None:
    assert FalseColour.of(stats(12)).caption == "red, green, blue: channels 0, 6, 11 of 12"
    named = stats(2, names=("DAPI", "GFP"))
    assert FalseColour.of(named, ("GFP",)).caption == "shown: channel 1 (GFP) of 2"
    assert FalseColour.of(RGB, ("2", "1", "0")).caption == "red, green, blue: channels 2, 1, 0 of 3"


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (("12",), "--show 12: no such channel; channels are 0 to 11$"),
        (("-1",), "--show -1: no such channel"),
        (("9" * 5000,), "--show 9+: no such channel"),
        (("0", "1"), "--show: one channel or three, got 2"),
    ],
)
def test_what_cannot_be_shown_is_one_line(chosen: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line):
        FalseColour.of(stats(12), chosen)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "bands"
    return stopmim.pretrain("bands:40:24", out, tiny(), stop_at=3)


def test_figures_show_some_channels_and_encoders_see_all(run: Run) -> None:
    (subject,) = load([run], None, 4, ("depth", "0", "shadow"))
    view, given = subject.views[0], stats_of(run.config)
    assert view.image.shape == (24, 24, 12)
    want = FalseColour(given, (4, 0, 11))(view.image)
    np.testing.assert_array_equal(view.picture, want)
    assert view.picture.shape == (24, 24, 3)
    assert len(np.unique(view.picture)) > 20
    seen = pixels(subject.views, run.config)
    raw = torch.from_numpy(np.stack([v.image for v in subject.views])).permute(0, 3, 1, 2)
    assert torch.equal(seen, normalise(raw, given))
    assert seen.abs().max() < 20


@pytest.mark.parametrize("what", ["masks", "pca", "prediction", "uncertainty"])
def test_captions_of_figures_say_what_is_shown(what: str, run: Run) -> None:
    picture = figure_of(what, [run], None)  # type: ignore[arg-type]
    said = str(picture._supxlabel.get_text())  # type: ignore[attr-defined]
    assert "red, green, blue: channels 0 (red), 1 (green), 2 (blue) of 12" in said


def test_neighbours_are_found_by_all_channels(run: Run) -> None:
    found = neighbours.find([run], None, ("4", "5", "6"))
    assert found.pictures.shape == (40, 24, 24, 3)
    whole = torch.from_numpy(np.float32(Bands(40, 24).read(7))).permute(2, 0, 1)[None]
    features = run.encoder().features(normalise(whole, stats_of(run.config)))
    want = torch.nn.functional.normalize(features.double())
    torch.testing.assert_close(found.encoders[1].features[7:8], want, atol=1e-4, rtol=0)
    texts = [text.get_text() for text in neighbours.figure(found).axes[0].texts]
    assert "channels 4 (depth), 5 (disparity), 6 (normal_x) of 12" in texts[-1]


def test_a_report_of_many_channels_is_whole(run: Run, tmp_path: Path) -> None:
    page = write_report(run, out=tmp_path / "page.html", show=["9"]).read_text()
    assert page.count("Pictures have false colours, shown: channel 9 (height) of 12.") == 2
    assert not re.search(r'class="missing">No (neighbours|images)', page)
    data = json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)[0])
    thumbnail = data["neighbours"]["pictures"][0].split(",")[1]
    with Image.open(io.BytesIO(base64.b64decode(thumbnail))) as picture:
        grey = np.asarray(picture.convert("RGB")).astype(int)
    assert np.abs(grey[..., 0] - grey[..., 1]).max() <= 2  # one channel: no colours
    with pytest.raises(UserError, match="--show heigth: no such channel; did you mean"):
        write_report(run, out=tmp_path / "page.html", show=["heigth"])


def test_the_command_line_takes_channels(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["analyse", "masks", str(run.path), "--out", str(tmp_path), "--show", "3", "2", "1"]
    assert main(command) == 0
    assert (tmp_path / "masks.png").exists()
    assert main([*command[:-1], "none"]) == 2
    assert "--show none: no such channel" in capsys.readouterr().err


def test_runs_of_other_channels_are_not_shown_the_same_images(run: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grey = Arrays(rng.normal(size=(40, 28, 28, 1)).astype(np.float32), {}, [], "grey")
    other = stopmim.pretrain(grey, tmp_path / "grey", tiny_mae(), stop_at=1)
    for what in ("pca", "neighbours"):
        with pytest.raises(UserError, match=r"1 channel of float32, .* on 12 channels of uint16"):
            figure_of(what, [run, other], None)
    assert figure_of("prediction", [other], grey) is not None  # alone, in grey
