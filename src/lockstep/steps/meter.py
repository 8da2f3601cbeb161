"""Metrics that stay on the device until they are wanted.

Each step leaves its loss here as a tensor; nothing waits for it. Once an interval (`--log-every` steps, or about
two seconds of slow ones) all of them are gathered from the ranks at once, summed, and recorded step by step. The same
exchange agrees on two things more: whether any rank was asked to stop, and how long the next interval is. So that all
ranks come to the collective at the same step, rank 0's clock decides.

It is an all-gather, summed here in the order of the ranks: an all-reduce over three ranks or more adds in an order
that depends on an element's place in the tensor, and where a step stands in its interval depends on the clock. Two
equal runs would then record losses that differ in the last bit.
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
"""Of whom, and since when, the numbers of `step` and `log` events are."""

_INTERVAL_S = 2.0
"""With slow steps an interval ends after about this time: a person who asked to stop waits no longer than that."""

_SAMPLE_EVERY_S = 1.0


@dataclass
class _Pending:
    """Steps since the last flush. `losses` are this rank's sums over its own samples."""

    rows: list[tuple[int, int, float, int]] = field(default_factory=list)  # step, epoch, lr, samples
    losses: list[Tensor] = field(default_factory=list)
    norms: list[tuple[int, Tensor]] = field(default_factory=list)  # index of the row, of the gradients
    values: list[tuple[int, str, Tensor]] = field(default_factory=list)  # index of the row, name, this rank's part


