"""Ranks that share a DataLoader out agree before they read: what one of them lacks, all of them hear."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.data.share import SharedLoader
from lockstep.errors import RequestError
from lockstep.world.world import World

from ..pool import RankPool


class _Own(WeightedRandomSampler):
    """A sampler that gives each rank indices of its own."""

    def __iter__(self) -> Any:
        return iter([index + self.num_samples * torch.distributed.get_rank() for index in range(self.num_samples)])


class _Samples(Dataset[dict[str, Any]]):
    """Samples that differ between the ranks, or from one reading to the next, as `what` says."""

    def __init__(self, what: str, rank: int) -> None:
        self._first = rank if what == "shifted" else 0
        self._drawn = np.random.default_rng() if what == "drawn" else None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = 0.0 if self._drawn is None else self._drawn.random()
        return {
            "x": torch.tensor([(self._first + index) % 12 + drawn]),
            "name": "a",
            "at": (torch.rand(2), torch.ones(1).bfloat16()),
        }


class _Stream(IterableDataset[Any]):
    def __init__(self, step: int, rank: int) -> None:
        self._step, self._rank = step, rank

    def __iter__(self) -> Any:
        return iter(range(self._rank if self._step > 1 else 0, 24, self._step))


def _read(world: World, what: str) -> tuple[str, str]:
    """Return what comparing the ranks' data says, before and after the first batch."""
    dataset: Any = _Samples(what, world.rank)
    if what in ("whole", "shared out"):
        dataset = _Stream(1 if what == "whole" else 2, world.rank)
    shared = SharedLoader(DataLoader(dataset, 6), world, seed=5)
    said = shared.compare()
    try:
        next(shared.micros(0))
        return said, shared.compare()
    except RequestError as error:
        return said, str(error)
    finally:
        shared.close()


def test_ranks_whose_data_have_other_samples_are_told_so(pool: RankPool) -> None:
    for what, words in (
        ("the same", ""),
        ("shifted", "rank 1 reads other samples than rank 0"),
        ("drawn", "draws from one of its own"),
        ("whole", ""),
        ("shared out", "rank 1 reads other samples than rank 0"),
    ):
        for before, said in pool.run(2, _read, what):
            assert before == "", "nothing is read yet"
            assert bool(said) == bool(words)
            assert words in said


def _made(world: World, what: str) -> str:
    dataset = TensorDataset(torch.arange(12 + (what == "length") * world.rank))
    sampler: Any = _Own([1.0], 6) if what == "order" else None
    if what == "sampler" and world.rank:
        sampler = DistributedSampler(dataset, 2, 0)
    try:
        shared = SharedLoader(DataLoader(dataset, 5, sampler=sampler), world, seed=5)
    except RequestError as error:
        return str(error)
    found = [world.sum(micro.batch[0].sum() * (micro.size > 0)).item() for micro in shared.micros(0)]
    return str(found)


def test_ranks_agree_on_what_they_share(pool: RankPool) -> None:
    assert pool.run(2, _made, "the same") == [str([0 + 1 + 2 + 3 + 4, 5 + 6 + 7 + 8 + 9, 10 + 11])] * 2
    unlike = "The DataLoader is not the same on every rank: rank 1 has samples 13 (rank 0 has 12); "
    assert all(told.startswith(unlike) for told in pool.run(2, _made, "length"))
    assert all("rank 1 has order of digest" in told for told in pool.run(2, _made, "order"))
    assert all("leave it out" in told for told in pool.run(2, _made, "sampler"))
