"""Synchronous BatchNorm on a GPU: torch's numbers, and a host that never waits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.nn.cuda_kernels import NO_SAMPLE
from lockstep.nn.sync_batchnorm import SyncBatchNorm
from lockstep.world.world import World

from ..kernels import KERNELS
from .conftest import joined, needs_cuda, never_waits, paired

TOLERANCES = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    """A rank of two, whose peer has no sample: the sums are its own."""
    with joined() as world:
        yield paired(world, _without_samples)


def _without_samples(own: Tensor) -> Tensor:
    """Return what a rank without a sample sends: a row of statistics (2·C + 1,) or sums (2·C,)."""
    peer = torch.zeros_like(own)
    if len(own) % 2:
        peer[len(own) // 2 : -1] = 1
        peer[-1] = NO_SAMPLE
    return peer


def _trained(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor | None]:
    mine = x.clone().requires_grad_()
    y = layer(mine)
    y.backward(dy)
    return [y.detach(), mine.grad, *(item.grad for item in layer.parameters()), *layer.buffers()]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("kind", "shape", "order"),
    [
        (nn.BatchNorm1d, (6, 5), torch.contiguous_format),
        (nn.BatchNorm2d, (6, 5, 4, 4), torch.contiguous_format),
        (nn.BatchNorm2d, (6, 5, 4, 4), torch.channels_last),
        (nn.BatchNorm2d, (6, 5, 1, 1), torch.channels_last),
        (nn.BatchNorm3d, (6, 5, 2, 3, 4), torch.channels_last_3d),
    ],
)
def test_a_ranks_own_sums_give_torchs_numbers(
    pair: World, dtype: torch.dtype, kind: type[nn.Module], shape: tuple[int, ...], order: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(shape, generator=generator).to(pair.device, dtype) + 2 for _ in range(2))
    x, close = x.contiguous(memory_format=order), TOLERANCES[dtype]
    for affine, gradients in ((True, dy), (False, dy.contiguous(memory_format=order))):
        whole = torch.float64 if dtype == torch.float64 else torch.float32
        # Against float64 of the same inputs.
        plain, other = (kind(5, affine=affine).to(pair.device, to) for to in (torch.float64, whole))
        assert isinstance(other, nn.modules.batchnorm._BatchNorm)
        found = _trained(SyncBatchNorm.of(other, pair), x, gradients)
        right = _trained(plain, x.double(), gradients.double())
        torch.testing.assert_close(found, right, rtol=close, atol=close, check_dtype=False)


@needs_cuda
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_emulated_kernels_are_torchs(dtype: torch.dtype, has_weight: bool, order: torch.memory_format) -> None:
    """The tests without a GPU emulate these kernels. The first and the third of four ranks have no sample."""
    generator = torch.Generator("cuda").manual_seed(1)
    exact = torch.promote_types(dtype, torch.float32)
    x, dy = (torch.randn(6, 5, 4, 4, device="cuda", dtype=exact, generator=generator) + 2 for _ in range(2))
    x, dy = (values.to(dtype, memory_format=order) for values in (x, dy))
    parameters = torch.rand(2, 5, device="cuda", dtype=exact, generator=generator).unbind()
    weight, bias = parameters if has_weight else (None, None)
    means, scales = torch.rand(2, 4, 5, device="cuda", dtype=exact, generator=generator).add_(0.5).unbind()
    counts = torch.tensor([NO_SAMPLE, 7, NO_SAMPLE, 30], device="cuda", dtype=exact)
    running = [torch.ones(2, 5, device="cuda", dtype=exact) for _ in range(2)]
    close = TOLERANCES[dtype]
    results = []
    for kernels, statistics in zip((vars(torch), KERNELS), running, strict=True):
        found = [*kernels["batch_norm_stats"](x, 1e-5)]
        gather = kernels["batch_norm_gather_stats_with_counts"]
        mean, scale = gather(means[0], means, scales, *statistics.unbind(), 0.1, 1e-5, counts)
        found += [mean, scale, statistics, *gather(means[0], means, scales, None, None, 0.1, 1e-5, counts)]
        found.append(kernels["batch_norm_elemt"](x, weight, bias, mean, scale, 1e-5))
        sums = kernels["batch_norm_backward_reduce"](dy, x, mean, scale, weight, True, has_weight, has_weight)
        found += sums if has_weight else sums[:2]
        found.append(kernels["batch_norm_backward_elemt"](dy, x, mean, scale, weight, *sums[:2], counts.int()))
        results.append(found)
    torch.testing.assert_close(*results, rtol=close, atol=close)


@needs_cuda
def test_a_first_rank_without_a_sample_takes_part(pair: World) -> None:
    x = torch.randn(6, 3, 4, 4, device="cuda", dtype=torch.float64) + 2
    mean, scale = torch.batch_norm_stats(x, 1e-5)
    row = torch.cat([mean, scale, mean.new_full((1,), 6 * 16)])
    exact = nn.BatchNorm2d(3).to(x)
    exact(x)
    world = paired(pair, lambda own: row if len(own) % 2 else torch.zeros_like(own))
    layer = SyncBatchNorm.of(nn.BatchNorm2d(3).to(x), world)
    mine = torch.zeros(0, 3, 4, 4, device="cuda", dtype=torch.float64, requires_grad=True)
    y = layer(mine)
    y.sum().backward()
    assert y.shape == mine.shape
    assert mine.grad is not None
    assert mine.grad.shape == mine.shape
    assert [item.grad.tolist() for item in layer.parameters() if item.grad is not None] == [[0.0] * 3] * 2
    torch.testing.assert_close(dict(layer.named_buffers()), dict(exact.named_buffers()))


def test_a_compiled_layer_is_one_graph(pair: World) -> None:
    layer = SyncBatchNorm.of(nn.BatchNorm2d(8).to(pair.device), pair)
    x, dy = torch.randn(2, 4, 8, 6, 6, device=pair.device).unbind()
    expected = _trained(copy.deepcopy(layer), x, dy)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_trained(compiled, x, dy), expected)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_never_waits(pair: World, momentum: float | None) -> None:
    layer = SyncBatchNorm.of(nn.BatchNorm2d(8, momentum=momentum).to(pair.device), pair)
    x = torch.randn(4, 8, 6, 6, device=pair.device, requires_grad=True)
    layer(x).sum().backward()  # the first exchange sets up NCCL
    with never_waits():
        layer(x).sum().backward()
