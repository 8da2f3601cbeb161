"""The GPUs of a host, as the driver and torch describe them now, and whether bytes come back from them unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .. import hardware
from .finding import MIB, RED, UNCHECKED, Finding, found, shown

if TYPE_CHECKING:
    import torch

_TAKEN = 0.5  # of a GPU's memory: with more in other hands, a batch that fits elsewhere does not fit here
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # by PCIe's generation
_COPIED_BYTES = 64 * MIB
CORRUPTS = "let no job run there: dmesg (Xid) and nvidia-smi -q tell more; the hardware, its seat or the IOMMU (PCIe \
ACS) is at fault"  # which changes bytes without a word, and the model is then another one


def usable(gpus: int, *, chosen_cpu: bool) -> Iterator[Finding]:
    """Yield whether torch can use the driver's GPUs, unless the CPU was chosen."""
    import torch

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


def judge(index: int, gpu: hardware.Gpu) -> Iterator[Finding]:
    """Yield what a GPU is, or each fault that its driver tells."""
    import pynvml as nvml

    handle = hardware.nvml_handle(gpu.uuid)
    memory = hardware.asked(nvml.nvmlDeviceGetMemoryInfo, handle)
    free_bytes = gpu.memory_bytes if memory is None else int(memory.free)
    about = f"{gpu.name}, {shown(gpu.memory_bytes, 'bytes')}, {shown(free_bytes, 'bytes')} free"
    for words, fix in [*_faults(handle, is_taken=free_bytes < _TAKEN * gpu.memory_bytes)] or [("no fault told", "")]:
        yield found("devices", f"GPU {index}", f"{about}: {words}", fix, value=free_bytes, unit="bytes")


def _faults(handle: Any, *, is_taken: bool) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, what to do) of a GPU."""
    import pynvml as nvml

    if is_taken:
        fix = "end it (nvidia-smi lists programs), or take other GPUs with --gpus"
        yield "another program holds most of its memory", fix
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if errors := hardware.asked(nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds):
        fix = "reset it (nvidia-smi --gpu-reset), watch nvidia-smi -q -d ECC; replace it if they recur"
        yield f"{errors} memory errors that ECC could not correct since the driver was loaded", fix
    slowed = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    if (hardware.asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0) & slowed:
        yield "held back by heat or its power supply", "see to its cooling and power: nvidia-smi -q -d PERFORMANCE"
    lanes = hardware.asked(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or 0
    most = hardware.asked(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0
    if lanes < most:
        fix = "put it into another slot, or seat it anew, if the board has more lanes for it"
        yield f"its slot has {lanes} of {most} PCIe lanes", fix


def link(gpu: hardware.Gpu) -> tuple[str, float]:
    """Return what joins a GPU to others, and its bytes/s one way (0: unknown)."""
    import pynvml as nvml

    handle = hardware.nvml_handle(gpu.uuid)
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    active = sum(hardware.asked(nvml.nvmlDeviceGetNvLinkState, handle, number) == 1 for number in links)
    told = hardware.asked(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]) or ()
    if active and (each := [value.value.uiVal for value in told if value.nvmlReturn == nvml.NVML_SUCCESS]):
        return "NVLink", active * float(each[0]) * 1e6
    # The generation falls while a GPU is idle; the greatest that it and its slot can agree on does not.
    generation = hardware.asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0
    lanes = hardware.asked(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or 0
    return "PCIe", _LANE_BYTES_PER_S.get(generation, 0.0) * lanes


def copies(gpus: Sequence[int]) -> Iterator[Finding]:
    """Yield whether bytes come back from each GPU unchanged, and pass to the next."""
    import torch

    sent = random_bytes(0, _COPIED_BYTES).pin_memory()
    there = [torch.zeros_like(sent, device=f"cuda:{gpu}") for gpu in gpus]
    for each in there:
        seconds(each.device, lambda each=each: each.copy_(sent).zero_())  # type: ignore[misc]  # which sets things up
    took_s = [seconds(each.device, lambda each=each: each.copy_(sent)) for each in there]  # type: ignore[misc]
    wrong = [f"host to {each.device} and back" for each in there if not torch.equal(each.cpu(), sent)]
    for each, after in zip(there, [*there[1:], there[0]], strict=True):
        if len(gpus) > 1 and not torch.equal(each.to(after.device), after):
            wrong.append(f"{each.device} to {after.device}")
    bytes_per_s = _COPIED_BYTES / max(took_s)
    words = f"other bits arrive from {', '.join(wrong)}" if wrong else "the same bits come back"
    words = f"{words}; {shown(_COPIED_BYTES, 'bytes')} at {shown(bytes_per_s, 'bytes/s')} to a GPU"
    yield found("devices", "copies", words, CORRUPTS if wrong else "", bad=RED, value=bytes_per_s, unit="bytes/s")


def random_bytes(seed: int, count: int) -> torch.Tensor:
    """Return `count` bytes (count,) on the host that depend on nothing but the seed."""
    import torch

    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long `work` takes on a device."""
    import torch

    since_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - since_s
