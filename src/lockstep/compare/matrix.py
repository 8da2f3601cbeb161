"""What a device multiplies matrices at: the most that a net of matrix products and convolutions can come to here."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIZE = {"cpu": 1024, "cuda": 8192}
_LEAST_S = 0.2


def flops_per_s(device: torch.device, precision: str) -> float:
    """Return the floating-point operations a second of a large product in this precision, with this rank's threads.

    NaN where the device's memory has no room for it.
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    size = _SIZE.get(device.type, _SIZE["cpu"])
    with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
        matrix = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)
        matrix @ matrix
        count, begun_s = 0, _now(device)
        while True:
            for _ in range(1 if device.type == "cpu" else 20):
                matrix @ matrix
                count += 1
            if (took_s := _now(device) - begun_s) > _LEAST_S:
                return 2 * float(size) ** 3 * count / took_s
    return math.nan


def _now(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
