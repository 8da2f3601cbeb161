"""Sums, maxima and gathered values over all ranks, for a training loop. Every function is *collective*."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.shards import full_tensor, is_shard
from ..errors import RequestError
from ..world.world import World

Meet = Callable[..., None]
"""meet(*details): raise `RunError` if another rank makes a different call."""


def sum_values(value: Any, world: World, meet: Meet, *, counts: bool) -> Any:
    """Return the sum of a number, as float64, or of each element of a tensor; a mask's elements are counted."""
    is_mask = isinstance(value, Tensor) and value.dtype == torch.bool
    return _reduce(value.long() if is_mask else value, world, meet, world.sum, None if counts else lambda _: 0)


def max_values(value: Any, world: World, meet: Meet, *, counts: bool) -> Any:
    """Return the maximum of a number, or of each element of a tensor."""
    return _reduce(value, world, meet, world.max, None if counts else _least)


def _reduce(
    value: Any,
    world: World,
    meet: Meet,
    reduce: Callable[[Tensor], Tensor],
    neutral: Callable[[torch.dtype], float] | None,
) -> Any:
    """Reduce a value over the ranks. `neutral(dtype)` replaces a value that does not count."""
    if is_tensor := isinstance(value, Tensor):
        value = full_tensor(value)
    if not is_tensor and not isinstance(value, int | float | np.number):
        raise RequestError(f"The collectives of a session take numbers and tensors; found a {type(value).__name__}.")
    tensor = value.detach() if is_tensor else torch.tensor(value, dtype=torch.float64, device=world.device)
    meet(reduce.__name__, tensor.dtype, tuple(tensor.shape))
    result = reduce(tensor if neutral is None else torch.full_like(tensor, neutral(tensor.dtype)))
    if is_tensor:
        return result
    number = float(result.item())  # its value decides the type: this rank's 0 may be added to another's 0.5
    return int(number) if isinstance(value, int) and number.is_integer() else number


def gather_values(value: Any, world: World, meet: Meet, *, counts: bool) -> Any:
    """Return all ranks' rows of a tensor (n, …), all items of their lists, or a list of their other values."""
    if isinstance(value, Tensor):
        value = full_tensor(value) if is_shard(value) else value
        local_rows = value if counts else value[:0]
        if world.size == 1:
            return local_rows
        meet("gather", value.dtype, tuple(value.shape[1:]))
        rows: Tensor = _Gather.apply(local_rows, world)
        return rows
    meet("gather", type(value).__name__)
    try:
        by_rank = world.gather(value if counts or not isinstance(value, list) else [])
    except TypeError as error:
        raise RequestError(
            f"session.gather takes tensors, and lists, dicts, numbers and texts; found {error}."
        ) from error
    return [item for items in by_rank for item in items] if isinstance(value, list) else by_rank


class _Gather(torch.autograd.Function):
    """Gather of all ranks' rows (n, …) in rank order. Its gradient sums those of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        parts = world.gather_variable_length(rows.detach())
        ctx.world, ctx.start = world, sum(map(len, parts[: world.rank]))
        ctx.count = len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(gradient)[ctx.start : ctx.start + ctx.count], None


GATHER = "_GatherBackward"
"""Name of a gather's node in the graph of a loss."""


def _least(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
