"""The work that all peers do, that of `benchmarks.faults`: its slow samples, a small net, SGD with momentum."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ..faults import EVERY as EVERY
from ..faults import Pair as Pair
from ..faults import Slow

DATA = Slow(240)
BATCH = 24
STEPS = 80
TIMEOUT_S = 10.0
"""For a collective: what --stall-timeout is to ours. With much less, ranks give up on those that still import torch."""
_RECORD = Path("run", "steps.jsonl")
_FINAL = Path("run", "checkpoints", "last", "model.safetensors")


def net() -> nn.Module:
    """Return the net, of 8 numbers and 4 classes."""
    return nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def begin(step: int, *, is_main: bool) -> None:
    """Note that training goes on after `step`."""
    _note({"event": "start", "first_step": step}, is_main=is_main)


def made(step: int, *, is_main: bool) -> None:
    """Note that `step` was made."""
    _note({"event": "step", "step": step}, is_main=is_main)


def _note(row: dict[str, object], *, is_main: bool) -> None:
    if is_main:
        _RECORD.parent.mkdir(exist_ok=True)
        with _RECORD.open("a") as file:
            file.write(json.dumps(row) + "\n")


def leave(model: nn.Module) -> None:
    """Write the weights with which training has ended."""
    _FINAL.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), _FINAL)
