"""BatchNorm over all ranks, as one process would compute it.

Ordinary BatchNorm takes mean and variance of its rank's samples, so that the model changes with the number of ranks.
Here each rank receives the other ranks' count, mean and variance of each channel: one all-gather forward. The gradient
of the input needs two sums over the global micro-batch: one exchange backward. With dy the gradient of the output, x̂
the normalised input, s the standard deviation, w the weight and n the global count of values per channel,

    dx = w/s · (dy - Σdy/n - x̂ · Σ(dy·x̂)/n).

The gradients of weight and bias cover the rank's samples: the strategy reduces them. A rank with an empty share joins
both collectives with a count of 0. torch's `SyncBatchNorm` refuses a CPU, and on a GPU makes the host wait once per
layer, to find the ranks without a sample. Here the counts stay on the device, so that the host never waits.

The layers keep their identity and class: only their `forward` is replaced (see `attach`). Compiled models call the same
functions as operators of torch, `lockstep::batch_norm_…`: the compiler neither looks into them nor changes their order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._torch import BatchNorm
from ..errors import RequestError
from ..world.world import World
from . import cpu_kernels, cuda_kernels
from .attach import Attached, attach

_WORLDS: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()
"""The layers' worlds by key: operators take tensors, numbers and text."""
_FORWARD_ORDER, _BACKWARD_ORDER = torch.zeros(()), torch.zeros(())
"""Arguments that operators with a collective claim to change: compiled code keeps the order of such operators."""


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
        self.world, self.key = world, str(id(world))
        _WORLDS[self.key] = world

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
        x, batches = cuda_kernels.dense(input) if input.is_cuda else input, norm.num_batches_tracked
        if batches is not None:
            batches.add_(1)
        # Eager code calls the functions: torch takes 50 µs for an operator with a gradient.
        is_compiling, settings = torch.compiler.is_compiling(), (norm.eps, SyncBatchNorm.stand_in, self.key)
        statistics, normalise = (_STATISTICS, _NORMALISE) if is_compiling else (_statistics, _Normalise.apply)
        with torch.no_grad():
            moments = statistics(
                x, norm.running_mean, norm.running_var, batches, _FORWARD_ORDER, norm.momentum, *settings
            )
        y: Tensor = normalise(x, norm.weight, norm.bias, moments, _BACKWARD_ORDER, *settings)
        return y


def _kernels(x: Tensor) -> ModuleType:
    return cuda_kernels if x.is_cuda else cpu_kernels


def _statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    order: Tensor,
    momentum: float | None,
    eps: float,
    stands_in: bool,
    world: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kernels' mean, scale and counts; move the running statistics towards those of the batch."""
    count = 0 if stands_in else x.numel() // x.shape[1]
    mean, scale, counts, unbiased = _kernels(x).statistics(
        _WORLDS[world], x, count, eps, running_mean, running_var, momentum
    )
    if unbiased is not None and running_mean is not None and running_var is not None:
        # Without a momentum the running statistics are the average over all batches so far.
        weight: Any = momentum if batches is None or momentum is not None else 1 / batches.to(running_mean.dtype)
        running_mean.lerp_(mean.to(running_mean.dtype), weight)
        running_var.lerp_(unbiased.to(running_var.dtype), weight)
    return mean, scale, counts


