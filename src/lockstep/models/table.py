"""Networks by name. Four kinds of names, tried in this order:

1. `module:attribute`, anything with a colon: the user's own callable that returns an `nn.Module`. It gets those of
   the keyword arguments `classes`, `in_channels`, `image_size` and `shape` (of a sample) that its signature names.
2. A builtin network: the names of `BUILTIN`, and every `pyramidnet-DEPTH-ALPHA`, with `-reference` for the variant that
   leaves out one block a stage. Stems are those for small images.
3. timm's network `NAME` as `timm.NAME`.
4. A torchvision classifier under torchvision's name, such as `mobilenet_v3_small`; with the prefix `torchvision.`
   also if the plain name is builtin: `torchvision.resnet50` is the net with the stem for ImageNet.

Torch is imported only by `build_for`, torchvision and timm only for names that are not ours: `--help` answers at once.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import user_code
from ..errors import RequestError, unknown
from . import timm, torchvision

if TYPE_CHECKING:
    from torch import Tensor, nn

_PREFIX, _TIMM = "torchvision.", "timm."
_HINT = "lockstep info lists models; your own goes with module:attribute."
_PYRAMIDNET = re.compile(r"pyramidnet-(\d{1,4})-(\d{1,6})(-reference)?")

_PYRAMIDNETS = ("20-48", "110-48", "110-270", "110-270-reference")
BUILTIN = {
    "convnet-small": ("small", "ConvNet"),
    "mlp": ("small", "mlp"),
    "vgg-small": ("vgg", "Vgg"),
    **{f"pyramidnet-{variant}": ("pyramidnet", "PyramidNet") for variant in _PYRAMIDNETS},
    **{name: ("resnet", name) for name in ("resnet8", "resnet18", "resnet20", "resnet34", "resnet50")},
}
"""{name: (file of this package, callable in it)}"""


def preflight(name: str) -> None:
    """Raise `RequestError` if no network has that name."""
    if ":" in name:
        user_code.check("--model", name)
    elif name.startswith(_TIMM):
        _timm_name(name)
    elif _find_builtin(name) is None:
        _torchvision_name(name)


def build_for(name: str, *, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return the network `name`, which takes (N, *shape) to logits (N, classes).

    The network is float32 on the CPU, its weights from torch's global generator. Raises `RequestError` for other names.
    """
    arguments = _arguments(classes, shape)
    if ":" in name:
        return _build_own(name, arguments)
    if name.startswith(_TIMM):
        _check_image(name, shape)
        return timm.build(_timm_name(name), classes, shape)
    if (builtin := _find_builtin(name)) is None:
        plain = _torchvision_name(name)
        _check_image(name, shape)
        return torchvision.build(plain, classes, shape)
    file, attribute, options = builtin
    builder = getattr(importlib.import_module(f".{file}", __package__), attribute)
    accepted = _accepted(builder, arguments)
    if "shape" not in accepted:
        _check_image(name, shape)
    model: nn.Module = builder(**options, **accepted)
    return model


def source(name: str, *, classes: int, shape: tuple[int, ...]) -> tuple[str, Path | None, str, dict[str, Any]]:
    """Return (callable, the file that defines it, the module that it is imported from, arguments) of a network.

    Either file or module is empty. The callable of torchvision's networks is `models.get_model`, of timm's
    `create_model`.
    """
    arguments = _arguments(classes, shape)
    if ":" in name:
        module, _, attribute = name.partition(":")
        return attribute, None, module, _accepted(user_code.load("--model", name), arguments)
    if name.startswith(_TIMM):
        plain = _timm_name(name)
        return "create_model", None, "timm", {"model_name": plain} | timm.arguments(plain, classes, shape)
    if (builtin := _find_builtin(name)) is None:
        plain = _torchvision_name(name)
        options = {"name": plain, "weights": None, "num_classes": classes} | torchvision.options(plain, shape)
        return "models.get_model", None, "torchvision", options
    file, attribute, options = builtin
    builder = getattr(importlib.import_module(f".{file}", __package__), attribute)
    return attribute, Path(__file__).with_name(f"{file}.py"), "", options | _accepted(builder, arguments)


