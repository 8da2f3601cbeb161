"""What this machine has: processors, memory, GPUs. Read without torch, so that asking is quick.

Numbers are those that *this process* may use: processors by its affinity mask (a container or `taskset` gives
fewer than the machine has), GPUs by `CUDA_VISIBLE_DEVICES`, which the caller passes in.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    name: str
    uuid: str
    memory_bytes: int


@dataclass(frozen=True)
class Hardware:
    """What a process of this machine can compute with."""

    cpu_name: str
    cpus: int
    """Processors that this process may run on."""
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
    """Return the number of processors that this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


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
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    return not _BF16_FLAGS.isdisjoint(flags.split())


def gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process with this CUDA_VISIBLE_DEVICES sees; none without a driver."""
    return _nvidia(visible)[0]


def select(found: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Return those of `found` that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: indices or unambiguous beginnings of UUIDs, up to the first one that does not exist.
    Indices count in the driver's order, which is CUDA's too where all GPUs of a machine are alike.
    """
    if visible is None:
        return tuple(found)
    chosen: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdecimal():
            named = [found[int(word)]] if int(word) < len(found) else []
        else:
            named = [gpu for gpu in found if word and gpu.uuid.startswith(word)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


def _cpuinfo() -> list[str]:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _nvidia(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the visible GPUs and the driver's version."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [
            Gpu(
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlDeviceGetUUID(handle),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        ]
        return select(found, visible), str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
