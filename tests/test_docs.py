"""What README and docs tell people to type works as it stands there."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_videos import davis
from torch.distributed.run import get_args_parser

import stopmim
from stopmim import pretrain
from stopmim.cli.run import main, parse
from stopmim.data.pack import pack
from stopmim.data.sources.open import open_images
from stopmim.method.build import build, configure
from stopmim.weights.export import export
from stopmim.weights.formats.data2vec import RelativeTransformer
from test_house import FOLDERS
from tiny import tiny, write_folder

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRIED = [page for page in PAGES if page.name != "extend.md"]  # test_extend.py runs that one
PLACES = {  # of every command the last page that has it
    line: page.name
    for page in TRIED
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    for line in block.splitlines()
    if line.strip() and not line.startswith(("#", "curl ", "hf "))  # test_encoders.py has those
}
SHELL = [pytest.param(line, id=f"{name}: {line}") for line, name in PLACES.items()]
PYTHON = [
    pytest.param(block, id=f"{page.name} {i}")
    for page in TRIED
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FEW = {"make_photos.py": ["photos", "12"]}  # arguments that make an example quicker
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
NOTEBOOK = ROOT / "notebooks" / "photos.ipynb"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the pages name: runs, and images with labels."""
    root = tmp_path_factory.mktemp("docs")
    for name in ("my_images", "photos"):
        write_folder(root / name, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        measured = {"health_every": None}
        certain = tiny(runtime=measured, positions={"kind": "sincos", "sigma": None})
        first, other = (tiny(runtime=measured, seed=seed) for seed in range(2))
        for name, config in {"first": first, "b16": other, "ijepa": certain}.items():
            pretrain("my_images", f"runs/{name}", config, stop_at=1)
        pretrain("bands:16:24", "runs/bands", first, stop_at=1)
    for name in ("photos", "stop"):
        shutil.copytree(root / "runs" / "first", root / "runs" / name)
    for part in ("my_data/train", "my_data/val", "imagenet/train", "imagenet/val"):
        write_folder(root / part, 40)
    shutil.copytree(ROOT / "examples", root / "examples")
    shutil.copytree(ROOT / "results", root / "results", ignore=shutil.ignore_patterns("*.json"))
    record = Path("results", "claim", "StoP-0.25-0.json")
    shutil.copy(ROOT / record, root / record)
    pixels, labels = np.zeros((1100, 8, 8, 3), np.uint8), np.arange(1100) % 100
    split = {"train_images": pixels, "train_labels": labels}
    np.savez(root / "tiny100.npz", val_images=pixels, val_labels=labels, **split)  # type: ignore[arg-type]
    for same in ("held100", "cifar100", "imagenette64", "imagenette", "imagenette_held"):
        shutil.copy(root / "tiny100.npz", root / f"{same}.npz")
    names = np.array([f"{i:03}.jpg" for i in range(16)])
    np.savez(root / "features.npz", names=names, features=np.eye(16, 96, dtype=np.float32))
    write_public(root)
    davis(root / "DAVIS", "2016")
    pack(root / "my_images", root / "shards")
    Image.new("I;16", (600, 500)).save(root / "mosaic.tif")
    (root / "1percent.txt").write_text("".join(f"{i:03}.png\n" for i in range(10)))
    return root


def write_public(root: Path) -> None:
    """Tiny networks under the names, and in the formats, of the encoders in docs/encoders.md."""
    for name in ("vit-b16.pth.tar", "IN1K-vit.h.14-300e.pth.tar"):
        export(root / "runs" / "first", "ijepa", root / "ijepa")
        (root / "ijepa" / "model.pth.tar").rename(root / name)
        shutil.rmtree(root / "ijepa")
    export(root / "runs" / "first", "hf", root / "ijepa_vith14_1k")
    plain = {"state_dict": build(configure(tiny(class_token=True))).encoder.state_dict()}
    far = {"model": RelativeTransformer(6, 4, 96, 1, 3, 384).state_dict()}
    for name in ("mae_pretrain_vit_base", "dino_deitsmall16_pretrain", "ibot_vitb_16"):
        torch.save(plain, root / f"{name}.pth")
    torch.save(far, root / "data2vec_base_800.pth")


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Goes to a folder of one command, which may leave its files there.

    It has a copy of what the command names: all of it for each would be 80,000 files.
    """
    monkeypatch.chdir(tmp_path)

    def enter(text: str) -> None:
        text += "my_images" * ("runs" in text)  # which runs were trained on
        for named in prepared.iterdir():
            if named.is_dir() and named.name in text:
                shutil.copytree(named, named.name, copy_function=link_or_copy)
            elif named.name in text:
                link_or_copy(named, named.name)

    return enter


def link_or_copy(source: str | Path, target: str) -> None:
    """Images and weights are replaced, never rewritten; only logs are appended to."""
    suffixes = (".safetensors", ".pth", ".tar", ".png", ".npz")
    (os.link if Path(source).suffix in suffixes else shutil.copy2)(source, target)


@pytest.mark.parametrize("line", SHELL)
def test_a_command_works_as_written(line: str, place: Callable[[str], None]) -> None:
    place(line)
    words = shlex.split(line, comments=True)
    while "=" in words[0]:  # VARIABLE=value before a command
        words = words[1:]
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
        case ["stopmim", *words] if "timm:" in line or "://" in line:
            assert parse(words) is not None  # timm would download it; test_urls.py has a server
        case ["stopmim", "pack", *words]:
            shutil.rmtree("shards", ignore_errors=True)
            assert main(["pack", *words]) == 0
        case ["stopmim", "pretrain", *words]:
            assert main(["pretrain", *words, "--dry-run"]) == 0  # the config, not the hours
        case ["torchrun", *options] if "-m" in options:
            options, ours = options[: options.index("-m")], options[options.index("-m") + 1 :]
            get_args_parser().parse_args([*options, "-m", *ours])
            assert ours[0] == "stopmim"
            assert main([*ours[1:], "--dry-run"]) == 0
        case ["stopmim", ("demo" | "bench") as command, *words]:
            assert parse([command, *words]) is not None
        case ["stopmim", "export", *words] if "onnx" in words or "--push" in words:
            assert parse(["export", *words]) is not None  # test_export.py, test_push.py have it all
        case ["stopmim", "eval", ("suite" | "tracking") as protocol, *words]:
            assert parse(["eval", protocol, *words]) is not None  # test_suite.py has the whole
        case ["stopmim", "eval", ("knn" | "linear" | "lowshot") as protocol, *words]:
            assert main(["eval", protocol, *words, "--random-inits", "1"]) == 0  # sooner
        case ["stopmim", "eval", "finetune", *words]:
            assert main(["eval", "finetune", *words, "--epochs", "1"]) == 0
        case ["stopmim", "ablate", *words] if "--list" not in words:
            few = ["--optim.batch_size", "8"]  # there are 40 images here
            assert main(["ablate", *words, *few, "--dry-run"]) == 0  # test_ablate.py has the runs
        case ["stopmim", "analyse", "all", *words]:
            assert parse(["analyse", "all", *words]) is not None  # test_analyse.py draws them all
        case ["stopmim", *words]:
            assert main(words) == 0
        case ["python", script]:
            assert ROOT / script in EXAMPLES  # run below
        case ["python", "results/tiny_imagenet.py", "tiny-imagenet-200", *out] if len(out) == 2:
            pass  # run below
        case ["python", "results/imagenette64.py", "imagenette2", "imagenette64.npz"]:
            pass  # run below
        case ["pip", "install", *words]:
            ours = [word for word in words if re.match(r"stopmim|\.(\[|$)|torch$", word)]
            assert ours, line
            assert set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", line)))) <= EXTRAS
        case ["python", "examples/make_photos.py", *words]:
            assert len(words) <= 2  # run below
        case ["docker", "build", *words]:
            named = [word.partition("=")[0] for word in words if "=" in word]
            assert all(f"ARG {name}=" in (ROOT / "Dockerfile").read_text() for name in named)
        case ["docker", "run", *words]:
            ours = words[
                next(i for i, word in enumerate(words) if word.startswith("stopmim")) + 1 :
            ]
            assert parse(ours) is not None
        case ["jupyter", "lab", notebook]:
            assert (ROOT / notebook).is_file()
        case _:
            pytest.fail(f"no rule for {line!r}")


@pytest.mark.parametrize("block", PYTHON)
def test_a_python_block_runs(block: str, place: Callable[[str], None]) -> None:
    place(block)
    # What the reader of such a block has at hand.
    for name in ("a.jpg", "b.jpg"):
        Image.new("RGB", (60, 48)).save(name)
    names: dict[str, Any] = {
        "images": torch.randn(2, 3, 48, 48),
        "context_index": torch.arange(12).expand(2, 12),
        "masked_index": torch.arange(20, 26).expand(2, 6),
        "context": torch.randn(2, 12, 192),
    }
    code = compile(block, "block", "exec")
    runner: Any = __builtins__["exec"] if isinstance(__builtins__, dict) else __builtins__.exec
    runner(code, names)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *FEW.get(script.name, [])])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_goes_from_a_folder_to_neighbours(tmp_path: Path) -> None:
    """Its cells in order, in a new process, with fewer photographs and epochs."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    sources = ["".join(cell["source"]) for cell in cells]
    (given,) = [
        i for i, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", ())
    ]
    names = set(re.findall(r"^(\w+) =", sources[given], re.M))
    few = {"EPOCHS": 1, "SCENES": 40}
    assert few.keys() <= names
    sources.insert(given + 1, "\n".join(f"{name} = {value}" for name, value in few.items()))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(sources)],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("40 photographs in photos\n1 updates, loss ")
    with Image.open(tmp_path / "runs" / "notebook" / "neighbours.png") as picture:
        assert picture.width > picture.height > 300


