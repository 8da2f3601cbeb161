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
    Sampler,
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
        x = (self._first + index) % 12 + (0.0 if self._drawn is None else self._drawn.random())
        return {"x": torch.tensor([x]), "name": "a", "at": (torch.rand(2), torch.ones(1).bfloat16())}


class _Stream(IterableDataset[Any]):
    def __init__(self, first: int, step: int) -> None:
        self._numbers = range(first, 24, step)

    def __iter__(self) -> Any:
        return iter(self._numbers)


def _compared(world: World, what: str) -> tuple[str, str]:
    """Return what comparing the ranks' data says, before and after the first batch."""
    streams = {"whole": _Stream(0, 1), "shared out": _Stream(world.rank, 2)}
    shared = SharedLoader(DataLoader(streams.get(what) or _Samples(what, world.rank), 6), world, seed=5)
    before = "".join(shared.compare())
    try:
        next(shared.micros(0))
        return before, "".join(shared.compare())
    except RequestError as error:
        return before, str(error)


def test_ranks_whose_data_have_other_samples_are_told_so(pool: RankPool) -> None:
    for what, words in (
        ("the same", ""),
        ("shifted", "rank 1 reads other samples than rank 0"),
        ("drawn", "draws from another one"),
        ("whole", ""),
        ("shared out", "rank 1 reads other samples than rank 0"),
    ):
        for before, after in pool.run(2, _compared, what):
            assert before == "", "nothing is read yet"
            assert words in after if words else after == ""


def _summed(world: World, what: str) -> str:
    dataset = TensorDataset(torch.arange(12 + (what == "length") * world.rank))
    sampler: Any = _Own([1.0], 6) if what == "order" else None
    if what == "sampler" and world.rank:
        sampler = DistributedSampler(dataset, 2, 0)
    try:
        shared = SharedLoader(DataLoader(dataset, 5, sampler=sampler), world, seed=5)
    except RequestError as error:
        return str(error)
    return str([world.sum(micro.batch[0].sum() * (micro.size > 0)).item() for micro in shared.micros(0)])


def test_ranks_agree_on_what_they_share(pool: RankPool) -> None:
    for what, words in (
        ("the same", str([0 + 1 + 2 + 3 + 4, 5 + 6 + 7 + 8 + 9, 10 + 11])),
        ("length", "The DataLoader is not the same on every rank: rank 1 has samples 13 (rank 0 has 12); "),
        ("order", "rank 1 has order of digest"),
        ("sampler", "leave it out"),
    ):
        assert all(words in told for told in pool.run(2, _summed, what)), what


class _Shuffles(Sampler[int]):
    """Draws from a generator of its own, which no seed reaches and which goes on whenever it is asked."""

    def __init__(self) -> None:
        self._drawn = np.random.default_rng(3)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(self._drawn.permutation(8).tolist())


def _order(world: World) -> list[list[int]]:
    """Return the samples of each batch, all ranks' shares put together."""
    shared = SharedLoader(DataLoader(TensorDataset(torch.arange(8)), 4, sampler=_Shuffles()), world, seed=5)
    batches = [world.gather(micro.batch[0].tolist()) for micro in shared.micros(0)]
    return [[sample for share in batch for sample in share] for batch in batches]


def test_a_sampler_with_a_generator_of_its_own_gives_any_number_of_ranks_one_order(pool: RankPool) -> None:
    assert pool.run(2, _order) == 2 * pool.run(1, _order)
