"""BatchNorm of all ranks' samples on a CPU, by torch's kernels and the exchange of NumPy arrays in float64.

Per channel tensors are (C,), images (N, C) or (N, C, …).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..world.world import World


@np.errstate(all="ignore")  # a run that diverges is reported by its loss
def statistics(
    world: World,
    x: Tensor,
    count: int,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean, biased variance, counts (ranks,), and unbiased variance of all ranks' samples (*collective*).

    Raises `ValueError` for a single value per channel.
    """
    channels = x.shape[1]
    mean, var = _statistics(x, eps) if count else 2 * (torch.zeros(channels),)
    # Arrays: NumPy is faster for many operations on few numbers.
    by_rank = world.gather_array(mean.numpy(), var.numpy(), np.array([count]))
    means, counts = by_rank[:, :channels], by_rank[:, -1:]
    total = int(counts.sum())
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel in training, found {total} on all ranks")
    moments = by_rank[0, :channels], by_rank[0, channels:-1]
    if len(counts) > 1:
        fractions = counts / total
        pooled = (by_rank * fractions).sum(0)
        # Around the common mean: E[x²] - E[x]² would lose a small variance.
        moments = pooled[:channels], pooled[channels:-1] + ((means - pooled[:channels]) ** 2 * fractions).sum(0)
    rows = np.array([*moments, moments[1] * (total / (total - 1))])
    dtype = torch.promote_types(x.dtype, torch.float32)
    mean, var, unbiased = torch.from_numpy(rows).to(dtype).unbind()  # at once: 4 µs, not 6
    return mean, var, torch.from_numpy(counts[:, 0].astype(np.int32)), unbiased


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # Momentum 0 leaves the buffer unchanged: its dtype alone decides in which the statistics of bf16 are computed.
    unused = None if x.dtype in (torch.float32, torch.float64) else torch.zeros(x.shape[1])
    return torch.batch_norm_update_stats(x, unused, unused, 0.0)


def normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / √(var + eps) · weight + bias."""
    scale, _ = _scale(var, weight, eps)
    moved = mean * scale
    return _affine(x, scale, moved.neg_() if bias is None else bias - moved)


@np.errstate(all="ignore")
def gradients(
    world: World,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    counts: Tensor,
    eps: float,
    *,
    has_samples: bool,
    exchanges: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, weight and bias (*collective* if `exchanges`, else the first is None)."""
    if has_samples:
        # Σ(dy·x̂) and Σdy are the gradients of weight and bias for fixed statistics.
        _, dot, total = torch.ops.aten.native_batch_norm_backward.default(
            dy, x, None, mean, var, None, None, False, eps, [False, True, True]
        )
    else:  # torch's kernel would divide by 0 samples (SIGFPE)
        dot, total = torch.zeros_like(mean), torch.zeros_like(mean)
    if not exchanges:
        return None, dot, total
    sums = world.gather_array(dot.numpy(), total.numpy()).sum(0)
    if not has_samples:
        return torch.zeros_like(x), dot, total
    return _input_gradient(dy, x, weight, mean, var, eps, sums / int(counts.sum())), dot, total


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, means: Any
) -> Tensor:
    """Return w/s · (dy - total - x̂ · dot). `means` (2·C,) are all ranks' dot and total."""
    scale, invstd = _scale(var, weight, eps)
    dot, total = torch.as_tensor(-means, dtype=var.dtype).view(2, -1).unbind()
    slope = dot.mul_(scale).mul_(invstd)
    total.mul_(scale)
    moved = slope * mean
    if x.dtype != scale.dtype:
        # Each constant with its variable: the constants nearly cancel, and bfloat16 rounds the intermediate result.
        return _affine(x, slope, moved.neg_()).add_(_affine(dy, scale, total))
    dx = _affine(x, slope, total - moved)
    return dx.addcmul_(dy, _spread(scale, dx))


def _scale(var: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight / s and 1 / s, s the standard deviation."""
    invstd = (var + eps).rsqrt_()
    return invstd if weight is None else invstd * weight, invstd


def _affine(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return scale · x + offset in x's type and memory order."""
    y = torch.empty_like(x)
    # With channels innermost this takes half the time of the kernel below, otherwise up to four times as long.
    if x.dtype == scale.dtype and x.stride(1) == 1:
        return torch.addcmul(_spread(offset, x), x, _spread(scale, x), out=y)
    # A product of bfloat16 and float32 is 4 to 20 times slower than this kernel for mixed types.
    unused = torch.empty(2, 0, dtype=scale.dtype)
    per_channel = (scale, offset, torch.zeros_like(scale), torch.ones_like(scale))
    torch.ops.aten.native_batch_norm.out(
        x, *per_channel, False, 0.0, 0.0, out=y, save_mean=unused[0], save_invstd=unused[1]
    )
    return y


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """Return values per channel (C,) in a shape that broadcasts to x."""
    return values.view(-1, *[1] * (x.dim() - 2))