def test_half_of_the_classes_of_tiny_imagenet_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images = Path("tiny-imagenet-200")
    (images / "val" / "images").mkdir(parents=True)
    lines = []
    for shade, name in enumerate(("n1", "n2", "n3", "n4")):
        (images / "train" / name / "images").mkdir(parents=True)
        picture = Image.new("RGB", (64, 64), (60 * shade,) * 3)
        for i in (7, 107):
            later = Image.new("RGB", (64, 64), (60 * shade + 2 * (i > 100),) * 3)
            later.save(images / "train" / name / "images" / f"{name}_{i}.JPEG")
        picture.save(images / "val" / "images" / f"val_{shade}.JPEG")
        lines.append(f"val_{shade}.JPEG\t{name}\t0\t0\t63\t63\n")
    (images / "val" / "val_annotations.txt").write_text("".join(lines))
    monkeypatch.setattr(sys, "argv", ["", "tiny-imagenet-200", "tiny100.npz", "held100.npz"])
    runpy.run_path(str(ROOT / "results" / "tiny_imagenet.py"), run_name="__main__")
    train, test = (open_images("tiny100.npz", split) for split in ("train", "test"))
    # n1 and n3, and of both the first hundred files come first
    assert train.labels["class"].tolist() == [0, 1, 0, 1]
    assert [int(train.read(i).mean()) for i in range(4)] == [0, 120, 2, 122]
    assert test.labels["class"].tolist() == [0, 1]
    # what a recipe is chosen by: of each class the last, and nothing of the test
    first, last = (open_images("held100.npz", split) for split in ("train", "test"))
    assert first.labels["class"].tolist() == last.labels["class"].tolist() == [0, 1]
    assert [int(last.read(i).mean()) for i in range(2)] == [2, 122]


