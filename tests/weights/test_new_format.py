"""A new weight format costs one class and one line in the list; all commands take it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stopmim
from helpers import seeded
from stopmim.cli import main
from stopmim.method.encoder import VisionTransformer
from stopmim.weights import load, vit
from stopmim.weights.format import Contents, Format, WeightFile

# ------------------------------------------------------------------------------ the example


class Npz(Format):
    """A plain ViT as NumPy arrays under timm's names."""

    name = "NumPy arrays"
    word = "npz"
    used_by = "NumPy"
    card = (
        '```python\nimport numpy as np\n\nweights = np.load("model.npz")\n```\n\n'
        "Names are timm's. It has {{ encoder.heads }} attention heads."
    )

    def recognises(self, file: WeightFile) -> bool:
        return file.path.suffix == ".npz"

    def encoder(self, file: WeightFile, branch: vit.Branch) -> VisionTransformer:
        with np.load(file.path, allow_pickle=False) as arrays:
            tree = {name: torch.from_numpy(arrays[name]) for name in arrays}
        return vit.read(vit.encoder_weights(tree, str(file)), str(file), file.heads)

    def write(self, contents: Contents, encoder: VisionTransformer, folder: Path) -> None:
        arrays: dict[str, Any] = {name: x.numpy() for name, x in vit.weights_of(encoder).items()}
        np.savez(folder / "model.npz", **arrays)


# ------------------------------------------------------------------------------ and its use


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of an encoder, exported by the command line from one of the other formats."""
    monkeypatch.setattr(load, "FORMATS", (Npz(), *load.FORMATS))  # the one line
    torch.manual_seed(0)
    torch.save(VisionTransformer(24, 4, 96, 2, 3).state_dict(), tmp_path / "a.pth")
    words = ["export", str(tmp_path / "a.pth"), "--to", "npz", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    return tmp_path / "out" / "model.npz"


def test_a_new_format_is_written_and_read(file: Path) -> None:
    images = torch.randn(2, 3, 24, 24, generator=seeded())
    want, found = stopmim.load_encoder(file.parents[1] / "a.pth"), stopmim.load_encoder(file)
    assert torch.equal(found.features(images), want.features(images))
    card = (file.parent / "README.md").read_text()
    assert "exported for NumPy" in card
    assert '```python\nimport numpy as np\n\nweights = np.load("model.npz")\n```' in card
    assert "It has 3 attention heads." in card


def test_a_new_format_is_inspected_and_exported(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["inspect", str(file)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["project"] == "NumPy arrays"
    assert lines["encoder"].startswith("patch 4, width 96, depth 2, 3 heads")
    assert lines["load_model"] == "no: there is no predictor in it"
    assert main(["export", str(file), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert "NumPy arrays" in (tmp_path / "hf" / "README.md").read_text()


def test_what_the_new_format_cannot_do_is_one_line(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: dict[str, Any] = {"norm.weight": np.zeros(3)}
    np.savez(tmp_path / "b.npz", **bad)
    for words, code, said in [
        (f"inspect {tmp_path / 'b.npz'}", 4, "not a plain ViT"),
        (f"export {file} --to ijepa --out {tmp_path / 'x'}", 4, "no predictor in it"),
        (f"export {file} --to npy --out {tmp_path / 'x'}", 2, 'did you mean "npz"?'),
    ]:
        capsys.readouterr()
        assert main(words.split()) == code
        assert said in (err := capsys.readouterr().err)
        assert len(err.splitlines()) == 1


def test_a_format_that_is_only_read_is_no_word_of_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class ReadOnly(Npz):
        word = ""

    monkeypatch.setattr(load, "FORMATS", (ReadOnly(), *load.FORMATS))
    assert main(["export", "a", "--to", "npz", "--out", str(tmp_path / "x")]) == 2
    assert "formats are timm, hf, ijepa, mae, safetensors, onnx" in capsys.readouterr().err
