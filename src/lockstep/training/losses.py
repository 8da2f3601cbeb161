"""The loss of a batch as a sum over its samples: cross-entropy, or the user's own.

It is divided once, by the number of samples in the global batch (see `engine.train_step`); a loss that divides by the
samples that it happens to see would weigh a sample by the size of its rank's share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import user_code
from ..config.schema import OptimConfig
from ..errors import RequestError

SAME_SUM = 1e-3
"""How far, relatively, the loss of samples together may be from the sum of their losses: half precision and more."""
LossFunction = Callable[..., Tensor]
"""(scores (n, classes), labels (n,), reduction="sum") -> the sum over the samples, 0-dim."""


def build(
    config: OptimConfig, *, classes: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LossFunction:
    """Return the loss that training takes, of scores of `dtype` on `device`.

    Raises `RequestError` where the user's own cannot be found, or does not return one number for a batch's sum.
    """
    if ":" not in config.loss:
        return functools.partial(nn.functional.cross_entropy, label_smoothing=config.label_smoothing)
    found: LossFunction = user_code.load("--loss", config.loss)
    _check(config.loss, found, torch.zeros(2, classes, device=device, dtype=dtype, requires_grad=True))
    return found


def check_sum(name: str, loss_fn: LossFunction, scores: Tensor, labels: Tensor) -> None:
    """Raise `RequestError` where the loss of samples together is not the sum of their losses.

    `scores` (n, …) are what the model gives for real samples, `labels` (n, …) theirs. Of a single sample nothing is
    asked.
    """
    if len(labels) < 2:
        return
    whole, first, rest = (
        float(loss_fn(scores[part], labels[part], reduction="sum")) for part in (slice(None), slice(1), slice(1, None))
    )
    if abs(whole - (first + rest)) > SAME_SUM * max(map(abs, (whole, first, rest))):
        raise RequestError(
            f"--loss {name} gives {whole:.6g} for {len(labels)} samples (scores {tuple(scores.shape)}, labels "
            f"{tuple(labels.shape)}), and {first:.6g} and {rest:.6g} for the first of them and the rest, which sum to "
            f"{first + rest:.6g}: it divides by the samples that it sees, and each rank would weigh its own otherwise; "
            'with reduction="sum" it has to return the sum over the samples.'
        )


def evaluated(config: OptimConfig, training: LossFunction) -> LossFunction:
    """Return the loss that an evaluation reports: labels are not smoothed there."""
    return training if ":" in config.loss else nn.functional.cross_entropy


def _check(name: str, loss_fn: LossFunction, scores: Tensor) -> None:
    """Raise `RequestError` where `loss_fn` does not give one number for `scores` (n, classes)."""
    wanted = 'it is called as loss(scores, labels, reduction="sum") and returns the sum over the samples, one number'
    labels = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    try:
        found = loss_fn(scores, labels, reduction="sum")
    except Exception as error:
        raise RequestError(f"--loss {name} {user_code.raised(error)}; {wanted}.") from error
    if not isinstance(found, Tensor) or found.dim() != 0 or not found.requires_grad:
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{type(found).__name__}"
        if isinstance(found, Tensor) and found.dim() == 0:
            shown = "a number without a gradient"
        raise RequestError(f"--loss {name} returned {shown}; {wanted}.")