def test_the_first_images_of_every_class_of_imagenette_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for shade, name in enumerate(("n2", "n1")):
        folder = Path("imagenette2", "train", name)
        folder.mkdir(parents=True)
        for i in range(301):
            Image.new("RGB", (90, 70), (100 * shade, 0, i // 2)).save(folder / f"{i:03}.png")
    monkeypatch.setattr(sys, "argv", ["", "imagenette2", "imagenette64.npz"])
    runpy.run_path(str(ROOT / "results" / "imagenette64.py"), run_name="__main__")
    train, test = (open_images("imagenette64.npz", split) for split in ("train", "test"))
    assert (len(train), len(test), train.read(0).shape) == (400, 200, (64, 64, 3))
    assert train.labels["class"].tolist() == [0] * 200 + [1] * 200
    assert train.read(0)[0, 0].tolist() == [100, 0, 0]  # n1 comes first
    assert test.read(0)[0, 0].tolist() == [100, 0, 100]  # the 201st


def test_imagenette_is_squared_and_a_fifth_of_each_class_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From folders of JPEG files, and the same from packs of them."""
    monkeypatch.chdir(tmp_path)
    packed: dict[str, list[tuple[bytes, int]]] = {"train": [], "val": []}
    for split, number in (("train", 5), ("val", 2)):
        for label, name in enumerate(("n1", "n2")):
            (folder := Path("imagenette2", split, name)).mkdir(parents=True)
            for i in range(number):
                picture = Image.new("RGB", (320, 240), (0, 0, 0))
                picture.paste((100 * label + 10 * i + 5,) * 3, (40, 0, 280, 240))  # the middle
                picture.save(folder / f"{i}.JPEG")
                packed[split].append(((folder / f"{i}.JPEG").read_bytes(), label))
    Path("packs").mkdir()
    for split, files in packed.items():
        blob = np.frombuffer(b"".join(file for file, _ in files), np.uint8)
        ends = np.cumsum([0, *(len(file) for file, _ in files)])
        labels = np.array([one for _, one in files], np.int16)
        np.savez(f"packs/imagenette224_{split}.npz", blob=blob, offsets=ends, label=labels)
    for folder in (Path("imagenette2"), Path("packs")):
        monkeypatch.setattr(sys, "argv", ["", str(folder), "all.npz", "held.npz"])
        runpy.run_path(str(ROOT / "results" / "imagenette.py"), run_name="__main__")
        train, test = (open_images("all.npz", split) for split in ("train", "test"))
        assert train.labels["class"].tolist() == [0] * 5 + [1] * 5
        assert test.labels["class"].tolist() == [0, 0, 1, 1]
        assert train.read(7).shape == (224, 224, 3)
        assert np.abs(train.read(7).astype(int) - 125).max() < 3  # nothing of the black sides
        held = open_images("held.npz", "test")
        assert held.labels["class"].tolist() == [0, 1]
        assert [round(held.read(i).mean()) for i in range(2)] == pytest.approx([45, 145], abs=2)
        assert len(open_images("held.npz", "train")) == 8


# Tables that have been run are planned above: their commands stand in the pages of results.
OPEN = sorted(
    path
    for path in (ROOT / "results").glob("*.yaml")
    if "# stopmim" in path.read_text() and not path.with_suffix("").is_dir()
)


@pytest.mark.parametrize("table", OPEN, ids=lambda path: path.stem)
def test_a_table_of_results_can_be_planned_by_the_command_above_it(
    table: Path, place: Callable[[str], None]
) -> None:
    first = table.read_text().partition("#\n")[0]  # remarks may follow
    command = " ".join(re.findall(r"^# +(.*)$", first, re.M))
    assert command.startswith(f"stopmim ablate results/{table.name} ")
    place(command)
    few = ["--optim.batch_size", "8", "--dry-run"]  # there are few images here
    assert main([*command.split()[1:], *few]) == 0


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_has_every_page_and_the_reference_every_public_name() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert set(re.findall(r": (\S+\.md)$", nav, re.M)) == {page.name for page in PAGES[1:]}
    reference = (ROOT / "docs" / "reference.md").read_text()
    listed = re.findall(r"^::: ([\w.]+)$", reference, re.M)
    wanted = {f"stopmim.{name}" for name in stopmim.__all__ if name != "__version__"}
    assert wanted <= set(listed)
    for name in listed:  # mkdocs reads the source and would not miss a method of a lazy module
        module, _, attribute = name.rpartition(".")
        if name != "stopmim.base.schedules":
            assert getattr(import_module(module), attribute).__doc__, name


def test_the_map_is_the_first_level_of_the_tree_from_the_top() -> None:
    text = (ROOT / "README.md").read_text()
    listed = re.findall(r"^  (\w+)/  +\S", text.partition("\nsrc/stopmim\n")[2], re.M)
    assert listed == FOLDERS[::-1]
