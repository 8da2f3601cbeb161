"""Torchvision's classifiers, built for a data set's classes and images."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor, nn

_INSTEAD = "one of lockstep's models (lockstep info lists them)"
# These two return auxiliary logits beside the logits unless told otherwise, and warn unless told how to initialise.
_PLAIN_LOGITS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def names() -> list[str]:
    """Return the names of torchvision's classifiers."""
    try:  # here, not above: some builds of torch cannot load it, and our own nets need none
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        advice = f"install the build that belongs to your torch, or take {_INSTEAD}"
        raise RequestError(f"torchvision cannot be imported ({error}); {advice}.") from error
    return list(models.list_models(module=models))


def build(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a classifier for images (channels, height, width)."""
    from torchvision import models

    _, height, width = shape
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options(name, shape))
    except (ValueError, AssertionError) as error:
        raise RequestError(
            f"Model {name!r} of torchvision cannot take {height}×{width} images ({error}); use --image-size 224, "
            f"for which it is made, or {_INSTEAD}, which take any size."
        ) from error
    return model


def options(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a builder's arguments for images (channels, height, width), other than the classes."""
    _, height, width = shape
    arguments: dict[str, Any] = dict(_PLAIN_LOGITS.get(name, {}))
    if name.startswith("vit_"):
        arguments["image_size"] = width
    if name.startswith("maxvit"):
        arguments["input_size"] = (height, width)
    return arguments


def pretrained(name: str) -> tuple[str, dict[str, Tensor]]:
    """Return a classifier's best weights: their label, and tensors by name.

    Weights come from torch's cache, or are downloaded there. Raises `RequestError` where neither is possible.
    """
    import torch
    from torchvision import models

    if name in _PLAIN_LOGITS:
        raise RequestError(
            f"--init-from pretrained: torchvision's weights of {name} are for images normalised in another way than "
            "ours; take another model, such as torchvision.resnet50."
        )
    weights = models.get_model_weights(name).DEFAULT
    try:
        tensors: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:160].removesuffix(".")
        raise RequestError(
            f"--init-from pretrained: {weights} cannot be loaded ({reason}); put {weights.url} into "
            f"{torch.hub.get_dir()}/checkpoints by hand, or give a file of weights."
        ) from error
    return str(weights), tensors
