"""The GPUs of a host, as the driver and torch describe them now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import hardware
from .finding import RED, UNCHECKED, Finding, found, shown

_TAKEN = 0.5  # of a GPU's memory: with more in other hands, a batch that fits elsewhere does not fit here


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
