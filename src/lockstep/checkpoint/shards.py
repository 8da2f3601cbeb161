"""Tensors that are divided among the ranks (torch's DTensor), and whole ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_shard(tensor: Tensor) -> bool:
    """Return whether this rank has a shard of the tensor."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, or the tensor itself, detached; it shares the memory."""
    detached: Any = tensor.detach()
    part: Tensor = detached.to_local() if is_shard(tensor) else detached
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached (*collective* for a shard)."""
    detached: Any = tensor.detach()
    gathered: Tensor = detached.full_tensor() if is_shard(tensor) else detached
    return gathered


def shard_as(parameter: Any, value: Any) -> Any:
    """Return this rank's shard of a whole tensor of a divided parameter's shape; any other value as it is."""
    if not is_shard(parameter) or not isinstance(value, Tensor) or is_shard(value) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # its import is slow

    # Every rank has the whole tensor: none sends it.
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
