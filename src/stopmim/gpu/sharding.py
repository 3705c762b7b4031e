"""Tensors of which every rank has a piece (FSDP2)."""

from typing import Any, cast

from torch import Tensor


def whole(x: Tensor) -> Tensor:
    """`x`, put together where every rank has a piece of it; then all of them must ask."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(x: Tensor, other: Tensor) -> Tensor:
    """`x`, cut into pieces as `other` is."""
    if not hasattr(other, "placements"):
        return x
    from torch.distributed.tensor import distribute_tensor

    pieces = cast(Any, other)
    x = x.to(other.device)
    return distribute_tensor(x, pieces.device_mesh, pieces.placements, src_data_rank=None)
