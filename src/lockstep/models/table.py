"""Networks by name. Three kinds of names, tried in this order:

1. `module:attribute`, anything with a colon: the user's own callable that returns an `nn.Module`. It gets those of
   the keyword arguments `classes`, `in_channels`, `image_size` and `shape` (of a sample) that its signature names.
   The current folder is importable.
2. A name of ours: those of `names()`, and every `pyramidnet-DEPTH-ALPHA`, with `-reference` for the variant that
   leaves out one block a stage and `-padded` for channels by the 8. Stems are those for small images.
3. A torchvision classifier under torchvision's name, such as `mobilenet_v3_small`; with the prefix `torchvision.`
   also where the plain name is ours: `torchvision.resnet50` is the net with the stem for ImageNet.

Torch is imported only by `build`, torchvision only for names that are not ours.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import own
from ..errors import RequestError, unknown

if TYPE_CHECKING:
    from torch import nn

_PREFIX = "torchvision."
_HINT = "lockstep info lists models; your own goes with module:attribute."
_PYRAMIDNET = re.compile(r"pyramidnet-(\d+)-(\d+)(-reference)?(-padded)?")

# name → module of this package and the callable in it
_OURS = {
    "convnet-small": ("small", "ConvNet"),
    "mlp": ("small", "mlp"),
    "pyramidnet-20-48": ("pyramidnet", "pyramidnet"),
    "pyramidnet-110-48": ("pyramidnet", "pyramidnet"),
    "pyramidnet-110-270": ("pyramidnet", "pyramidnet"),
    "pyramidnet-110-270-padded": ("pyramidnet", "pyramidnet"),
    "pyramidnet-110-270-reference": ("pyramidnet", "pyramidnet"),
    "resnet8": ("resnet", "resnet8"),
    "resnet18": ("resnet", "resnet18"),
    "resnet20": ("resnet", "resnet20"),
    "resnet34": ("resnet", "resnet34"),
    "resnet50": ("resnet", "resnet50"),
}


def names() -> tuple[str, ...]:
    """Return the names of our own networks; any `pyramidnet-DEPTH-ALPHA` is one too."""
    return tuple(_OURS)


def preflight(name: str) -> None:
    """Check that `name` names a network, without building it and without importing torch for one of ours.

    Raises `RequestError` with the nearest names, or where the module of a `module:attribute` cannot be found.
    """
    if ":" in name:
        own.check("--model", name)
    elif not _is_ours(name):
        _torchvision_name(name)


def build(name: str, *, classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return the network `name` for square images; otherwise as `build_for`."""
    return build_for(name, classes=classes, shape=(in_channels, image_size, image_size))


