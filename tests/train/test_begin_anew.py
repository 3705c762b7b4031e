"""A run directory in which nothing was saved protects nothing: the next command may differ."""

import json
from pathlib import Path

import pytest

from stopmim import pretrain
from stopmim.base.errors import DataError, UserError
from stopmim.cli import main
from stopmim.data.pack import pack
from stopmim.data.sources.open import open_images
from tiny import NoiseImages, tiny, write_folder


def test_a_run_that_stopped_at_broken_images_begins_anew_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "photos", 16)
    for i in range(4):
        (tmp_path / "photos" / f"broken{i}.jpg").write_bytes(b"no picture")
    config = tiny(**{"runtime.save_every": 1000})
    with pytest.raises(DataError, match=r"--data.skip .*bad_files.jsonl"):
        pretrain(tmp_path / "photos", tmp_path / "run", config)
    listed = str(tmp_path / "broken.jsonl")
    assert main(["check", str(tmp_path / "photos"), "--fix-list", listed]) == 0
    run = pretrain(
        tmp_path / "photos", tmp_path / "run", config, stop_at=1, **{"data.skip": listed}
    )
    assert run.config.data.skip == listed
    assert "starts over" in capsys.readouterr().err
    assert not (run.path / "bad_files.jsonl").exists()  # of an attempt on other images


def test_a_run_cannot_leave_out_what_it_lists_itself(tmp_path: Path) -> None:
    images = NoiseImages(broken=(3, 17))
    with pytest.raises(DataError):
        pretrain(images, tmp_path, tiny(**{"data.max_bad": 0.0}))
    skip = {"data.skip": str(tmp_path / "bad_files.jsonl")}  # it would grow, and end a resume
    with pytest.raises(UserError, match="list of this run itself; choose another --out"):
        pretrain(images, tmp_path, tiny(**skip))
    assert (tmp_path / "bad_files.jsonl").exists()


def test_a_run_with_a_checkpoint_does_not(tmp_path: Path) -> None:
    pretrain(NoiseImages(), tmp_path, tiny(), stop_at=1)
    with pytest.raises(UserError, match="another config"):
        pretrain(NoiseImages(), tmp_path, tiny(seed=1))
    with pytest.raises(DataError, match="not the images this run began with"):
        pretrain(NoiseImages(48), tmp_path, tiny())


def test_the_command_that_pack_prints_names_a_run_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "photos", 4)
    assert main(["pack", str(tmp_path / "photos"), "--out", str(tmp_path / "shards")]) == 0
    assert capsys.readouterr().out.endswith("--out runs/shards\n")


def test_a_skip_list_of_other_images_names_the_run_it_came_from(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", 16)
    names = tmp_path / "skip.jsonl"
    first = open_images(tmp_path / "photos").name(0)
    names.write_text(json.dumps({"name": first, "reason": "dull"}) + "\n")
    pretrain(tmp_path / "photos", tmp_path / "run", tiny(**{"data.skip": str(names)}), stop_at=1)
    pack(tmp_path / "photos", tmp_path / "shards")
    with pytest.raises(DataError, match=r"the run there is trained on .*photos, or with"):
        pretrain(tmp_path / "shards", tmp_path / "run")
