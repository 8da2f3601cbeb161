"""lockstep trains the same PyTorch model on any number of devices.

Your training loop:

    session = lockstep.session()                        this rank of the job; a single rank without a launcher
    session.prepare(model, optimizer, loader, …)        returns the prepared objects in the same order
    session.epochs(n)                                   the remaining epochs
    session.backward(loss, weight=None)                 in place of loss.backward()
    session.evaluating(loader)                          this rank's share of each batch; each sample once
    session.sum, .mean, .max, .gather                   over all ranks
    session.log, .print, .score                         record values; print on rank 0; score the weights
    lockstep.launch(main, devices=2)                    call a function that uses session() on several ranks

The command from Python:

    config = lockstep.override(lockstep.recipe("digits"), devices=2)
    result = lockstep.launch(lockstep.run, config)      as `lockstep train digits --devices 2`

Failures raise a `LockstepError`, whose text is one sentence: `RequestError`, `RunError`, `ProofError`, `Stopped`. Names
are imported on first use, so that importing lockstep, and with it the command, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.options import override, recipe
    from .config.schema import RunConfig
    from .errors import LockstepError, ProofError, RequestError, RunError, Stopped
    from .record.result import RunResult, Scores
    from .sessions.opening import session
    from .sessions.script import launch
    from .sessions.session import Session
    from .trainer import run, train
    from .world.topology import Topology
    from .world.world import World

_HOMES = {
    **dict.fromkeys(("LockstepError", "ProofError", "RequestError", "RunError", "Stopped"), "errors"),
    **dict.fromkeys(("RunResult", "Scores"), "record.result"),
    **dict.fromkeys(("override", "recipe"), "config.options"),
    **dict.fromkeys(("run", "train"), "trainer"),
    "RunConfig": "config.schema",
    "Session": "sessions.session",
    "Topology": "world.topology",
    "World": "world.world",
    "launch": "sessions.script",
    "session": "sessions.opening",
}

__all__ = [
    "LockstepError",
    "ProofError",
    "RequestError",
    "RunConfig",
    "RunError",
    "RunResult",
    "Scores",
    "Session",
    "Stopped",
    "Topology",
    "World",
    "launch",
    "override",
    "recipe",
    "run",
    "session",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
