"""Synchronous BatchNorm on several ranks equals ordinary BatchNorm on all their samples in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.nn import sync_batchnorm
from lockstep.world import World

from ..pool import RankPool

CHANNELS = 5
# Samples of each rank: even, uneven, and ranks without any, the first among them.
SPLITS = [(4, 4), (5, 2), (0, 6), (3, 3, 3), (4, 1, 2), (6, 0, 1), (0, 0, 3)]
LAYERS = {
    "1d flat": (nn.BatchNorm1d, ()),
    "1d": (nn.BatchNorm1d, (7,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-2},
]


def _layer(kind: str, options: dict[str, Any]) -> nn.Module:
    layer: nn.Module = LAYERS[kind][0](CHANNELS, **options).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    return layer


def _batches(kind: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return two batches of `count` samples with the gradients of their outputs; means far from 0."""
    generator = torch.Generator().manual_seed(2)
    shape = (count, CHANNELS, *LAYERS[kind][1])
    return [
        (
            torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 10,
            torch.randn(shape, generator=generator, dtype=torch.float64),
        )
        for _ in range(2)
    ]


def _run(
    layer: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Return outputs, input gradients, parameter gradients and buffers after training, and an evaluation's output."""
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    outputs = [layer(x) for x in inputs]
    # One backward pass through both uses of the layer.
    torch.autograd.backward(outputs, [dy for _, dy in batches])
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    buffers = [buffer.clone() for buffer in layer.buffers()]
    tracked = getattr(layer, "track_running_stats", True)
    evaluated = layer.eval()(inputs[0]).detach() if tracked else torch.zeros(0)
    return [y.detach() for y in outputs], [x.grad for x in inputs if x.grad is not None], gradients, buffers, evaluated


def _on_ranks(world: World, kind: str, options: dict[str, Any], split: tuple[int, ...]) -> Any:
    start = sum(split[: world.rank])
    share = slice(start, start + split[world.rank])
    layer = sync_batchnorm.convert(_layer(kind, options), world)
    assert isinstance(layer, sync_batchnorm.SyncBatchNorm)
    outputs, dx, gradients, buffers, evaluated = _run(
        layer, [(x[share], dy[share]) for x, dy in _batches(kind, sum(split))]
    )
    return outputs, dx, [world.sum(gradient) for gradient in gradients], buffers, evaluated


def _same_as_one(pool: RankPool, kind: str, options: dict[str, Any], split: tuple[int, ...]) -> None:
    outputs, dx, gradients, buffers, evaluated = _run(_layer(kind, options), _batches(kind, sum(split)))
    ranks = pool.run(len(split), _on_ranks, kind, options, split)
    close = {"rtol": 1e-11, "atol": 1e-12}
    for index in range(2):
        torch.testing.assert_close(torch.cat([rank[0][index] for rank in ranks]), outputs[index], **close)
        torch.testing.assert_close(torch.cat([rank[1][index] for rank in ranks]), dx[index], **close)
    for rank in ranks:
        torch.testing.assert_close(rank[2], gradients, **close)
        torch.testing.assert_close(rank[3], buffers, **close)
    if evaluated.numel():
        torch.testing.assert_close(torch.cat([rank[4] for rank in ranks]), evaluated, **close)


@pytest.mark.parametrize("split", SPLITS)
def test_equals_one_process(pool: RankPool, split: tuple[int, ...]) -> None:
    for kind in LAYERS:
        _same_as_one(pool, kind, {}, split)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_equals_one_process(pool: RankPool, options: dict[str, Any]) -> None:
    for split in ((5, 2), (0, 6)):
        _same_as_one(pool, "2d", options, split)
