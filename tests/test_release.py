"""What is uploaded: light to import, one version, and complete when it is installed elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import stopmim

ROOT = Path(__file__).parents[1]


def seconds(code: str) -> float:
    """CPU time of `code` in a new interpreter, the better of two: other processes cost some too."""
    timed = f"import time; t = time.process_time()\n{code}\nprint(time.process_time() - t)"
    command = [sys.executable, "-c", timed]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    return min(float(run.stdout) for run in runs)


@pytest.mark.slow
def test_importing_everything_public_takes_at_most_twice_as_long_as_torch() -> None:
    torch = seconds("import torch")
    everything = "import stopmim\nfor name in stopmim.__all__: getattr(stopmim, name)"
    assert seconds(everything) < 2 * torch
    assert seconds("import stopmim") < 0.1 * torch  # names are imported when they are first used


def test_the_version_is_said_in_one_place() -> None:
    said = [
        path.name
        for path in (ROOT / "src" / "stopmim").rglob("*.py")
        if stopmim.__version__ in path.read_text()
    ]
    assert said == ["_version.py"]
    assert (
        'version = { attr = "stopmim._version.__version__" }'
        in (ROOT / "pyproject.toml").read_text()
    )


def test_every_tested_dependency_is_pinned() -> None:
    """What `make test` installs does not change from one day to the next."""
    project = (ROOT / "pyproject.toml").read_text()
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for extra, needed in tomllib.loads(project)["project"]["optional-dependencies"].items():
        names = {re.split(r"[\[>=]", one)[0].lower().replace("_", "-") for one in needed}
        assert names - {"stopmim"} <= pinned, extra


def test_the_lowest_versions_that_are_tested_are_the_lowest_that_are_admitted() -> None:
    """`make test-lowest`; all but torch and what goes with it, which constraints.txt pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"]]
    reads = ("dicom", "fast", "heic", "remote", "science", "shards")
    for extra in (*reads, "timm", "hf", "onnx", "tensorboard", "test"):
        needed += extras[extra]
    text = (ROOT / "constraints-lowest.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([\d.]+)$", text.lower(), re.M))
    for one in needed:
        name, _, bound = one.lower().partition(">=")
        if name not in ("torch", "torchvision") and not name.startswith("stopmim["):
            assert f"{pins.pop(name)}.".startswith(f"{bound}."), one
    assert pins.keys() == {"torch", "torchvision"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of this checkout."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(".venv", ".git", "*.egg-info", "build", "__pycache__")
    own = {"runs", "vendor"}  # of whoever works here; src/stopmim has a folder runs too
    shutil.copytree(
        ROOT,
        folder / "source",
        ignore=lambda at, names: ignored(at, names) | (own if Path(at) == ROOT else set()),
    )
    code = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "source", check=True, capture_output=True
    )
    return folder


@pytest.mark.slow
def test_the_archives_have_all_there_is(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "src" / "stopmim").rglob("*.*") if path.suffix != ".pyc"]
    data = {str(path.relative_to(ROOT / "src")) for path in files if path.suffix != ".py"}
    assert {"stopmim/py.typed", "stopmim/config/presets.yaml", "stopmim/base/page.css"} <= data
    assert data <= inside
    assert not any(name.startswith(("tests", "examples")) for name in inside)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "LICENSE",
        "CHANGELOG.md",
        "constraints.txt",
        "constraints-lowest.txt",
        "mkdocs.yml",
        "Dockerfile",
        ".dockerignore",
        ".ci/docs.py",
        "docs/theme/iframe-worker.js",
        "notebooks/photos.ipynb",
        "benchmarks/loader_x86-64_2026-11-15.md",
        "docs/train.md",
        "tests/golden/README.md",
    }
    assert wanted <= names
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "src" / "stopmim").rglob("*.py")}
    assert ours <= names
    assert {name.removeprefix("src/") for name in ours} <= inside


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Dependencies are lent by the environment of the tests; our package comes from the wheel."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    lender = Path(pytest.__file__).parents[1]
    (site / "lent.pth").write_text(f"{lender}\n")  # its editable installs are not followed
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv"), "install"]
    command += ["--no-deps", "--no-index", "--quiet", "--ignore-installed", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    stop = str(tmp_path / "venv" / "bin" / "stopmim")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
        )
        return done.stdout

    python = str(tmp_path / "venv" / "bin" / "python")
    where = run(python, "-c", "import stopmim; print(stopmim.__file__)")
    assert where.startswith(str(site))
    assert run(stop, "--version").split() == ["stopmim", stopmim.__version__]
    tiny = ["--preset", "tiny_cpu", "--optim.epochs", "1", "--optim.batch-size", "8"]
    run(stop, "pretrain", "scenes:16:48", "--out", "run", *tiny, "--optim.warmup-epochs", "0")
    assert "stopmim run" in run(stop, "inspect", "run")
    run(stop, "export", "run", "--to", "timm", "--out", "exported")
    run(
        stop, "features", "scenes:4:48", "--encoder", "exported/model.safetensors", "--out", "f.npz"
    )
    assert (tmp_path / "f.npz").stat().st_size > 1000
