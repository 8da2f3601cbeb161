"""Data sets of a user's own, for tests: named as tests.own_data:NAME."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

Pair = tuple[torch.Tensor, int]


class _Labelled(Dataset[Pair]):
    """Sixty images, read one by one, of three classes, as they say; sample 41 is of a fourth."""

    classes = 3

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Pair:
        return torch.full((1, 8, 8), float(index)), 3 if index == 41 else index % 3


def beyond_the_classes() -> tuple[Dataset[Pair], TensorDataset]:
    """Return a training set with a label that no class has."""
    return _Labelled(), TensorDataset(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)


class _Drawn(Dataset[Pair]):
    """Forty samples, each drawn anew from the three generators that transforms draw from."""

    classes = 4

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Pair:
        return torch.cat([torch.randn(2), torch.tensor([random.random(), np.random.rand()])]), index % 4


def drawn() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return two sets whose samples are varied at random."""
    return _Drawn(), _Drawn()


def split_at_random() -> tuple[TensorDataset, TensorDataset]:
    """Return one set's tensors, split in two by Python's generator."""
    order = random.sample(range(40), 40)
    x, y = torch.arange(40.0).view(40, 1), torch.arange(40) % 4
    first, second = (TensorDataset(x[part], y[part]) for part in (order[:32], order[32:]))
    return first, second


WAY = ""
"""How `differing` differs."""


class _Targets(_Drawn):
    def __init__(self, samples: int, classes: int, shift: int) -> None:
        self.samples, self.classes = samples, classes
        self.targets = [(index + shift) % 4 for index in range(samples)]

    def __len__(self) -> int:
        return self.samples


def differing() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data that tests may make different on one rank."""
    if WAY == "gone":
        raise OSError("no such file")
    train = _Targets(
        samples=39 if WAY == "fewer" else 40, classes=5 if WAY == "classes" else 4, shift=WAY == "relabelled"
    )
    return train, _Drawn()


class _Holding(_Drawn):
    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: int) -> Pair:
        self.read += 1
        time.sleep(0.02)
        if index == 23 and self.read > 50:
            ctypes.PyDLL(None).sleep(600)  # a C function that keeps Python's lock
        return torch.zeros(4), index % 4


def holding() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample stops all of its process's Python."""
    return _Holding(), _Drawn()


class _Eventful(_Drawn):
    """At sample 23, something happens to the process that reads it."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = happens

    def __getitem__(self, index: int) -> Pair:
        if index == 23:
            self._happens()
        return torch.zeros(4), index % 4


def _burn() -> None:
    raise OSError("disk on fire")


def hanging() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample never comes, as from a disk that does not answer."""
    return _Eventful(partial(time.sleep, 600)), _Drawn()


def debugged() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample has a breakpoint."""
    return _Eventful(breakpoint), _Drawn()


def _talk() -> None:
    print("by print")
    os.write(2, b"by C code\n")
    os.system("echo by a program")


def talking() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample makes its process talk."""
    return _Eventful(_talk), _Drawn()


def crashing() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample ends its process in C code."""
    return _Eventful(partial(ctypes.string_at, 0)), _Drawn()


def broken() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample cannot be read."""
    return _Eventful(_burn), _Drawn()


def leaving() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data that end their process in the middle of training, as if all were well."""
    return _Eventful(partial(os._exit, 0)), _Drawn()


def _start_and_end() -> None:
    with subprocess.Popen(["sleep", "600"]) as program:
        program.terminate()


def starting() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample starts a program, and ends it as programs are ended."""
    return _Eventful(_start_and_end), _Drawn()


def _move() -> None:
    os.chdir("further")


def moving() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data that change the working folder, when they are made and when one sample is read."""
    os.chdir("elsewhere")
    return _Eventful(_move), _Drawn()


def _interrupt() -> None:
    raise KeyboardInterrupt


def interrupting() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample raises what Ctrl-C does."""
    return _Eventful(_interrupt), _Drawn()


def exiting() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which one sample ends the process that reads it."""
    return _Eventful(partial(os._exit, 7)), _Drawn()


class _Slow(Dataset[Pair]):
    classes = 4

    def __init__(self, samples: int, sample_s: float = 0.003) -> None:
        self.samples, self.sample_s = samples, sample_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        time.sleep(self.sample_s)
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


def evaluated_slowly() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data whose evaluation takes ten seconds and more, and a batch of it one, and two on a busy machine."""
    return _Slow(40), _Slow(10_000, 0.001)


def very_slow() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data of which eight samples take four seconds."""
    return _Slow(400, 0.5), _Slow(8)


def slow() -> tuple[Dataset[Pair], Dataset[Pair]]:
    """Return data that keeps a run going for some seconds."""
    return _Slow(400), _Slow(40)
