"""What a user brings by name: `module:attribute`, looked up with the current folder importable."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import RequestError


def check(flag: str, name: str) -> tuple[str, str]:
    """Return module and attribute of `name`, given with `flag`; imports only the module's parents.

    Raises `RequestError` where the name is not of the form or its module cannot be found.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise RequestError(f"{flag} {name}: write module:attribute, such as my_module:name.")
    try:
        with _current_folder_importable():
            found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no parent package; a relative name
        found = False
    if not found:
        raise RequestError(
            f"{flag} {name}: no module {module!r} in {Path.cwd()} or among the installed packages; "
            "start in the folder that holds it, or install it."
        )
    return module, attribute


def load(flag: str, name: str) -> Any:
    """Return the callable that `name` names.

    Raises `RequestError` where its module cannot be imported, or has no such attribute, or it cannot be called.
    """
    module, attribute = check(flag, name)
    try:
        with _current_folder_importable():
            found: Any = importlib.import_module(module)
    except Exception as error:
        raise RequestError(f"{flag} {name}: importing {module} raised {type(error).__name__}: {error}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise RequestError(f"{flag} {name}: {module} has no {attribute!r}; check the name after the colon.")
        found = getattr(found, part)
    if not callable(found):
        raise RequestError(f"{flag} {name} is an object of type {type(found).__name__}; give a class or function.")
    return found


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Put the current folder first among those that are searched for modules, for the time of the block."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
