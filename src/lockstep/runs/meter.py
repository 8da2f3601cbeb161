"""Metrics that stay on the device until an interval ends.

Once an interval (`--log-every` steps, or about two seconds of slow steps) the meter gathers the losses of all ranks,
sums them, and records each step. The same exchange agrees on stop requests, and on the length of the next interval by
rank 0's clock. It is an all-gather, summed here in rank order: the order of an all-reduce's additions depends on an
element's position, and so on the clock, so that equal runs would record different last bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..record.base import Recorder
from ..record.telemetry import StepClock, Telemetry
from ..world.world import World

COVERS = {
    "loss samples": "the global batch of the step, all ranks",
    "top1": "the last micro-batch of the step, all ranks",
    "samples_per_s": "all ranks, over the interval",
    "step_s data_wait_s eta_s": "rank 0, mean over the interval",
    "process_cpu_percent host_memory_bytes device_memory_bytes device_percent device_used_bytes": (
        "rank 0's process and the devices that it drives"
    ),
    "host_cpu_percent": "all processes of rank 0's host",
}
"""Scope of the numbers in `step` and `log` events: ranks and period."""
_Row = dict[str, Any]
_INTERVAL_S = 2.0
"""Approximate length of an interval of slow steps. On a GPU also the usual wait after a stop request."""
_SAMPLE_EVERY_S = 1.0
_NORM = "grad_norm"
_EXTRAS = 4  # numbers between the losses and the values in the exchange of `flush`


@dataclass
class Pending:
    """Steps to record. `losses` (0-dim) are this rank's parts of the batch's mean."""

    rows: list[tuple[int, int, float, int]] = field(default_factory=list)  # step, epoch, lr, samples
    losses: list[Tensor] = field(default_factory=list)
    values: list[tuple[int, str, Tensor, int]] = field(default_factory=list)
    """Index of the row, name, this rank's sum, and the samples on all ranks that the sums span."""
    wait_s: float = 0.0  # waited for data
    last: tuple[Tensor, Tensor] | None = None  # (logits, labels) of the last micro-batch, for the training accuracy


