"""A run is bound to itself: no checkpoint, run.json or image of another one passes for its own."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stopmim import Run, load_encoder, pretrain
from stopmim.base.errors import CheckpointError, DataError, StorageError, UserError
from stopmim.cli import main
from stopmim.runs import identity
from stopmim.runs.identity import read_about, sealed
from stopmim.runs.repair import repair
from tiny import NoiseImages, assert_same_run, tiny, write_folder


class OtherNoise(NoiseImages):
    """As many pictures of the same sizes, with another fingerprint."""

    def __init__(self) -> None:
        super().__init__()
        self.images = self.images[::-1].copy()
        self.fingerprint = "other noise"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(NoiseImages(), tmp_path_factory.mktemp("whole"), tiny())


def begun(path: Path, images: NoiseImages | None = None, **changes: Any) -> Run:
    return pretrain(images or NoiseImages(), path, tiny(**changes), stop_at=4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "its seed is 1, that of run.json 0"),
        ({"optim.lr": 1e-3}, "its optim.lr is 0.001, that of run.json 0.0003"),
        ({"positions.sigma": 0.5}, "its positions.sigma is 0.5, that of run.json 0.25"),
        ({"optim.ema": [0.9, 1.0]}, "its optim.ema is"),
        ({"images": OtherNoise()}, "its run id is"),
        ({}, "its run id is"),  # they differ in nothing else
    ],
    ids=["seed", "lr", "sigma", "ema", "data", "id"],
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    own = begun(tmp_path / "own")
    images = changes.pop("images", None)
    other = begun(tmp_path / "other", images, **changes)
    shutil.rmtree(own.path / "checkpoints")
    shutil.copytree(other.path / "checkpoints", own.path / "checkpoints")
    with pytest.raises(CheckpointError, match=f"a checkpoint of another run: {said}") as caught:
        pretrain(NoiseImages(), own.path, tiny())
    assert caught.value.exit_code == 4
    if said == "its run id is":
        assert all(repr(run.about["id"]) in str(caught.value) for run in (own, other))
    with pytest.raises(CheckpointError, match="of another run"):
        load_encoder(own.path)  # as eval, export and report do


def test_the_fingerprint_of_the_data_is_compared_as_well(tmp_path: Path) -> None:
    """Somebody made the ids agree."""
    from stopmim.runs.identity import foreign, sealed

    own, other = begun(tmp_path / "own"), begun(tmp_path / "other", OtherNoise())
    state = json.loads((own.checkpoint / "state.json").read_text())
    about = sealed(other.about | {"id": own.about["id"]})
    said = foreign(about, state)
    assert said == "its data fingerprint is 'noise-40', that of run.json 'other noise'"


def test_a_run_directory_that_is_copied_or_moved_resumes(whole: Run, tmp_path: Path) -> None:
    run = begun(tmp_path / "first")
    shutil.copytree(run.path, tmp_path / "copy")
    run.path.rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        assert_same_run(pretrain(NoiseImages(), tmp_path / name, tiny()), whole)


def test_a_run_of_a_version_without_ids_resumes_and_stays_one(whole: Run, tmp_path: Path) -> None:
    run = begun(tmp_path)
    about = {key: value for key, value in run.about.items() if key not in ("id", "check")}
    del about["data"]["sample"]
    (run.path / "run.json").write_text(json.dumps(about))
    for path in (run.path / "checkpoints").iterdir():
        strip(path)
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in run.metrics))
    assert_same_run(pretrain(NoiseImages(), tmp_path, tiny()), whole)
    assert not {"id", "check"} & run.about.keys()
    assert run.lost_lines == []


def strip(path: Path) -> None:
    """Makes a checkpoint one of an old version."""
    import hashlib

    manifest = json.loads((path / "manifest.json").read_text())
    state = json.loads((path / "state.json").read_text())
    text = json.dumps({key: x for key, x in state.items() if key not in ("run", "logged")})
    (path / "state.json").write_text(text)
    sha = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"]["state.json"] = {"sha256": sha, "bytes": len(text)}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_an_old_checkpoint_with_another_config_is_refused_too(tmp_path: Path) -> None:
    own, other = begun(tmp_path / "own"), begun(tmp_path / "other", optim={"lr": 1e-3})
    for run in (own, other):
        about = {key: value for key, value in run.about.items() if key not in ("id", "check")}
        (run.path / "run.json").write_text(json.dumps(about))
        for path in (run.path / "checkpoints").iterdir():
            strip(path)
    shutil.rmtree(own.path / "checkpoints")
    (other.path / "checkpoints").rename(own.path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"its optim.lr is 0.001, that of run.json 0.0003"):
        pretrain(NoiseImages(), own.path, tiny())


# ------------------------------------------------------------------------------ run.json


@pytest.mark.parametrize(
    "edit",
    [
        lambda about: about["starts"][0].update(threads=7),
        lambda about: about["config"]["optim"].update(lr=1.0),
        lambda about: about["data"].update(fingerprint="another"),
        lambda about: about.update(id="0" * 16),
        lambda about: about.pop("check"),
        lambda about: about["data"].pop("sample"),
    ],
    ids=["threads", "lr", "fingerprint", "id", "check", "sample"],
)
def test_an_edited_run_json_is_refused_and_the_way_out_is_named(tmp_path: Path, edit: Any) -> None:
    run = begun(tmp_path)
    about = run.about
    edit(about)
    (run.path / "run.json").write_text(json.dumps(about, indent=1))
    threads_by_itself = tiny(**{"runtime.threads": None})
    with pytest.raises(CheckpointError, match=r"changed since it was written.*stopmim repair"):
        pretrain(NoiseImages(), run.path, threads_by_itself)


@pytest.mark.parametrize(
    ("key", "value"),
    [("threads", 2), ("precision", "bf16"), ("accumulate", 2), ("residual", "half")],
)
def test_what_would_round_otherwise_is_sealed_too(tmp_path: Path, key: str, value: Any) -> None:
    """A run that is resumed without a preset takes its config from run.json."""
    run = begun(tmp_path)
    about = run.about
    about["config"]["runtime"][key] = value
    (run.path / "run.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="changed since it was written"):
        pretrain(NoiseImages(), run.path)
    if key == "accumulate":  # on the command line it may change
        repair(run.path)
        assert pretrain(NoiseImages(), run.path, runtime={"accumulate": 2}).metrics


def test_an_older_seal_holds(whole: Run, tmp_path: Path) -> None:
    run = begun(tmp_path)
    about = run.about | {"check": identity._seal(run.about, frozenset())}
    (run.path / "run.json").write_text(json.dumps(about))
    assert_same_run(pretrain(NoiseImages(), run.path), whole)


@pytest.mark.parametrize("threads", [0, -1, True, 100_000, 10**30])
def test_threads_that_torch_cannot_have_are_refused_though_the_seal_is_right(
    tmp_path: Path, threads: int
) -> None:
    """Anybody can seal; 100,000 threads crash the process."""
    run = begun(tmp_path)
    about = run.about
    about["starts"][0]["threads"] = threads
    (run.path / "run.json").write_text(json.dumps(sealed(about)))
    with pytest.raises(CheckpointError, match="not as stopmim writes it"):
        pretrain(NoiseImages(), run.path, tiny(**{"runtime.threads": None}))


def test_a_sample_may_hold_anything(whole: Run, tmp_path: Path) -> None:
    run = begun(tmp_path)
    about = run.about
    about["data"]["sample"] |= {"\u0663": "x", "-1": "x", "9" * 5000: "x", "\u00b2": "x"}
    (run.path / "run.json").write_text(json.dumps(sealed(about)))
    for path in (run.path / "checkpoints").iterdir():
        state = json.loads((path / "state.json").read_text())
        assert state["run"]["id"] == about["id"]
    assert_same_run(pretrain(NoiseImages(), run.path, tiny()), whole)


def test_what_decides_no_number_may_be_edited(whole: Run, tmp_path: Path) -> None:
    run = begun(tmp_path)
    about = run.about
    about["config"]["runtime"]["keep"] = 5
    about["starts"][0]["host"] = "elsewhere"
    (run.path / "run.json").write_text(json.dumps(about))
    assert_same_run(pretrain(NoiseImages(), run.path), whole)


# ------------------------------------------------------------------------------ images


def change(file: Path) -> None:
    """Overwrites a picture by another in the same number of bytes."""
    size = file.stat().st_size
    Image.fromarray(np.zeros((28, 32, 3), np.uint8)).save(file)
    assert file.stat().st_size < size
    file.write_bytes(file.read_bytes().ljust(size, b"\0"))


def test_a_picture_of_the_same_size_but_another_content_is_noticed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    run = pretrain(folder, tmp_path / "run", tiny(), stop_at=3)
    assert len(run.about["data"]["sample"]) == 40
    change(folder / "part1" / "013.png")
    said = r"1 of 40 sampled images .* such as part1/013\.png; .*check DATA --against"
    with pytest.raises(DataError, match=said):
        pretrain(folder, tmp_path / "run", tiny())


def test_a_picture_that_cannot_be_read_any_more_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a crash of the machine: the size is right, the content zeros."""
    folder = write_folder(tmp_path / "images")
    config = tiny(**{"data.max_bad": 0.5})
    pretrain(folder, tmp_path / "run", config, stop_at=3)
    file = folder / "part1" / "013.png"
    file.write_bytes(bytes(file.stat().st_size))
    pretrain(folder, tmp_path / "run", config, stop_at=4)
    said = "1 of 40 sampled images could be read at the first start and no longer can"
    assert f"{said}, such as part1/013.png; training replaces them" in capsys.readouterr().err


