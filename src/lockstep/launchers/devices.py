"""The GPUs of each process of a node. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from .. import hardware
from ..config.schema import ParallelConfig

Gpu = TypeVar("Gpu")


def visible_gpus() -> str | None:
    """Return this process's CUDA_VISIBLE_DEVICES; None if unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def visible(env: Mapping[str, str]) -> tuple[hardware.Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES in `env` shows."""
    return hardware.gpus(env.get("CUDA_VISIBLE_DEVICES"))


def gpu_ids(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may use, by local rank; () on the CPU."""
    if parallel.accelerator != "cuda":
        return ()
    gpus = visible(env)
    return tuple(gpus[index].uuid for index in _chosen(parallel, len(gpus)))


def gpu_index(parallel: ParallelConfig, env: Mapping[str, str], local_rank: int) -> int:
    """Return the index of a local rank's first GPU, among the GPUs visible to its process."""
    return of_rank(_chosen(parallel, len(visible(env))), local_rank, drives_all=parallel.drives_all)[0]


def of_rank(gpus: Sequence[Gpu], local_rank: int, *, drives_all: bool) -> Sequence[Gpu]:
    """Return a local rank's GPUs out of `gpus`; empty if too few."""
    # A single GPU suits any local rank: --gpus, CUDA_VISIBLE_DEVICES or a scheduler gave each rank its own.
    return gpus if drives_all or len(gpus) == 1 else gpus[local_rank : local_rank + 1]


def _chosen(parallel: ParallelConfig, count: int) -> Sequence[int]:
    """Return the indices of this process's GPUs among the `count` visible ones."""
    every = range(parallel.devices or count) if parallel.drives_all else range(count)
    return parallel.gpu_indices or every
