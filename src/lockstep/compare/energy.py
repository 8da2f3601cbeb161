"""Energy that a host's processors and GPUs have used, where the system tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import hardware

_PACKAGES = Path("/sys/class/powercap")


def joules(gpus: Iterable[Any], *, processors: bool) -> float:
    """Return the energy counted so far, of GPUs (by their NVML handles) and this host's processors (Intel's RAPL).

    0 if no counter can be read. https://docs.kernel.org/power/powercap/powercap.html
    """
    return (_processors() if processors else 0.0) + sum(map(_gpu, gpus))


def _processors() -> float:
    total = 0.0
    for counter in _PACKAGES.glob("intel-rapl:*/energy_uj"):
        if counter.parent.name.count(":") == 1:  # the whole package, of which the others are parts
            with contextlib.suppress(OSError, ValueError):
                total += int(counter.read_text()) / 1e6
    return total


def _gpu(handle: Any) -> float:
    import pynvml

    return (hardware.asked(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) or 0) / 1000
