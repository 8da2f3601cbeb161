"""Processors, memory and GPUs that this process may use, read without torch.

Processors are those of its affinity mask (`taskset`, a scheduler) within its control group's quota (a container), GPUs
those that CUDA_VISIBLE_DEVICES leaves, which the caller passes in. This is the one client of NVML.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512"}
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of malloc.h
malloc = ""
"""What this process's malloc was set to do, for the startup report."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    name: str
    uuid: str
    memory_bytes: int  # the GPU's, or the host's if the GPU uses that


@dataclass(frozen=True)
class Hardware:
    """The hardware that a process on this machine can use."""

    cpu_name: str
    cpus: int  # usable by this process
    memory_bytes: int  # of the host
    has_bf16_units: bool  # of the CPU; without them, bf16 is slower than fp32
    gpus: tuple[Gpu, ...]  # visible to this process, in the order of their indices
    driver: str  # NVIDIA's version; empty without one


def survey(visible: str | None) -> Hardware:
    """Return this machine's hardware. `visible` is the value of CUDA_VISIBLE_DEVICES, None if unset."""
    gpus, driver = _nvidia(visible)
    return Hardware(cpu_name(), cpus(), memory_bytes(), bool(bf16_units()), gpus, driver)


def cpus() -> int:
    """Return the number of processors that this process may use, at least 1; a quota is rounded up."""
    return max(1, math.ceil(min(len(processors()), quota())))


