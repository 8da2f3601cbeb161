"""Trial pass before training: can the network's output be scored?

A user's model may return auxiliary logits, a dictionary, or ten outputs for a hundred classes. The loss would raise
inside torch, and on a GPU only as a device-side assertion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import user_code
from ..errors import RequestError
from .modes import evaluating

_SAMPLES = 2
"""Two: a model that squeezes its output loses the batch dimension of a single sample."""
_UNFIT = (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError, AssertionError)
"""Errors that layers raise for samples of the wrong kind."""


def check(name: str, model: nn.Module, *, classes: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `RequestError` unless `model` returns (N, at least `classes`) scores.

    The samples have this shape and dtype. Statistics stay unchanged, and dropout draws nothing. Call under the autocast
    of training, if any.
    """
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    with evaluating(model), torch.no_grad():
        try:
            scores = model(torch.zeros((_SAMPLES, *shape), dtype=dtype, device=device))
        except torch.OutOfMemoryError:
            raise
        except _UNFIT as error:
            raise RequestError(
                f"--model {name} cannot take this data set's samples, {dtype} of shape {shape}: it "
                f"{user_code.raised(error)}; give a model for such samples (its arguments classes, in_channels, "
                "image_size and shape receive theirs), or other data; torchvision's take --image-size 224."
            ) from error
        _check_scores(name, scores, classes)


def check_parts(name: str, model: nn.Module) -> None:
    """Raise `RequestError` for parts that cannot be placed or saved."""
    if lazy := [key for key, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise RequestError(
            f"--model {name} has tensors whose shapes a first batch decides ({', '.join(lazy[:3])}); run a batch of "
            "zeros through it where it is made, so that they are known before training."
        )
    if extra := [key for key in model.state_dict() if key.endswith("_extra_state")]:
        raise RequestError(
            f"--model {name} keeps more than tensors in its state ({', '.join(extra[:3])}), and a checkpoint holds "
            "tensors; keep it in buffers instead of get_extra_state."
        )


def _check_scores(name: str, scores: Any, classes: int) -> None:
    output, is_fit = f"a {type(scores).__name__}", False
    if isinstance(scores, Tensor):
        output = f"{scores.dtype} of shape {tuple(scores.shape)}"
        is_fit = scores.dim() == 2 and len(scores) == _SAMPLES and scores.shape[1] >= classes
    if not is_fit or not scores.is_floating_point():
        raise RequestError(
            f"--model {name} returns {output} for {_SAMPLES} samples, and the loss needs one score for each sample and "
            f"class, of shape ({_SAMPLES}, {classes}); return the scores alone, from a last layer of {classes} outputs "
            "(an argument named classes is given the number), or train another task than classification by --step."
        )
