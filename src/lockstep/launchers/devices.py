"""How many devices there are, and so how many processes: what `auto` means, decided before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from .. import hardware
from ..config.registry import auto, kind, with_ranks, with_several
from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError, counted
from .environments import of_array, ranks_told

if TYPE_CHECKING:
    from ..world.world import World  # which imports torch; a launcher is chosen without it

Entry = Callable[[RunConfig, "World"], Any]
"""What every rank runs. Must be importable by name, since a launcher may start processes that look it up."""
Gpu = TypeVar("Gpu")


def resolve(config: RunConfig, env: Mapping[str, str]) -> RunConfig:
    """Return `config` with the strategy and the accelerator named, `auto` no more; a resolved one stays as it is.

    Under Ray, whose nodes are other machines than this one, that is found out there. Raises `RequestError` for devices
    that this machine lacks, and for strategies that cannot use what was asked.
    """
    asked = config.parallel
    if asked.launcher == "ray":
        return config
    accelerator = _accelerator(asked, 0 if asked.accelerator == "cpu" else _count_gpus(env))
    parallel = dataclasses.replace(asked, accelerator=accelerator)
    if asked.strategy == "auto":
        several = max(devices_here(parallel, env), parallel.most_nodes, ranks_elsewhere(parallel, env)) > 1
        parallel = dataclasses.replace(parallel, strategy=auto(several=several))
    if not kind(parallel.strategy).has_ranks:
        _check_one_process(parallel, env)
    if not kind(parallel.strategy).process_per_device:
        count = devices_here(parallel, env) if kind(parallel.strategy).drives_all else 1
        parallel = dataclasses.replace(parallel, devices=count)
    return dataclasses.replace(config, parallel=parallel)


def processes(config: RunConfig, env: Mapping[str, str]) -> int:
    """Return the number of processes that a config needs on this node; 1 where it is not resolved, as under Ray."""
    strategy = config.parallel.strategy
    return devices_here(config.parallel, env) if strategy != "auto" and kind(strategy).process_per_device else 1


def devices_here(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return the number of devices to use on this node: --devices, the --gpus, all GPUs, or one CPU process."""
    if parallel.devices is not None:
        return parallel.devices
    if parallel.gpu_indices:
        return len(parallel.gpu_indices)
    return _count_gpus(env) if parallel.accelerator == "cuda" else 1


def ranks_elsewhere(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return a lower bound of the world size that flags or the environment already tell."""
    array = of_array(env) if parallel.world_size is None and meets_by_url(parallel) else None
    return max(parallel.nodes, parallel.world_size or 1, ranks_told(env)[1], array[1] if array else 1)


def gpu_ids(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may take: by local rank, or all its own; empty on the CPU."""
    if parallel.accelerator != "cuda":
        return ()
    visible = hardware.gpus(env.get("CUDA_VISIBLE_DEVICES"))
    return tuple(visible[index].uuid for index in _chosen(parallel, len(visible)))


def gpu_index(parallel: ParallelConfig, env: Mapping[str, str], local_rank: int) -> int:
    """Return the index of a local rank's GPU, the first of several, among those visible to its process."""
    return of_rank(_chosen(parallel, _count_gpus(env)), local_rank, drives_all=drives_all(parallel))[0]


def of_rank(gpus: Sequence[Gpu], local_rank: int, *, drives_all: bool) -> Sequence[Gpu]:
    """Return those of the GPUs that its process may take which are a local rank's; none where there are too few.

    A process that drives several takes all. Of the others, one with a single GPU takes it, whatever its local rank:
    somebody has given each rank its own, by --gpus, by CUDA_VISIBLE_DEVICES, or by a scheduler that binds one to each
    task.
    """
    return gpus if drives_all or len(gpus) == 1 else gpus[local_rank : local_rank + 1]


def drives_all(parallel: ParallelConfig) -> bool:
    """Return whether each process drives all devices that it may take; `auto` never comes to such a strategy."""
    return parallel.strategy != "auto" and kind(parallel.strategy).drives_all


def meets_by_url(parallel: ParallelConfig) -> bool:
    """Return whether ranks meet where --init-method says, and not where the environment does."""
    return parallel.init_method not in ("", "env:", "env:/", "env://")


def host_and_port(url: str) -> tuple[str, int]:
    """Return the two that tcp://HOST:PORT names. Raises `RequestError` where it does not."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path.strip("/") or parts.query:
        raise RequestError(
            f"--init-method {url}: give an address and a port from 1 to 65535, such as tcp://10.0.0.1:29500."
        )
    return host, port


def _chosen(parallel: ParallelConfig, visible: int) -> Sequence[int]:
    """Return the indices of the GPUs that this process may take, among its `visible` ones."""
    if drives_all(parallel) and not parallel.gpu_indices:
        return range(parallel.devices or visible)
    return parallel.gpu_indices or range(visible)


def _count_gpus(env: Mapping[str, str]) -> int:
    return len(hardware.gpus(env.get("CUDA_VISIBLE_DEVICES")))


def _accelerator(asked: ParallelConfig, gpus: int) -> str:
    """Return cuda or cpu; raise where GPUs were asked for that do not exist."""
    there_are = f"this machine shows {counted(gpus, 'GPU') if gpus else 'no GPU'}"
    if asked.accelerator == "cuda" and gpus == 0:
        raise RequestError(
            f"--accelerator cuda: {there_are}; check nvidia-smi and CUDA_VISIBLE_DEVICES, or take --accelerator cpu."
        )
    missing = [index for index in asked.gpu_indices if index >= gpus]
    if missing:
        indices = f", with indices 0 to {gpus - 1}" if gpus else ""
        raise RequestError(f"--gpus {asked.gpus}: there is no GPU {missing[0]}; {there_are}{indices}.")
    chosen = asked.accelerator if asked.accelerator != "auto" else ("cuda" if gpus else "cpu")
    if chosen == "cuda" and (asked.devices or 1) > gpus:
        raise RequestError(
            f"--devices {asked.devices}: {there_are}; ask for at most that many, "
            "or take --accelerator cpu for CPU processes."
        )
    return chosen


def _check_one_process(parallel: ParallelConfig, env: Mapping[str, str]) -> None:
    """Raise where a strategy of one process was asked to be several, or to use more devices than it can."""
    ranks = max(parallel.most_nodes, ranks_elsewhere(parallel, env))
    if ranks > 1:
        raise RequestError(
            f"--strategy {parallel.strategy} is one process, but {ranks} ranks were asked for (by --nodes, "
            f"--world-size or the environment's {ranks_told(env)[0] or 'WORLD_SIZE'}); take --strategy {with_ranks()}, "
            "or start one process."
        )
    asked = parallel.devices or len(parallel.gpu_indices)
    if asked > 1 and not kind(parallel.strategy).drives_all:
        raise RequestError(
            f"--strategy {parallel.strategy} uses one device, but {asked} were asked for; take {with_several()}, "
            "or one device."
        )
