"""Plain PyTorch for the calls of a session. An ejected loop gets the definitions that it needs."""

# mypy: ignore-errors
from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


def join() -> tuple[int, int, torch.device]:
    """Join the ranks that torchrun has started; return (rank, world size, device)."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    atexit.register(dist.destroy_process_group)
    if dist.get_rank():
        # Rank 0 prints.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123
    return dist.get_rank(), dist.get_world_size(), device


def parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model, whose gradients DDP averages over the ranks, and whose BatchNorm layers are synchronised."""
    if device.type == "cuda":  # torch synchronises statistics on GPUs only
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model.to(device))


class GlobalBatches:
    """This rank's part of each batch of `size` samples, unpadded: parts differ by one sample at most."""

    def __init__(self, samples: int, size: int, rank: int, world: int, *, shuffles: bool, seed: int = 0) -> None:
        self.samples, self.size, self.rank, self.world, self.shuffles = samples, size, rank, world, shuffles
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, whose order all ranks draw alike."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self.samples / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator) if self.shuffles else torch.arange(self.samples)
        for batch in order.split(self.size):
            if len(batch) < self.world:
                raise SystemExit(f"A batch of {len(batch)} samples is too small for {self.world} ranks.")
            yield batch.tensor_split(self.world)[self.rank].tolist()


class EvaluationBatches(GlobalBatches):
    """The same in ascending order, with batches of about `size` samples."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.arange(self.samples).tensor_split(len(self)):
            yield batch.tensor_split(self.world)[self.rank].tolist()


def shared(loader: DataLoader[Any], rank: int, world: int, seed: int = 0) -> DataLoader[Any]:
    """Return a loader of this rank's parts of the loader's batches."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or loader.drop_last:
        raise SystemExit("Streams, batch samplers and drop_last need a sampler of your own in the place of this one.")
    shuffles = isinstance(loader.sampler, torch.utils.data.RandomSampler)
    batches = GlobalBatches(len(loader.dataset), loader.batch_size, rank, world, shuffles=shuffles, seed=seed)
    options = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory}
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


def evaluating(loader: DataLoader[Any], device: torch.device, rank: int, world: int) -> Iterator[Any]:
    """Yield this rank's parts of the loader's batches: each sample once over all ranks, in ascending order."""
    size = loader.batch_size or loader.batch_sampler.size
    batches = EvaluationBatches(len(loader.dataset), size, rank, world, shuffles=False)
    options = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    yield from on_device(DataLoader(loader.dataset, batch_sampler=batches, **options), device)


def on_device(batches: Any, device: torch.device) -> Iterator[Any]:
    """Yield the batches on the device."""
    for batch in batches:
        yield moved(batch, device)


def moved(part: Any, device: torch.device) -> Any:
    """Return tensors in lists, tuples and dictionaries on the device."""
    if hasattr(part, "to"):
        return part.to(device)
    if isinstance(part, dict):
        return {key: moved(value, device) for key, value in part.items()}
    return type(part)(moved(value, device) for value in part) if isinstance(part, list | tuple) else part


def backward(loss: Tensor, count: Any, device: torch.device, world: int) -> None:
    """Add the gradients of the mean over all ranks' samples; `loss` is the mean over this rank's `count` samples.

    DDP divides by the number of ranks, so that a rank's loss is weighted by its share times the ranks.
    """
    (loss * count * world / summed(count, device)).backward()


def summed(value: Any, device: torch.device) -> Tensor:
    """Return the sum of a number or tensor over the ranks."""
    total = torch.as_tensor(value, device=device).detach().clone().double()
    dist.all_reduce(total)
    return total


def largest(value: Any, device: torch.device) -> Tensor:
    """Return the largest of a number or tensor over the ranks."""
    result = torch.as_tensor(value, device=device).detach().clone()
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result


def mean_of(value: Any, count: Any, device: torch.device) -> Tensor:
    """Return the mean over all ranks' samples; `value` is the mean over this rank's `count`."""
    return summed(torch.as_tensor(value, device=device) * count, device) / summed(count, device)


def gathered(rows: Tensor, world: int) -> Tensor:
    """Return the ranks' rows, one rank after the other."""
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, rows.detach().cpu())
    return torch.cat(parts).to(rows.device)