def processors() -> tuple[int, ...]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def quota(own_groups: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return a process's quota by cgroup v2, in processors; infinite without a limit.

    `own_groups` is the process's /proc/PID/cgroup, `groups` where the hierarchy is mounted. Each group's `cpu.max` has
    the microseconds, or `max`, of a period (https://docs.kernel.org/admin-guide/cgroup-v2.html).
    """
    limits = [math.inf]
    for group in _control_groups(own_groups, groups):
        limit, _, period = " ".join(_lines(group / "cpu.max")).partition(" ")
        limits += [int(limit) / int(period)] if limit.isdecimal() else []
    return min(limits)


def _control_groups(own_groups: Path, groups: Path) -> list[Path]:
    group_path = next((line[3:].strip("/") for line in _lines(own_groups) if line.startswith("0::")), "")
    paths = (groups / group_path, *(groups / group_path).parents)
    return [group for group in paths if group.is_relative_to(groups)]


def memory_bytes() -> int:
    """Return the memory of the host."""
    return int(psutil.virtual_memory().total)


def free_memory_bytes(own_groups: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process can still take from the host and its control groups (see `quota`).

    Of a group's memory, its cached files can be freed.
    """
    free = [int(psutil.virtual_memory().available)]
    for group in _control_groups(own_groups, groups):
        limit, used = ("".join(_lines(group / f"memory.{name}")) for name in ("max", "current"))
        cached = [line.split()[1] for line in _lines(group / "memory.stat") if line.startswith("inactive_file ")]
        if limit.isdecimal() and used.isdecimal():
            free.append(int(limit) - int(used) + sum(map(int, cached)))
    return max(0, min(free))


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if unknown."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def bf16_units() -> str:
    """Return the CPU's unit for bf16 matrix products: AMX or AVX-512; "" without one, or if unknown."""
    flags = _cpuinfo("flags").split()
    return next((name for flag, name in _BF16_UNITS.items() if flag in flags), "")


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Have glibc keep freed memory for later allocations, unless the user set malloc options in `env`.

    By default glibc returns large blocks at once, so that the tensors of each step cost thousands of page faults: a
    tenth to a quarter of a small convolutional net's step, different in each process (mallopt(3)).
    """
    if not (any(name.startswith("MALLOC_") for name in env) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")):
        _set_malloc("keeps freed memory", 2**28, 2**31 - 1)


def return_freed_memory() -> None:
    """Have glibc return each freed block of 128 KiB or more at once, if `keep_freed_memory` has set it.

    Blocks of many sizes leave kept memory in pieces, of which few are used again; so does glibc's default, which adapts
    its thresholds.
    """
    if malloc:
        _set_malloc("returns freed memory", 2**17, 2**17)


def _set_malloc(words: str, mmap_bytes: int, trim_bytes: int) -> None:
    global malloc
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        malloc = words
        mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(_M_TRIM_THRESHOLD, trim_bytes)


def _cpuinfo(field: str) -> str:
    fields = (line.partition(":") for line in _lines(Path("/proc/cpuinfo")))
    return next((value.strip() for name, _, value in fields if name.strip() == field), "")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs usable under this CUDA_VISIBLE_DEVICES; empty without a driver."""
    return _nvidia(visible)[0]


def select(
    gpus: Sequence[Gpu], visible: str | None, parts: Mapping[str, Sequence[Gpu]] = MappingProxyType({})
) -> tuple[Gpu, ...]:
    """Return those of `gpus` that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: indices or unambiguous prefixes of UUIDs, up to the first that does not exist. `parts` are the
    partitions (MIG) of divided GPUs by UUID. CUDA shows a process one partition, the first, and then no other GPU
    (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ "CUDA visible devices").
    """
    chosen = [*gpus] if visible is None else []
    for word in [] if visible is None else map(str.strip, visible.split(",")):
        if matches := [part for of_gpu in parts.values() for part in of_gpu if part.uuid == word]:
            return tuple(matches)
        if word.isdecimal():
            matches = list(gpus[int(word) : int(word) + 1])
        else:
            matches = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(matches) != 1:
            break
        chosen += matches
    visible_parts = [part for gpu in chosen for part in parts.get(gpu.uuid, ())]
    return tuple(visible_parts[:1] or chosen)


def partitions() -> int:
    """Return the number of partitions (MIG) of all GPUs of this machine."""
    query_nvml("nvmlInit")
    devices = _handles("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    return sum(map(len, map(_parts_of, devices)))


def driver_trouble() -> str:
    """Return why the NVIDIA driver does not answer; "" if it does, and without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return "" if error.value in absent else str(error)
    return ""


def nvml_handle(uuid: str) -> Any | None:
    """Return NVML's handle of a GPU; None if unknown. Valid while this process lives."""
    query_nvml("nvmlInit")
    return query_nvml("nvmlDeviceGetHandleByUUID", uuid)


def in_use(handle: Any) -> tuple[int, int] | None:
    """Return a GPU's (percent of time in use, bytes used); None if the driver does not report it (MIG)."""
    times, memory = query_nvml("nvmlDeviceGetUtilizationRates", handle), query_nvml("nvmlDeviceGetMemoryInfo", handle)
    return None if times is None or memory is None else (times.gpu, int(memory.used))


def query_nvml(function: str, *about: Any) -> Any:
    """Return the result of an NVML function; None without a driver, for lost GPUs, and if partitions (MIG) lack it."""
    import pynvml  # late: it takes 25 ms

    try:
        return getattr(pynvml, function)(*about)
    except pynvml.NVMLError:
        return None


def _nvidia(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the visible GPUs and the driver's version."""
    query_nvml("nvmlInit")  # if this fails, all queries below return None
    devices = _handles("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    parts = {gpu.uuid: _described(_parts_of(handle)) for handle in devices for gpu in _described([handle])}
    gpus = select(_described(devices), visible, parts)
    driver = str(query_nvml("nvmlSystemGetDriverVersion") or "")
    query_nvml("nvmlShutdown")
    return gpus, driver


def _parts_of(device: Any) -> list[Any]:
    return _handles("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", device)


def _handles(count: str, handle_of: str, *parents: Any) -> list[Any]:
    handles = (query_nvml(handle_of, *parents, index) for index in range(query_nvml(count, *parents) or 0))
    return [handle for handle in handles if handle is not None]


def _described(handles: Sequence[Any]) -> list[Gpu]:
    described = []
    for handle in handles:
        name, uuid = query_nvml("nvmlDeviceGetName", handle), query_nvml("nvmlDeviceGetUUID", handle)
        memory = query_nvml("nvmlDeviceGetMemoryInfo", handle)
        if name is not None and uuid is not None:
            described.append(Gpu(name, uuid, memory_bytes() if memory is None else int(memory.total)))
    return described
