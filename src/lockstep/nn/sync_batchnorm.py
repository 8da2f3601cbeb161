"""BatchNorm over all ranks: each global micro-batch is normalised as one process would normalise it.

Ordinary BatchNorm takes mean and variance of the samples that its own rank holds, so that the model changes with
the number of ranks. Here the ranks add up, per channel, the count, the sum and the sum of squares of their samples:
one all-reduce forward. The gradient of the input needs two more sums over the whole micro-batch: one all-reduce
backward. With dy the gradient of the output, x̂ the normalised input, s the standard deviation, w the weight and n
the global count of values per channel,

    dx = w/s · (dy - Σdy/n - x̂ · Σ(dy·x̂)/n).

The gradients of weight and bias stay those of the rank's own samples, like every other parameter's: the strategy
reduces them. A rank whose share is empty joins both collectives with zeros.

On a GPU torch's own `SyncBatchNorm` does this; on a CPU that one refuses, and the one here takes its place. The
sums travel in float64, so that the square sum loses nothing of a float32 variance.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import RequestError
from ..world import World

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d over the samples of all ranks of `world`, on a CPU.

    Input and output (N, C) or (N, C, …), N may differ between ranks and be 0. In training `forward` and the
    backward pass are *collective*; in evaluation nothing is communicated.
    """

    world: World

    @classmethod
    def of(cls, norm: _BatchNorm, world: World) -> SyncBatchNorm:
        """Return `norm` made synchronous: the same parameter and buffer objects, hooks and settings."""
        sync = cls.__new__(cls)
        sync.__dict__ = {**norm.__dict__, "world": world}
        return sync

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised with the statistics of the global micro-batch (*collective* in training)."""
        if x.dim() < 2:
            raise ValueError(f"expected (N, C) or (N, C, …), got {x.dim()} dimensions")
        if not self.training:
            batch_statistics = self.running_mean is None
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, batch_statistics, 0.0, self.eps
            )
        statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, var, count = _global_statistics(x.detach(), self.world, statistics_dtype)
        self._track(mean, var, count)
        y: Tensor = _Normalise.apply(x, self.weight, self.bias, mean, var, count, self.eps, self.world)
        return y

    def _track(self, mean: Tensor, var: Tensor, count: float) -> None:
        """Move the running statistics towards those of this global micro-batch; the variance's is the unbiased one."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Without a momentum the running statistics are the plain average over all batches so far.
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        self.running_var.mul_(1 - momentum).add_(var, alpha=momentum * count / (count - 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # A process group cannot be copied; a copy of the layer belongs to the same world.
        memo[id(self.world)] = self.world
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


def _global_statistics(x: Tensor, world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """Return mean and biased variance per channel (C,) of all ranks' `x`, and the values per channel (*collective*)."""
    channels = x.shape[1]
    local_count = x.numel() // channels
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if local_count:
        mean, var = _local_statistics(x, dtype)
        torch.mul(mean, local_count, out=sums[:channels])
        torch.mul(var + mean * mean, local_count, out=sums[channels:-1])
        sums[-1] = local_count
    sums = world.sum(sums)
    count = float(sums[-1])
    if count <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel in training, found {count:.0f} in all ranks")
    mean, square = sums[:-1].div_(count).chunk(2)
    var = (square - mean * mean).clamp_(min=0)
    return mean.to(dtype), var.to(dtype), count


def _local_statistics(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of this rank's `x`, in float64 (C,)."""
    # The buffers are left as they are (momentum 0): they only say in which type to compute the statistics of bf16.
    zeros = torch.zeros(x.shape[1], dtype=dtype)
    mean, var = torch.batch_norm_update_stats(x, zeros, zeros.clone(), 0.0)
    return mean.double(), var.double()


def _local_sums(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ(dy·x̂) and Σdy of this rank's samples, per channel (C,)."""
    if x.numel() == 0:
        # torch's kernel divides by the number of samples: on an empty batch it kills the process (SIGFPE).
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # The gradients of weight and bias, had the statistics been fixed, are these sums.
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, [False, True, True]
    )
    return dot, total


def _input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float, scale: Tensor, dot: Tensor, total: Tensor
) -> Tensor:
    """Return scale · (dy - total - x̂ · dot); `scale` is w/s, `dot` and `total` are the global means, each (C,)."""
    # Affine in x̂, so the forward's kernel does it in one pass.
    dx = functional.batch_norm(x, mean, var, -scale * dot, -scale * total, False, 0.0, eps)
    if dx.dtype == scale.dtype:
        return dx.addcmul_(dy, scale.view(-1, *[1] * (x.dim() - 2)))
    # A product of bfloat16 and float32 is 4 to 20 times slower than the kernel that is made for the mixture.
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    return dx.add_(functional.batch_norm(dy, zero, one, scale, zero, False, 0.0, 0.0))


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / √(var + eps) · weight + bias, with the gradient through the global mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: float,
        eps: float,
        world: World,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.eps, ctx.world = count, eps, world
        return functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        dot, total = _local_sums(dy, x, mean, var, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            means = ctx.world.sum(torch.stack([dot, total]).double()).div_(ctx.count).to(mean.dtype)
            scale = torch.rsqrt(var.double() + ctx.eps).to(mean.dtype)
            scale = scale if weight is None else scale * weight
            dx = _input_gradient(dy, x, mean, var, ctx.eps, scale, *means)
        return dx, dot if ctx.needs_input_grad[1] else None, total if ctx.needs_input_grad[2] else None, *[None] * 5


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether `model` has a layer whose output depends on the whole batch in training."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def convert(model: nn.Module, world: World) -> nn.Module:
    """Return `model` with every BatchNorm made synchronous over `world`; unchanged where the world has one rank.

    Layers are replaced in place, parameters, buffers, their names and their order stay. On a GPU the layers
    become torch's `SyncBatchNorm`, on a CPU the one of this module.

    Raises `RequestError` where a layer is a kind of BatchNorm whose own behaviour the exchange would drop.
    """
    if world.size == 1:
        return model
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in (*_PLAIN, nn.SyncBatchNorm, SyncBatchNorm):
            raise RequestError(
                f"Layer {name!r} is a {type(module).__name__}, a BatchNorm of its own kind, which cannot be made "
                f"synchronous; use --batchnorm local, or nn.BatchNorm in the model."
            )
    if world.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(  # type: ignore[no-untyped-call]
            model, world.group
        )
        return converted
    return _replace(model, world, {})


def _replace(module: nn.Module, world: World, made: dict[nn.Module, SyncBatchNorm]) -> nn.Module:
    """Return `module` with its BatchNorms replaced; `made` keeps a layer that is used in two places one layer."""
    if isinstance(module, _PLAIN):
        if module not in made:
            made[module] = SyncBatchNorm.of(module, world)
        return made[module]
    # Not named_children(), which names a layer that the module holds twice only once.
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _replace(child, world, made))
    return module
