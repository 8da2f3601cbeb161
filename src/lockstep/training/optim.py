"""Build torch's optimizers; compute the learning rate as a pure function of the step.

torch's schedulers have state that must be saved, and each process steps its own. Here, the rate at step s is a function
of the config and s, so that a resumed run, or one on another world, has the same rate.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from .. import _torch
from ..checkpoint.state import matching, set_buffer
from ..config.schema import OptimConfig, RunConfig
from ..errors import RequestError
from .layerwise import Lamb, Lars
from .muon import Muon

_SCALE = "lr_scale"  # a parameter group's factor on the learning rate, stored in the group
Schedule = Callable[[int], float]
"""Maps an optimizer step, from 0, to the learning rate, or to the factor on its peak."""


class Average:
    """Average of a model's weights over optimizer steps. Buffers are those of the model after the last step.

    Its points are the weights after steps `start`, `start` + `every`, …; step 0 has the initial weights, and until
    `start` the average is the model. With a `decay` it is an exponential moving average of the points, else their mean,
    as in stochastic weight averaging (Izmailov et al. 2018, arXiv 1803.05407).
    """

    # torch's AveragedModel reads its counter at each update: the host would wait for the GPU.
    def __init__(self, model: nn.Module, decay: float | None, *, start: int = 0, every: int = 1) -> None:
        # Copies share process groups, such as those of torch's SyncBatchNorm, which cannot be copied.
        groups = (getattr(module, "process_group", None) for module in model.modules())
        self.module = copy.deepcopy(model, {id(group): group for group in groups}).requires_grad_(False).eval()
        self._average: Any = get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._start, self._every = start, every
        self._model = model

    @functools.cached_property
    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The averaged weights and the model's, as they are in training: both may be divided among ranks by then."""
        return list(self.module.parameters()), list(self._model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the model's weights after optimizer step `step`, counted from 1."""
        points, remainder = divmod(step - self._start, self._every)  # a function of the step: no state to save
        if step <= self._start:
            _torch.foreach_copy_(*self._weights)
        elif not remainder:
            self._average(*self._weights, points)
        # By name: a forward pass may replace a buffer, in another shape, or register one.
        averaged, buffers = (dict(model.named_buffers()) for model in (self.module, self._model))
        for name, buffer in buffers.items():
            if name not in averaged or averaged[name].shape != buffer.shape:
                averaged[name] = torch.empty_like(buffer)
                set_buffer(self.module, name, averaged[name])
        if buffers:
            _torch.foreach_copy_([averaged[name] for name in buffers], [*buffers.values()])


def build(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """Return the configured optimizers over the trainable parameters of `model`.

    Muon takes matrices and filters of convolutions: AdamW trains the other parameters, and --lr is the rate of both.
    Raises `RequestError` for a model without trainable parameters, or, with Muon, without matrices.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise RequestError("The model has no parameter that trains (requires_grad); there is nothing to optimize.")
    factors = {parameter: factor for _, factor, matches in scaled(model, config) for parameter in matches}

    def group_by_factor(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_factor.setdefault(factors.get(parameter, 1.0), []).append(parameter)
        return [{"params": group, _SCALE: factor} for factor, group in by_factor.items()]

    optimizers: list[Optimizer] = []
    adamw_parameters = parameters
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    momentum: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.name == "muon":
        filters = {
            module.weight
            for module in model.modules()
            if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1
        }

        def is_matrix(parameter: nn.Parameter) -> bool:
            return not parameter.is_complex() and (parameter.ndim == 2 or parameter in filters)

        matrices = [parameter for parameter in parameters if is_matrix(parameter)]
        adamw_parameters = [parameter for parameter in parameters if not is_matrix(parameter)]
        if not matrices:
            raise RequestError("--optimizer muon needs matrices, and this model has none; use adamw or sgd.")
        optimizers.append(Muon(group_by_factor(matrices), **common, **momentum))
    # Fused kernels update all tensors in one call; on a CPU this saves a third of a small model's step.
    if config.name == "sgd":
        sgd = torch.optim.SGD(group_by_factor(parameters), **common, **momentum, fused=True)
        # Initialized here: if an overflow skips the first step, the fused kernel leaves its new buffers unwritten.
        for parameter in parameters if config.momentum else ():
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        optimizers.append(sgd)
    elif config.name == "lars":
        optimizers.append(Lars(group_by_factor(parameters), **common, momentum=config.momentum))
    elif config.name == "lamb":
        optimizers.append(Lamb(group_by_factor(parameters), **common))
    elif adamw_parameters:
        optimizers.append(torch.optim.AdamW(group_by_factor(adamw_parameters), **common, fused=True))
    return optimizers


def set_lr(optimizers: Iterable[Optimizer], lr: float) -> None:
    """Set the learning rate of each parameter group of optimizers from `build`: `lr` times the group's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group[_SCALE]


def gradient_norm(optimizers: Iterable[Optimizer], clip: float | None) -> Tensor:
    """Return the norm (0-dim) of all gradients; scale them to a norm of at most `clip`."""
    parameters = [item for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]]
    if clip is not None:
        return nn.utils.clip_grad_norm_(parameters, clip)
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Zero gradients without torch's profiler range, which costs more than the work."""
    if not set_to_none:
        Optimizer.zero_grad(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def scaled(model: nn.Module, config: OptimConfig) -> list[tuple[str, float, list[nn.Parameter]]]:
    """Return (pattern, factor, parameters) of each --lr-scale. A parameter belongs to its first matching pattern."""
    named_parameters = model.named_parameters(remove_duplicate=False)
    trainable = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
    scales: list[tuple[str, float, list[nn.Parameter]]] = []
    claimed: set[nn.Parameter] = set()
    for pattern, factor in config.lr_scales:
        # A shared parameter has several names.
        matches = dict.fromkeys(matching("--lr-scale", pattern, trainable))
        unclaimed = [parameter for parameter in matches if parameter not in claimed]
        if not unclaimed:
            raise RequestError(
                f"--lr-scale {pattern}={factor:g} reaches no parameter: the patterns before it match all of its "
                "parameters, and the first match counts; give it before them."
            )
        claimed.update(unclaimed)
        scales.append((pattern, factor, unclaimed))
    return scales


def rate(config: RunConfig, batch: int, steps_per_epoch: int) -> Schedule:
    """Return the learning rate's schedule for a global batch of `batch` samples."""
    peak = peak_lr(config.optim, batch)
    factor = schedule(config.optim, steps_per_epoch=steps_per_epoch, epochs=config.epochs)
    return lambda step: peak * factor(step)


def peak_lr(config: OptimConfig, batch: int) -> float:
    """Return the peak rate for a global batch: `lr` times (batch ÷ base batch), its square root, or 1.

    Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". Square root: Krizhevsky 2014, "One weird trick".
    """
    ratio = batch / config.base_batch if config.base_batch else 1.0
    return config.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_rule]


def schedule(config: OptimConfig, *, steps_per_epoch: int, epochs: int) -> Schedule:
    """Return the factor on the peak rate. The config's epochs are rounded to the nearest step."""
    total = steps_per_epoch * epochs
    warmup = round(config.warmup * steps_per_epoch)
    marks = [round(mark * steps_per_epoch) for mark in config.milestones]
    # Smith & Topin 2018, with torch's OneCycleLR's shape: up from 1/25 of the peak, down to 1/250,000, by cosines.
    peak_step = max(1, warmup or round(0.3 * total)) - 1

    def onecycle(step: int) -> float:
        if step <= peak_step:
            return _anneal(1 / 25, 1.0, step / max(1, peak_step))
        return _anneal(1.0, 1 / 250_000, (step - peak_step) / max(1, total - 1 - peak_step))

    factors: dict[str, Schedule] = {
        "constant": lambda step: 1.0,
        "step": lambda step: float(config.gamma ** (step // max(1, marks[0]))),
        "multistep": lambda step: float(config.gamma ** sum(step >= mark for mark in marks)),
        "cosine": lambda step: _anneal(1.0, 0.0, (step - warmup) / max(1, total - warmup)),
        "onecycle": onecycle,
    }
    factor = factors[config.schedule]

    def with_warmup(step: int) -> float:
        # From 1/warmup, not 0: a step at a rate of 0 would be wasted.
        return (step + 1) / warmup if step < warmup else factor(step)

    try:
        factor(total)
    except OverflowError:
        raise RequestError(f"--gamma {config.gamma:g} raises the learning rate beyond any number; give less.") from None
    return with_warmup if warmup and config.schedule != "onecycle" else factor


def _anneal(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
