"""Files that the processes of an audited command leave in its folder."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .tensors import count_samples

TOGETHER, REVERSED = "together", "in reverse order"
TURNS, BY_SHARE, FIRST = "in turns", "statistics by share", "first micro-batch"
"""Passes of a replay: all ranks' samples in one batch; the same with the last rank's samples first; each rank's batch
alone, in turns; all in one with BatchNorm's statistics of each rank's share; each micro-batch replaced by a copy of the
first. The others have one rank's samples; see `Alone`."""
UNMATCHED, UNMATCHED_ROWS, UNREAD = "unmatched", "unmatched rows", "unread"
"""Files of a replay whose draws have other shapes than the ranks' together, whose BatchNorm has other rows, or which
reads a loader that the ranks did not read."""
SOURCES = ("random", "numpy", "torch", "generator")
"""What loaders draw from: Python's `random`, NumPy, torch, and torch by a generator that the script names."""
_DIGEST = 32  # bytes


class Alone(NamedTuple):
    """A pass with one rank's samples, or with one micro-batch of them in place of each."""

    rank: int
    micro_batch: int | None = None

    @property
    def name(self) -> str:
        """The pass's name."""
        return f"rank {self.rank}" + (f" micro-batch {self.micro_batch}" if self.micro_batch is not None else "")

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the pass of a name; None for that of all ranks' samples."""
        words = name.split()
        if words[0] != "rank":
            return None
        return cls(int(words[1]), int(words[3]) if len(words) > 2 else None)


class Read(NamedTuple):
    """A rank's next batch of a loader, or the end of the loader's iteration."""

    loader: int
    """Number in the order of creation."""
    iteration: int
    batch: Any
    generators: tuple[Any, Any] | None
    """States of `random` and of NumPy's generator after it was read. None for an end."""

    @property
    def is_end(self) -> bool:
        """Whether the loader had no batch left."""
        return self.generators is None


class Window(NamedTuple):
    """One rank's part of an optimizer step, from the step before it."""

    reads: list[Read]
    draws: list[Tensor]
    """Results of random operators, in call order."""
    states: list[bytes]
    """Digests of the generators' states before each of them."""
    is_drawn_outside: bool
    """Whether the script drew from `random` or NumPy."""
    weights: list[list[Tensor]]
    """Parameters and buffers of each outermost module, before its first call."""
    gradients: list[list[Tensor | None]]
    """By module and parameter; None for one of another optimizer."""
    unclipped: list[list[Tensor | None]]
    """The same before they were clipped."""
    names: list[list[str]]
    buffers: dict[str, Tensor]
    """Before the first call of their modules."""
    has_batchnorm: bool
    is_coarse: bool
    """Whether a part is computed in less than float32."""
    optimizer: int
    """Number in the order of the first steps."""
    learning_rates: list[float]
    schedule_steps: int
    """Since the begin."""
    inputs: list[bytes]
    """Digests of the samples given to the model."""
    calls: int
    """Of outermost modules whose gradients are computed."""
    training: set[int]
    """Loaders whose batches are trained on."""
    exchanges: list[bool]
    """By call of a DistributedDataParallel: whether its backward pass exchanges gradients."""
    place: str
    """FILE:LINE of the optimizer's step in the user's code."""

    @property
    def batches(self) -> list[Any]:
        """Its batches that are trained on."""
        return [read.batch for read in self.reads if not read.is_end and read.loader in self.training]

    @property
    def micro_batches(self) -> int:
        """Number of its micro-batches: a batch may take several calls of the model, and be read ahead of its step."""
        reads = collections.Counter(read.loader for read in self.reads if not read.is_end)
        return min(self.calls, max((reads[loader] for loader in self.training if reads[loader]), default=self.calls))

    @property
    def samples(self) -> int:
        """Their number of samples."""
        return sum(map(count_samples, self.batches))


