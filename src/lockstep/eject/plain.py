"""Plain PyTorch for the calls of a session. An ejected loop gets the definitions that it needs."""

# mypy: ignore-errors
from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from .program import synchronised


def join() -> tuple[int, int, torch.device]:
    """Join the ranks that torchrun has started; return (rank, world size, device)."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank():
        # Rank 0 prints.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123
    return dist.get_rank(), dist.get_world_size(), device


def parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model, whose gradients DDP averages over the ranks, and whose BatchNorm layers are synchronised."""
    return DistributedDataParallel(synchronised(model, device).to(device))


class GlobalBatches:
    """This rank's part of each batch of `size` samples, unpadded: parts differ by one sample at most."""

    def __init__(self, samples: int, size: int, rank: int, world: int, *, shuffles: bool, seed: int = 0) -> None:
        self.samples, self.size, self.rank, self.world, self.shuffles = samples, size, rank, world, shuffles
        self.seed = seed
        if self.smallest() < world:
            raise SystemExit(f"A batch of {self.smallest()} samples is too small for {world} ranks.")

    def smallest(self) -> int:
        """Return the number of samples of the smallest batch."""
        return self.samples % self.size or self.size

    def __len__(self) -> int:
        return math.ceil(self.samples / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(self.samples, generator=generator) if self.shuffles else torch.arange(self.samples)
        self.seed += 1  # another order in the next pass, alike on all ranks
        for batch in order.split(self.size):
            yield batch.tensor_split(self.world)[self.rank].tolist()


class EvaluationBatches(GlobalBatches):
    """The same in ascending order, with batches of about `size` samples."""

    def smallest(self) -> int:
        """Return the number of samples of the smallest batch."""
        return self.samples // len(self)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.arange(self.samples).tensor_split(len(self)):
            yield batch.tensor_split(self.world)[self.rank].tolist()


class Shared:
    """A loader whose batches are divided among the ranks, on the device."""

    def __init__(self, loader: Any, batches: GlobalBatches, device: torch.device) -> None:
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "persistent_workers")
        options = {name: getattr(loader, name) for name in names}
        self.dataset, self.batches, self.device = loader.dataset, batches, device
        self._loader = DataLoader(loader.dataset, batch_sampler=batches, **options)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield moved(batch, self.device)


def shared(loader: DataLoader[Any], device: torch.device, rank: int, world: int, seed: int) -> Shared:
    """Return a loader of this rank's parts of the loader's batches."""
    sampler, samples = loader.sampler, len(loader.dataset)
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples
    if loader.batch_size is None or loader.drop_last or not (shuffles or type(sampler) is SequentialSampler):
        raise SystemExit(
            "A batch sampler, a sampler other than shuffle=True, and drop_last need GlobalBatches to match."
        )
    return Shared(loader, GlobalBatches(samples, loader.batch_size, rank, world, shuffles=shuffles, seed=seed), device)


def evaluating(loader: Any, models: list[nn.Module], device: torch.device, rank: int, world: int) -> Iterator[Any]:
    """Yield this rank's parts of the loader's batches: each sample once over all ranks, in ascending order.

    The models are in evaluation mode, and no gradients are computed.
    """
    if isinstance(loader, Shared):
        size, loader = loader.batches.size, loader._loader
    elif type(loader.sampler) not in (SequentialSampler, RandomSampler) or loader.batch_size is None:
        raise SystemExit("A sampler that leaves samples out needs EvaluationBatches to match.")
    else:
        size = loader.batch_size
    batches = EvaluationBatches(len(loader.dataset), size, rank, world, shuffles=False)
    training = [model for model in models if model.training]
    for model in training:
        model.eval()
    try:
        with torch.no_grad():
            yield from Shared(loader, batches, device)
    finally:
        for model in training:
            model.train()


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
    """Return the ranks' rows, one rank after the other, without gradients."""
    if rows.requires_grad:
        raise SystemExit("torch.distributed.nn.functional.all_gather gathers with gradients; use it here.")
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, rows.detach().cpu())
    return torch.cat(parts).to(rows.device)
