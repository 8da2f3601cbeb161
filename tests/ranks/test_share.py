"""Ranks that share a DataLoader out agree before they read: what one of them lacks, all of them hear."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from lockstep.data.share import SharedLoader
from lockstep.errors import RequestError
from lockstep.world import World

from ..pool import RankPool


class _Own(WeightedRandomSampler):
    """A sampler that gives each rank indices of its own."""

    def __iter__(self) -> Any:
        return iter([index + self.num_samples * torch.distributed.get_rank() for index in range(self.num_samples)])


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
    assert pool.run(2, _made, "length") == [unlike + "give every rank the same samples, in the same order."] * 2
    assert all("rank 1 has order of digest" in told for told in pool.run(2, _made, "order"))
    assert all("leave it out" in told for told in pool.run(2, _made, "sampler"))