class Meter:
    """Collects a run's steps on every rank and records them on rank 0."""

    def __init__(
        self,
        world: World,
        recorder: Recorder,
        *,
        log_every: int,
        total_steps: int,
        devices: Sequence[torch.device] | None = None,
        sums: bool = True,
    ) -> None:
        """`devices` are those that this process drives, by default the world's.

        `sums` says whether the losses that come are sums over a rank's samples, or its parts of the batch's mean.
        """
        self.clock = StepClock(world.device)
        self.telemetry = Telemetry([world.device] if devices is None else devices)
        self.train_s = 0.0
        self.wait_s = 0.0
        self.images = 0
        self.step_s = 0.0
        """Mean seconds of a step in the last interval; 0 before the first."""
        self._world = world
        self._recorder = recorder
        self._log_every = log_every
        self._sums = sums
        self._total_steps = total_steps
        self._interval = 1
        self._pending = _Pending()
        self._since_s = 0.0
        self._sampled_s = 0.0

    def start(self) -> None:
        """Start the clock: at the first step, and again after whatever is not training."""
        self.clock.start()
        self._since_s = time.perf_counter()

    def add(self, step: int, epoch: int, lr: float, samples: int, loss: Tensor, norm: Tensor | None) -> None:
        """Note one step: `loss` is this rank's summed loss (0-dim, detached), `samples` the global batch's size."""
        self.clock.tick()
        pending = self._pending
        pending.rows.append((step, epoch, lr, samples))
        pending.losses.append(loss)
        if norm is not None:
            pending.norms.append((len(pending.rows) - 1, norm))

    def note(self, name: str, value: Tensor) -> None:
        """Note a value of the step under way: `value` (0-dim) is this rank's part of it, and the parts add up."""
        self._pending.values.append((len(self._pending.rows), name, value))

    @property
    def ends_interval(self) -> bool:
        """Whether the step under way is the last of its interval."""
        return len(self._pending.rows) + 1 >= self._interval

    def due(self, stop: bool) -> bool:
        """Whether the interval is over: true on all ranks at the same step."""
        # One process need not agree with anybody, and stops at once.
        return len(self._pending.rows) >= self._interval or (stop and self._world.group is None)

    def flush(self, *, stop: bool, wait_s: float = 0.0, last: tuple[Tensor, Tensor] | None = None) -> bool:
        """Record the steps since the last flush; return whether any rank wants to stop (*collective*).

        `wait_s` is the time since the last flush that this rank waited for data, `last` the last micro-batch's
        (logits, labels) on this rank, for the training accuracy.

        Raises `NonFiniteLossError` at the first step whose loss is not a finite number.
        """
        pending, self._pending = self._pending, _Pending()
        own = torch.stack(pending.losses).double()
        elapsed_s = self._elapsed(own)
        hits, seen = _hits(last) if last is not None else (0.0, 0.0)
        proposal = min(self._log_every, max(1, round(_INTERVAL_S * len(own) / elapsed_s)))
        extras = [hits, seen, float(stop), float(proposal if self._world.is_main else 0)]
        parts = [value.double().to(own.device) for *_, value in pending.values]
        told = torch.cat([own, torch.tensor(extras, dtype=torch.float64, device=own.device)])
        told = torch.cat([told, torch.stack(parts)]) if parts else told
        by_rank: list[list[float]] = self._world.stack(told).tolist()
        summed = [sum(column, 0.0) for column in zip(*by_rank, strict=True)]
        losses, values = summed[: len(own)], summed[len(own) + len(extras) :]
        hits, seen, wants_stop, interval = summed[len(own) : len(own) + len(extras)]
        self._interval = int(interval)
        self._account(pending, elapsed_s, wait_s)
        norms = torch.stack([norm for _, norm in pending.norms]).tolist() if pending.norms else []
        self._record(pending, losses, norms, values, elapsed_s, wait_s, hits / seen if seen else None)
        self._check(pending, by_rank)
        return bool(wants_stop)

    @property
    def pending(self) -> int:
        """Steps since the last flush."""
        return len(self._pending.rows)

    def _elapsed(self, own: Tensor) -> float:
        own.sum().item()  # the device has then done all that is timed
        now_s = time.perf_counter()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        return elapsed_s

    def _account(self, pending: _Pending, elapsed_s: float, wait_s: float) -> None:
        self.clock.flush()
        self.train_s += elapsed_s
        self.wait_s += wait_s
        self.step_s = elapsed_s / len(pending.rows)
        self.images += sum(samples for *_, samples in pending.rows)

    def _sampled(self) -> dict[str, float | int]:
        """Return rank 0's telemetry, at most once a second: a sample costs as much as some tiny steps."""
        now_s = time.perf_counter()
        if not self._world.is_main or now_s - self._sampled_s < _SAMPLE_EVERY_S:
            return {}
        self._sampled_s = now_s
        return self.telemetry.sample()

    def _check(self, pending: _Pending, by_rank: list[list[float]]) -> None:
        if math.isfinite(sum(map(sum, by_rank))):
            return
        for number, (step, *_) in enumerate(pending.rows):
            bad = [rank for rank, told in enumerate(by_rank) if not math.isfinite(told[number])]
            if bad:
                raise NonFiniteLossError(step, bad)

    def _record(
        self,
        pending: _Pending,
        losses: list[float],
        norms: list[float],
        values: list[float],
        elapsed_s: float,
        wait_s: float,
        top1: float | None,
    ) -> None:
        record = self._recorder.record
        rows: list[dict[str, Any]] = [
            {"step": step, "epoch": epoch, "loss": loss / (samples if self._sums else 1), "lr": lr, "samples": samples}
            for (step, epoch, lr, samples), loss in zip(pending.rows, losses, strict=True)
        ]
        for (number, _), norm in zip(pending.norms, norms, strict=True):
            rows[number]["grad_norm"] = norm
        own: dict[str, float] = {"grad_norm": norms[-1]} if norms else {}
        for (number, name, _), value in zip(pending.values, values, strict=True):
            if number < len(rows):  # what was noted after the last whole step is of no step
                rows[number][name] = own[name] = rows[number].get(name, 0.0) + value
        record("steps", rows=rows)
        step, epoch, lr, _ = pending.rows[-1]
        images = sum(samples for *_, samples in pending.rows)
        step_s = elapsed_s / len(pending.rows)
        record(
            "log",
            step=step,
            epoch=epoch,
            loss=rows[-1]["loss"],
            lr=lr,
            top1=top1,
            samples_per_s=images / elapsed_s,
            step_s=step_s,
            data_wait_s=wait_s / len(pending.rows),
            eta_s=step_s * (self._total_steps - step),
            **self._sampled(),
            **own,
        )


class NonFiniteLossError(Exception):
    """The loss of `step` (from 1) is not a finite number; `ranks` are those on whose own samples it is not."""

    def __init__(self, step: int, ranks: list[int]) -> None:
        super().__init__(f"the loss of step {step} is not finite on ranks {ranks}")
        self.step = step
        self.ranks = ranks


def _hits(last: tuple[Tensor, Tensor]) -> tuple[float, float]:
    logits, y = last
    if logits.ndim != 2:
        return 0.0, 0.0
    return float((logits.argmax(dim=1) == y).sum()), float(len(y))
