"""What all scripts in this folder train, and how they are timed: after torch's own `sgd`, which all call.

`JOB` names the net and its data. Where `TURNS` is the path of a socket, a rank tells there when it has made its first
step; then it trains by turns of `TURN` steps, "SKIPPED TIMED": it waits for a word before each, and tells how long a
step took.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

JOB = os.environ.get("JOB", "mlp")
BATCH = int(os.environ.get("BATCH", "64"))
"""Samples in a step of all ranks."""
STEPS = int(os.environ.get("STEPS", "100"))
"""Of the one epoch, so that what happens at the end of one is in no turn."""
SHAPE = (1, 28, 28) if JOB == "conv" else (64,)
CLASSES = 10


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The samples of tensors, by a class of one's own."""

    classes = CLASSES

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def data(samples: int = STEPS * BATCH) -> Dataset[Any]:
    """Return samples (x, label), the same each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, *SHAPE, generator=generator)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return Rows(x, y) if JOB == "rows" else TensorDataset(x, y)


def splits() -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the data as `lockstep train --data` takes them, with a small test set."""
    return data(), data(BATCH)


class Net(nn.Sequential):
    """A perceptron, or a small convolutional net without batch statistics."""

    def __init__(self) -> None:
        if JOB == "conv":
            super().__init__(
                *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
            )
        else:
            super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))


class Turns:
    """A rank's side of the taking of turns."""

    def __init__(self, path: str, skipped: int, timed: int) -> None:
        self._path, self._skipped, self._timed = path, skipped, timed
        self._socket = socket.socket(socket.AF_UNIX)
        self._step = 0
        self._begin_s = 0.0

    def __call__(self) -> None:
        """Count a step; where a turn ends, tell how long it took and wait for the next one."""
        at = self._step % (self._skipped + self._timed)
        self._step += 1
        if at == self._skipped:
            self._begin_s = time.perf_counter()
        elif at == 0 and self._step == 1:
            self._socket.connect(self._path)
            self._tell(time.monotonic())  # a clock that all processes share
        elif at == 0:
            self._tell((time.perf_counter() - self._begin_s) / self._timed)

    def _tell(self, seconds: float) -> None:
        told = {"seconds": seconds, "peak": _peak_bytes(), "threads": torch.get_num_threads()}
        self._socket.sendall(json.dumps(told).encode() + b"\n")
        self._socket.recv(1)


def _peak_bytes() -> int:
    """Return the most memory that was resident: of this program alone, unlike what getrusage says."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _counted(made: Callable[..., None], turns: Turns) -> Callable[..., None]:
    def sgd(*given: Any, **named: Any) -> None:
        made(*given, **named)
        turns()

    return sgd


if "TURNS" in os.environ:
    # Not by a hook of optimizers, which one of them leaves out: all step by this function, once, for one group.
    module = import_module("torch.optim.sgd")
    vars(module)["sgd"] = _counted(module.sgd, Turns(os.environ["TURNS"], *map(int, os.environ["TURN"].split())))
