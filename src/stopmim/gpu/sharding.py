"""Sharded tensors (FSDP2): each rank holds a piece."""

from typing import Any, cast

from torch import Tensor


def whole(x: Tensor) -> Tensor:
    """The full tensor; if `x` is sharded, every rank must call this."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(x: Tensor, other: Tensor) -> Tensor:
    """`x`, sharded as `other` is."""
    if not hasattr(other, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh = cast(Any, other).device_mesh
    return distribute_tensor(x.to(other.device), mesh, other.placements, src_data_rank=None)
