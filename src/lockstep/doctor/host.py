"""What a host gives its ranks: versions, processors, memory, shared memory, open files, GPUs."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator, Mapping

import psutil
import pynvml as nvml
import torch

from .. import hardware
from ..errors import counted, ranks_in_short
from ..record import manifest
from ..world.topology import Topology
from .finding import GIB, RED, UNCHECKED, YELLOW, Finding, found, shown

_MUST_AGREE = ("lockstep-torch", "torch", "cuda", "NCCL")
"""Ranks with different ones speak different protocols, or compute other bits."""
_WORKERS_HOLD_BYTES = 4 * 2 * 32 * 3 * 224 * 224 * 4
"""In shared memory, of a rank: 4 data workers with 2 batches each of 32 images of 224 × 224 as float32."""
_TAKEN = 0.5  # of a GPU's memory: with more in other hands, a batch that fits elsewhere does not fit here


def versions(driver: str) -> dict[str, str | None]:
    """Return the version of each part on this rank, None for one that is missing. `driver` is NVIDIA's."""
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return manifest.versions() | {"NCCL": ".".join(map(str, nccl)) or None, "driver": driver or None}


def judge_versions(told: Mapping[int, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Yield what the versions that each rank told amount to: {rank: {part: version}}."""
    for part, version in told[0].items():
        if others := [rank for rank, each in told.items() if each[part] != version]:
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
        words += f"; data workers of {counted(ranks, 'rank')} need {shown(need, 'bytes')}, or die with a bus error"
        gib = max(1, math.ceil(2 * need / GIB))
        fix = f"docker run --shm-size={gib}g (or --ipc=host), mount -o remount,size={gib}G /dev/shm, or --workers 0"
    return found("host", "shared memory", words, fix, value=free_bytes, unit="bytes")


def judge_files(soft: int, ranks: int) -> Finding:
    """Return what the soft limit of open files means for a rank among so many; -1 is none."""
    need = max(1024, 8 * ranks)  # what distributions give; data workers pass tensors as open files
    words, fix = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,} for a process", ""
    if soft != resource.RLIM_INFINITY and soft < need:
        words += f"; {counted(ranks, 'rank')} with data workers need {need:,}"
        fix = f"ulimit -n {need} in the shell that starts the job (docker run --ulimit nofile={need})"
    return found("host", "open files", words, fix, value=soft)


def usable_gpus(gpus: int, *, chosen_cpu: bool) -> Iterator[Finding]:
    """Yield whether torch can use the driver's GPUs, unless the CPU was chosen."""
    if trouble := hardware.driver_trouble():
        fix = "run nvidia-smi; load the driver, or reboot"
        yield found("devices", "driver", f"the NVIDIA driver does not answer: {trouble}", fix)
    if not gpus or chosen_cpu:
        words = f"{gpus} here, left alone as --accelerator cpu asks" if gpus else "none: ranks compute on the CPU"
        yield Finding("devices", "GPUs", UNCHECKED, words)
    elif not torch.cuda.is_available():
        why, fix = "is a build without CUDA", "pip install --force-reinstall torch torchvision (PyPI's have CUDA)"
        if built := torch.version.cuda:
            why = f"(built for CUDA {built}) cannot use them: the driver is too old, or a GPU is lost"
            fix = "install a newer driver, or a torch built for an older CUDA (pytorch.org); see nvidia-smi"
        words = f"the driver shows {gpus}, but torch {torch.__version__} {why}"
        yield found("devices", "GPUs", words, f"{fix}, or take --accelerator cpu", bad=RED)


def judge_gpu(index: int, gpu: hardware.Gpu) -> Finding:
    """Return what a GPU is, and the worst fault that its driver tells."""
    handle = hardware.nvml_handle(gpu.uuid)
    memory = hardware.asked(nvml.nvmlDeviceGetMemoryInfo, handle)
    free_bytes = gpu.memory_bytes if memory is None else int(memory.free)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    words, fix = "no fault told", ""
    if errors := hardware.asked(nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds):
        words = f"{errors} memory errors that ECC could not correct since the driver was loaded"
        fix = "reset it (nvidia-smi --gpu-reset), watch nvidia-smi -q -d ECC; replace it if they recur"
    elif free_bytes < _TAKEN * gpu.memory_bytes:
        words = "another program holds most of its memory"
        fix = "end it (nvidia-smi lists programs), or take other GPUs with --gpus"
    about = f"{gpu.name}, {shown(gpu.memory_bytes, 'bytes')}, {shown(free_bytes, 'bytes')} free"
    return found("devices", f"GPU {index}", f"{about}: {words}", fix, value=free_bytes, unit="bytes")
