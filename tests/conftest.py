"""One thread per test process: pytest-xdist already uses every core, and equal sums need it."""

import gc
import os
import signal
import sys
import warnings
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in child processes
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command line sets it

import pytest
import torch

from stopmim.base import console

torch.set_num_threads(1)
# A shell starts jobs in the background with Ctrl-C ignored, as would be all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of libraries that take ten seconds to import come first, and to one process."""
    slow = {"timm", "transformers", "torchvision"}
    items.sort(key=lambda item: slow.isdisjoint(getattr(item, "fixturenames", ())))
    for item in items:
        if not slow.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("libraries"))


def pytest_collection_finish() -> None:
    """What was imported stays: to look through all of it for garbage takes seconds."""
    gc.freeze()


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
