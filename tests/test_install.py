"""How stopmim is installed, as docs/install.md, pyproject.toml and the Dockerfile say it."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OWN = {"test", "docs", "dev"}  # for those who work on stopmim
MODULES = {"scikit-learn": "sklearn", "PyYAML": "yaml", "pillow": "PIL"}  # by another name
BROUGHT = {"triton", "markupsafe", "huggingface_hub"}  # by torch, jinja2, and timm or transformers


def package(requirement: str) -> str:
    return re.split(r"[\[>=]", requirement)[0]


def members(extra: str) -> set[str]:
    """The extras that an extra consists of."""
    found = re.findall(r"stopmim\[(.*?)\]", " ".join(EXTRAS[extra]))
    return {name for names in found for name in names.split(",")}


def test_the_table_of_extras_is_that_of_pyproject() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.M))
    assert list(rows) == list(EXTRAS)
    for extra, text in rows.items():
        named = set(re.findall(r"[\w-]+", text))
        named |= members("all") if "all" in named else set()
        assert {package(one) for one in EXTRAS[extra]} - {"stopmim"} <= named, extra
        if extra != "all":
            assert members(extra) <= named, extra


def test_all_is_every_extra_for_users() -> None:
    groups = members("all") | {name for extra in members("all") for name in members(extra)}
    assert groups == set(EXTRAS) - OWN - {"all"}


def test_a_message_names_an_extra_that_exists() -> None:
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"stopmim\[(\w+)\]", text)) <= set(EXTRAS)


def test_everything_imported_is_installed_by_the_package_or_an_extra() -> None:
    needed = [*PROJECT["dependencies"], *(one for names in EXTRAS.values() for one in names)]
    packages = {package(one) for one in needed}
    known = {MODULES.get(name, name.replace("-", "_")) for name in packages} | BROUGHT
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
            assert tops <= known, path


# ------------------------------------------------------------------------------- the image


class Instruction(NamedTuple):
    word: str
    text: str


def dockerfile() -> list[Instruction]:
    text = (ROOT / "Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line]


def commands(word: str) -> list[list[str]]:
    """The single commands of all instructions of a kind."""
    text = [one.text for one in dockerfile() if one.word == word]
    return [shlex.split(command) for line in text for command in line.split("&&")]


def test_the_dockerfile_has_a_stage_per_device_and_ends_in_a_user_without_rights() -> None:
    words = [one.word for one in dockerfile()]
    assert set(words) <= {
        "ARG",
        "FROM",
        "ENV",
        "WORKDIR",
        "COPY",
        "RUN",
        "USER",
        "ENTRYPOINT",
        "CMD",
    }
    (default,) = [one.text for one in dockerfile() if one.word == "ARG"]
    stages: dict[str, str] = {}
    for source, _, name in commands("FROM"):
        assert source in stages or source == "${DEVICE}" or re.search(r":\d+\.\d+-", source), source
        stages[name] = source
    assert {"cuda", "cpu"} <= stages.keys()
    assert default.removeprefix("DEVICE=") in stages
    assert stages["final"] == "${DEVICE}"
    users = [one.text for one in dockerfile() if one.word == "USER"]
    assert ["useradd", "--uid", "1000", users[-1]] in commands("RUN")
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "RUN")
    python = next(source for source in stages.values() if source.startswith("python:"))
    newest = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert re.findall(r"\d+", python)[:2] >= newest


def test_commands_of_the_dockerfile_leave_nothing_behind_and_are_pinned() -> None:
    environment = [one.text for one in dockerfile() if one.word == "ENV"]
    assert any("PIP_NO_CACHE_DIR=1" in text for text in environment)
    for command in commands("RUN"):
        match command:
            case ["apt-get", "install", *options]:
                assert {"-y", "--no-install-recommends"} <= set(options)
            case ["pip", "install", "-c", "constraints.txt", *_]:
                pass
            case ["apt-get", "update"] | ["rm" | "mkdir" | "useradd" | "chown", *_]:
                pass
            case _:
                pytest.fail(f"no rule for {command}")
    steps = [one.text for one in dockerfile() if "apt-get install" in one.text]
    assert all("rm -rf /var/lib/apt/lists/*" in step for step in steps)
    wanted = [word for command in commands("RUN") for word in command if word.startswith(".[")]
    assert {extra for word in wanted for extra in word[2:-1].split(",")} <= set(EXTRAS)
    (entry,) = [json.loads(one.text) for one in dockerfile() if one.word == "ENTRYPOINT"]
    assert entry == list(PROJECT["scripts"])


def copied() -> list[str]:
    return [source for *sources, _ in commands("COPY") for source in sources]


def test_what_the_dockerfile_copies_is_all_that_docker_is_sent() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(copied())
    assert all((ROOT / name).exists() for name in copied())


@pytest.mark.slow
def test_what_the_dockerfile_copies_is_enough_to_install_it(tmp_path: Path) -> None:
    """As its last pip command does, but with what is installed here in place of a network."""
    for name in copied():
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation"]
    command += ["-c", "constraints.txt", ".[all]"]
    for options in (["--dry-run"], ["--no-deps", "--target", "site"]):  # it fits together, it works
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    code = "import stopmim; print(stopmim.__file__); from stopmim.__main__ import run; run()"
    shown = subprocess.run(
        [sys.executable, "-c", code, "presets"],
        cwd=tmp_path,
        env={"PYTHONPATH": "site", "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith(str(tmp_path / "site"))
    assert "small_images" in shown.stdout
