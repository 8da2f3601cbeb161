"""The accelerators of each process of a node.

NVML shows NVIDIA's GPUs without torch. torch counts other accelerators: it is imported where this machine has the
device file of one, or for a flag that names one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from .. import hardware
from ..config.schema import ParallelConfig
from ..errors import RequestError
from .stores import import_torch

Gpu = TypeVar("Gpu")
_FILES = ("/dev/kfd", "/dev/dri/renderD128", "/dev/davinci0")
"""Device files of AMD's and Intel's GPUs, and of Ascend's NPUs."""


def visible_gpus() -> str | None:
    """Return this process's CUDA_VISIBLE_DEVICES; None if unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def visible(env: Mapping[str, str]) -> tuple[hardware.Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES in `env` shows."""
    return hardware.gpus(env.get("CUDA_VISIBLE_DEVICES"))


def find(name: str, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the accelerator for `name`, as of --accelerator, and the number of its devices that this process may use.

    (cpu, 0) if `auto` finds none. Raises `RequestError` for a named accelerator that torch has no code for.
    """
    if name == "cpu":
        return "cpu", 0
    if name in ("auto", "cuda") and (gpus := visible(env)):
        return "cuda", len(gpus)
    if name == "mps":
        raise RequestError(
            "--accelerator mps: Apple's GPUs have no float64, in which losses and counts are summed; take "
            "--accelerator cpu."
        )
    if name in ("auto", "cuda") and not any(Path(file).exists() for file in _FILES):
        return ("cpu" if name == "auto" else name), 0
    import_torch()
    import torch

    built, present = (torch.accelerator.current_accelerator(check_available=check) for check in (False, True))
    if name not in ("auto", "cuda") and (built is None or built.type != name):
        has = f"for {built.type}" if built else "for the CPU alone"
        raise RequestError(
            f"--accelerator {name}: torch {torch.__version__} was built {has}; install a build of torch for {name}, or "
            "take --accelerator auto."
        )
    if present is None or (name == "cuda" and present.type != name):
        return ("cpu" if name == "auto" else name), 0
    return present.type, torch.accelerator.device_count()


def gpu_ids(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return names of the devices that this process may use, by local rank: UUIDs of GPUs; () on the CPU."""
    if parallel.accelerator == "cpu":
        return ()
    gpus = visible(env) if parallel.accelerator == "cuda" else ()
    count = find(parallel.accelerator, env)[1]
    ids = [gpu.uuid for gpu in gpus] or [f"{parallel.accelerator}:{index}" for index in range(count)]
    return tuple(ids[index] for index in _chosen(parallel, len(ids)))


def gpu_index(parallel: ParallelConfig, env: Mapping[str, str], local_rank: int) -> int:
    """Return the index of a local rank's first GPU, among the GPUs visible to its process."""
    return of_rank(_chosen(parallel, find(parallel.accelerator, env)[1]), local_rank, drives_all=parallel.drives_all)[0]


def of_rank(gpus: Sequence[Gpu], local_rank: int, *, drives_all: bool) -> Sequence[Gpu]:
    """Return a local rank's GPUs out of `gpus`; empty if too few."""
    # A single GPU suits any local rank: --gpus, CUDA_VISIBLE_DEVICES or a scheduler gave each rank its own.
    return gpus if drives_all or len(gpus) == 1 else gpus[local_rank : local_rank + 1]


def _chosen(parallel: ParallelConfig, count: int) -> Sequence[int]:
    """Return the indices of this process's GPUs among the `count` visible ones."""
    every = range(parallel.devices or count) if parallel.drives_all else range(count)
    return parallel.gpu_indices or every
