"""BatchNorm over all ranks, as one process would compute it.

Ordinary BatchNorm takes mean and variance of its rank's samples, so that the model changes with the number of ranks.
Here each rank receives the other ranks' count, mean and variance of each channel, in float64: one all-gather forward.
The gradient of the input needs two sums over the global micro-batch: one exchange backward. With dy the gradient of the
output, x̂ the normalised input, s the standard deviation, w the weight and n the global count of values per channel,

    dx = w/s · (dy - Σdy/n - x̂ · Σ(dy·x̂)/n).

The gradients of weight and bias cover the rank's samples: the strategy reduces them. A rank with an empty share joins
both collectives with zeros. torch's `SyncBatchNorm` refuses a CPU, and on a GPU makes the host wait once per layer, to
find the ranks without a sample. Here the global count stays on the device, so that the host never waits.

The layers keep their identity and class: only their `forward` is replaced (see `attach`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .._torch import BatchNorm
from ..errors import RequestError
from ..world.world import World
from . import cpu_kernels, cuda_kernels
from .attach import Attached, attach

_EAGER: list[Callable[..., Tensor]] = []  # `SyncBatchNorm._synchronised`, excluded from compilation


class SyncBatchNorm:
    """Forward pass of BatchNorm layers over the samples of all ranks of `world`.

    Input and output are (N, C) or (N, C, …); N may differ between ranks and be 0. In training, forward and backward
    pass are *collective*; in evaluation the layer's replaced forward runs. Has no second derivatives.
    """

    stand_in: ClassVar[bool] = False
    """Whether this rank's samples stand in for an empty share: statistics exclude them."""

    weightless: ClassVar[bool | Tensor] = False
    """Whether this rank's loss counts nothing (bool or 0-dim): a mean over nothing may have NaNs as gradients."""

    def __init__(self, world: World) -> None:
        self.world = world

    @classmethod
    def of(cls, norm: BatchNorm, world: World) -> BatchNorm:
        """Make `norm`, the same object, synchronous over `world`, and return it."""
        attach(norm, "forward", cls(world), copies=True)
        return norm

    def __call__(self, forward: partial[Tensor], input: Tensor) -> Tensor:
        """Return the input normalised over the global micro-batch (*collective* in training).

        Raises `ValueError` for another number of channels.
        """
        norm: BatchNorm = forward.args[0]
        if not norm.training:
            return forward(input)
        # torch's kernels do not check the shape, and would read beyond the weights.
        if input.dim() < 2 or input.shape[1] != norm.num_features:
            shapes = f"(N, {norm.num_features}) or (N, {norm.num_features}, …)"
            raise ValueError(f"BatchNorm of {norm.num_features} channels takes {shapes}, found {tuple(input.shape)}")
        if not torch.compiler.is_compiling():
            return self._synchronised(norm, input)
        # Ranks with different shares compile different programs; eager code keeps their collectives in one order.
        if not _EAGER:  # only once a compiler runs: importing it takes as long as torch itself
            _EAGER.append(torch.compiler.disable(SyncBatchNorm._synchronised))  # type: ignore[no-untyped-call]
        y: Tensor = _EAGER[0](self, norm, input)
        return y

    def _synchronised(self, norm: BatchNorm, x: Tensor) -> Tensor:
        if x.is_cuda:
            x = cuda_kernels.dense(x)
        mean, var, unbiased, count = _global_statistics(x.detach(), self.world, norm.eps)
        _track(norm, mean, unbiased)
        y: Tensor = _Normalise.apply(x, norm.weight, norm.bias, mean, var, count, self.world, norm.eps)
        return y


