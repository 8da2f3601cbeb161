"""BatchNorm on a GPU by torch's kernels, without host waits.

Per channel tensors are (C,), images (N, C) or (N, C, …), x and dy in the same dense order of memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..world.world import World


def dense(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return x without gaps in memory, ordered like `like`. The kernels misread gaps."""
    like = x if like is None else like
    orders = torch.channels_last, torch.channels_last_3d
    matches = (order for order in orders if like.is_contiguous(memory_format=order))
    return x.contiguous(memory_format=next(matches, torch.contiguous_format))


def exchange(world: World, mean: Tensor, var: Tensor, count: int) -> Tensor:
    """Return every rank's statistics as a row of float64 (*collective*)."""
    # `full` fills on the device; a tensor made from a number would make the host wait for a copy.
    counts = torch.full((1,), count, dtype=torch.float64, device=mean.device)
    return world.stack(torch.cat([mean.double(), var.double(), counts]))


def summed(world: World, dot: Tensor, total: Tensor) -> Tensor:
    """Return the sums over all ranks: (2·C,), float64 (*collective*)."""
    return world.sum_(torch.cat([dot.double(), total.double()]))


def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and, in float64, biased variance per channel."""
    mean, invstd = torch.batch_norm_stats(x, eps)
    return mean, invstd.double().square_().reciprocal_().sub_(eps)


def normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / √(var + eps) · weight + bias."""
    return functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def sums(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ(dy·x̂) and Σdy per channel. x̂ is the normalised x, with at least one sample."""
    invstd = _invstd(var, eps)
    total, dot, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, False, False)
    return dot * invstd, total


def input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, means: Tensor
) -> Tensor:
    """Return the input's gradient, w/s · (dy - total - x̂ · dot). `means` (2·C,) are all ranks' dot and total."""
    invstd = _invstd(var, eps)
    dot, total = means.to(var.dtype).view(2, -1).unbind()
    # The kernel takes sums and counts: means are sums with a count of 1. It takes Σdy·(x - mean), hence the division.
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, total, dot / invstd, one)


def _invstd(var: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(var.double() + eps).to(var.dtype)
