"""BatchNorm over all ranks: each global micro-batch is normalised as one process would normalise it.

Ordinary BatchNorm takes mean and variance of the samples that its own rank holds, so that the model changes with
the number of ranks. Here the ranks add up, per channel, the count, the sum and the sum of squares of their samples:
one all-reduce forward. The gradient of the input needs two more sums over the whole micro-batch: one all-reduce
backward. With dy the gradient of the output, x̂ the normalised input, s the standard deviation, w the weight and n
the global count of values per channel,

    dx = w/s · (dy - Σdy/n - x̂ · Σ(dy·x̂)/n).

The gradients of weight and bias stay those of the rank's own samples, like every other parameter's: the strategy
reduces them. A rank whose share is empty joins both collectives with zeros.

torch's own `SyncBatchNorm` refuses a CPU, and on a GPU the host waits once a layer for it, to find the ranks without
a sample. Here the global count stays on the device, so that nobody waits. The sums travel in float64, so that the
square sum loses nothing of a float32 variance.
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
_DENSE = (torch.channels_last, torch.channels_last_3d)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d over the samples of all ranks of `world`.

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
        if x.is_cuda:
            x = x.contiguous(memory_format=_memory_format(x))  # as its kernels need it
        mean, var, count = _global_statistics(x.detach(), self.world, self.eps)
        self._track(mean, var, count)
        y: Tensor = _Normalise.apply(x, self.weight, self.bias, mean, var, count, self.eps, self.world)
        return y

    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of this global micro-batch; the variance's is the unbiased one."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Without a momentum the running statistics are the plain average over all batches so far.
        momentum = 1.0 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - momentum).add_(mean * momentum)
        self.running_var.mul_(1 - momentum).add_(var * (momentum * count / (count - 1)))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # A process group cannot be copied; a copy of the layer belongs to the same world.
        memo[id(self.world)] = self.world
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


def _global_statistics(x: Tensor, world: World, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return all ranks' mean and biased variance per channel (C,), and values per channel (0-dim) (*collective*).

    On a CPU a single value raises `ValueError`. On a GPU the host would have to wait to know it: the running
    variance becomes NaN there.
    """
    channels = x.shape[1]
    local_count = x.numel() // channels
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if local_count:
        mean, var = _local_statistics(x, eps)
        torch.mul(mean, local_count, out=sums[:channels])
        torch.mul(var + mean * mean, local_count, out=sums[channels:-1])
        sums[-1] = local_count
    sums = world.sum(sums)
    count = sums[-1]
    if not x.is_cuda and count <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel in training, found {count:.0f} in all ranks")
    mean, square = (sums[:-1] / count).chunk(2)
    var = (square - mean * mean).clamp_(min=0)
    dtype = _statistics_dtype(x)
    return mean.to(dtype), var.to(dtype), count


def _local_statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of this rank's `x`, in float64 (C,)."""
    if x.is_cuda:
        mean, invstd = torch.batch_norm_stats(x, eps)
        return mean.double(), invstd.double().square_().reciprocal_().sub_(eps)
    # The buffers are left as they are (momentum 0): they only say in which type to compute the statistics of bf16.
    zeros = torch.zeros(x.shape[1], dtype=_statistics_dtype(x))
    mean, var = torch.batch_norm_update_stats(x, zeros, zeros.clone(), 0.0)
    return mean.double(), var.double()


def _local_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return Σ(dy·x̂) and Σdy of this rank's samples, per channel (C,)."""
    if x.numel() == 0:
        # torch's kernel divides by the number of samples: on an empty batch it kills the process (SIGFPE).
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if x.is_cuda:
        invstd = _invstd(var, eps)
        total, dot, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, False, False)
        return dot * invstd, total
    # The gradients of weight and bias, had the statistics been fixed, are these sums.
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, [False, True, True]
    )
    return dot, total


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float, dot: Tensor, total: Tensor
) -> Tensor:
    """Return w/s · (dy - total - x̂ · dot); `dot` and `total` are the means over all ranks, each (C,)."""
    invstd = _invstd(var, eps)
    if x.is_cuda:
        if x.numel() == 0:
            return torch.empty_like(x)
        # The kernel takes sums and counts: the means are sums of one. It wants Σdy·(x - mean), hence the division.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, total, dot / invstd, one)
    scale = invstd if weight is None else invstd * weight
    # Affine in x̂, so the forward's kernel does it in one pass.
    dx = functional.batch_norm(x, mean, var, -scale * dot, -scale * total, False, 0.0, eps)
    if dx.dtype == scale.dtype:
        return dx.addcmul_(dy, scale.view(-1, *[1] * (x.dim() - 2)))
    # A product of bfloat16 and float32 is 4 to 20 times slower than the kernel that is made for the mixture.
    zero, ones = torch.zeros_like(scale), torch.ones_like(scale)
    return dx.add_(functional.batch_norm(dy, zero, ones, scale, zero, False, 0.0, 0.0))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _invstd(var: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(var.double() + eps).to(var.dtype)


def _memory_format(x: Tensor) -> torch.memory_format:
    """Return the order in which `x` lies in memory without gaps, or the plain one."""
    return next((order for order in _DENSE if x.is_contiguous(memory_format=order)), torch.contiguous_format)


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
        count: Tensor,
        eps: float,
        world: World,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.world = eps, world
        return functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        if x.is_cuda:
            dy = dy.contiguous(memory_format=_memory_format(x))  # one order for both, or the kernels misread one
        dot, total = _local_sums(dy, x, weight, mean, var, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            means = (ctx.world.sum(torch.stack([dot, total]).double()) / count).to(mean.dtype)
            dx = _input_gradient(dy, x, weight, mean, var, ctx.eps, *means)
        return dx, dot if ctx.needs_input_grad[1] else None, total if ctx.needs_input_grad[2] else None, *[None] * 5


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether `model` has a layer whose output depends on the whole batch in training."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def convert(model: nn.Module, world: World) -> nn.Module:
    """Return `model` with every BatchNorm made synchronous over `world`; unchanged where the world has one rank.

    Layers are replaced in place, parameters, buffers, their names and their order stay. torch's `SyncBatchNorm` is
    replaced too, unless it has a process group of its own.

    Raises `RequestError` where a layer is a kind of BatchNorm whose own behaviour the exchange would drop.
    """
    if world.size == 1:
        return model
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and not _replaceable(module):
            raise RequestError(
                f"Layer {name!r} is a {type(module).__name__}, a BatchNorm of its own kind, which cannot be made "
                f"synchronous; use --batchnorm local, or nn.BatchNorm in the model."
            )
    return _replace(model, world, {})


def _replaceable(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm of torch's own that, made synchronous, is no other layer."""
    return type(module) in _PLAIN or (type(module) is nn.SyncBatchNorm and module.process_group is None)


def _replace(module: nn.Module, world: World, made: dict[nn.Module, SyncBatchNorm]) -> nn.Module:
    """Return `module` with its BatchNorms replaced; `made` keeps a layer that is used in two places one layer."""
    if isinstance(module, _BatchNorm) and _replaceable(module):
        if module not in made:
            made[module] = SyncBatchNorm.of(module, world)
        return made[module]
    # Not named_children(), which names a layer that the module holds twice only once.
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _replace(child, world, made))
    return module
