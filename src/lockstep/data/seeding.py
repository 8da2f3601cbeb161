"""The generators that a user's own data set draws from, seeded anew for each sample.

Its transforms draw from torch's, Python's and NumPy's global generators, whose states depend on what the process has
done before: on the rank, the worker and the history. Seeded from (seed, epoch, sample index), they give a sample the
same variations wherever and whenever it is made. What is drawn in the rank's own process leaves no trace there,
since the model's own randomness, such as dropout, comes from the same generators.

A generator that the data set keeps for itself, such as one from `np.random.default_rng`, is beyond reach.

Seeding three generators takes some 15 µs, longer than a small sample. Most data sets draw nothing: until one does,
a batch is read without, and whether it has drawn is looked at afterwards. If so, it is read again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from ..randomness import Generators
from . import counter
from .source import Indices

T = TypeVar("T")
_GENERATORS = 3
"""Each gets bits of its own: torch's and NumPy's are of one kind, and would draw alike from the same seed."""


def seeds(indices: Indices, *words: int) -> counter.UInt64:
    """Return the bits (n, 3) that `seed_generators` takes, for each of `indices` (n,), keyed by `words`."""
    return counter.bits(counter.keys(_GENERATORS, *words), indices).T


def seed_generators(bits: counter.UInt64) -> None:
    """Seed torch's generator (the CPU's), Python's and NumPy's from `bits` (3,)."""
    for_torch, for_python, for_numpy = bits.tolist()
    # Not torch.manual_seed, which seeds every GPU's too; those are not given back, and it takes 100 times as long.
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_python)
    np.random.seed(for_numpy >> 32)  # it takes 32 bits


class Drawing:
    """Whether a data set draws from the generators at all, as far as is known."""

    def __init__(self) -> None:
        self.is_seen = False
        self._before: Generators | None = None

    def read(self, plain: Callable[[], T], seeded: Callable[[], T]) -> T:
        """Return what `plain()` reads, or, of a data set that draws, what `seeded()` does, which seeds for each sample.

        The process's generators are left as they were.
        """
        self._before = before = Generators.now((), self._before)
        if not self.is_seen:
            found = plain()
            if before.is_now():
                return found
            self.is_seen = True
        try:
            return seeded()
        finally:
            before.put_back(())
