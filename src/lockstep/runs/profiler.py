"""A trace of some steps on each rank, by torch.profiler (`--profile FROM:TO`), and the ranks' waits for each other.

Each rank writes `profile/rank_N.json.gz` to the run's folder, for https://ui.perfetto.dev. The wait is the time in
exchanges: of the host on a CPU, of the communication kernels on an accelerator. The slowest rank waits the least.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerAction, profile, record_function

from ..files import own_folder, reason, shown, write_whole
from ..launchers.variables import having, unset
from ..monitor.output import say
from ..monitor.progress import EXCHANGES
from ..world.world import World

_OPERATIONS = 8
"""Operations in the report."""
_QUIET = {"KINETO_LOG_LEVEL": "99"}
"""Read at the first trace: torch's library would print when it starts, and that there is no GPU."""
_NAMES = {"ProfilerStep*": "Python between operations"}
"""torch's event of a step, by its self time."""


class Profiler:
    """Traces the optimizer steps `steps` of a run. Every rank makes the same calls."""

    def __init__(self, steps: range, world: World, folder: Path) -> None:
        self.steps, self._world, self._folder = steps, world, folder / "profile"
        self.is_done = False
        """Whether all the steps are in the trace."""
        self._profile: profile | None = None
        self._on_host, self._is_waiting = world.device.type == "cpu", False
        self._begun_s = self._wait_s = 0.0
        self._operations: list[dict[str, Any]] = []

    def advance(self, step: int) -> dict[str, Any] | None:
        """Note that the run has made `step` steps; return the report after the last one traced (*collective*).

        See `record.base` on the report. A run that does not make all the steps has no trace.
        """
        first, last = self.steps[0], self.steps[-1]
        if self._profile is None:
            if first - 2 <= step < first:
                self._begin(warm_up=first - 1 - step)
        elif step == last:
            return self._end()
        else:
            self._profile.step()
            if step == first - 1:  # the warm-up is over
                self._begun_s, self._wait_s = self._now(), 0.0
        return None

    def _begin(self, *, warm_up: int) -> None:
        actions = [ProfilerAction.WARMUP] * warm_up + [ProfilerAction.RECORD] * (len(self.steps) - 1)
        actions += [ProfilerAction.RECORD_AND_SAVE, ProfilerAction.NONE]
        with having(unset(_QUIET)):
            self._profile = profile(schedule=actions.__getitem__, on_trace_ready=self._write)
            self._profile.start()
        self._world.progress.traced = self._wait
        self._begun_s, self._wait_s = self._now(), 0.0

    def _end(self) -> dict[str, Any]:
        elapsed_s, steps = self._now() - self._begun_s, len(self.steps)
        self.close(discard=False)
        self.is_done = True
        step_s, wait_s = map(list, zip(*self._world.gather([elapsed_s / steps, self._wait_s / steps]), strict=True))
        return {
            "step": self.steps[-1],
            "first_step": self.steps[0],
            "step_s": step_s,
            "wait_s": wait_s,
            "slowest": min(range(len(wait_s)), key=wait_s.__getitem__),
            "operations": [item | {"self_s": item["self_s"] / steps} for item in self._operations],
            "folder": shown(self._folder),
        }

    def _now(self) -> float:
        if not self._on_host:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def close(self, *, discard: bool = True) -> None:
        """End the trace, if there is one; write it unless told to `discard` it."""
        if self._profile is not None:
            traced, self._profile, self._world.progress.traced = self._profile, None, None
            traced.on_trace_ready = None if discard else self._write
            traced.stop()

    @contextlib.contextmanager
    def _wait(self, phase: str) -> Iterator[None]:
        """Show the phase in the trace, and count its time if it is an exchange within none."""
        counts, begun_s = phase in EXCHANGES and not self._is_waiting, time.perf_counter()
        self._is_waiting |= counts
        with record_function(f"lockstep: {phase}"):
            yield
        if counts:
            self._is_waiting = False
            self._wait_s += time.perf_counter() - begun_s

    def _write(self, traced: profile) -> None:
        """Write the trace of this rank; take the operations and the kernels' waits from it."""
        key, name = "self_cpu_time_total", f"rank_{self._world.rank}.json.gz"
        if not self._on_host:
            key = "self_device_time_total"
            self._wait_s = device_wait_s(traced.events())  # type: ignore[no-untyped-call]
        times = {item.key: getattr(item, key) for item in traced.key_averages() if item.device_type == DeviceType.CPU}
        self._operations = [
            {"name": _NAMES.get(name, name), "self_s": us / 1e6, "share": us / (sum(times.values()) or 1)}
            for name, us in sorted(times.items(), key=lambda pair: -pair[1])[:_OPERATIONS]
        ]
        try:
            own_folder(self._folder)
            with tempfile.TemporaryDirectory() as folder:
                traced.export_chrome_trace(str(Path(folder) / name))
                write_whole(self._folder / name, (Path(folder) / name).read_bytes())
        except OSError as error:
            say(f"{shown(self._folder / name)} could not be written: {reason(error)}")


def device_wait_s(events: Any) -> float:
    """Return the seconds of the communication kernels (NCCL, RCCL, XCCL, HCCL) among a profile's events."""
    kernels = (event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation)
    return float(sum(event.time_range.elapsed_us() for event in kernels if "ccl" in event.name.lower())) / 1e6
