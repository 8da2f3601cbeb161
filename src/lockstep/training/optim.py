"""torch's optimizers; the learning rate as a pure function of the step.

torch's schedulers hold state that has to be saved, and each process steps its own. Here the rate at step s follows from
the config and s alone, so that a resumed run, or one on another world, has the same one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .. import _torch
from ..checkpoint.state import matching, set_buffer
from ..config.schema import OptimConfig, RunConfig
from ..errors import RequestError

_SCALE = "lr_scale"  # a parameter group's own factor on the learning rate, among its settings
Schedule = Callable[[int], float]
"""The learning rate, or the factor on its peak, at an optimizer step, counted from 0."""


class Average:
    """Exponential moving average of a model's weights. Starts at their initial values; buffers are the model's own."""

    # torch's AveragedModel asks its counter at each update whether it is the first: the host would wait for the GPU.
    def __init__(self, model: nn.Module, decay: float) -> None:
        # A process group, as torch's SyncBatchNorm may hold one, cannot be copied: copies share it.
        groups = (getattr(module, "process_group", None) for module in model.modules())
        self.module = copy.deepcopy(model, {id(group): group for group in groups}).requires_grad_(False)
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._ours: list[Tensor] = list(self.module.parameters())
        self._theirs: list[Tensor] = list(model.parameters())
        self._model = model

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the model's weights after a step."""
        self._average(self._ours, self._theirs, 0)
        # By name: a model's forward may assign a buffer anew, in another shape, or register one.
        averaged, buffers = (dict(model.named_buffers()) for model in (self.module, self._model))
        for name, buffer in buffers.items():
            if name not in averaged or averaged[name].shape != buffer.shape:
                averaged[name] = torch.empty_like(buffer)
                set_buffer(self.module, name, averaged[name])
        if buffers:
            _torch.foreach_copy_([averaged[name] for name in buffers], [*buffers.values()])


def build(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """Return the configured optimizers over the parameters of `model` that train.

    torch's Muon is defined for matrices alone: AdamW has the rest, and one --lr serves both.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise RequestError("The model has no parameter that trains (requires_grad); there is nothing to optimize.")
    factors = {each: factor for _, factor, reached in scaled(model, config) for each in reached}

    def grouped(held: list[nn.Parameter]) -> list[dict[str, Any]]:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for each in held:
            by_factor.setdefault(factors.get(each, 1.0), []).append(each)
        return [{"params": each, _SCALE: factor} for factor, each in by_factor.items()]

    each: list[Optimizer] = []
    rest = parameters
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    momentum: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.name == "muon":
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        rest = [parameter for parameter in parameters if parameter.ndim != 2]
        if not matrices:
            raise RequestError("--optimizer muon needs matrices, and this model has none; use adamw or sgd.")
        each.append(torch.optim.Muon(grouped(matrices), **common, **momentum, adjust_lr_fn="match_rms_adamw"))
    # The fused kernels update all tensors in one call; on a CPU they save a third of a small model's step.
    if config.name == "sgd":
        sgd = torch.optim.SGD(grouped(parameters), **common, **momentum, fused=True)
        # Made here, since the fused kernel, where an overflow skips its first step, leaves what it makes unwritten.
        for parameter in parameters if config.momentum else ():
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        each.append(sgd)
    elif rest:
        each.append(torch.optim.AdamW(grouped(rest), **common, fused=True))
    return each


def set_lr(optimizers: Iterable[Optimizer], lr: float) -> None:
    """Set the learning rate of every parameter in optimizers of `build`: `lr`, times its own factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group[_SCALE]


def gradient_norm(optimizers: Iterable[Optimizer], clip: float | None) -> Tensor:
    """Return the norm (0-dim) of the gradients, of a length of at most `clip` afterwards."""
    parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if clip is not None:
        return nn.utils.clip_grad_norm_(parameters, clip)
    return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Zero gradients without torch's profiler range. The range costs more than the work."""
    if not set_to_none:
        Optimizer.zero_grad(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = None


def scaled(model: nn.Module, config: OptimConfig) -> list[tuple[str, float, list[nn.Parameter]]]:
    """Return (pattern, factor, parameters) of each --lr-scale. The first pattern that matches a parameter has it."""
    named = {name: each for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    found: list[tuple[str, float, list[nn.Parameter]]] = []
    taken: set[nn.Parameter] = set()
    for pattern, factor in config.lr_scales:
        # A parameter that is shared has several names.
        left = [each for each in dict.fromkeys(matching("--lr-scale", pattern, named)) if each not in taken]
        if not left:
            raise RequestError(
                f"--lr-scale {pattern}={factor:g} reaches no parameter: the patterns before it have all that it "
                "matches, and the first one counts; give it before them."
            )
        taken.update(left)
        found.append((pattern, factor, left))
    return found


def rate(config: RunConfig, batch: int, steps_per_epoch: int) -> Schedule:
    """Return the learning rate's schedule for a global batch of `batch` samples."""
    peak = peak_lr(config.optim, batch)
    factor = schedule(config.optim, steps_per_epoch=steps_per_epoch, epochs=config.epochs)
    return lambda step: peak * factor(step)


def peak_lr(config: OptimConfig, batch: int) -> float:
    """Return the peak rate for a global batch. `lr` times (batch ÷ base batch), its root, or 1.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". Square root: Krizhevsky 2014, "One weird trick".
    """
    ratio = batch / config.base_batch if config.base_batch else 1.0
    return config.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_rule]


def schedule(config: OptimConfig, *, steps_per_epoch: int, epochs: int) -> Schedule:
    """Return the factor on the peak rate. The config's epochs become steps, rounded to the nearest."""
    total = steps_per_epoch * epochs
    warmup = round(config.warmup * steps_per_epoch)
    marks = [round(mark * steps_per_epoch) for mark in config.milestones]
    # Smith & Topin 2018, with torch's OneCycleLR's shape: up from 1/25 of the peak, down to 1/250,000, by cosines.
    top = max(1, warmup or round(0.3 * total)) - 1

    def onecycle(step: int) -> float:
        if step <= top:
            return _by_cosine(1 / 25, 1.0, step / max(1, top))
        return _by_cosine(1.0, 1 / 250_000, (step - top) / max(1, total - 1 - top))

    factors: dict[str, Schedule] = {
        "constant": lambda step: 1.0,
        "step": lambda step: float(config.gamma ** (step // max(1, marks[0]))),
        "multistep": lambda step: float(config.gamma ** sum(step >= mark for mark in marks)),
        "cosine": lambda step: _by_cosine(1.0, 0.0, (step - warmup) / max(1, total - warmup)),
        "onecycle": onecycle,
    }
    factor = factors[config.schedule]

    def warmed(step: int) -> float:
        # From 1/warmup at the first step, so that no step is wasted at a rate of nothing.
        return (step + 1) / warmup if step < warmup else factor(step)

    try:
        factor(total)
    except OverflowError:
        raise RequestError(f"--gamma {config.gamma:g} raises the learning rate beyond any number; give less.") from None
    return warmed if warmup and config.schedule != "onecycle" else factor


def _by_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
