"""One forward pass before training, to see that what a model returns can be scored against the labels.

A user's own model may return what its last project needed: auxiliary logits, a dictionary, ten outputs for a hundred
classes. The loss would raise in the midst of torch, and on a GPU only tell of a device-side assertion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import user_code
from ..errors import RequestError, counted
from .modes import evaluating

_SAMPLES = 2
"""Two, since a model that squeezes its output loses the batch's dimension of one sample, and of no other."""


def check(
    name: str, model: nn.Module, *, classes: int, shape: tuple[int, ...], dtype: torch.dtype, empty: bool = False
) -> None:
    """Raise `RequestError` where `model`, called `name`, does not give (N, at least `classes`) scores.

    Its samples have this shape and dtype; `empty` says that it will get batches of none too. The model is in
    evaluation mode meanwhile: statistics stay as they are, and dropout draws nothing. To be called where autocast is on
    if it will be.
    """
    if not dtype.is_floating_point and ":" not in name:
        raise RequestError(
            f"--model {name} computes with floating-point numbers, and the samples of this data set are {dtype}; give "
            "others, or your own model as module:attribute."
        )
    device = next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    with evaluating(model), torch.no_grad():
        found = _tried(name, model, torch.zeros((_SAMPLES, *shape), dtype=dtype, device=device))
        _check_scores(name, found, classes)
        if empty:
            _check_empty(name, model, torch.zeros((0, *shape), dtype=dtype, device=device), found.shape[1])


def check_parts(name: str, model: nn.Module) -> None:
    """Raise `RequestError` where `model`, called `name`, has parts that cannot be placed, stepped or saved."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if lazy := [key for key, held in tensors.items() if is_lazy(held)]:
        raise RequestError(
            f"--model {name} has tensors whose shapes a first batch decides ({', '.join(lazy[:3])}); run a batch of "
            "zeros through it where it is made, so that they are known before training."
        )
    if tensors and not any(each.requires_grad for each in model.parameters()):
        raise RequestError(
            f"--model {name} has no parameter that is trained (requires_grad): nothing would be learned."
        )
    if extra := [key for key in model.state_dict() if key.endswith("_extra_state")]:
        raise RequestError(
            f"--model {name} keeps more than tensors in its state ({', '.join(extra[:3])}), and a checkpoint holds "
            "tensors; keep it in buffers instead of get_extra_state."
        )
    if sparse := [key for key, module in model.named_modules() if getattr(module, "sparse", False) is True]:
        raise RequestError(
            f"--model {name} makes sparse gradients ({', '.join(sparse[:3])}), which the optimizers here do not take; "
            "leave sparse=True out."
        )


def _tried(name: str, model: nn.Module, x: Tensor) -> Any:
    """Return what the model makes of `x`; what layers raise for samples they were not made for is a request's fault."""
    try:
        return model(x)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise RequestError(
            f"--model {name} cannot take this data set's samples, {x.dtype} of shape {tuple(x.shape[1:])}: it "
            f"{user_code.raised(error)}; give a model for such samples (arguments named classes, in_channels, "
            "image_size and shape are told of them), or other data."
        ) from error


def _check_scores(name: str, found: Any, classes: int) -> None:
    wanted = f"the loss needs one score for each sample and class, of shape ({_SAMPLES}, {classes})"
    if not isinstance(found, Tensor):
        raise RequestError(f"--model {name} returns {_in_words(found)}, and {wanted}; return the scores alone.")
    if found.dim() != 2 or len(found) != _SAMPLES or not found.is_floating_point():
        raise RequestError(
            f"--model {name} returns {found.dtype} of shape {tuple(found.shape)} for {_SAMPLES} samples, and {wanted}."
        )
    if found.shape[1] < classes:
        raise RequestError(
            f"--model {name} returns {counted(found.shape[1], 'score')} a sample, and the labels are of {classes} "
            f"classes; give its last layer {classes} outputs (an argument named classes is told the number)."
        )


def _check_empty(name: str, model: nn.Module, x: Tensor, scores: int) -> None:
    instead = (
        "an epoch's last batch is smaller than the number of ranks, and leaves some without a sample; use "
        "x.flatten(1) where the model reshapes with -1, or --drop-last, or another --batch."
    )
    try:
        found = model(x)
    except (RuntimeError, ValueError, ArithmeticError, IndexError) as error:  # what it raises for no others
        reason = str(error).split("\n")[0] or type(error).__name__
        raise RequestError(f"--model {name} cannot take a batch of no samples ({reason}), and {instead}") from error
    if found.shape != (0, scores):
        raise RequestError(
            f"--model {name} makes scores of shape {tuple(found.shape)} of a batch of no samples, not (0, {scores}), "
            f"and {instead}"
        )


def _in_words(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"several things by name ({', '.join(map(str, found))})"
    if isinstance(found, tuple | list):
        return f"{counted(len(found), 'thing')} at once"
    return "nothing" if found is None else f"an object of type {type(found).__name__}"
