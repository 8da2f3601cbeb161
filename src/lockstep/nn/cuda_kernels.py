"""What BatchNorm computes on a GPU, with torch's own kernels: none of them makes the host wait.

Per channel tensors are (C,), images (N, C) or (N, C, …), x and dy in the same dense order of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..world.world import World

_DENSE = (torch.channels_last, torch.channels_last_3d)


def dense(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return x without gaps in memory, in the order of `like` (by default its own): else the kernels misread it."""
    like = x if like is None else like
    order = next((each for each in _DENSE if like.is_contiguous(memory_format=each)), torch.contiguous_format)
    return x.contiguous(memory_format=order)


def exchanged(world: World, mean: Tensor, var: Tensor, count: int) -> Tensor:
    """Return every rank's statistics as one row of float64: (ranks, 2·C + 1) (*collective*)."""
    # `full` fills on the device; a tensor made of a number would be copied from the host, which waits for that.
    counted = torch.full((1,), count, dtype=torch.float64, device=mean.device)
    return world.stack(torch.cat([mean.double(), var.double(), counted]))


def summed(world: World, dot: Tensor, total: Tensor) -> Tensor:
    """Return the sums over all ranks: (2, C), float64 (*collective*)."""
    return world.sum_(torch.stack([dot.double(), total.double()]))


def tensors(dtype: torch.dtype, computed: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors (C,), or the rows of one, as float64 where `dtype` is that, else as float32."""
    return [each.to(torch.float64 if dtype == torch.float64 else torch.float32) for each in computed]


def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and, in float64, biased variance per channel."""
    mean, invstd = torch.batch_norm_stats(x, eps)
    return mean, invstd.double().square_().reciprocal_().sub_(eps)


def normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / √(var + eps) · weight + bias."""
    return functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def sums(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ(dy·x̂) and Σdy per channel, x̂ the normalised x."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    invstd = _invstd(var, eps)
    total, dot, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, False, False)
    return dot * invstd, total


def input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, means: Any
) -> Tensor:
    """Return w/s · (dy - total - x̂ · dot), s the standard deviation; `means` (2, C) are all ranks' of dot and total."""
    if x.numel() == 0:
        return torch.empty_like(x)
    invstd = _invstd(var, eps)
    dot, total = tensors(var.dtype, means)
    # The kernel takes sums and counts: the means are sums of one. It wants Σdy·(x - mean), hence the division.
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, total, dot / invstd, one)


def _invstd(var: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(var.double() + eps).to(var.dtype)