class Replayed(NamedTuple):
    """One process's computation of a window."""

    gradients: list[list[Tensor | None]]
    unclipped: list[list[Tensor | None]]
    schedule_steps: int
    inputs: list[bytes]
    calls: int
    draws_of_samples: list[int]
    """Indices of the draws that have a row for each of the ranks' samples together."""


class Recording:
    """All ranks' windows, and the facts of each rank beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = range(len([*folder.glob("rank*")]))
        self.windows = [self._read_windows(rank) for rank in self.ranks]
        self.facts: list[dict[str, Any]] = [
            json.loads(rank_path(folder, rank, "facts.json").read_text()) for rank in self.ranks
        ]

    @property
    def steps(self) -> int:
        """Windows that all ranks have."""
        return min(map(len, self.windows), default=0)

    def step(self, number: int) -> list[Window]:
        """Return the ranks' windows of a step."""
        return [windows[number] for windows in self.windows]

    def read_tails(self) -> list[list[Read]]:
        """Return each rank's reads after its last window."""
        return [self._read(rank, "tail") or [] for rank in self.ranks]

    def read_final_weights(self) -> list[list[Tensor]]:
        """Return rank 0's weights after its last window."""
        return self._read(0, "final") or []

    def read_universe(self, rank: int, loader: int) -> Tensor:
        """Return the indices (n) of the samples that a loader's data set has, in the data set it is a part of."""
        universe: Tensor = self._read(rank, f"universe {loader}")
        return universe

    def read_order(self, rank: int, loader: int, iteration: int) -> Tensor | None:
        """Return the sample indices (n) of a loader's iteration on a rank, if they were known beforehand."""
        order: Tensor | None = self._read(rank, f"order {loader} {iteration}")
        return order

    def read_orders(self, loader: int) -> list[Tensor] | None:
        """Return each rank's order of a loader's first iteration, if all are known."""
        orders = [self.read_order(rank, loader, 0) for rank in self.ranks]
        return None if any(order is None for order in orders) else [order for order in orders if order is not None]

    def read_augmentation(self, step: int, source: str) -> list[list[bytes]]:
        """Return, by rank, sorted digests of what its loaders drew for samples; data workers draw in the first step."""
        paths = [rank_path(self.folder, rank, f"augmentation {step} {source}") for rank in self.ranks]
        files = [path.read_bytes() if path.exists() else b"" for path in paths]
        return [sorted(data[start : start + _DIGEST] for start in range(0, len(data), _DIGEST)) for data in files]

    def read_replay(self, step: int, name: str) -> Replayed | None:
        """Return a pass's computation of a window; None if it ended before."""
        replayed: Replayed | None = _load(replay_path(self.folder, step, name))
        return replayed

    def read_reference(self, step: int) -> Replayed | None:
        """Return one process's computation of all ranks' samples."""
        return self.read_replay(step, TURNS) or self.read_replay(step, TOGETHER)

    def read_replay_facts(self) -> dict[str, Any]:
        """Return the facts of the process that had all ranks' samples."""
        path = self.folder / "replay.json"
        facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return facts

    def _read(self, rank: int, name: str) -> Any:
        return _load(rank_path(self.folder, rank, f"{name}.pt"))

    def _read_windows(self, rank: int) -> list[Window]:
        windows = list[Window]()
        while window := self._read(rank, f"window{len(windows)}"):
            windows.append(window)
        return windows


def rank_path(folder: Path, rank: int, name: str) -> Path:
    """Return the path of a rank's file."""
    return folder / f"rank{rank}" / name


def replay_path(folder: Path, step: int, name: str) -> Path:
    """Return the file of a window in the pass `name`."""
    return folder / f"replay {step} {name}.pt"


def save(values: Any, path: Path) -> None:
    """Save values by torch, atomically."""
    part = path.with_suffix(".part")
    torch.serialization.save(values, part)  # torch.save is patched in an audited process
    part.replace(path)


def _load(path: Path) -> Any:
    """Return what `save` wrote into the audit's own temporary folder, with batches of any classes."""
    return torch.serialization.load(path, weights_only=False) if path.exists() else None
