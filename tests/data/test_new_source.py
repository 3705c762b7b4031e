"""A new kind of source costs one file, here npy_source.py, and one line in the list of sources."""

from pathlib import Path

import numpy as np
import pytest
from npy_source import NPY, NpyFolder

from stopmim import Run
from stopmim.base.errors import DataError
from stopmim.cli import main
from stopmim.data.sources import open as opening
from stopmim.data.sources.open import open_images, open_test
from stopmim.data.stamps import stamp
from tiny import NoiseImages


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(opening, "SOURCES", [NPY, *opening.SOURCES])  # the line in the list
    (tmp_path / "images").mkdir()
    for i, image in enumerate(NoiseImages(16).images):
        np.save(tmp_path / "images" / f"{i:02}.npy", image)
    return tmp_path / "images"


def test_the_file_is_short() -> None:
    assert len((Path(__file__).parent / "npy_source.py").read_text().splitlines()) <= 40


def test_it_is_recognised_named_and_stamped(root: Path) -> None:
    images = open_images(root)
    assert isinstance(images, NpyFolder)
    assert len(images) == len(open_images(f"npy:{root}")) == 16
    assert open_test(root) is None
    before = stamp(images)
    np.save(root / "00.npy", images.read(1))
    assert stamp(images) != before
    (root / "x.xyz").touch()
    with pytest.raises(DataError, match="a prefix states the kind: npy:, scenes:"):
        open_images(root / "x.xyz")


def test_check_and_pretrain_take_it_from_the_command_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "99.npy").write_bytes(b"junk")
    small = ["--preset", "tiny_cpu", "--optim.batch_size", "8", "--optim.epochs", "1"]
    assert main(["check", f"npy:{root}", *small, "--data.max_bad", "0.1"]) == 0
    assert "99.npy: " in capsys.readouterr().out
    (root / "99.npy").unlink()
    small += ["--optim.warmup_epochs", "0", "--runtime.log_every", "1", "--runtime.device", "cpu"]
    assert main(["pretrain", f"npy:{root}", "--out", str(tmp_path / "run"), *small]) == 0
    run = Run(tmp_path / "run")
    assert run.about["data"]["source"] == f"npy:{root}"
    assert [line["step"] for line in run.metrics] == [1, 2]
