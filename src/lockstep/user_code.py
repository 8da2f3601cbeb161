"""User code named as `module:attribute`, looked up with the current folder importable."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from .errors import RequestError
from .monitor import failures

_PACKAGE = str(Path(__file__).parent)


def check(flag: str, name: str) -> tuple[str, str]:
    """Return module and attribute of `name`; imports only the module's parents.

    Raises `RequestError` if the name has another form or the module cannot be found.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise RequestError(f"{flag} {name}: write module:attribute, such as my_module:name.")
    if find(module) is None:
        raise RequestError(
            f"{flag} {name}: no module {module!r} in {Path.cwd()} or among the installed packages; "
            "start in the folder that holds it, or install it."
        )
    return module, attribute


def load(flag: str, name: str) -> Any:
    """Return the callable named `name`; raise `RequestError` if none is found."""
    module, attribute = check(flag, name)
    try:
        with _current_folder_importable():
            value: Any = importlib.import_module(module)
    except Exception as error:
        raise RequestError(f"{flag} {name}: importing {module} {raised(error)}.") from error
    try:
        value = operator.attrgetter(attribute)(value)
    except AttributeError:
        raise RequestError(f"{flag} {name}: {module} has no {attribute!r}; check the name after the colon.") from None
    if not callable(value):
        raise RequestError(f"{flag} {name} is an object of type {type(value).__name__}; give a class or function.")
    return value


def raised(error: Exception) -> str:
    """Describe an error of the user's code: `raised KeyError at /home/me/net.py:12: 'depth'`.

    The place is the user's deepest frame; absent if a call does not fit the signature.
    """
    places = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_PACKAGE) and not failures.is_library(frame.filename)
    ]
    text = " ".join(str(error).split()).removesuffix(".")
    return f"raised {type(error).__name__}{places[-1] if places else ''}{': ' if text else ''}{text}"


def find(module: str) -> ModuleSpec | None:
    """Return a module's spec; None if not found. Imports only the module's parents."""
    with contextlib.suppress(ImportError, ValueError), _current_folder_importable():  # no parent; a relative name
        return importlib.util.find_spec(module)
    return None


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def within(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function within partials of it."""
    while isinstance(function, partial):
        function = function.func
    return function


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, also of one within a partial; of another callable its class's."""
    function = within(function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
