"""Imported by every Python process of an audited command (its folder is on PYTHONPATH): observe once torch is there."""

import importlib.machinery
import os
import sys
from typing import Any


class _Finder(importlib.machinery.PathFinder):
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


if "LOCKSTEP_AUDIT" in os.environ:
    sys.meta_path.insert(0, _Finder)
