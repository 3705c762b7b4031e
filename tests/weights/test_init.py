"""A run begins with the encoder of any file that is read, exactly; or with one line."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import stopmim
from helpers import seeded
from stopmim.base.errors import CheckpointError, UserError
from stopmim.cli import main
from stopmim.evals.feature_files import write_features
from stopmim.method.build import build, configure
from stopmim.method.encoder import VisionTransformer
from stopmim.weights.load import apply_init
from tiny import NoiseImages, assert_same_run, tiny, write_folder


def pictures(size: int = 24) -> Tensor:
    return torch.randn(2, 3, size, size, generator=seeded())


def source(folder: Path, *, class_token: bool = False, image_size: int = 24) -> Path:
    """A file as MAE or DINO publish them, positions learned."""
    torch.manual_seed(5)
    encoder = VisionTransformer.from_arch("vit_micro4", image_size, class_token)
    state = encoder.state_dict()
    state["pos_embed"] += 0.1 * torch.randn(state["pos_embed"].shape)
    torch.save({"model": state}, folder / "theirs.pth")
    return folder / "theirs.pth"


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("image_size", [24, 32])
@torch.no_grad()
def test_both_encoders_begin_with_the_features_of_the_file(
    class_token: bool, image_size: int, tmp_path: Path
) -> None:
    path = source(tmp_path, class_token=class_token, image_size=image_size)
    config = configure(tiny(init=str(path), class_token=class_token))
    model = apply_init(build(config), config, tmp_path / "run").eval()
    given = stopmim.load_encoder(path)
    for part in (model.encoder, model.branch()):
        torch.testing.assert_close(part(pictures()), given(pictures()), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            part.features(pictures(), 4, given.pool), given.features(pictures(), 4, given.pool)
        )
    assert model.encoder.pos_embed.shape == (1, 36 + class_token, 96)
    fresh = build(configure(tiny(class_token=class_token)))
    assert torch.equal(  # the predictor is that of the seed
        model.predictor.predictor_embed.weight, fresh.predictor.predictor_embed.weight
    )


@pytest.mark.slow
def test_a_run_that_is_resumed_needs_the_file_no_more_and_is_the_same_run(tmp_path: Path) -> None:
    path = source(tmp_path, class_token=True)
    config = tiny(init=str(path), class_token=True)
    whole = stopmim.pretrain(NoiseImages(), tmp_path / "whole", config)
    stopmim.pretrain(NoiseImages(), tmp_path / "cut", config, stop_at=4)
    path.unlink()
    cut = stopmim.pretrain(NoiseImages(), tmp_path / "cut", config)
    assert_same_run(whole, cut)
    encoder = stopmim.load_encoder(cut.path)
    assert encoder.pool == "cls"
    plain = stopmim.pretrain(NoiseImages(), tmp_path / "plain", tiny(class_token=True))
    assert plain.metrics[0]["loss"] != cut.metrics[0]["loss"]


def test_another_init_is_another_run(tmp_path: Path) -> None:
    path = source(tmp_path)
    stopmim.pretrain(NoiseImages(), tmp_path / "run", tiny(init=str(path)), stop_at=1)
    with pytest.raises(UserError, match=r"another config: init"):
        stopmim.pretrain(NoiseImages(), tmp_path / "run", tiny())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"class_token": True}, r"with class token: set --arch vit_micro4 --class-token false"),
        ({"arch": "vit_micro6"}, r"set --arch vit_micro4 --class-token false"),
        (
            {"arch": "vit_ti4", "predictor": {"width": 24, "depth": 1}},
            r"vit_ti4.*--arch vit_micro4",
        ),
    ],
)
def test_an_encoder_of_another_shape_is_one_line_that_says_what_to_set(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = tiny(init=str(source(tmp_path)), **changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        stopmim.pretrain(NoiseImages(), tmp_path / "run", config)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_or_no_encoder_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for name in ("absent", "text"):
        with pytest.raises(CheckpointError):
            stopmim.pretrain(NoiseImages(), tmp_path / "run", tiny(init=str(tmp_path / name)))
        assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------ features


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
@torch.no_grad()
def test_a_table_of_features_has_names_features_and_labels_in_order(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = source(tmp_path), tmp_path / f"table{suffix}"
    words = ["features", "scenes:6:24", "--encoder", str(path), "--out", str(out), "--layers", "2"]
    assert main([*words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    if suffix == ".npz":
        table = np.load(out)
        names, features, count = table["names"], table["features"], table["label_count"]
    elif suffix == ".csv":
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
        names, count = [row["name"] for row in rows], [int(row["label_count"]) for row in rows]
        columns = [name for name in rows[0] if name.startswith("feature_")]
        features = [[float(row[name]) for name in columns] for row in rows]
        exact = np.load(write_features("scenes:6:24", path, tmp_path / "exact.npz", layers=2))
        assert (np.array(features, np.float32) == exact["features"]).all()
        (tmp_path / "exact.npz").unlink()
    else:
        import pyarrow.parquet

        read = pyarrow.parquet.read_table(out).to_pydict()
        names, features, count = (read[key] for key in ("name", "feature", "label_count"))
    images = stopmim.data.open_images("scenes:6:24")
    assert list(names) == [images.name(i) for i in range(6)]
    assert list(count) == images.labels["count"].tolist()
    from stopmim.data.crops import center_crop, normalise

    pixels = normalise(torch.stack([center_crop(images.read(i), 24) for i in range(6)]))
    want = stopmim.load_encoder(path).features(pixels, 2)
    torch.testing.assert_close(
        torch.tensor(np.array(features, np.float32)), want, atol=1e-5, rtol=0
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["theirs.pth", out.name])


def test_a_table_of_features_lacks_what_is_skipped(tmp_path: Path) -> None:
    skip, out = tmp_path / "skip.jsonl", tmp_path / "table.npz"
    skip.write_text('{"name": "scene 00000002"}\n')
    words = ["features", "scenes:4:24", "--encoder", str(source(tmp_path)), "--out", str(out)]
    assert main([*words, "--skip", str(skip)]) == 0
    assert [name[-1] for name in np.load(out)["names"]] == ["0", "1", "3"]


def test_the_class_token_is_the_natural_feature_of_an_encoder_that_has_one(tmp_path: Path) -> None:
    path = source(tmp_path, class_token=True)
    rows = {}
    for pool in ("auto", "cls", "mean"):
        file = write_features(
            "scenes:4:24", path, tmp_path / f"{pool}.npz", pool=pool, device="cpu"
        )
        rows[pool] = np.load(file)["features"]
    assert np.array_equal(rows["auto"], rows["cls"])
    assert not np.allclose(rows["auto"], rows["mean"])


def test_features_say_of_a_broken_image_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, encoder = write_folder(tmp_path / "images", 3), str(source(tmp_path))
    (folder / "part0" / "broken.png").write_bytes(b"junk")
    words = ["features", str(folder), "--encoder", encoder, "--out", str(tmp_path / "x.npz")]
    assert main(words) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        "broken.png: not an image of a known format; images are never left out silently: fix"
        in said
    )
    assert "evaluation" not in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--out {tmp}/x.txt", 2, ".npz, .csv, .parquet"),
        ("--out {tmp}/no/x.npz", 5, "no such folder"),
        ("--out {tmp}/x.npz --layers 5", 2, "has 4 blocks"),
        ("--out {tmp}/x.npz --pool cls", 2, "no class token"),
        ("--out {tmp}/x.npz --size 25", 2, "patches of 4"),
        ("--out {tmp}/x.npz --branch teacher", 2, "teacher"),
        ("--seed 3 --out {tmp}/x.npz", 2, "takes no config key"),
    ],
)
def test_what_features_cannot_do_is_one_line(
    words: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = str(source(tmp_path))
    line = ["features", "scenes:4:24", "--encoder", encoder, *words.format(tmp=tmp_path).split()]
    assert main(line) == code
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "x.npz").exists()
