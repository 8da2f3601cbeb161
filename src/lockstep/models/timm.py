"""timm's classifiers, built for a data set's classes and images; `timm.` in a name is no part of timm's name.

A name may have the tag of its weights, such as `vit_tiny_patch16_224.augreg_in21k`, whose images it then expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from torch import nn


def names() -> list[str]:
    """Return the names of timm's networks. Raises `RequestError` where timm cannot be imported."""
    try:
        import timm
    except ImportError as error:
        advice = "pip install 'lockstep-torch[hf]'"
        raise RequestError(f"--model timm.NAME needs timm, which cannot be imported ({error}); {advice}.") from error
    return list(timm.list_models()) + list(timm.list_pretrained())


def build(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return a classifier for images (channels, height, width)."""
    import timm

    try:
        model: nn.Module = timm.create_model(name, **arguments(name, classes, shape))
    except (ValueError, AssertionError, TypeError, RuntimeError) as error:
        size, made_for = "×".join(map(str, shape[1:])), timm.get_pretrained_cfg(name).input_size[-1]
        raise RequestError(
            f"Model {name!r} of timm cannot take {size} images ({error}); use --image-size {made_for}, for which it is "
            "made."
        ) from error
    return model


def arguments(name: str, classes: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of `timm.create_model` besides the name."""
    import timm

    config = timm.get_pretrained_cfg(name)
    has_size = config is not None and config.fixed_input_size and config.input_size[-2:] != shape[1:]
    size = {"img_size": shape[1] if shape[1] == shape[2] else shape[1:]} if has_size else {}
    return {"pretrained": False, "num_classes": classes, "in_chans": shape[0], **size}


def images(name: str) -> dict[str, Any]:
    """Return how the network's weights expect photographs: mean, std, interpolation, crop, size; {} if unknown."""
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None:
        return {}
    mean, std = (tuple(255 * value for value in values) for values in (config.mean, config.std))
    fields = {"interpolation": config.interpolation, "crop": config.crop_pct, "size": config.input_size[-1]}
    return {"mean": mean, "std": std, **fields}
