"""Loss of a batch, summed over samples and divided once. Cross-entropy, or the user's own."""

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
"""Relative tolerance of samples' loss against the sum of their losses: that of half precision, and more."""
LossFunction = Callable[..., Tensor]
"""(scores (n, classes), labels (n,), reduction="sum") -> the sum over the samples, 0-dim."""


def build(config: OptimConfig) -> LossFunction:
    """Return the training loss."""
    if ":" not in config.loss:
        return functools.partial(nn.functional.cross_entropy, label_smoothing=config.label_smoothing)
    own: LossFunction = user_code.load("--loss", config.loss)
    return own


def evaluated(config: OptimConfig, training: LossFunction) -> LossFunction:
    """Return the evaluation loss, without label smoothing."""
    return training if ":" in config.loss else nn.functional.cross_entropy


def check_number(whose: str, found: Any, wanted: str) -> None:
    """Raise `RequestError` unless a user's function has returned one number.

    `whose` names the function. Where gradients are computed, the number must have one.
    """
    shown = f"a {type(found).__name__}"
    if isinstance(found, Tensor):
        if not found.dim() and (found.requires_grad or not torch.is_grad_enabled()):
            return
        shown = f"a tensor of shape {tuple(found.shape)}" if found.dim() else "a number without a gradient"
    raise RequestError(f"{whose} returned {shown}; {wanted}.")


def check_sum(whose: str, whole: float, first: float, rest: float, *, of: str) -> None:
    """Raise `RequestError` unless losses add up over samples. `whole`, of samples `of`, must be `first` + `rest`."""
    total = first + rest
    if abs(whole - total) > _SAME_SUM * max(map(abs, (whole, first, rest))):
        raise RequestError(
            f"{whose} returned {whole:.6g} for {of}, and {first:.6g} and {rest:.6g} for the first of them and the "
            f"rest, which sum to {total:.6g}: it divides by the samples that it sees, or one sample's depends on the "
            "others (such as on how far they are padded), and each rank sees but its own; return the sum over the "
            'samples (reduction="sum").'
        )
