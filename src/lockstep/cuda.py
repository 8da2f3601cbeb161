"""What torch answers for CUDA (and ROCm) alone: capabilities, architectures, NCCL. Other devices: `torch.accelerator`.

The driver's answers, without torch, are in `hardware.py`, NCCL's settings in `launchers/rank.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TF32 = (8, 0)  # Ampere


def has_tf32(device: torch.device) -> bool:
    """Return whether a device has TF32 units."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32


def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU computes bf16 in hardware."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def missing_architecture(capability: tuple[int, int], built: list[str]) -> str:
    """Return a GPU's architecture, such as sm_61, if a build for `built` has no code for it; else "".

    Code for sm_XY runs on the same X with a minor number of Y or more, and code for compute_XY on all later GPUs
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/ "Application Compatibility").
    """
    major, minor = capability
    codes = [(kind, int(number.rstrip("af"))) for kind, _, number in (name.partition("_") for name in built)]
    fits = any(
        number // 10 == major and number % 10 <= minor if kind == "sm" else number <= 10 * major + minor
        for kind, number in codes
    )
    return "" if fits or not codes else f"sm_{major}{minor}"


def architectures() -> list[str]:
    """Return the architectures that this build of torch has code for, such as sm_90; [] without CUDA."""
    return list(torch.cuda.get_arch_list())


def lacking(device: torch.device) -> str:
    """Return the architecture of a GPU that this build of torch has no code for, or ""."""
    if device.type != "cuda" or torch.version.hip:
        return ""
    return missing_architecture(torch.cuda.get_device_capability(device), architectures())


def nccl_version() -> tuple[int, ...]:
    """Return the version of torch's NCCL; () without it."""
    if not torch.version.cuda or not torch.distributed.is_nccl_available():
        return ()
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


def uuid(device: torch.device) -> str:
    """Return a GPU's UUID, as NVML writes it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def has_graphs(device: torch.device) -> bool:
    """Return whether torch can record CUDA graphs on a device."""
    return device.type == "cuda"


def graphed(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `module` for batches like `x`, by graphs of its forward and backward pass."""
    options: dict[str, Any] = {"allow_unused_input": True}
    if "capture_error_mode" in inspect.signature(torch.cuda.make_graphed_callables).parameters:
        # The watchdogs, NCCL's and ours, query events from threads of their own.
        options["capture_error_mode"] = "thread_local"
    recorded: Any = torch.cuda.make_graphed_callables(module, (x,), **options)
    return recorded  # type: ignore[no-any-return]