def test_of_many_pictures_a_sample_is_kept(tmp_path: Path) -> None:
    run = pretrain(NoiseImages(200), tmp_path, tiny(), stop_at=1)
    numbers = [int(i) for i in run.about["data"]["sample"]]
    assert len(numbers) == 64
    assert (numbers[0], numbers[-1]) == (0, 199)
    assert max(np.diff(numbers)) <= 4


def test_check_against_a_run_records_all_pictures_and_then_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "images")
    run = pretrain(folder, tmp_path / "run", tiny(), stop_at=1)
    words = ["check", str(folder), "--preset", "tiny_cpu", "--runtime.workers", "0"]
    words += ["--optim.batch_size", "8", "--against", str(run.path)]
    assert main([*words, "--limit", "3"]) == 0
    assert not (run.path / "hashes.jsonl").exists()
    assert main(words) == 0
    assert "recorded the content of 40 images" in " ".join(capsys.readouterr().out.split())
    assert main(words) == 0
    assert "40 images are as recorded in" in " ".join(capsys.readouterr().out.split())
    change(folder / "part2" / "020.png")
    assert main(words) == 3
    said = capsys.readouterr().err
    assert "1 of 40 images differ in content from" in said
    assert "such as part2/020.png" in said
    (run.path / "hashes.jsonl").unlink()
    assert main(words) == 3  # the sample of run.json knows better than to record it
    assert not (run.path / "hashes.jsonl").exists()


