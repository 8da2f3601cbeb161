"""Accelerator, devices and processes of a node. Resolves `auto`; no torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from .. import hardware
from ..config.registry import auto, kind, with_ranks, with_several
from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError, counted
from .environments import of_array, started_ranks

if TYPE_CHECKING:
    from ..world.world import World  # which imports torch; a launcher is chosen without it

Entry = Callable[[RunConfig, "World"], Any]
"""The function of every rank. Importable by name, since a launcher may start processes that look it up."""
Gpu = TypeVar("Gpu")


def resolve(config: RunConfig, env: Mapping[str, str]) -> RunConfig:
    """Return `config` with `auto` strategy and accelerator resolved. Unchanged under Ray, whose launcher resolves them.

    Raises `RequestError` for devices that this machine lacks, and for strategies that cannot use the devices or ranks.
    """
    asked = config.parallel
    if asked.launcher == "ray":
        return config
    parallel = dataclasses.replace(asked, accelerator=_accelerator(asked, env))
    devices, ranks = _devices(parallel, env), max(asked.most_nodes, known_ranks(asked, env))
    if asked.strategy == "auto":
        parallel = dataclasses.replace(parallel, strategy=auto(several=max(devices, ranks) > 1))
    strategy, chosen = parallel.strategy, kind(parallel.strategy)
    if ranks > 1 and not chosen.has_ranks:
        raise RequestError(
            f"--strategy {strategy} is one process, but --nodes, --world-size or the environment ask for {ranks} "
            f"ranks; take --strategy {with_ranks()}."
        )
    if chosen.process_per_device:
        return dataclasses.replace(config, parallel=parallel)
    named = asked.devices or len(asked.gpu_indices)
    if named > 1 and not chosen.drives_all:
        raise RequestError(
            f"--strategy {strategy} uses one device, but {named} were asked for; take {with_several()}, or one device."
        )
    parallel = dataclasses.replace(parallel, devices=devices if chosen.drives_all else 1)
    return dataclasses.replace(config, parallel=parallel)


def processes(config: RunConfig, env: Mapping[str, str]) -> int:
    """Return this node's number of processes; 1 for an unresolved config (Ray)."""
    strategy = config.parallel.strategy
    return _devices(config.parallel, env) if strategy != "auto" and kind(strategy).process_per_device else 1


def known_ranks(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return the least world size that flags and environment imply, devices aside."""
    array = of_array(env) if parallel.world_size is None and has_rendezvous_url(parallel) else None
    return max(parallel.nodes, parallel.world_size or 1, started_ranks(env), array[1] if array else 1)


def gpu_ids(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may use. By local rank, or all its own; empty on the CPU."""
    if parallel.accelerator != "cuda":
        return ()
    visible = hardware.gpus(env.get("CUDA_VISIBLE_DEVICES"))
    return tuple(visible[index].uuid for index in _chosen(parallel, len(visible)))


def gpu_index(parallel: ParallelConfig, env: Mapping[str, str], local_rank: int) -> int:
    """Return the index of a local rank's (first) GPU. It counts among the GPUs visible to the rank's process."""
    return of_rank(_chosen(parallel, _count_gpus(env)), local_rank, drives_all=drives_all(parallel))[0]


def of_rank(gpus: Sequence[Gpu], local_rank: int, *, drives_all: bool) -> Sequence[Gpu]:
    """Return a local rank's GPUs out of `gpus`; empty if too few."""
    # A single GPU suits any local rank: --gpus, CUDA_VISIBLE_DEVICES or a scheduler gave each rank its own.
    return gpus if drives_all or len(gpus) == 1 else gpus[local_rank : local_rank + 1]


def drives_all(parallel: ParallelConfig) -> bool:
    """Return whether each process drives all its devices. `auto` never resolves to such a strategy."""
    return parallel.strategy != "auto" and kind(parallel.strategy).drives_all


def has_rendezvous_url(parallel: ParallelConfig) -> bool:
    """Return whether ranks meet at the --init-method URL, not by the environment."""
    return parallel.init_method not in ("", "env:", "env:/", "env://")


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT. Raises `RequestError` for any other URL."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.hostname and parts.port and not parts.path.strip("/") and not parts.query:
            return parts.hostname, parts.port
    raise RequestError(
        f"--init-method {url}: give an address and a port from 1 to 65535, such as tcp://10.0.0.1:29500."
    )


def _devices(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return this node's device count: --devices, --gpus, all GPUs, or 1 (CPU)."""
    asked = parallel.devices or len(parallel.gpu_indices)
    return asked or (_count_gpus(env) if parallel.accelerator == "cuda" else 1)


def _chosen(parallel: ParallelConfig, visible: int) -> Sequence[int]:
    """Return the indices of this process's GPUs among its `visible` ones."""
    every = range(parallel.devices or visible) if drives_all(parallel) else range(visible)
    return parallel.gpu_indices or every


def _count_gpus(env: Mapping[str, str]) -> int:
    return len(hardware.gpus(env.get("CUDA_VISIBLE_DEVICES")))


def _accelerator(asked: ParallelConfig, env: Mapping[str, str]) -> str:
    """Return cuda or cpu. Raises `RequestError` for GPUs that do not exist."""
    if asked.accelerator == "cpu":
        return "cpu"
    gpus = _count_gpus(env)
    shown = f"this machine shows {counted(gpus, 'GPU') if gpus else 'no GPU'}"
    if missing := [index for index in asked.gpu_indices if index >= gpus]:
        instead = "counted from 0" if gpus else f"take --devices {len(asked.gpu_indices)} --accelerator cpu"
        raise RequestError(f"--gpus {asked.gpus}: there is no GPU {missing[0]}; {shown}; {instead}.")
    if asked.accelerator == "auto" and not gpus:
        return "cpu"
    if (asked.devices or 1) > gpus:
        flag = f"--devices {asked.devices}" if gpus else "--accelerator cuda"
        raise RequestError(f"{flag}: {shown}; see nvidia-smi and CUDA_VISIBLE_DEVICES, or take --accelerator cpu.")
    return "cuda"