def _normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Sequence[Tensor],
    order: Tensor,
    eps: float,
    stands_in: bool,
    world: str,
) -> Tensor:
    """Return the output; `moments` are the results of `_statistics`."""
    y: Tensor = _kernels(x).normalise(x, *moments[:2], weight, bias, eps)
    return y


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    moments: Sequence[Tensor],
    order: Tensor,
    eps: float,
    stands_in: bool,
    world: str,
    exchanges: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty unless `exchanges`), weight and bias (of no use without a weight)."""
    kernels, has_samples = _kernels(x), x.numel() > 0 and not stands_in
    if x.is_cuda:
        dy = cuda_kernels.dense(dy, like=x)
    if SyncBatchNorm.weightless is not False:  # else this rank's NaNs would be in all ranks' gradients
        dy = dy.masked_fill(~dy.isfinite() & SyncBatchNorm.weightless, 0)
    if has_samples:
        *sums, dw, db = kernels.sums(dy, x, weight, *moments[:2], eps)
    else:  # an empty share: torch's CPU kernel would divide by 0 samples (SIGFPE)
        *sums, dw, db = (torch.zeros_like(moments[0]) for _ in range(4))
    summed = kernels.summed(_WORLDS[world], *sums) if exchanges else None
    if summed is not None and has_samples:
        dx = kernels.input_gradient(dy, x, weight, moments, eps, summed)
    else:
        dx = torch.zeros_like(x) if exchanges else x.new_empty(0)
    return (dx, x.new_empty(0), x.new_empty(0)) if weight is None else (dx, dw, db)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _bias, moments, *ctx.arguments = inputs
    ctx.save_for_backward(x, weight, *moments)


def _backward(gradients: Callable[..., tuple[Tensor, ...]], of_moments: Any, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the arguments; those of the moments, `of_moments`, are None in the form asked for."""
    if torch.is_grad_enabled():
        raise RuntimeError("synchronised BatchNorm cannot be differentiated twice; use --batchnorm local")
    (x, weight, *moments), needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
    dx_dw_db = gradients(dy, x, weight, moments, *ctx.arguments, needed[0])
    first = [gradient if is_needed else None for gradient, is_needed in zip(dx_dw_db, needed, strict=True)]
    return *first, of_moments, *[None] * len(ctx.arguments)


class _Normalise(torch.autograd.Function):
    """Normalisation with the gradient through the global mean and variance."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y = _normalise(*inputs)
        _set_up(ctx, inputs, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _backward(_gradients, None, ctx, dy)


def _define(function: Callable[..., Any], like: Callable[..., Any], *changed: str) -> Any:
    """Make an operator of torch from a function, and one that makes the tensors alike; it changes these arguments."""
    name = f"lockstep::batch_norm{function.__name__}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=changed))
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, like)
    return getattr(torch.ops.lockstep, f"batch_norm{function.__name__}").default


def _statistics_like(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return mean, torch.empty_like(mean), x.new_empty(_WORLDS[arguments[-1]].group_size, dtype=torch.int32)


def _gradients_like(
    dy: Tensor, x: Tensor, weight: Tensor | None, moments: Sequence[Tensor], *arguments: Any
) -> tuple[Tensor, ...]:
    parameter = x.new_empty(0) if weight is None else weight if x.is_cuda else moments[0]
    dx = torch.empty_like(x) if arguments[-1] else x.new_empty(0)
    return dx, torch.empty_like(parameter), torch.empty_like(parameter)


_STATISTICS = _define(_statistics, _statistics_like, "running_mean", "running_var", "order")
_NORMALISE = _define(_normalise, lambda x, *_: torch.empty_like(x))
_GRADIENTS = _define(_gradients, _gradients_like, "order")
torch.library.register_autograd(_NORMALISE, partial(_backward, _GRADIENTS, [None] * 3), setup_context=_set_up)


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

    *Collective* on GPUs, where the exchanges have a separate process group: in the gradients' group they would wait
    behind buckets. A world of one rank changes nothing. Layers keep their identity and class; torch's `SyncBatchNorm`
    layers change too. Raises `RequestError` on accelerators other than CUDA, for subclasses, and for layers with a
    process group or a replaced `forward`, whose behaviour would be lost.
    """
    if world.size == 1:
        return model
    if world.device.type not in ("cpu", "cuda"):
        raise RequestError(
            f"Synchronised BatchNorm runs on CPUs and CUDA, and this rank is on {world.device.type}: use --batchnorm "
            "local, or another norm."
        )
    world = world.beside()
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
