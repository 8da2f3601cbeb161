"""The exchange among real ranks: the same bits whenever buckets leave, and the sum that plain torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.exchange.allreduce import AllReduce
from lockstep.exchange.base import Call, Header, Part, Pass
from lockstep.exchange.compress import CompressedSum, reduce_scatter
from lockstep.world.world import World

from ..pool import RankPool

WIDE = 1024  # a layer fills a bucket of 4 MiB
MICRO_BATCHES, STEPS = 2, 3


def _compressed(world: World, wire: torch.dtype, dtype: torch.dtype, count: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return this rank's numbers, and the sum that the ranks have made of them."""
    flat = torch.randn(count, generator=torch.Generator().manual_seed(world.rank), dtype=dtype) * scale
    own = flat.clone()
    assert world.group is not None
    pending = CompressedSum(flat, wire, world.group)
    pending.send_sum()
    pending.wait()
    return own, flat


@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_in_bfloat16_is_added_at_full_width_and_rounded_twice(
    pool: RankPool, dtype: torch.dtype, count: int
) -> None:
    wire = torch.bfloat16
    for size in (2, 3):
        by_rank = pool.run(size, _compressed, wire, dtype, count, 1.0)
        total = sum(own.to(wire).to(dtype) for own, _ in by_rank)
        assert isinstance(total, Tensor)
        assert all(torch.equal(summed, total.to(wire).to(dtype)) for _, summed in by_rank)


def _scattered(world: World, wire: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's numbers, and its part of the sum over the ranks."""
    parts = torch.randn(world.size * 5, generator=torch.Generator().manual_seed(world.rank), dtype=dtype)
    output = torch.empty(5, dtype=dtype)
    assert world.group is not None
    reduce_scatter(output, parts, wire, world.group)
    return parts, output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_a_shard_is_rounded_once(pool: RankPool, dtype: torch.dtype) -> None:
    by_rank = pool.run(3, _scattered, torch.bfloat16, dtype)
    total = sum(parts.bfloat16().to(dtype) for parts, _ in by_rank)
    assert torch.equal(torch.cat([part for _, part in by_rank]), total)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_sum_in_float16_neither_overflows_nor_vanishes(pool: RankPool, scale: float) -> None:
    by_rank = pool.run(3, _compressed, torch.float16, torch.float32, 1000, scale)
    exact = torch.stack([own for own, _ in by_rank]).double().sum(0)
    assert all(torch.equal(summed, by_rank[0][1]) for _, summed in by_rank)
    assert float((by_rank[0][1] - exact).abs().max()) < 2**-9 * float(exact.abs().max())


def _net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDE, WIDE), nn.Tanh()))).to(dtype)


def _loss(net: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    """Return a rank's loss of a micro-batch. Ranks have shares of different sizes."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(1 + rank, WIDE, generator=generator)
    found: Tensor = net(x.to(next(net.parameters()).dtype)).square().sum()
    return found


def _gradients(net: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in net.parameters() if each.grad is not None]


def _exchanged(world: World, overlap: bool) -> tuple[list[int], list[list[Tensor]]]:
    """Return how many buckets had left when each step's backward pass was over, and each step's gradients."""
    assert world.memory is None
    net = _net(torch.float32)
    exchange = AllReduce(world, overlap=overlap)
    exchange.attach(net)
    left, found = [], []
    for step in range(STEPS):
        part = Part()
        exchange.hide()
        for micro in range(MICRO_BATCHES):
            loss = _loss(net, world.rank, step, micro)

            def run(loss: Tensor = loss) -> None:
                loss.backward()
                left.append(len(exchange._works))

            exchange.backward(Pass(run, part, Header(Call.BACKWARD.kind, micro), 1.0, micro == MICRO_BATCHES - 1))
        found.append(_gradients(net))
    exchange.close()
    return left, found


def _both(world: World) -> tuple[list[int], list[int], bool, float]:
    """Return what had left with and without overlap, whether all bits are the same, and the greatest relative error."""
    (with_, overlapped), (without, after) = _exchanged(world, True), _exchanged(world, False)
    pairs = [pair for each in zip(overlapped, after, strict=True) for pair in zip(*each, strict=True)]
    net, errors = _net(torch.float64), []
    for step in range(STEPS):
        net.zero_grad()
        for rank in range(world.size):
            for micro in range(MICRO_BATCHES):
                _loss(net, rank, step, micro).backward()
        for ours, right in zip(overlapped[step], _gradients(net), strict=True):
            errors.append(float((ours - right).norm() / right.norm()))
    return with_, without, all(torch.equal(one, other) for one, other in pairs), max(errors)


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_or_not_the_sums_have_the_same_bits(pool: RankPool, size: int) -> None:
    for with_, without, are_same, error in pool.run(size, _both, collectives="gloo"):
        assert with_ == [0, 0, *(STEPS - 1) * [0, 3]]  # the first step learns; of the last micro-batch all leave early
        assert without == 2 * STEPS * [0]
        assert are_same
        assert error < 1e-5
