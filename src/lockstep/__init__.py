"""lockstep trains the same PyTorch model on any number of devices.

A loop of one's own:

    session = lockstep.session()                        one rank of the job, alone where nothing has started others
    session.prepare(model, optimizer, loader, …)        made ready, in the same order
    session.epochs(n)                                   the epochs that are left
    session.backward(loss, weight=None)                 in place of loss.backward()
    session.evaluating(loader)                          shares of each batch, each sample once
    session.sum, .mean, .max, .gather                   over all ranks
    session.log, .print, .score                         records; rank 0's print; how good the weights are
    lockstep.launch(main, devices=2)                    a function that calls session(), on several ranks

The command from Python:

    config = lockstep.override(lockstep.recipe("digits"), devices=2)
    result = lockstep.launch(lockstep.run, config)      what `lockstep train digits --devices 2` does

Failures raise a `LockstepError`, whose text is one sentence: `RequestError`, `RunError`, `ProofError`, `Stopped`. The
names are looked up when they are used, so that importing lockstep, and with it the command, does not import torch.
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
