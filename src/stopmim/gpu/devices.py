"""Device, its memory, precision and compilation of a run."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from stopmim.base.errors import UserError
from stopmim.base.memory import Memory, main_memory

P = ParamSpec("P")
R = TypeVar("R")


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Chooses the device of process number `local_rank` on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda, but torch sees no GPU; choose cpu, or leave it out")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise UserError(
            f"process {local_rank + 1} of this machine has no GPU, torch sees {count}; "
            f"use torchrun --nproc-per-node {count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def memory_of(device: torch.device) -> Memory | None:
    """Memory of a GPU, or main memory; None where the system does not report it."""
    return Memory(*torch.cuda.mem_get_info(device)) if device.type == "cuda" else main_memory()


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """Chooses the dtype of autocast; None is float32 throughout."""
    if name == "auto":
        if device.type == "cpu":
            return None
        own = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if own else torch.float16
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled for fixed shapes, one graph per size of target block."""
    # torch gives up a function after 8 graphs; grids finer than 16x16 have more block sizes.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False)
