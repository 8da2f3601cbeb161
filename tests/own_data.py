"""Data sets of a user's own, for tests: named as tests.own_data:NAME."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

Pair = tuple[torch.Tensor, int]
Splits = tuple[Dataset[Pair], Dataset[Pair]]

WAY = ""
"""How `differing` differs."""


def _pause(seconds: float, _: int) -> None:
    time.sleep(seconds)


class _Samples(Dataset[Pair]):
    """Samples of four classes; `reads` is called with the index of each before it is read."""

    classes = 4
    targets: Sequence[int]

    def __init__(self, samples: int = 40, reads: Callable[[int], object] = hash) -> None:
        self.samples, self.reads = samples, reads

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        self.reads(index)
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


class _Drawn(_Samples):
    """Samples drawn anew from the three generators that transforms draw from."""

    def __getitem__(self, index: int) -> Pair:
        return torch.cat([torch.randn(2), torch.tensor([random.random(), np.random.rand()])]), index % 4


class _Others(_Drawn):
    def __getitem__(self, index: int) -> Pair:
        x, label = super().__getitem__(index)
        return x + 3, label


class _Unseeded(_Drawn):
    def __getitem__(self, index: int) -> Pair:
        x, label = super().__getitem__(index)
        return x * np.random.default_rng().random(), label


def drawn() -> Splits:
    return _Drawn(), _Drawn()


def split_at_random() -> tuple[TensorDataset, TensorDataset]:
    """Return one set's tensors, split in two by Python's generator."""
    order = random.sample(range(40), 40)
    x, y = torch.arange(40.0).view(40, 1), torch.arange(40) % 4
    first, second = (TensorDataset(x[part], y[part]) for part in (order[:32], order[32:]))
    return first, second


def differing() -> tuple[Dataset[Pair], ...]:
    """Return data that tests may make different on one rank."""
    if WAY == "gone":
        raise OSError("no such file")
    train = {"other samples": _Others, "own generator": _Unseeded}.get(WAY, _Drawn)()
    train.targets = [(index + (WAY == "relabelled")) % 4 for index in range(len(train))]
    return (train, *[_Drawn()] * (1 + (WAY == "three sets")))


class _Labelled(_Samples):
    """Images of three classes, as they say; sample 41 is of a fourth."""

    classes = 3

    def __getitem__(self, index: int) -> Pair:
        return torch.full((1, 8, 8), float(index)), 3 if index == 41 else index % 3


def beyond_the_classes() -> tuple[Dataset[Pair], TensorDataset]:
    return _Labelled(60), TensorDataset(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3)


# ---- data that take their time


def evaluated_slowly() -> Splits:
    """Return data whose evaluation takes four seconds and more, and a batch of it little."""
    return _Samples(), _Samples(2_500, partial(_pause, 0.001))


def built_slowly() -> Splits:
    """Return data that the first process to ask takes long to build: the seconds that the file `builds` says."""
    with contextlib.suppress(FileExistsError), Path("builder").open("x") as file:
        file.write(str(os.getpid()))
        file.close()
        time.sleep(float(Path("builds").read_text()))
    return _Samples(), _Samples(8)


def _wait_at_gate(_: int) -> None:
    while _is_closed():
        time.sleep(0.002)


def _is_closed() -> bool:
    try:
        first, last = map(int, Path("gate").read_text().split())
        return first <= Path("run/steps.jsonl").read_bytes().count(b'"event": "step"') < last
    except FileNotFoundError:
        return False


def gated() -> Splits:
    """Return data that nobody can read while the file `gate` says so: "3 9" where the run in `run` is at steps 3–8."""
    return _Samples(160, _wait_at_gate), _Samples(8)


# ---- data of which sample 23 does something to the process that reads it


def _do(happens: Callable[[], object], index: int) -> None:
    if index == 23:
        happens()


def _at_23(happens: Callable[[], object]) -> Splits:
    return _Samples(reads=partial(_do, happens)), _Samples()


def _raise(error: BaseException) -> None:
    raise error


def _talk() -> None:
    print("by print")
    os.write(2, b"by C code\n")
    os.system("echo by a program")


def _start_and_end() -> None:
    with subprocess.Popen(["sleep", "600"]) as program:
        program.terminate()


breaking = partial(_at_23, partial(_raise, OSError("disk on fire")))
hanging = partial(_at_23, partial(time.sleep, 600))
crashing = partial(_at_23, partial(ctypes.string_at, 0))
talking = partial(_at_23, _talk)
starting = partial(_at_23, _start_and_end)


class _Holding(_Samples):
    read = 0

    def __getitem__(self, index: int) -> Pair:
        self.read += 1
        time.sleep(0.02)
        if index == 23 and self.read > 50:
            ctypes.PyDLL(None).sleep(600)  # a C function that keeps Python's lock
        return super().__getitem__(index)


def holding() -> Splits:
    """Return data of which one sample stops all of its process's Python, once the run is under way."""
    return _Holding(), _Samples()
