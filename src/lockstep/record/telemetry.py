"""Measure step times, processor load and memory of this rank.

No measurement waits for the device: its events time the steps, and are read together with the loss.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from .. import cuda, hardware

SAMPLED = (
    *("process_cpu_percent", "host_cpu_percent", "host_memory_bytes"),
    *("device_memory_bytes", "device_percent", "device_used_bytes"),
)


class StepClock:
    """Seconds of each optimizer step, by the GPU's events or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type != "cpu" else None
        self._all_s = array("d")  # a million steps are 8 MB
        self._spans: list[tuple[Any, Any]] = []
        self.start()

    def start(self) -> None:
        """Begin a step that does not directly follow another, as after an evaluation."""
        self._begin = self._now()

    def tick(self) -> None:
        """End a step, and begin the next."""
        begin, self._begin = self._begin, self._now()
        self._spans.append((begin, self._begin))

    def _now(self) -> Any:
        if self._gpu is None:
            return time.perf_counter()
        event = torch.Event(self._gpu, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._gpu))
        return event

    def flush(self) -> list[float]:
        """Return the seconds of each step that ended since the last call. Waits for the device to finish them."""
        spans, self._spans = self._spans, []
        if self._gpu is not None and spans:
            spans[-1][1].synchronize()
        new_s = [end - begin if self._gpu is None else begin.elapsed_time(end) / 1000 for begin, end in spans]
        self._all_s.extend(new_s)
        return new_s

    def percentiles(self, *percents: float) -> list[float]:
        """Return percentiles of all steps flushed so far, in seconds."""
        values: list[float] = np.percentile(self._all_s, percents).tolist()
        return values


class Telemetry:
    """Samples this process and its devices; call `sample` once a log interval."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type != "cpu"]
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only sets the start of the next measurement
        psutil.cpu_percent()
        # By UUID: the driver's indices ignore CUDA_VISIBLE_DEVICES.
        uuids = [cuda.uuid(device) for device in self._gpus if device.type == "cuda"]
        self.handles: list[Any] = [handle for uuid in uuids if (handle := hardware.nvml_handle(uuid)) is not None]

    def sample(self) -> dict[str, float | int]:
        """Return the values of `SAMPLED`; those of devices only for GPUs, as far as the driver reports them.

        Percentages are since the last call: of one core for the process, of all cores for the host. Several GPUs give
        the mean of percentages and the sum of bytes: `memory` held by tensors, `used` by all processes.
        """
        values: dict[str, float | int] = {
            "process_cpu_percent": self._process.cpu_percent(),
            "host_cpu_percent": psutil.cpu_percent(),
            "host_memory_bytes": self._process.memory_info().rss,
        }
        if self._gpus:
            values["device_memory_bytes"] = sum(map(torch.accelerator.memory_allocated, self._gpus))
        if used := [use for handle in self.handles if (use := hardware.in_use(handle)) is not None]:
            percents, used_bytes = zip(*used, strict=True)
            values |= {"device_percent": sum(percents) / len(used), "device_used_bytes": sum(used_bytes)}
        return values

    def peak_memory_bytes(self) -> dict[str, int | None]:
        """Return this process's peak memory: `host` in total, `device` by tensors on its GPUs, if any."""
        host: int = self._process.memory_info().rss
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):  # not Linux's ru_maxrss: a child starts with its parent's
                    host = max(int(line.split()[1]) * 1024, host)
        return {
            "host": host,
            "device": sum(map(torch.accelerator.max_memory_allocated, self._gpus)) if self._gpus else None,
        }