def test_a_record_of_pictures_notices_its_own_damage(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", n=9)
    words = ["check", str(folder), "--preset", "tiny_cpu", "--runtime.workers", "0"]
    words += ["--optim.batch_size", "8", "--against", str(tmp_path / "list.jsonl")]
    assert main(words) == 0
    text = (tmp_path / "list.jsonl").read_text()
    (tmp_path / "list.jsonl").write_text(text.replace('"sha256": "', '"sha256": "0', 1))
    assert main(words) == 3
    (tmp_path / "list.jsonl").write_text(text)
    assert main(words) == 0
    (folder / "part0" / "000.png").unlink()
    assert main(words) == 3


def test_the_id_is_another_one_in_every_run(tmp_path: Path) -> None:
    ids = {begun(tmp_path / str(i)).about["id"] for i in range(2)}
    assert len(ids) == 2
    assert read_about(tmp_path / "0")["id"] in ids


def test_where_nothing_could_be_saved_nothing_is_trained(tmp_path: Path) -> None:
    """safetensors writes files whose names are not UTF-8, and cannot read them."""
    with pytest.raises(UserError, match="not UTF-8"):
        pretrain(NoiseImages(), tmp_path / os.fsdecode(b"run\xff"), tiny())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="no folder to save to"):
        pretrain(NoiseImages(), tmp_path / "run", tiny())
