"""Imported by every Python process of an audited command (its folder is on PYTHONPATH): observes torch."""

import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

_NAME, _HERE = "LOCKSTEP_AUDIT", str(Path(__file__).parent)


class _Finder(importlib.machinery.PathFinder):
    """Has torch observed as soon as it is imported."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_observe(module: Any) -> None:
                execute(module)
                from lockstep.audit import observer

                observer.install()

            spec.loader.exec_module = then_observe  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    asked = json.loads(os.environ[_NAME])
    if asked["mode"] == "replay" and "RANK" in os.environ and not asked.get("keeps_world"):
        if os.environ["RANK"] != "0":
            os._exit(0)  # one process replays for all
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = "1"
    sys.meta_path.insert(0, _Finder)


if _NAME in os.environ:
    _begin()
# This file hides another one of its name.
_other = importlib.machinery.PathFinder.find_spec("sitecustomize", [each for each in sys.path if each != _HERE])
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(importlib.util.module_from_spec(_other))
