"""How many devices there are, and so how many processes: what `auto` means, decided before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .. import hardware
from ..config import ParallelConfig, RunConfig
from ..errors import RequestError

ONE_PROCESS = ("single", "dp")
"""Strategies whose one process drives all the devices it uses."""


def resolve(config: RunConfig, env: Mapping[str, str]) -> RunConfig:
    """Return `config` with the strategy and the accelerator named, `auto` no more; a resolved one stays as it is.

    Raises `RequestError` for devices that this machine lacks, and for strategies that cannot use what was asked.
    """
    asked = config.parallel
    accelerator = _accelerator(asked, 0 if asked.accelerator == "cpu" else _count_gpus(env))
    parallel = dataclasses.replace(asked, accelerator=accelerator)
    if asked.strategy == "auto":
        several = devices_here(parallel, env) > 1 or _ranks_elsewhere(parallel, env) > 1
        parallel = dataclasses.replace(parallel, strategy="ddp" if several else "single")
    _check_one_process(parallel, env)
    if parallel.strategy in ONE_PROCESS:
        parallel = dataclasses.replace(
            parallel, devices=1 if parallel.strategy == "single" else devices_here(parallel, env)
        )
    return dataclasses.replace(config, parallel=parallel)


def processes(config: RunConfig, env: Mapping[str, str]) -> int:
    """Return the number of processes that a resolved config needs on this node."""
    return 1 if config.parallel.strategy in ONE_PROCESS else devices_here(config.parallel, env)


def least_ranks(config: RunConfig, env: Mapping[str, str]) -> int:
    """Return the least number of ranks, on all nodes, that a resolved config will have."""
    return max(processes(config, env) * config.parallel.nodes, _ranks_elsewhere(config.parallel, env))


def devices_here(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return the number of devices to use on this node: --devices, the --gpus, all GPUs, or one CPU process."""
    if parallel.devices is not None:
        return parallel.devices
    if parallel.gpu_indices:
        return len(parallel.gpu_indices)
    return _count_gpus(env) if parallel.accelerator == "cuda" else 1


def gpu_ids(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that ranks of this process's node use, by local rank; empty on the CPU."""
    if parallel.accelerator != "cuda":
        return ()
    visible = hardware.gpus(env.get("CUDA_VISIBLE_DEVICES"))
    return tuple(visible[index].uuid for index in (parallel.gpu_indices or range(len(visible))))


def gpu_index(parallel: ParallelConfig, local_rank: int) -> int:
    """Return the index of the GPU that a local rank computes on, among those visible to its process.

    A process that was given one GPU uses it, whatever its local rank: ranks started by hand name one GPU each.
    """
    chosen = parallel.gpu_indices
    if not chosen:
        return local_rank
    return chosen[0] if len(chosen) == 1 else chosen[local_rank]


def _count_gpus(env: Mapping[str, str]) -> int:
    return len(hardware.gpus(env.get("CUDA_VISIBLE_DEVICES")))


def _accelerator(asked: ParallelConfig, gpus: int) -> str:
    """Return cuda or cpu; raise where GPUs were asked for that do not exist."""
    there_are = {0: "this machine shows no GPU", 1: "this machine shows 1 GPU"}.get(
        gpus, f"this machine shows {gpus} GPUs"
    )
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


def _ranks_elsewhere(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return a lower bound of the world size that flags or the environment already tell."""
    told = env.get("WORLD_SIZE", "") if "RANK" in env else ""
    return max(parallel.nodes, parallel.world_size or 1, int(told) if told.isdecimal() else 1)


def _check_one_process(parallel: ParallelConfig, env: Mapping[str, str]) -> None:
    if parallel.strategy not in ONE_PROCESS:
        return
    ranks = _ranks_elsewhere(parallel, env)
    if ranks > 1:
        raise RequestError(
            f"--strategy {parallel.strategy} is one process, but {ranks} ranks were asked for (by --nodes, "
            "--world-size or the environment's WORLD_SIZE); take --strategy ddp, or start one process."
        )
    asked = parallel.devices or len(parallel.gpu_indices)
    if parallel.strategy == "single" and asked > 1:
        raise RequestError(f"--strategy single uses one device, but {asked} were asked for; take ddp or one device.")
