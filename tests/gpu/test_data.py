"""Batches on their way to a GPU: the CPU's numbers, copied while the GPU computes, and not once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.data import sets
from lockstep.data.share import SharedLoader
from lockstep.data.transfer import copy_stream
from lockstep.world.world import World

from .conftest import DEVICE, IS_REHEARSAL, needs_cuda, never_waits, synchronize

BATCHES, SAMPLES = 12, 64


@pytest.fixture
def device() -> World:
    """One process, one GPU, no process group."""
    return World.alone(DEVICE)


@pytest.fixture(scope="module")
def samples() -> Tensor:
    """Return samples of 128 KiB."""
    return torch.randn(BATCHES * SAMPLES, 1 << 15, generator=torch.Generator().manual_seed(0))


def batches(samples: Tensor, world: World, **options: Any) -> Any:
    loader = SharedLoader(DataLoader(TensorDataset(samples), SAMPLES, **options), world, seed=0)
    return contextlib.closing(loader.micros(0))


@contextlib.contextmanager
def busy(products: int) -> Iterator[Any]:
    """Give an event behind work that is queued on the GPU, 1.1 · 10¹² operations a product; afterwards, wait for it."""
    factor, event = torch.rand(8192, 8192, device=DEVICE), torch.Event(DEVICE)
    for _ in range(products):
        factor @ factor
    event.record()
    assert not event.query()
    yield event
    synchronize()


class Uploads(TorchDispatchMode):
    """Counts the copies from the host to the GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].device.type == "cpu" and torch.device(options.get("device") or "cpu").type != "cpu"
        if func is torch.ops.aten.copy_.default:
            self.count += args[1].device.type == "cpu" and args[0].device.type != "cpu"
        return func(*args, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pins", [True, False])
def test_a_loaders_batches_are_a_cpus_while_the_gpu_computes(
    device: World, samples: Tensor, *, workers: int, pins: bool
) -> None:
    with batches(samples, World.alone()) as on_cpu:
        expected = [micro.batch[0].double().sum(1) for micro in on_cpu]
    sums = []
    with batches(samples, device, num_workers=workers, pin_memory=pins and not IS_REHEARSAL) as micros:
        for micro in micros:
            with contextlib.nullcontext() if IS_REHEARSAL else busy(3):
                sums.append(micro.batch[0].double().sum(1))  # long after its memory is free again for Python
                del micro
    assert len(sums) == BATCHES
    for found, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-12, atol=1e-12)


@needs_cuda
def test_a_workers_batch_is_copied_while_the_gpu_computes_and_the_host_does_not_wait(
    device: World, samples: Tensor
) -> None:
    with batches(samples, device, num_workers=2, pin_memory=True) as micros:
        next(micros)  # the second is under way
        with busy(50) as event:
            copies = copy_stream(DEVICE)
            assert copies is not None
            copies.synchronize()
            assert not event.query(), "the copy waited for the computation"
            next(micros)
            assert not event.query(), "the host waited for the computation"


@pytest.mark.parametrize("options", [{"data": "digits"}, {"data": "fake", "image_size": 32}], ids=str)
def test_a_step_on_a_resident_set_costs_no_copy(device: World, options: dict[str, Any]) -> None:
    config = override(RunConfig(), augment=["crop", "flip", "cutout"], samples=2000, **options).data
    train = sets.build(config, seed=0, world=device, dtype=torch.float32, channels_last=True).train
    stream = train.stream((np.arange(start, start + 20) for start in range(0, 1400, 20)), epoch=0)
    with Uploads() as uploads:
        next(stream)
        assert uploads.count == (0 if IS_REHEARSAL else 1)
        with never_waits():
            assert len(list(stream)) == 69
        assert uploads.count == (0 if IS_REHEARSAL else 1)
