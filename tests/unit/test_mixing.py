"""MixUp and CutMix: the ranks' shares of a batch are torchvision's mixture of the whole one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from lockstep.batching import BatchPlan
from lockstep.data import counter
from lockstep.data.feed import GENERATORS, seed
from lockstep.data.mixing import Mixing
from lockstep.data.order import Order
from lockstep.world.random_state import preserve_generators

SAMPLES, BATCH, CLASSES, EPOCH = 29, 12, 4, 3
KINDS = {"mixup": v2.MixUp, "cutmix": v2.CutMix}


def shares(names: tuple[str, ...], rank: int, ranks: int, accumulation: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return (batch, images, labels) of each of a rank's shares, without those that stand in."""
    x, y = samples()
    order, mixing = Order(SAMPLES, seed=5, epoch=EPOCH), Mixing(names, CLASSES, 5)
    plan, found = BatchPlan.solve(BATCH, ranks, accumulation=accumulation), []
    for share in plan.shares(SAMPLES, rank):
        rows = torch.from_numpy(mixing.indices(order.indices, plan, share, SAMPLES))
        mixed, labels = mixing(x[rows], y[rows], epoch=EPOCH, step=share.step)
        assert len(mixed) == len(labels) == share.stop - share.start
        found.append((share.step, mixed[: share.size], labels[: share.size]))
    return found


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(SAMPLES, 3, 6, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


@pytest.mark.parametrize("names", [("mixup",), ("cutmix",), ("mixup", "cutmix")])
def test_any_shares_are_those_of_the_mixed_batch(names: tuple[str, ...]) -> None:
    x, y = samples()
    order = torch.from_numpy(Order(SAMPLES, seed=5, epoch=EPOCH).indices(0, SAMPLES).copy())
    mix = v2.RandomChoice([KINDS[name](num_classes=CLASSES) for name in names])
    state = torch.get_rng_state()
    for ranks, accumulation in ((1, 1), (1, 3), (3, 1), (2, 2)):
        found = [share for rank in range(ranks) for share in shares(names, rank, ranks, accumulation)]
        assert torch.equal(torch.get_rng_state(), state)
        for step, start in enumerate(range(0, SAMPLES, BATCH)):
            rows = order[start : start + BATCH]
            with preserve_generators():
                seed(counter.keys(GENERATORS, 5, EPOCH, 9), step)
                images, labels = mix(x[rows], y[rows])
            parts = [share[1:] for share in found if share[0] == step]
            for expected, tensors in zip((images, labels.double()), zip(*parts, strict=True), strict=True):
                joined = torch.cat(tensors).flatten(1).numpy()
                assert np.array_equal(sorted(map(tuple, joined)), sorted(map(tuple, expected.flatten(1).numpy())))
            assert not torch.equal(images, x[rows])
