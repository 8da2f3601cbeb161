"""Loss of a batch, summed over samples and divided once: cross-entropy, or the user's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import user_code
from ..config.schema import OptimConfig
from ..errors import RequestError

_SAME_SUM = 1e-3
"""Relative tolerance between a batch's loss and the sum of its parts; it exceeds half precision's rounding."""
LossFunction = Callable[..., Tensor]
"""(scores (n, classes), labels (n,), reduction="sum") -> the sum over the samples, 0-dim."""


def build(config: OptimConfig) -> LossFunction:
    """Return the training loss."""
    if ":" not in config.loss:
        return functools.partial(nn.functional.cross_entropy, label_smoothing=config.label_smoothing)
    loss: LossFunction = user_code.load("--loss", config.loss)
    return loss


def evaluated(config: OptimConfig, training: LossFunction) -> LossFunction:
    """Return the evaluation loss, without label smoothing."""
    return training if ":" in config.loss else nn.functional.cross_entropy


def check_number(function: str, result: Any, wanted: str) -> None:
    """Raise `RequestError` unless a user's function has returned one number.

    `function` is its name. While gradients are computed, the number must require one.
    """
    shown = f"a {type(result).__name__}"
    if isinstance(result, Tensor):
        if not result.dim() and (result.requires_grad or not torch.is_grad_enabled()):
            return
        shown = f"a tensor of shape {tuple(result.shape)}" if result.dim() else "a number without a gradient"
    raise RequestError(f"{function} returned {shown}; {wanted}.")


def check_sum(function: str, joint: float, first: float, second: float, *, of: str) -> None:
    """Raise `RequestError` unless losses add up over samples: `joint`, of samples `of`, must be `first` + `second`."""
    total = first + second
    if abs(joint - total) > _SAME_SUM * max(map(abs, (joint, first, second))):
        raise RequestError(
            f"{function} returned {joint:.6g} for {of}, and {first:.6g} and {second:.6g} for the first of them and the "
            f"rest, which sum to {total:.6g}: it divides by the samples that it sees, or one sample's depends on the "
            "others (such as on how far they are padded), and each rank sees but its own; return the sum over the "
            'samples (reduction="sum").'
        )