def build_for(name: str, *, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return the network `name`, float32 on the CPU, with weights drawn from torch's global generator.

    It takes samples (N, *shape) to logits (N, classes).

    Raises `RequestError` for an unknown name, and where the network cannot take such samples.
    """
    # What is no image has features where an image has channels.
    given = {"classes": classes, "in_channels": shape[0] if shape else 1, "image_size": shape[-1] if shape else 1}
    if ":" in name:
        return _call_own(name, own.load("--model", name), given | {"shape": shape})
    if _is_ours(name):
        return _build_ours(name, given | {"shape": shape})
    plain = _torchvision_name(name)
    _check_image(name, shape)
    return _build_torchvision(plain, classes, shape)


# --- ours


def _is_ours(name: str) -> bool:
    return name in _OURS or _pyramidnet_arguments(name) is not None


def _pyramidnet_arguments(name: str) -> dict[str, int] | None:
    """Return the arguments in a `pyramidnet-DEPTH-ALPHA[-reference][-padded]`, None for another name."""
    match = _PYRAMIDNET.fullmatch(name)
    if match is None:
        return None
    depth, alpha, reference = int(match[1]), int(match[2]), bool(match[3])
    least = 14 if reference else 8
    if depth < least or (depth - 2) % 6:
        below = max(least, depth - (depth - 2) % 6)
        raise RequestError(
            f"Model {name!r}: PyramidNet has depths 6 × blocks + 2 from {least} on, found {depth}; "
            f"use {below} or {below + 6}."
        )
    return {"depth": depth, "alpha": alpha, "reference": reference, "padded": bool(match[4])}


def _build_ours(name: str, given: dict[str, Any]) -> nn.Module:
    file, attribute = _OURS.get(name, ("pyramidnet", "pyramidnet"))
    builder = getattr(importlib.import_module(f".{file}", __package__), attribute)
    accepted = _accepted(builder, given)
    if "shape" not in accepted:
        _check_image(name, given["shape"])
    model: nn.Module = builder(**_pyramidnet_arguments(name) or {}, **accepted)
    return model


def _accepted(builder: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments `given` that `builder` names; all but the shape if it takes any it does not name.

    Who hands any arguments on to another library's builder has none there for a shape.
    """
    from torch import nn

    if getattr(builder, "__init__", None) is nn.Module.__init__:
        return {}  # its signature names any arguments, and it refuses each of them
    parameters = inspect.signature(builder).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named |= given.keys() - {"shape"}
    return {key: value for key, value in given.items() if key in named}


def _check_image(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise RequestError(
            f"--model {name} takes images, of shape (channels, height, width), and the samples of this data set have "
            f"the shape {shape}; take --model mlp, which takes any, or your own as module:attribute."
        )


# --- torchvision's

# These two return auxiliary logits beside the logits unless told otherwise, and warn unless told how to initialise.
_PLAIN_LOGITS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def _torchvision_names() -> list[str]:
    """Return the names of torchvision's classifiers: not its detectors, segmenters, or quantised and video nets."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"torchvision cannot be imported ({error}); install the build that belongs to your torch, "
            f"or use one of our own models: {', '.join(_OURS)}."
        ) from error
    return list(models.list_models(module=models))


def _torchvision_name(name: str) -> str:
    """Return torchvision's own name for `name`; raise with the nearest names if it has none."""
    plain, theirs = name.removeprefix(_PREFIX), _torchvision_names()
    if plain in theirs:
        return plain
    if name.startswith(_PREFIX):
        raise unknown("model", name, [_PREFIX + each for each in theirs], _HINT)
    own.check_no_module("--model", name, "Net")
    raise unknown("model", name, {*_OURS, *theirs}, _HINT)


def _build_torchvision(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    import torch
    from torchvision import models

    in_channels, height, width = shape
    if in_channels != 3:
        raise RequestError(
            f"Model {name!r} of torchvision takes images of 3 channels, the data has {in_channels}; "
            f"use one of our own models ({', '.join(_OURS)}), which take any, or your own as module:attribute."
        )
    options: dict[str, Any] = dict(_PLAIN_LOGITS.get(name, {}))
    if name.startswith("vit_"):
        options["image_size"] = width
    if name.startswith("maxvit"):
        options["input_size"] = (height, width)
    # Those that are built for a size refuse it when they are built.
    with _refusal(name, shape) if options.keys() & {"image_size", "input_size"} else contextlib.nullcontext():
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    with _refusal(name, shape), torch.no_grad():
        model.eval()(torch.zeros(1, *shape))
    return model.train()


@contextlib.contextmanager
def _refusal(name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn what shapes that do not fit raise, in torch or in torchvision's own checks, into a `RequestError`."""
    import torch

    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        if isinstance(error, torch.OutOfMemoryError | NotImplementedError) or "can't allocate memory" in reason:
            raise
        _, height, width = shape
        raise RequestError(
            f"Model {name!r} of torchvision cannot take {height}×{width} images ({reason}); use --image-size "
            f"224, for which it is made, or one of our own models ({', '.join(_OURS)}), which take any size."
        ) from error


# --- the user's own


def _call_own(name: str, builder: Callable[..., Any], given: dict[str, Any]) -> nn.Module:
    from torch import nn

    if isinstance(builder, nn.Module):
        raise RequestError(f"--model {name} is {_a(builder)}; give a class or function that returns a new nn.Module.")
    arguments = _accepted(builder, given)
    shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
    try:
        model = builder(**arguments)
    except Exception as error:
        raise RequestError(f"--model {name}, called with ({shown}), {own.raised(error)}.") from error
    if not isinstance(model, nn.Module):
        raise RequestError(f"--model {name}, called with ({shown}), returned {_a(model)}; it must return an nn.Module.")
    return model


def _a(thing: object) -> str:
    return "None" if thing is None else f"an object of type {type(thing).__name__}"
