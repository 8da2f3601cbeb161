"""Numbers, tensors and objects of all ranks, as a loop asks for them. Every rank calls these functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import RequestError
from ..world.world import World

Meet = Callable[..., None]
"""meet(*what): raises where another rank makes another call."""


def summed(value: Any, world: World, meet: Meet, *, counts: bool) -> Any:
    """Return the sum of a number, as float64, or of each element of a tensor; of a mask, the count."""
    is_mask = isinstance(value, Tensor) and value.dtype == torch.bool
    return _reduced(value.long() if is_mask else value, world, meet, world.sum, None if counts else lambda _: 0)


def largest(value: Any, world: World, meet: Meet, *, counts: bool) -> Any:
    """Return the maximum of a number, or of each element of a tensor."""
    return _reduced(value, world, meet, world.max, None if counts else _least)


def _reduced(
    value: Any,
    world: World,
    meet: Meet,
    reduce: Callable[[Tensor], Tensor],
    neutral: Callable[[torch.dtype], float] | None,
) -> Any:
    """Reduce a value over the ranks. `neutral` of its dtype stands for one that does not count."""
    is_tensor = isinstance(value, Tensor)
    own = value.detach() if is_tensor else torch.tensor(value, dtype=torch.float64, device=world.device)
    meet("reduce", own.dtype, tuple(own.shape))
    found = reduce(own if neutral is None else torch.full_like(own, neutral(own.dtype)))
    if is_tensor:
        return found
    number = float(found.item())  # by its value: this rank's 0 may meet another's 0.5
    return int(number) if isinstance(value, int) and number.is_integer() else number


def gathered(value: Any, world: World, meet: Meet, *, counts: bool) -> Any:
    """Return all ranks' rows of a tensor (n, …), all items of their lists, or a list of their other values."""
    if isinstance(value, Tensor):
        own = value if counts else value[:0]
        if world.size == 1:
            return own
        meet("gather", value.dtype, tuple(value.shape[1:]))
        rows: Tensor = _Gathered.apply(own, world)
        return rows
    meet("gather", type(value).__name__)
    try:
        found = world.gather(value if counts or not isinstance(value, list) else [])
    except TypeError as error:
        raise RequestError(
            f"session.gather takes tensors, and lists, dicts, numbers and texts; found {error}."
        ) from error
    return [item for own in found for item in own] if isinstance(value, list) else found


class _Gathered(torch.autograd.Function):
    """Every rank's rows, in rank order; each rank's gradients of them are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World) -> Tensor:
        parts = world.gather_variable_length(own.detach())
        ctx.world, ctx.start = world, sum(map(len, parts[: world.rank]))
        ctx.count = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(gradient)[ctx.start : ctx.start + ctx.count], None


def _least(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
