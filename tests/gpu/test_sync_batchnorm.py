"""Synchronous BatchNorm on a GPU: torch's numbers, and a host that never waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lockstep.nn.sync_batchnorm import SyncBatchNorm
from lockstep.world.world import World

from .conftest import joined, needs_cuda, never_waits, paired

TOLERANCES = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    """A rank of two, whose peer has no sample: the sums are its own."""
    with joined() as world:
        yield paired(world, torch.zeros_like)


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


@needs_cuda  # a CPU refuses it, and a GPU's host would have to wait to do so
def test_a_rank_without_a_sample_takes_part(pair: World) -> None:
    # With nobody else in its group it has no statistics to speak of; what counts is that every kernel takes no sample.
    layer = SyncBatchNorm.of(nn.BatchNorm2d(3).to(pair.device), pair)
    x = torch.zeros(0, 3, 4, 4, device=pair.device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert [item.grad.tolist() for item in layer.parameters() if item.grad is not None] == [[0.0] * 3] * 2


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_host_never_waits(pair: World, momentum: float | None) -> None:
    layer = SyncBatchNorm.of(nn.BatchNorm2d(8, momentum=momentum).to(pair.device), pair)
    x = torch.randn(4, 8, 6, 6, device=pair.device, requires_grad=True)
    layer(x).sum().backward()  # the first exchange sets up NCCL
    with never_waits():
        layer(x).sum().backward()
