"""What the hardware does meanwhile: step times, processor, memory.

Nothing here waits for the device. Step times on a GPU are taken between CUDA events, which the GPU stamps as it passes
them and which are read at the log interval, when the loss is read anyway. All values are this rank's own.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from .. import hardware

SAMPLED = (
    *("process_cpu_percent", "host_cpu_percent", "host_memory_bytes"),
    *("device_memory_bytes", "device_percent", "device_used_bytes"),
)
"""What `Telemetry.sample` may tell of."""


class StepClock(Protocol):
    """Seconds of each optimizer step, on the device where it runs."""

    def start(self) -> None:
        """Mark the begin of a step that does not follow directly on the one before (after an evaluation)."""

    def tick(self) -> None:
        """Mark the end of a step, which is the begin of the next."""

    def flush(self) -> list[float]:
        """Return the seconds of each step that ended since the last call. Waits for the device to finish them."""

    def percentiles(self, *percents: float) -> list[float]:
        """Return percentiles of all steps flushed so far, in seconds: `p50, p95 = clock.percentiles(50, 95)`."""


class _Times:
    """The seconds of all steps, as 8 bytes each: a million steps are 8 MB."""

    def __init__(self) -> None:
        self._all_s = array("d")

    def _keep(self, times_s: list[float]) -> list[float]:
        self._all_s.extend(times_s)
        return times_s

    def percentiles(self, *percents: float) -> list[float]:
        """Return percentiles of all steps, by linear interpolation; NaN where there are none."""
        found: list[float] = np.percentile(self._all_s or [np.nan], percents).tolist()
        return found


class HostClock(_Times):
    """Times steps by the host's clock: right where the host computes."""

    def __init__(self) -> None:
        super().__init__()
        self._new_s: list[float] = []
        self.start()

    def start(self) -> None:
        """Mark the begin of a step."""
        self._begin_s = time.perf_counter()

    def tick(self) -> None:
        """Mark the end of a step."""
        now_s = time.perf_counter()
        self._new_s.append(now_s - self._begin_s)
        self._begin_s = now_s

    def flush(self) -> list[float]:
        """Return the seconds of each step since the last call."""
        new_s, self._new_s = self._new_s, []
        return self._keep(new_s)


class CudaClock(_Times):
    """Times steps by the GPU's own clock, with events in its stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.start()

    def start(self) -> None:
        """Mark the begin of a step."""
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record(torch.cuda.current_stream(self._device))

    def tick(self) -> None:
        """Mark the end of a step."""
        begin = self._begin
        self.start()
        self._spans.append((begin, self._begin))

    def flush(self) -> list[float]:
        """Return the seconds of each step since the last call. Waits for the GPU to finish them."""
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return self._keep([begin.elapsed_time(end) / 1000 for begin, end in spans])


def step_clock(device: torch.device) -> StepClock:
    """Return the clock for steps on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class Telemetry:
    """Samples this process and the devices that it drives; `sample` is meant for once a log interval."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only sets the point that the next one measures from
        psutil.cpu_percent()
        # By their UUIDs: the driver's numbers know nothing of CUDA_VISIBLE_DEVICES.
        uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in self._gpus]
        self.handles: list[Any] = [handle for uuid in uuids if (handle := hardware.nvml_handle(uuid)) is not None]

    def sample(self) -> dict[str, float | int]:
        """Return, since the last call where it is a percentage:

        `process_cpu_percent` (100 is one core), `host_cpu_percent` (of all cores, by all processes),
        `host_memory_bytes` of this process; on GPUs `device_memory_bytes` held by tensors, and where the driver tells,
        `device_percent` (of the time that a kernel ran) and `device_used_bytes` (by all processes). Of several GPUs
        bytes are the sum, the percentage is the mean.
        """
        found: dict[str, float | int] = {
            "process_cpu_percent": self._process.cpu_percent(),
            "host_cpu_percent": psutil.cpu_percent(),
            "host_memory_bytes": self._process.memory_info().rss,
        }
        if self._gpus:
            found["device_memory_bytes"] = sum(torch.cuda.memory_allocated(device) for device in self._gpus)
            if used := [each for handle in self.handles if (each := hardware.in_use(handle)) is not None]:
                percents, used_bytes = zip(*used, strict=True)
                found |= {"device_percent": sum(percents) / len(used), "device_used_bytes": sum(used_bytes)}
        return found

    def peak_memory_bytes(self) -> dict[str, int | None]:
        """Return the most memory this process has held: `host` in all, `device` by tensors, on all
        its GPUs (None without one).
        """
        on_device = sum(torch.cuda.max_memory_allocated(device) for device in self._gpus) if self._gpus else None
        return {"host": self._peak_host_bytes(), "device": on_device}

    def _peak_host_bytes(self) -> int:
        now: int = self._process.memory_info().rss
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):  # Linux's ru_maxrss is not it: a child starts with its parent's
                    return max(int(line.split()[1]) * 1024, now)
        return now
