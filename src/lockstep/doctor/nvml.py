"""What NVIDIA's driver says of GPUs and the links between them, as values.

Questions that a driver, or a part of a GPU (MIG), does not answer are left open: None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import hardware

Answer = TypeVar("Answer")

# pynvml 13 spells this one constant as a tuple; nvml.h has NVML_P2P_CAPS_INDEX_READ = 0.
_READ, _NVLINK = 0, 2
_PCIE_GT_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True)
class GpuState:
    """One GPU as the driver describes it now."""

    index: int
    """Among those that this process sees."""
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int | None = None
    exclusive: bool = False
    prohibited: bool = False
    """Whether its compute mode keeps every program away."""
    persistence: bool | None = None
    uncorrected: int | None = None
    """Memory errors that ECC found and could not correct since the driver was loaded."""
    remapping_pending: bool = False
    """Whether a broken row of memory waits for a reset to be replaced."""
    remapping_failed: bool = False
    """Whether one could not be replaced."""
    slowed: bool = False
    """Whether it is held back now by heat or by its power supply."""
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_most_width: int | None = None
    nvlink_bytes_per_s: float = 0.0
    """Of all its active NVLinks together, one way."""

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """The rate of its PCIe slot, one way, without the packets' headers."""
        if not self.pcie_generation or not self.pcie_width:
            return None
        return pcie_bytes_per_s(self.pcie_generation, self.pcie_width)


@dataclass(frozen=True)
class Link:
    """What lies between two GPUs of a host."""

    a: int
    b: int
    kind: str
    """nvlink, or where their PCIe paths meet: switch, bridge, cpu, system."""
    peer: bool
    """Whether one reads the other's memory directly."""


@dataclass(frozen=True)
class Driver:
    """All that was asked."""

    version: str = ""
    gpus: tuple[GpuState, ...] = ()
    links: tuple[Link, ...] = ()
    trouble: str = ""
    """Why the driver could not be asked, where it is there."""


def pcie_bytes_per_s(generation: int, width: int) -> float:
    """Return the rate of a PCIe link, one way: transfers × lanes × the code's share (8b/10b, 128b/130b, flits)."""
    code = 0.8 if generation < 3 else 128 / 130 if generation < 6 else 236 / 256
    return _PCIE_GT_PER_S.get(generation, 64.0) * 1e9 * width * code / 8


def link_kind(ancestor: int | None, nvlink: bool) -> str:
    """Return the kind of a link, by where NVML says that two GPUs' paths meet (nvmlGpuTopologyLevel_t)."""
    if nvlink:
        return "nvlink"
    names = {0: "board", 10: "switch", 20: "switches", 30: "bridge", 40: "cpu", 50: "system"}
    return names.get(ancestor if ancestor is not None else 50, "system")


def ask(visible: str | None) -> Driver:
    """Return the driver's answers about the GPUs that CUDA_VISIBLE_DEVICES leaves; nothing without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Driver(trouble="" if error.value in absent else str(error))
    try:
        seen = hardware.gpus(visible)
        handles = [(gpu, _asked(pynvml.nvmlDeviceGetHandleByUUID, gpu.uuid)) for gpu in seen]
        gpus = tuple(_state(index, gpu, handle) for index, (gpu, handle) in enumerate(handles))
        version = str(_asked(pynvml.nvmlSystemGetDriverVersion) or "")
        return Driver(version, gpus, _links([handle for _, handle in handles]))
    finally:
        pynvml.nvmlShutdown()


def _asked(question: Callable[..., Answer], *about: Any) -> Answer | None:
    """Return the answer; None where this GPU or this driver has none."""
    import pynvml

    try:
        return question(*about)
    except (pynvml.NVMLError, AttributeError):  # AttributeError: an older pynvml's answer lacks a field
        return None


def _state(index: int, gpu: hardware.Gpu, handle: Any) -> GpuState:
    import pynvml as nvml

    if handle is None:
        return GpuState(index, gpu.uuid, gpu.name, gpu.memory_bytes)
    memory = _asked(nvml.nvmlDeviceGetMemoryInfo, handle)
    mode = _asked(nvml.nvmlDeviceGetComputeMode, handle)
    remapped = _asked(nvml.nvmlDeviceGetRemappedRows, handle)  # correctable, uncorrectable, pending, failed
    slowed = _asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    persistence = _asked(nvml.nvmlDeviceGetPersistenceMode, handle)
    return GpuState(
        index=index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        free_bytes=None if memory is None else int(memory.free),
        exclusive=mode in (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD),
        prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
        persistence=None if persistence is None else bool(persistence),
        uncorrected=_asked(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remapping_pending=bool(remapped and remapped[2]),
        remapping_failed=bool(remapped and remapped[3]),
        slowed=bool(
            slowed & (nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown)
        ),
        # The generation falls while a GPU is idle; the greatest that it and its slot can agree on does not.
        pcie_generation=_asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_asked(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_most_width=_asked(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        nvlink_bytes_per_s=_nvlink_bytes_per_s(handle),
    )


def _nvlink_bytes_per_s(handle: Any) -> float:
    import pynvml as nvml

    active = sum(_asked(nvml.nvmlDeviceGetNvLinkState, handle, link) == 1 for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    told: Sequence[Any] = (
        _asked(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]) or ()
    )
    each = [int(value.value.uiVal) for value in told if value.nvmlReturn == nvml.NVML_SUCCESS]
    return active * each[0] * 1e6 if each else 0.0  # in MB/s, each way


def _links(handles: Sequence[Any]) -> tuple[Link, ...]:
    import pynvml as nvml

    found = []
    for a, one in enumerate(handles):
        for b, other in enumerate(handles[:a]):
            if one is None or other is None:
                continue
            nvlink = _asked(nvml.nvmlDeviceGetP2PStatus, one, other, _NVLINK) == nvml.NVML_P2P_STATUS_OK
            peer = _asked(nvml.nvmlDeviceGetP2PStatus, one, other, _READ) == nvml.NVML_P2P_STATUS_OK
            ancestor = _asked(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
            found.append(Link(b, a, link_kind(ancestor, nvlink), peer))
    return tuple(found)
