"""BatchNorm of all ranks' samples on a GPU by the kernels of torch's `SyncBatchNorm`, without host waits.

See torch/nn/modules/_functions.py and aten/src/ATen/native/cuda/Normalization.cuh. Per channel tensors are (C,), images
(N, C) or (N, C, …), x and dy in the same dense order of memory. `scale` is 1 / √(var + eps).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..world.world import World

NO_SAMPLE = 1e-30
"""Count of a rank without a sample: torch's kernel divides by the count so far, and adds counts as integers."""


def dense(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return x without gaps in memory, ordered like `like`. The kernels misread gaps."""
    like = x if like is None else like
    orders = torch.channels_last, torch.channels_last_3d
    matches = (order for order in orders if like.is_contiguous(memory_format=order))
    return x.contiguous(memory_format=next(matches, torch.contiguous_format))


def statistics(
    world: World,
    x: Tensor,
    count: int,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return mean, scale, counts (ranks,), and the unbiased variance unless the kernel has tracked it (*collective*).

    For a single value per channel, the running variance becomes NaN: an error would make the host wait.
    """
    channels = x.shape[1]
    if count:
        mean, scale = torch.batch_norm_stats(x, eps)
    else:
        mean = torch.zeros(channels, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        scale = torch.ones_like(mean)
    # `full` fills on the device; a tensor made from a number would make the host wait for a copy.
    row = torch.cat([mean, scale, mean.new_full((1,), count or NO_SAMPLE)])
    rows, means, scales, counts = rows_of(world.group_size, channels, row.dtype, row.device)
    world.gather_into(rows, row)
    unbiased = None
    if running_mean is None or momentum is None or running_mean.dtype != row.dtype:
        running_mean, unbiased = mean.new_zeros(2, channels).unbind()
        running_var, momentum = unbiased, 1.0
    mean, scale = torch.batch_norm_gather_stats_with_counts(
        row, means, scales, running_mean, running_var, momentum, eps, counts
    )
    return mean, scale, counts.int(), unbiased


@lru_cache(256)
def rows_of(ranks: int, channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return a buffer for all ranks' rows, with views of means, scales and counts.

    Layers share it: the next exchange on a stream begins when the kernel has read the last one.
    """
    with torch.inference_mode(False):  # an inference tensor, made in an evaluation, is read-only in training
        rows = torch.empty(ranks * (2 * channels + 1), dtype=dtype, device=device)
        means, scales, counts = torch.split(rows.view(ranks, -1), [channels, channels, 1], 1)
        return rows, means, scales, counts.view(-1)


def normalise(x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) · scale · weight + bias."""
    return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps) if x.numel() else torch.empty_like(x)


def sums(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Return Σdy and Σdy·(x - mean) per channel, and the gradients of weight and bias. x has a sample."""
    has_weight = weight is not None
    return torch.batch_norm_backward_reduce(dy, x, mean, scale, weight, True, has_weight, has_weight)


def summed(world: World, total: Tensor, dot: Tensor) -> Tensor:
    """Return the sums over all ranks: (2·C,) (*collective*)."""
    return world.sum_(torch.cat([total, dot]))


def input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, statistics: Sequence[Tensor], eps: float, sums: Tensor
) -> Tensor:
    """Return the input's gradient, with `sums` as `summed` returns them."""
    mean, scale, counts = statistics
    weight = None if weight is None else weight.to(mean.dtype)
    total, dot = torch.split(sums, len(mean))
    return torch.batch_norm_backward_elemt(dy, x, mean, scale, weight, total, dot, counts)
