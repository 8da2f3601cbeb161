"""Synchronous BatchNorm on several ranks equals ordinary BatchNorm on all their samples in one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lockstep.nn import cuda_kernels, sync_batchnorm
from lockstep.nn.sync_batchnorm import SyncBatchNorm
from lockstep.training import optim
from lockstep.world.world import World

from ..kernels import KERNELS
from ..models import Normed
from ..pool import RankPool

CHANNELS = 5
LAYERS = {
    "1d flat": (nn.BatchNorm1d, ()),
    "1d": (nn.BatchNorm1d, (7,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
# The layer, its options, and the samples of each rank: even, uneven, and ranks without any, the first among them.
CASES: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("2d", {}, [(4, 4), (5, 2), (0, 6), (4, 1, 2), (6, 0, 1), (0, 0, 3)]),
    *((kind, {}, [(0, 6), (4, 1, 2)]) for kind in LAYERS if kind != "2d"),
    ("2d", {"affine": False}, [(5, 2), (0, 6)]),
    ("2d", {"track_running_stats": False}, [(5, 2), (0, 6)]),
    ("2d", {"momentum": None}, [(5, 2), (0, 6)]),
    ("2d", {"momentum": 0.3, "eps": 1e-2}, [(5, 2), (0, 6)]),
]


def _layer(kind: str, options: dict[str, Any]) -> nn.Module:
    layer: nn.Module = LAYERS[kind][0](CHANNELS, **options).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    return layer


def _batches(kind: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return two batches of `count` samples, means far from 0, with the gradients of their outputs."""
    drawn = partial(torch.randn, (count, CHANNELS, *LAYERS[kind][1]), dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    return [(drawn(generator=generator) * 3 + 10, drawn(generator=generator)) for _ in range(2)]


def _run(layer: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what the samples come to (outputs, input gradients, an evaluation), parameter gradients, and buffers."""
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    outputs = [layer(x) for x in inputs]
    # One backward pass through both uses of the layer.
    torch.autograd.backward(outputs, [dy for _, dy in batches])
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    buffers = [buffer.clone() for buffer in layer.buffers()]
    by_sample = [*(y.detach() for y in outputs), *(x.grad for x in inputs if x.grad is not None)]
    if buffers:
        by_sample.append(layer.eval()(inputs[0]).detach())
    return by_sample, gradients, buffers


def _on_ranks(world: World, kind: str, options: dict[str, Any], split: tuple[int, ...]) -> Any:
    start = sum(split[: world.rank])
    share = slice(start, start + split[world.rank])
    layer = sync_batchnorm.convert(_layer(kind, options), world)
    assert sync_batchnorm.synchronous(layer)
    found, gradients, buffers = _run(layer, [(x[share], dy[share]) for x, dy in _batches(kind, sum(split))])
    return found, [world.sum(gradient) for gradient in gradients], buffers


def _as_on_a_gpu(world: World, run: Any, *arguments: Any) -> Any:
    """Run the code of GPUs, with the kernels that only they have emulated."""
    choice = mock.patch.object(sync_batchnorm, "_kernels", return_value=cuda_kernels)
    with choice, mock.patch.multiple(torch, **KERNELS):
        return run(world, *arguments)


@pytest.mark.parametrize("call", [(_on_ranks,), (_as_on_a_gpu, _on_ranks)], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("kind", "options", "splits"), CASES, ids=[f"{kind} {options}" for kind, options, _ in CASES])
def test_equals_one_process(
    pool: RankPool, call: tuple[Any, ...], kind: str, options: dict[str, Any], splits: list[tuple[int, ...]]
) -> None:
    close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)
    for split in splits:
        by_sample, gradients, buffers = _run(_layer(kind, options), _batches(kind, sum(split)))
        ranks = pool.run(len(split), *call, kind, options, split)
        close([torch.cat(shares) for shares in zip(*(rank[0] for rank in ranks), strict=True)], by_sample)
        for rank in ranks:
            close(rank[1:], (gradients, buffers))


def _in_bfloat16(world: World) -> None:
    x, dy = (values.float().to(memory_format=torch.channels_last) for values in _batches("2d", 8)[0])
    share = slice(world.rank * 4, world.rank * 4 + 4)
    exact = nn.BatchNorm2d(CHANNELS)
    inputs = x.bfloat16().float().requires_grad_()
    outputs = exact(inputs)
    outputs.backward(dy.bfloat16().float())
    layer = sync_batchnorm.convert(nn.BatchNorm2d(CHANNELS), world)
    mine = x[share].bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(mine)
    y.backward(dy[share].bfloat16())
    assert mine.grad is not None
    assert inputs.grad is not None
    torch.testing.assert_close(dict(layer.named_buffers()), dict(exact.named_buffers()))  # in float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    # Values of about 3 have bfloat16 steps of 1/64, gradients of about 1 steps of 1/128, rounded twice.
    for found, expected in ((y, outputs[share]), (mine.grad, inputs.grad[share])):
        assert found.dtype == torch.bfloat16
        assert float((found - expected).abs().max()) <= 1 / 64


@pytest.mark.parametrize("call", [(_in_bfloat16,), (_as_on_a_gpu, _in_bfloat16)], ids=["cpu", "gpu"])
def test_bfloat16_is_rounded_only_at_the_end(pool: RankPool, call: tuple[Any, ...]) -> None:
    pool.run(2, *call)


def _kept(world: World) -> None:
    """Check a copy, an average of the weights, and a batch with too few values in all."""
    layer = sync_batchnorm.convert(nn.BatchNorm1d(CHANNELS), world)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, CHANNELS)
    assert torch.equal(layer(x), twin(x))
    assert twin.get_buffer("running_var") is not layer.get_buffer("running_var")
    torch.testing.assert_close(twin.state_dict(), layer.state_dict(), rtol=0, atol=0)
    model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3, process_group=world.group))
    norm = optim.Average(model, 0.9).module.get_submodule("1")
    assert isinstance(norm, nn.SyncBatchNorm)
    assert norm.process_group is world.group
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1 - world.rank, CHANNELS))


def test_copies_and_averages_share_the_group_and_one_value_is_refused_by_every_rank(pool: RankPool) -> None:
    pool.run(2, _kept)


def _variance(world: World, x: torch.Tensor) -> list[float]:
    layer = sync_batchnorm.convert(nn.BatchNorm1d(CHANNELS).double(), world)
    layer(x[world.rank :: world.size])
    return [float(each) for each in layer.get_buffer("running_var")]


def test_a_variance_far_smaller_than_the_mean_is_exact(pool: RankPool) -> None:
    x = torch.randn(64, CHANNELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e5
    alone = nn.BatchNorm1d(CHANNELS).double()
    alone(x)
    for var in pool.run(2, _variance, x):
        torch.testing.assert_close(torch.tensor(var, dtype=torch.float64), alone.running_var, rtol=1e-9, atol=0)


# The samples of each rank. One sample stands in for an empty share.
SHARES = [(4, 3), (0, 2)]


def _train(world: World, is_compiled: bool) -> tuple[list[float], list[Tensor]]:
    """Return the losses of the global batches, and the state; of all samples in one process."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(1)
    model = sync_batchnorm.convert(Normed(classes=3, in_channels=1, image_size=8).double(), world)
    counter: Any = CompileCounterWithBackend("aot_eager")
    called = torch.compile(model, fullgraph=True, backend=counter, dynamic=False) if is_compiled else model
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    try:
        for number, counts in enumerate(2 * SHARES):
            x = torch.randn(sum(counts), 1, 8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            share = x if world.size == 1 else x.split(counts)[world.rank]
            SyncBatchNorm.stand_in = not len(share)
            loss = called(share if len(share) else x[:1]).square().sum() * bool(len(share))
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                world.sum_(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(world.sum(loss.detach())))
    finally:
        SyncBatchNorm.stand_in = False
        torch.compiler.reset()
    assert counter.frame_count == len(SHARES) * is_compiled, "one graph for each size of a share"
    return losses, [*model.state_dict().values()]


SLOW = pytest.param((_as_on_a_gpu, _train), True, marks=pytest.mark.slow)  # other kernels of the same operators
COMPILED = [((_train,), False), ((_as_on_a_gpu, _train), False), ((_train,), True), SLOW]


@pytest.mark.parametrize(("call", "is_compiled"), COMPILED, ids=["cpu-False", "gpu-False", "cpu-True", "gpu-True"])
def test_a_compiled_model_has_one_graph_and_the_losses_of_one_process(
    pool: RankPool, call: tuple[Any, ...], is_compiled: bool
) -> None:
    [alone] = pool.run(1, _train, False)
    for trained in pool.run(2, *call, is_compiled):
        torch.testing.assert_close(trained, alone, rtol=1e-9, atol=1e-9)