def pretrained(name: str) -> tuple[str, dict[str, Tensor]]:
    """Return torchvision's weights of `name`: their label, and tensors by name.

    Raises `RequestError` if torchvision has none, or they are neither on disk nor downloadable.
    """
    if ":" in name or name.startswith(_TIMM) or _find_builtin(name):
        raise RequestError(
            f"--init-from pretrained belongs to torchvision's models, and --model {name} is none; take one, such as "
            "torchvision.resnet18, or give a file of weights."
        )
    return torchvision.pretrained(_torchvision_name(name))


def images(name: str) -> dict[str, Any]:
    """Return how the network expects photographs (see `timm.images`); {} for torchvision's, ours and the user's."""
    return timm.images(_timm_name(name)) if name.startswith(_TIMM) else {}


def _timm_name(name: str) -> str:
    plain, networks = name.removeprefix(_TIMM), timm.names()
    if plain not in networks:
        raise unknown("model", name, [_TIMM + network for network in networks], _HINT)
    return plain


def _find_builtin(name: str) -> tuple[str, str, dict[str, int]] | None:
    """Return (module, callable, options) of the builtin network `name`; None for other names."""
    options: dict[str, int] = {}
    if match := _PYRAMIDNET.fullmatch(name):
        depth, alpha, reference = int(match[1]), int(match[2]), bool(match[3])
        least = 14 if reference else 8
        if depth < least or (depth - 2) % 6:
            below = max(least, depth - (depth - 2) % 6)
            raise RequestError(
                f"Model {name!r}: PyramidNet has depths 6 × blocks + 2 from {least} on, found {depth}; "
                f"use {below} or {below + 6}."
            )
        options = {"depth": depth, "alpha": alpha, "reference": reference}
    elif name not in BUILTIN:
        return None
    file, attribute = BUILTIN.get(name, ("pyramidnet", "PyramidNet"))
    return file, attribute, options


def _arguments(classes: int, shape: tuple[int, ...]) -> dict[str, Any]:
    # Samples other than images have features in place of channels.
    sides = {"in_channels": shape[0] if shape else 1, "image_size": shape[-1] if shape else 1}
    return {"classes": classes, **sides, "shape": shape}


def _torchvision_name(name: str) -> str:
    plain, classifiers = name.removeprefix(_PREFIX), torchvision.names()
    if plain in classifiers:
        return plain
    if name.startswith(_PREFIX):
        raise unknown("model", name, [_PREFIX + classifier for classifier in classifiers], _HINT)
    raise unknown("model", name, {*BUILTIN, *classifiers}, _HINT)


def _check_image(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise RequestError(
            f"--model {name} takes images, of shape (channels, height, width), and the samples of this data set have "
            f"the shape {shape}; take --model mlp, which takes any, or your own as module:attribute."
        )


def _build_own(name: str, arguments: dict[str, Any]) -> nn.Module:
    from torch import nn

    builder = user_code.load("--model", name)
    accepted = _accepted(builder, arguments)
    call = f"--model {name}, called with ({', '.join(f'{key}={value}' for key, value in accepted.items())}),"
    try:
        model = builder(**accepted)
    except Exception as error:
        raise RequestError(f"{call} {user_code.raised(error)}.") from error
    if not isinstance(model, nn.Module):
        result = "None" if model is None else f"a {type(model).__name__}"
        raise RequestError(f"{call} returned {result}; it must return an nn.Module.")
    return model


def _accepted(builder: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the `arguments` that `builder` names, or may pass on."""
    parameters = inspect.signature(builder).parameters.values()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {parameter.name for parameter in parameters if parameter.kind in kinds}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names |= arguments.keys() - {"shape"}
    return {key: value for key, value in arguments.items() if key in names}
