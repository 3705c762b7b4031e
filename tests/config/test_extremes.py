"""Any config is refused in a line, or trains: no crash, no internal error, no broken model."""

import json
import os
import random
import re
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which an optimizer imports, in more time than a run takes

from limits import limit_memory
from stopmim import pretrain
from stopmim.base.errors import CheckpointError, ResourceError, UserError
from stopmim.base.memory import is_out_of_memory
from stopmim.base.sandbox import read_tree
from stopmim.cli import main
from stopmim.config.schema import Config, flatten, override, type_of
from tiny import NoiseImages, tiny

KEYS = dict(flatten(Config().model_dump(mode="json")))
# Those of a machine or a file, and of images that are not these.
LEFT_OUT = {"init", "runtime.device", "runtime.compile", "runtime.mirror"}
WHOLE = [*range(-1, 9), 10, 12, 16, 20, 24, 32, 64, 100, 1024, 10**5, 10**6, 2**31, 2**63, 2**100]
FRACTIONS = [5e-324, 1e-45, 1e-20, 1e-8, 1e-3, 0.1, 0.3, 0.5, 0.999, 1.0, 1.5, 1e3, 1e38, 1.7e308]
ARCHS = ["vit_micro1", "vit_micro4", "vit_micro6", "vit_micro24", f"vit_micro{10**30}"]
MEMORY, SECONDS = 3 << 30, 60  # for one config


def extreme(key: str, rng: random.Random) -> Any:
    kind = str(type_of(key))
    choices = re.findall(r"'(\w+)'", kind)
    if key == "arch":
        return rng.choice(ARCHS)
    if "tuple" in kind:
        return [rng.choice([*WHOLE, *FRACTIONS]) for _ in range(2)]
    if isinstance(KEYS[key], bool):
        return rng.choice([True, False])
    if choices:
        return rng.choice(choices)
    if "str" in kind:
        return KEYS[key]
    return rng.choice([*WHOLE, *FRACTIONS, None])


def outcome(changes: dict[str, Any], out: Path) -> str:
    """What becomes of two updates: "trained", the exit code, or what went wrong."""
    try:
        run = pretrain(NoiseImages(), out, override(tiny(), changes), stop_at=2)
    except UserError as error:
        return f"exit code {error.exit_code}"
    except Exception as error:
        return "exit code 7" if is_out_of_memory(error) else traceback.format_exc()
    finite = all(x.isfinite().all() for x in run.model().state_dict().values())
    return "trained" if finite else "a model that is not finite"


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 1500), marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_any_config_is_refused_or_trains(seeds: range, tmp_path: Path) -> None:
    keys = [key for key in KEYS if key not in LEFT_OUT and not key.startswith("data.")]
    notes, trained = tmp_path / "notes", 0
    for first in range(seeds.start, seeds.stop, 30):  # in a fork each, for a crash is one of ours
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            limit_memory(MEMORY)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for seed in range(first, min(first + 30, seeds.stop)):
                rng = random.Random(seed)
                changes = {k: extreme(k, rng) for k in rng.sample(keys, rng.choice([1, 1, 2, 4]))}
                with notes.open("a") as file:
                    file.write(f"{json.dumps(changes)}: ")
                    file.flush()
                    signal.alarm(SECONDS)
                    file.write(f"{outcome(changes, tmp_path / str(seed))!r}\n")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        lines = notes.read_text().splitlines()
        assert status == 0, f"killed by {status}: {lines[-1]}"
        wrong = [line for line in lines if not re.search(r"'(exit code [2367]|trained)'$", line)]
        assert not wrong, "\n".join(wrong)
        trained = sum("'trained'" in line for line in lines)
    assert trained > len(seeds) / 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--optim.betas", "0.9", "1.0"], "optim.betas.1: input should be less than 1"),
        (["--runtime.threads", "100000"], "runtime.threads: input should be less than or equal to"),
        (["--seed", "1" * 5000], "--seed: a number of more than 4,300 digits"),
        (["--seed", str(2**64)], "seed: input should be less than"),
        (["--predictor.depth", "300000"], "predictor.depth: input should be less than or equal"),
        (
            ["--arch", "vit_micro1", "--image_size", "1024"],
            "1024 patches of 1 pixels along an edge",
        ),
        (["--optim.lr", "1e39"], "optim.lr: input should be less than or equal to 1000"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_what_crashed_is_exit_code_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["pretrain", "scenes:16:24", "--preset", "tiny_cpu", "--out", out, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_number_of_5000_digits_from_python_is_a_user_error() -> None:
    with pytest.raises(UserError, match="a number of more than 4,300 digits"):
        override(Config(), {"seed": 10**5000})


def test_weights_that_do_not_fit_into_memory_are_not_called_damaged(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(16 << 20)}, tmp_path / "x.safetensors")
    child = os.fork()
    if not child:
        code = 1
        try:
            limit_memory(16 << 20)
            read_tree(tmp_path / "x.safetensors")
        except (ResourceError, CheckpointError) as error:
            code = error.exit_code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