def _track(norm: BatchNorm, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics towards those of a batch; `var` is unbiased."""
    running_mean, running_var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if running_mean is None or running_var is None or batches is None:
        return
    batches.add_(1)
    # Without a momentum the running statistics are the average over all batches so far.
    momentum = 1 / batches.to(running_mean.dtype) if norm.momentum is None else norm.momentum
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(var.to(running_var.dtype), momentum)


@np.errstate(all="ignore")  # a run that diverges is reported by its loss
def _global_statistics(x: Tensor, world: World, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
    """Return mean, biased and unbiased variance (C,), and values per channel of all ranks (*collective*).

    Raises `ValueError` for a single value per channel on CPUs. On GPUs the host would have to wait: there the running
    variance becomes NaN.
    """
    kernels, channels = _kernels(x), x.shape[1]
    count: Any = 0 if SyncBatchNorm.stand_in else x.numel() // channels
    mean, var = kernels.statistics(x, eps) if count else 2 * (torch.zeros(channels, device=x.device),)
    if world.size > 1:
        by_rank = kernels.exchange(world, mean, var, count)
        means, counts = by_rank[:, :channels], by_rank[:, -1:]
        count = counts.sum() if x.is_cuda else int(counts.sum())
        fractions = counts / count
        pooled = (by_rank * fractions).sum(0)
        mean, variance_within = pooled[:channels], pooled[channels:-1]
        # Around the common mean: E[x²] - E[x]² would lose a small variance.
        var = variance_within + ((means - mean) ** 2 * fractions).sum(0)
    if isinstance(count, int) and count <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel in training, found {count} on all ranks")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    moments = mean, var, var * (count / (count - 1))
    if isinstance(mean, Tensor):
        return *(moment.to(dtype) for moment in moments), count
    return *torch.from_numpy(np.array(moments)).to(dtype).unbind(), count  # at once: 4 µs, not 6


def _kernels(x: Tensor) -> ModuleType:
    return cuda_kernels if x.is_cuda else cpu_kernels


class _Normalise(torch.autograd.Function):
    """Normalisation with the gradient through the global mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, count: Any, world: World, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.world, ctx.eps = count, world, eps
        ctx.counts = x.numel() > 0 and not SyncBatchNorm.stand_in
        y: Tensor = _kernels(x).normalise(x, mean, var, weight, bias, eps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("synchronised BatchNorm cannot be differentiated twice; use --batchnorm local")
        x, weight, mean, var = ctx.saved_tensors
        if x.is_cuda:
            dy = cuda_kernels.dense(dy, like=x)
        if SyncBatchNorm.weightless is not False:  # else this rank's NaNs would be in all ranks' gradients
            dy = dy.masked_fill(~dy.isfinite() & SyncBatchNorm.weightless, 0)
        kernels, eps = _kernels(x), ctx.eps
        if ctx.counts:
            dot, total = kernels.sums(dy, x, weight, mean, var, eps)
        else:  # an empty share: torch's CPU kernel would divide by 0 samples (SIGFPE)
            dot, total = torch.zeros_like(mean), torch.zeros_like(mean)
        dx = None
        if ctx.needs_input_grad[0]:
            means = kernels.summed(ctx.world, dot, total) / ctx.count
            dx = kernels.input_gradient(dy, x, weight, mean, var, eps, means) if ctx.counts else torch.zeros_like(x)
        return dx, dot if ctx.needs_input_grad[1] else None, total if ctx.needs_input_grad[2] else None, *[None] * 5


@contextmanager
def without_weight(weightless: bool | Tensor) -> Iterator[None]:
    """Run a backward pass whose loss may count nothing; see `SyncBatchNorm.weightless`."""
    if weightless is False:
        yield
        return
    SyncBatchNorm.weightless = weightless
    try:
        yield
    finally:
        SyncBatchNorm.weightless = False


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convert(model: nn.Module, world: World) -> nn.Module:
    """Make every BatchNorm of `model` synchronous over `world`; return `model`.

    A world of one rank changes nothing. Layers keep their identity and class; torch's `SyncBatchNorm` layers change
    too. Raises `RequestError` for subclasses, and for layers with a process group or a replaced `forward`, whose
    behaviour would be lost.
    """
    if world.size == 1:
        return model
    plain = {name: norm for name, norm in _norms(model) if synchronous(norm) is None}
    for name, norm in plain.items():
        if type(norm) not in _KINDS or getattr(norm, "process_group", None) is not None or "forward" in vars(norm):
            raise RequestError(
                f"Layer {name!r} is a {type(norm).__name__}, a custom BatchNorm that cannot be made synchronous; use "
                f"--batchnorm local, or nn.BatchNorm in the model."
            )
    for norm in plain.values():
        SyncBatchNorm.of(norm, world)
    return model


def restore(model: nn.Module) -> None:
    """Restore the forward of all BatchNorms of `model`."""
    for _, norm in _norms(model):
        forward = vars(norm).get("forward")
        if isinstance(forward, Attached) and isinstance(forward.wrapper, SyncBatchNorm):
            forward.remove()


def synchronous(module: nn.Module) -> SyncBatchNorm | None:
    """Return the `SyncBatchNorm` of a layer that `convert` has changed, or None."""
    forward = vars(module).get("forward")
    wrapper = forward.wrapper if isinstance(forward, Attached) else None
    return wrapper if isinstance(wrapper, SyncBatchNorm) else None


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether `model` has a BatchNorm."""
    return any(_norms(model))


def untracked(model: nn.Module) -> list[str]:
    """Return the names of BatchNorm layers that keep no running statistics."""
    return [name for name, norm in _norms(model) if norm.running_mean is None]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the BatchNorm layers' running statistics by name."""
    return {key: buffer for name, norm in _norms(model) for key, buffer in norm.named_buffers(name, recurse=False)}


def _norms(model: nn.Module) -> Iterator[tuple[str, BatchNorm]]:
    """Yield the BatchNorm layers with their names, each once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BatchNorm))
