"""What this machine has: processors, memory, GPUs. Read without torch, so that asking is quick.

Numbers are those that *this process* may use: processors by its affinity mask (`taskset` or a scheduler gives fewer
than the machine has) and the quota of its control group (a container's limit), GPUs by `CUDA_VISIBLE_DEVICES`, which
the caller passes in.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

Answer = TypeVar("Answer")

_CPUINFO = Path("/proc/cpuinfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512"}


_MALLOPT = {-3: 2**28, -1: 2**31 - 1}
"""`M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` of malloc.h, in bytes."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    name: str
    uuid: str
    memory_bytes: int
    """Its own memory; the host's where it computes in that."""


@dataclass(frozen=True)
class Hardware:
    """What a process of this machine can compute with."""

    cpu_name: str
    cpus: int
    """Processors that this process may keep busy."""
    memory_bytes: int
    """Memory of the host."""
    has_bf16_units: bool
    """Whether the CPU multiplies bf16 matrices in hardware; without that, bf16 is slower than fp32."""
    gpus: tuple[Gpu, ...]
    """The GPUs visible to this process, in the order of their indices."""
    driver: str
    """Version of the NVIDIA driver; empty without one."""


def survey(visible: str | None) -> Hardware:
    """Return what there is; `visible` is the value of CUDA_VISIBLE_DEVICES, None where that is not set."""
    gpus, driver = _nvidia(visible)
    return Hardware(cpu_name(), cpus(), memory_bytes(), has_bf16_units(), gpus, driver)


def cpus() -> int:
    """Return the number of processors that this process may keep busy, at least 1; a quota is rounded up."""
    return max(1, math.ceil(min(len(processors()), quota())))


def processors() -> tuple[int, ...]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def quota(own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> float:
    """Return the processors' worth of time that control groups (cgroup v2) leave a process; infinite without a limit.

    `own_groups` is the process's /proc/PID/cgroup, `groups` where the hierarchy is mounted. Each group's `cpu.max`
    holds the microseconds, or `max`, out of a period's (https://docs.kernel.org/admin-guide/cgroup-v2.html).
    """
    own = next((line[3:].strip("/") for line in _lines(own_groups) if line.startswith("0::")), "")
    group = groups / own
    limits = [math.inf]
    for each in (group, *group.parents):
        if not each.is_relative_to(groups):
            break
        words = " ".join(_lines(each / "cpu.max")).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits)


def memory_bytes() -> int:
    """Return the memory of the host."""
    return int(psutil.virtual_memory().total)


def cpu_name() -> str:
    """Return the processor's model name, or what kind it is where the system does not tell the model."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def has_bf16_units() -> bool:
    """Return whether the CPU has bf16 instructions (x86's avx512_bf16 or amx_bf16); False where that is unknown."""
    return bool(bf16_units())


def bf16_units() -> str:
    """Return what the CPU multiplies bf16 matrices with, AMX or AVX-512; "" without such, or where that is unknown."""
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "").split()
    return next((name for flag, name in _BF16_UNITS.items() if flag in flags), "")


def gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process with this CUDA_VISIBLE_DEVICES sees; none without a driver.

    GPUs that are lost, or that this process may not use, are not among them.
    """
    return _nvidia(visible)[0]


def select(found: Sequence[Gpu], visible: str | None, parts: Mapping[str, Gpu] | None = None) -> tuple[Gpu, ...]:
    """Return those of `found` that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: indices or unambiguous beginnings of UUIDs, up to the first one that does not exist.
    Indices count in the driver's order, which is CUDA's too where all GPUs of a machine are alike. `parts` are the
    parts of divided GPUs (MIG) by their names; a process sees the first that is named, and nothing else.
    """
    if visible is None:
        return tuple(found)
    chosen: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        if parts and word in parts:
            return (parts[word],)
        if word.isdecimal():
            named = [found[int(word)]] if int(word) < len(found) else []
        else:
            named = [gpu for gpu in found if word and gpu.uuid.startswith(word)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


def _cpuinfo() -> list[str]:
    return _lines(_CPUINFO)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def driver_trouble() -> str:
    """Return why the NVIDIA driver does not answer; "" where it does, and where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return "" if error.value in absent else str(error)
    pynvml.nvmlShutdown()
    return ""


def nvml_handle(uuid: str) -> Any | None:
    """Return the driver's handle of a GPU, to ask about while this process lives; None where it knows none."""
    import pynvml

    asked(pynvml.nvmlInit)
    return asked(pynvml.nvmlDeviceGetHandleByUUID, uuid)


def in_use(handle: Any) -> tuple[int, int] | None:
    """Return (percent of the time in use, bytes used) of a GPU; None where the driver does not tell (a part, MIG)."""
    import pynvml

    times = asked(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return None if times is None or memory is None else (times.gpu, int(memory.used))


def asked(question: Callable[..., Answer], *about: Any) -> Answer | None:
    """Return the driver's answer; None where the GPU is lost, forbidden to this process, or has none (parts, MIG)."""
    import pynvml

    try:
        return question(*about)
    except pynvml.NVMLError:
        return None


def _nvidia(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the visible GPUs and the driver's version."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ""
    try:
        handles = [
            handle
            for index in range(pynvml.nvmlDeviceGetCount())
            if (handle := asked(pynvml.nvmlDeviceGetHandleByIndex, index)) is not None
        ]
        found = [gpu for handle in handles if (gpu := asked(_gpu, handle)) is not None]
        parts = (
            {name: gpu for handle in handles for name, gpu in _parts(handle).items()}
            if "MIG-" in (visible or "")
            else {}
        )
        return select(found, visible, parts), str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return (), ""
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: Any) -> Gpu:
    import pynvml

    memory = asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    own_bytes = int(memory.total) if memory is not None else memory_bytes()
    return Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle), own_bytes)


def _parts(handle: Any) -> dict[str, Gpu]:
    """Return the parts that a GPU is divided into (MIG), by both names that CUDA knows each by."""
    import pynvml

    parts: dict[str, Gpu] = {}
    for index in range(asked(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = asked(lambda index: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), index)
        if part is None or (gpu := asked(_gpu, part)) is None:
            continue
        parts[gpu.uuid] = gpu
        gpu_instance = asked(pynvml.nvmlDeviceGetGpuInstanceId, part)
        compute_instance = asked(pynvml.nvmlDeviceGetComputeInstanceId, part)
        parts[f"MIG-{pynvml.nvmlDeviceGetUUID(handle)}/{gpu_instance}/{compute_instance}"] = gpu
    return parts


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Have the C library keep freed memory for what is allocated next, where it is glibc.

    By default it gives large blocks back to the system at once, so that the tensors of each training step cost
    thousands of page faults: of a small convolutional net's step a tenth to a quarter, and in each process another
    part. Not where `env` has settings of the user's own (see mallopt(3)).
    """
    if any(name.startswith("MALLOC_") for name in env) or "glibc.malloc" in env.get("GLIBC_TUNABLES", ""):
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, size_bytes in _MALLOPT.items():
            mallopt(option, size_bytes)
