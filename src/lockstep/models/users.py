"""A network of the user's own: what the class or function returns that --model module:attribute names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import user_code
from ..errors import RequestError


def build(name: str, given: dict[str, Any]) -> nn.Module:
    """Return the network `name`, called with those of the arguments `given` that its signature names.

    Raises `RequestError` where it cannot be called so, and for what is no network.
    """
    builder = user_code.load("--model", name)
    if isinstance(builder, nn.Module):
        raise RequestError(f"--model {name} is {_a(builder)}; give a class or function that returns a new nn.Module.")
    arguments = accepted(builder, given)
    shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
    try:
        model = builder(**arguments)
    except Exception as error:
        raise RequestError(f"--model {name}, called with ({shown}), {user_code.raised(error)}.") from error
    if not isinstance(model, nn.Module):
        raise RequestError(f"--model {name}, called with ({shown}), returned {_a(model)}; it must return an nn.Module.")
    return model


def _a(thing: object) -> str:
    return "None" if thing is None else f"an object of type {type(thing).__name__}"


def accepted(builder: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments `given` that `builder` names; all but the shape if it takes any it does not name.

    Who hands any arguments on to another library's builder has none there for a shape.
    """
    if getattr(builder, "__init__", None) is nn.Module.__init__:
        return {}  # its signature names any arguments, and it refuses each of them
    parameters = inspect.signature(builder).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named |= given.keys() - {"shape"}
    return {key: value for key, value in given.items() if key in named}
