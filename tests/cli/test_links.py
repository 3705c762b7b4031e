"""No command writes through a link that somebody has put into a run directory."""

import os
import shutil
from pathlib import Path

import pytest

from stopmim import Run, pretrain
from stopmim.base.errors import StorageError
from stopmim.cli import main
from tiny import assert_same_run, tiny, write_folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("begun")
    return pretrain(write_folder(root / "images"), root / "run", tiny(), stop_at=3)


@pytest.fixture
def run(begun: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun.path, tmp_path / "run"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that must not change."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    return folder


def plant(run: Path, victim: Path, *names: str) -> None:
    for name in names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(victim / "precious")


def untouched(victim: Path) -> bool:
    return [path.name for path in victim.iterdir()] == ["precious"] and (
        victim / "precious"
    ).read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "names", "code"),
    [
        ("report {run} --data {images}", [".report.html.tmp", "report.html"], 0),
        ("eval knn {run} --data {images} --hold-out 0.3", ["results.jsonl"], 5),
        ("analyse pca {run} --data {images}", ["figures/pca.png"], 0),
        ("features {images} --encoder {run} --out {run}/f.npz", ["f.npz", ".f.tmp.npz"], 0),
        ("features {images} --encoder {run} --out {run}/f.csv", ["f.csv", ".f.tmp.csv"], 0),
        ("check {images} --preset tiny_cpu --fix-list {run}/l.jsonl", ["l.jsonl"], 0),
        ("check {images} --preset tiny_cpu --against {run}", ["hashes.jsonl"], 3),
        ("repair {run}", ["damaged/metrics.jsonl", "run.lock", "results.jsonl"], 0),
        ("export {run} --to safetensors --out {run}/out", [".out"], 0),
    ],
)
def test_commands_that_write(
    begun: Run, run: Path, victim: Path, command: str, names: list[str], code: int
) -> None:
    plant(run, victim, *names)
    images = begun.path.parent / "images"
    assert main(command.format(run=run, images=images).split()) == code
    assert untouched(victim)


def test_a_hard_link_is_replaced_by_a_copy(begun: Run, run: Path, victim: Path) -> None:
    names = ["run.lock", "results.jsonl", "bad_files.jsonl", "damaged/results.jsonl"]
    (run / "damaged").mkdir()
    (run / "run.lock").unlink()
    for name in names:
        (run / name).hardlink_to(victim / "precious")
    pretrain(begun.path.parent / "images", run, tiny()).add_result(value=1.0)
    assert main(["repair", str(run)]) == 0
    assert untouched(victim)


def test_a_copy_of_hard_links_trains_beside_its_original(begun: Run, tmp_path: Path) -> None:
    images, both = begun.path.parent / "images", [tmp_path / "a", tmp_path / "b"]
    shutil.copytree(begun.path, both[0])
    shutil.copytree(both[0], both[1], copy_function=os.link)
    first = pretrain(images, both[0], tiny())
    lines = first.metrics
    assert_same_run(first, pretrain(images, both[1], tiny()))
    assert first.metrics == lines


@pytest.mark.parametrize(
    ("names", "fails"),
    [
        (["run.lock"], True),
        (["bad_files.jsonl"], True),
        ([".run.json.tmp", ".metrics.jsonl.tmp", "metrics.jsonl"], False),
        (["crash-rank0.txt"], False),
    ],
    ids=str,
)
def test_a_resumed_run(
    begun: Run, run: Path, victim: Path, names: list[str], fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(run, victim, *names)
    images = begun.path.parent / "images"
    broken = images / "part0" / "000.png"
    data = broken.read_bytes()
    config = tiny(**{"data.max_bad": 0.5})
    try:
        if "bad_files.jsonl" in names:  # an image that cannot be read any more
            broken.write_bytes(b"x" * len(data))
        if "crash-rank0.txt" in names:
            monkeypatch.setattr("stopmim.train.training.loader", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pretrain(images, run, config)
            assert "ZeroDivisionError" in (run / "crash-rank0.txt").read_text()
        elif fails:
            with pytest.raises(StorageError, match="is a link") as caught:
                pretrain(images, run, config)
            assert caught.value.exit_code == 5
        else:
            pretrain(images, run, config)
    finally:
        broken.write_bytes(data)
    assert untouched(victim)


def test_a_folder_of_figures_that_leads_elsewhere_is_refused(
    begun: Run, run: Path, victim: Path
) -> None:
    (run / "figures").symlink_to(victim)
    images = begun.path.parent / "images"
    assert main(["analyse", "pca", str(run), "--data", str(images)]) == 5
    (run / "damaged").symlink_to(victim)
    (run / "run.json").write_text("{}")
    assert main(["repair", str(run)]) == 5
    assert untouched(victim)


def test_pipes_do_not_block_a_command(begun: Run, run: Path) -> None:
    for name in ("results.jsonl", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert main(["report", str(run)]) == 5
    assert main(["doctor", str(run)]) == 5
    assert main(["repair", str(run)]) == 0
    assert main(["report", str(run), "--data", str(begun.path.parent / "images")]) == 0
