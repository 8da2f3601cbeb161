"""The five kernels of torch's `SyncBatchNorm`, which only GPUs have, in plain torch.

As aten/src/ATen/native/cuda/Normalization.cuh computes them: a rank with a count of 0 that comes first gives NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _spread(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


def _sum(x: Tensor) -> Tensor:
    return x.sum([0, *range(2, x.dim())])


def _accumulated(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = _accumulated(x)
    count = x.numel() // x.shape[1]
    mean = _sum(x) / count
    return mean, (_sum((x - _spread(mean, x)) ** 2) / count + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    like: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert counts.dim() == 1
    assert counts.dtype == (like if running_mean is None else running_mean).dtype
    average, var_n, n = torch.zeros_like(means[0]), torch.zeros_like(means[0]), torch.zeros_like(counts[0])
    for mean, invstd, count in zip(means, invstds, counts, strict=True):
        factor = 1 / (n + count)
        var_n = var_n + (invstd**-2 - eps) * count + (average - mean) ** 2 * n * count * factor
        average = n * factor * average + count * factor * mean
        n = (n + count).trunc()  # an integer
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(average, alpha=momentum)
        running_var.mul_(1 - momentum).add_(var_n / (n - 1), alpha=momentum)
    return average, (var_n / n + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    y = (x - _spread(mean, x)) * _spread(invstd if weight is None else invstd * weight, x)
    return (y if bias is None else y + _spread(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, for_x: bool, for_w: bool, for_b: bool
) -> tuple[Any, ...]:
    assert for_x
    assert for_w == for_b == (weight is not None)  # else the kernel reads a weight that is not there
    dy = _accumulated(dy)
    total, dot = _sum(dy), _sum(dy * (x - _spread(mean, x)))
    return total, dot, *((dot * invstd, total.clone()) if for_w else (None, None))


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    total: Tensor,
    dot: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32
    assert weight is None or weight.dtype == mean.dtype
    n = counts.sum()
    dx = dy - _spread(total / n, x) - (x - _spread(mean, x)) * _spread(dot / n * invstd**2, x)
    return (dx * _spread(invstd if weight is None else invstd * weight, x)).to(x.dtype)


KERNELS = {name: kernel for name, kernel in globals().items() if name.startswith("batch_norm_")}
"""The kernels by name, in `torch` and in `torch.ops.aten`."""
