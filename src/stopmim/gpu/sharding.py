"""Sharded tensors (FSDP2): each rank holds a piece."""

from typing import Any, cast

from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """The full tensor; if `x` is sharded, every rank must call this."""
    return cast(Any, x).full_tensor() if is_sharded(x) else x


def like(x: Tensor, other: Tensor) -> Tensor:
    """`x`, sharded as `other` is."""
    if not hasattr(other, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh = cast(Any, other).device_mesh
    return distribute_tensor(x.to(other.device), mesh, other.placements, src_data_rank=None)
