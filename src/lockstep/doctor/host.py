"""What a host gives its ranks besides devices: versions, processors, memory, shared memory, open files."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator, Mapping

import psutil

from .. import hardware
from ..errors import counted, ranks_in_short
from ..world.topology import Topology
from .finding import GIB, RED, YELLOW, Finding, found, shown

_MUST_AGREE = ("lockstep-torch", "torch", "cuda", "NCCL")
"""Ranks with different ones speak different protocols, or compute other bits."""
_WORKERS_HOLD_BYTES = 4 * 2 * 32 * 3 * 224 * 224 * 4
"""What the data workers of a rank hold in shared memory: 4 (the default's most) with 2 batches each (torch's
prefetch_factor) of 32 images of 224 × 224 as float32."""


def versions(driver: str) -> dict[str, str | None]:
    """Return the version of each part on this rank, None for one that is missing. `driver` is NVIDIA's."""
    import torch

    from ..record import manifest

    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return manifest.versions() | {"NCCL": ".".join(map(str, nccl)) or None, "driver": driver or None}


def judge_versions(told: Mapping[int, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Yield what the versions that each rank told amount to: {rank: {part: version}}."""
    for part, version in told[0].items():
        others = [rank for rank, each in told.items() if each[part] != version]
        if others:
            words = f"{version} on rank 0, {told[others[0]][part]} or others on {ranks_in_short(others)}"
            bad = RED if part in _MUST_AGREE else YELLOW
            yield found("host", f"{part} versions", words, f"install the same {part} on every node", bad=bad)
    yield found("host", "versions", ", ".join(f"{part} {version}" for part, version in told[0].items() if version))


def look_at(topology: Topology, on_cpu: bool) -> Iterator[Finding]:
    """Yield what this host's ranks find there; `on_cpu` says where they compute."""
    yield judge_processors(len(hardware.processors()), hardware.quota(), topology.local_size if on_cpu else 1)
    free_bytes = int(psutil.virtual_memory().available)
    words = f"{shown(free_bytes, 'bytes')} of {shown(hardware.memory_bytes(), 'bytes')} free"
    fix = "end other programs: a rank alone holds several hundred MiB before it trains" if free_bytes < GIB else ""
    yield found("host", "memory", words, fix, value=free_bytes, unit="bytes")
    with contextlib.suppress(FileNotFoundError):  # on systems that have it elsewhere
        shared = os.statvfs("/dev/shm")
        yield judge_shared_memory(shared.f_bavail * shared.f_frsize, topology.local_size)
    yield judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0], topology.size)


def judge_processors(visible: int, quota: float, ranks: int) -> Finding:
    """Return whether `visible` processors, under a control group's `quota`, keep so many ranks busy."""
    usable = max(1, math.ceil(min(visible, quota)))
    bf16 = "in hardware" if hardware.has_bf16_units() else "emulated"
    words, fix = f"{usable} to use ({hardware.cpu_name()}), bf16 {bf16}", ""
    if quota < visible:
        words = f"{visible} are visible, but the control group gives the time of {quota:.3g}: threads will be held up"
        fix = f"raise the container's quota (docker run --cpus), or pin it to {usable} with --cpuset-cpus"
    elif ranks > usable:
        words = f"{ranks} ranks share {usable}: they will wait for one another"
        fix = f"start at most {counted(usable, 'rank')} on this host"
    return found("host", "processors", words, fix, value=usable)


def judge_shared_memory(free_bytes: int, ranks: int) -> Finding:
    """Return whether so much free shared memory is enough for the data workers of the host's ranks."""
    need = _WORKERS_HOLD_BYTES * ranks
    words, fix = f"{shown(free_bytes, 'bytes')} free in /dev/shm", ""
    if free_bytes < need:
        words += f"; data workers of {counted(ranks, 'rank')} need {shown(need, 'bytes')} for images of 224 × 224"
        words += ", or die with a bus error"
        gib = max(1, math.ceil(2 * need / GIB))
        fix = f"docker run --shm-size={gib}g (or --ipc=host), mount -o remount,size={gib}G /dev/shm, or --workers 0"
    return found("host", "shared memory", words, fix, value=free_bytes, unit="bytes")


def judge_files(soft: int, ranks: int) -> Finding:
    """Return what the soft limit of open files means for a rank among so many; -1 is none."""
    need = max(1024, 8 * ranks)  # what distributions give; data workers pass tensors as open files
    words, fix = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,} for a process", ""
    if soft != resource.RLIM_INFINITY and soft < need:
        words += f"; {counted(ranks, 'rank')} with data workers need {need:,}"
        fix = f"ulimit -n {need} in the shell that starts the job, or nofile in /etc/security/limits.conf (docker run \
--ulimit nofile={need})"
    return found("host", "open files", words, fix, value=soft)
