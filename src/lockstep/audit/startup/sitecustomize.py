"""Imported by every Python process of an audited command (its folder is on PYTHONPATH): observes torch."""

import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME, _HERE = "LOCKSTEP_AUDIT", str(Path(__file__).parent)


def _observe(module: Any) -> None:
    from lockstep.audit import observer, patches

    _HOOKS["accelerate.accelerator"] = functools.partial(patches.watch_gathers, observer.install())


def _accept_any_world(module: Any) -> None:
    """Let a trainer run as the only rank, whose arguments name a number of ranks."""
    module.TorchElasticEnvironment.validate_settings = lambda *args, **options: None


_HOOKS: dict[str, Callable[[Any], None]] = {
    "torch": _observe,
    "lightning.fabric.plugins.environments.torchelastic": _accept_any_world,
    "lightning_fabric.plugins.environments.torchelastic": _accept_any_world,
}
"""Functions that are called with a module as soon as it is imported."""


class _Finder(importlib.machinery.PathFinder):
    """Calls the hooks."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(fullname, path, target) if fullname in _HOOKS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: Any) -> None:
            execute(module)
            if hook := _HOOKS.pop(fullname, None):  # a search alone, as by importlib.util.find_spec, imports nothing
                hook(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    if json.loads(os.environ[_NAME])["mode"] == "replay" and "RANK" in os.environ:
        if os.environ["RANK"] != "0":
            os._exit(0)  # one process replays for all
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = "1"
    sys.meta_path.insert(0, _Finder)


if _NAME in os.environ:
    _begin()
# This file hides another one of its name.
_other = importlib.machinery.PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != _HERE])
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))
