"""lockstep trains one PyTorch model on any number of devices, and it is still the same model.

The names below are the public ones. They are looked up when they are used, so that importing lockstep, and with it
the command, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batching import BatchPlan
    from .config import RunConfig
    from .engine import train
    from .errors import LockstepError, ProofError, RequestError, RunError, Stopped
    from .evaluation import evaluate
    from .launchers.table import launch
    from .options import override, recipe
    from .precision import Precision
    from .result import RunResult, Scores
    from .runs import run
    from .strategies.table import build as build_strategy
    from .topology import Topology
    from .world import World

_HOMES = {
    "BatchPlan": "batching",
    "LockstepError": "errors",
    "Precision": "precision",
    "ProofError": "errors",
    "RequestError": "errors",
    "RunConfig": "config",
    "RunError": "errors",
    "RunResult": "result",
    "Scores": "result",
    "Stopped": "errors",
    "Topology": "topology",
    "World": "world",
    "build_strategy": "strategies.table:build",
    "evaluate": "evaluation",
    "launch": "launchers.table",
    "override": "options",
    "recipe": "options",
    "run": "runs",
    "train": "engine",
}

__all__ = [
    "BatchPlan",
    "LockstepError",
    "Precision",
    "ProofError",
    "RequestError",
    "RunConfig",
    "RunError",
    "RunResult",
    "Scores",
    "Stopped",
    "Topology",
    "World",
    "build_strategy",
    "evaluate",
    "launch",
    "override",
    "recipe",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f".{module}", __name__), attribute or name)
