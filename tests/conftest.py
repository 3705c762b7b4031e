"""One thread per test process: pytest-xdist already uses every core, and equal sums need it."""

import functools
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes
os.environ["SLURM_CPUS_PER_TASK"] = "1"  # one process reads images unless a test wants more
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command line sets it

import pytest
import torch
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from stopmim.base import console

torch.set_num_threads(1)
gc.disable()  # until all tests are imported: it would take a third of that time
# A shell starts jobs in the background with Ctrl-C ignored, as would be all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Has torch, wandb and Chromium leave their temporary files in a folder that is removed."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's stay
    os.environ["TMPDIR"] = folder = tempfile.mkdtemp(prefix="stopmim-")
    os.chmod(folder, 0o755)  # some tests read as nobody
    tempfile.tempdir = None  # so that it is chosen anew
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives tests of files that share something costly to one process, and all others singly.

    Marks of groups would do, but pytest 9.2 hides them from pytest-xdist 3.8.
    """

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(self.config.rootpath / nodeid.partition("::")[0]) or nodeid


@functools.cache
def shared_by(file: Path) -> str:
    """A name for what tests of `file` share: libraries that take seconds to import, or a run."""
    text = file.read_text(encoding="utf-8")
    if re.search(r"\b(timm|transformers|torchvision): (Any|None)\b", text):
        return "libraries"
    return str(file) if 'scope="module"' in text else ""


@pytest.hookimpl(optionalhook=True)  # for `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    return Together(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays: to look through all of it for garbage takes seconds."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_kept_at_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["STOPMIM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _a_slow_machine_says_no_more() -> None:
    """Signs of life come after two seconds, which a busy machine may take for anything."""
    console.QUIET = 3600.0


@pytest.fixture(scope="session")
def timm(torchvision: None) -> Any:
    import timm

    return timm


@pytest.fixture(scope="session")
def transformers(torchvision: None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    return transformers


@pytest.fixture(scope="session")
def torchvision() -> None:
    """torchvision, which timm and transformers need, and whose wheel for Linux is a CUDA build.

    Beside a CPU build of torch its import fails for want of two operators (pytorch/vision#9085).
    Nobody calls them: it is enough to declare them. Where they exist that would be an error.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
        for op in ("nms", "qnms"):
            schema = f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            _DECLARED[0].define(schema)


_DECLARED: list[torch.library.Library] = []  # they last as long as this does