class Meter:
    """Collector of a run's steps on every rank. Rank 0 records them."""

    def __init__(self, world: World, recorder: Recorder, devices: Sequence[torch.device], *, log_every: int) -> None:
        """Set up clock and telemetry."""
        self.clock = StepClock(world.device)
        self.telemetry = Telemetry(devices)
        self.pending = Pending()
        self.train_s = self.wait_s = 0.0
        self.images = 0
        self.step_s = 0.0  # mean over the last interval; 0 before the first ends
        self._world, self._recorder, self._log_every = world, recorder, log_every
        self._interval = 1
        self._since_s = self._sampled_s = 0.0

    def start(self) -> None:
        """Start the clock, at the first step and after non-training work."""
        self.clock.start()
        self._since_s = time.perf_counter()

    def add(self, step: int, epoch: int, lr: float, samples: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note a step of `samples` over all ranks. `loss` (0-dim, detached) is this rank's part of the mean."""
        self.clock.tick()
        pending = self.pending
        pending.rows.append((step, epoch, lr, samples))
        pending.losses.append(loss)
        if norm is not None:
            pending.values.append((len(pending.rows) - 1, _NORM, norm, 0))

    def note(self, name: str, value: Tensor, samples: int) -> None:
        """Note a value of the current step. `value` (0-dim) is this rank's sum; all ranks have `samples`."""
        self.pending.values.append((len(self.pending.rows), name, value, samples))

    @property
    def ends_interval(self) -> bool:
        """Whether the current step is the last of its interval."""
        return len(self.pending.rows) + 1 >= self._interval

    def due(self, stop: bool) -> bool:
        """Return whether the interval is over. All ranks agree at each step."""
        # A single process stops at once, since it needs no agreement.
        return len(self.pending.rows) >= self._interval or (stop and self._world.group is None)

    def flush(self, *, stop: bool, total_steps: int) -> tuple[bool, tuple[int, list[int]] | None]:
        """Record the pending steps; return (stop requested on any rank, non-finite loss) (*collective*).

        The latter is the first step with a non-finite loss and the ranks whose samples have it, or None.
        """
        pending, self.pending = self.pending, Pending()
        steps, losses = len(pending.rows), torch.stack(pending.losses).double()
        losses.sum().item()  # waits until the device has done all timed work
        now_s = time.perf_counter()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        proposal = min(self._log_every, max(1, round(_INTERVAL_S * steps / elapsed_s)))
        extras = torch.tensor([float(stop), float(proposal)], dtype=torch.float64).to(losses.device, non_blocking=True)
        extras = torch.cat([_count_hits(pending.last, losses.device), extras])
        values = [value.to(losses.device, torch.float64) for _, _, value, _ in pending.values]
        message = torch.cat([losses, extras, *([torch.stack(values)] if values else [])])
        by_rank: list[list[float]] = self._world.stack(message).tolist()
        sums = [sum(column, 0.0) for column in zip(*by_rank, strict=True)]
        hits, samples_seen, stopping, _ = sums[steps : steps + _EXTRAS]
        self._interval = int(by_rank[0][steps + 3])
        self.clock.flush()
        self.train_s += elapsed_s
        self.wait_s += pending.wait_s
        self.step_s = elapsed_s / steps
        rows, last_values = self._make_rows(pending, sums, by_rank[0])
        samples = sum(row["samples"] for row in rows)
        self.images += samples
        self._recorder.record("steps", rows=rows)
        self._recorder.record(
            "log",
            **{key: rows[-1][key] for key in ("step", "epoch", "loss", "lr")},
            top1=hits / samples_seen if samples_seen else None,
            samples_per_s=samples / elapsed_s,
            step_s=self.step_s,
            data_wait_s=pending.wait_s / steps,
            eta_s=self.step_s * (total_steps - rows[-1]["step"]) if total_steps else None,
            **self._sample_telemetry(),
            **last_values,
        )
        for number, (step, *_) in enumerate(pending.rows if not math.isfinite(sum(sums)) else ()):
            if ranks := [rank for rank, parts in enumerate(by_rank) if not math.isfinite(parts[number])]:
                return bool(stopping), (step, ranks)
        return bool(stopping), None

    def _make_rows(
        self, pending: Pending, sums: list[float], main_parts: list[float]
    ) -> tuple[list[_Row], dict[str, float]]:
        """Return a row per step, and the last values by name. `sums` span all ranks, `main_parts` are rank 0's."""
        rows: list[_Row] = [
            {"step": step, "epoch": epoch, "loss": loss, "lr": lr, "samples": samples}
            for (step, epoch, lr, samples), loss in zip(pending.rows, sums, strict=False)
        ]
        last_values: dict[str, float] = {}
        means: dict[tuple[int, str], tuple[float, int]] = {}
        for position, (number, name, _, samples) in enumerate(pending.values, start=len(rows) + _EXTRAS):
            if number >= len(rows):  # values after the last complete step belong to no row
                continue
            if name == _NORM:  # every rank has that of all ranks' gradients
                rows[number][name] = last_values[name] = main_parts[position]
            else:
                total, count = means.get((number, name), (0.0, 0))
                means[number, name] = total, count = total + sums[position], count + samples
                rows[number][name] = last_values[name] = total / count
        return rows, last_values

    def _sample_telemetry(self) -> dict[str, float | int]:
        """Return rank 0's telemetry, at most once a second. A sample costs as much as some tiny steps."""
        now_s = time.perf_counter()
        if not self._world.is_main or now_s - self._sampled_s < _SAMPLE_EVERY_S:
            return {}
        self._sampled_s = now_s
        return self.telemetry.sample()


def _count_hits(last: tuple[Tensor, Tensor] | None, device: torch.device) -> Tensor:
    """Return the numbers of correct predictions and of samples (2,) in (logits (n, classes), labels (n,))."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    if last is not None and last[0].ndim == 2:
        counts[0] = (last[0].argmax(dim=1) == last[1]).sum()
        counts[1] = len(last[1])
    return counts
