"""Watching ranks from their parent: pass on signals, find the first cause, leave nobody behind.

A rank reports its value or its failure through a pipe; one that dies without a word is known by its exit status.
After the first failure the parent listens a moment longer, ends the other ranks, and raises the first cause as its own
error (see `reports.py`).
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import Any

from ..errors import RunError
from ..interrupts import KILLED, OUTSIDE, Heard, Interrupts, heeded
from . import lifeline, reports
from .frozen import Frozen
from .reports import GRACE_S, Report, obituary

_LOOK_S = 0.05
_DONE_S = 10.0  # for ranks that are done to end what they have started
_KILLED_S = 5.0
_SILENT_GRACE_S = 0.3  # for ranks that have not even said that they end, before they are killed


@dataclass(frozen=True)
class Worker:
    """A rank's process, and the parent's ends of the two pipes to it."""

    rank: int
    process: SpawnProcess
    reports: Connection
    lifeline: Connection
    """Never written to: it closes when the parent ends, whereupon the rank ends too."""


class Supervisor:
    """Owns the ranks' processes: on leaving the `with` block none of them is left, nor anything they started."""

    def __init__(self, again: str, *, stall_timeout_s: float, aborts_when_alone: bool = False) -> None:
        """`again` says how to go on after a rank was killed, such as "continue with --resume auto".

        Ranks that are not done about `stall_timeout_s` after the first one has been are given up.

        `aborts_when_alone` says that a rank which waits in vain for another one ends by SIGABRT, as NCCL has it.
        """
        self._again = again
        self._laggards, self._frozen = reports.Laggards(stall_timeout_s), Frozen(stall_timeout_s, again)
        self._aborts_when_alone = aborts_when_alone
        self._workers: list[Worker] = []
        self._reports: dict[int, Report] = {}
        self._interrupts = Interrupts()
        self._heeding = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        self._heeding.enter_context(heeded(self._on_signal))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._heeding:
            self._end()

    def add(self, worker: Worker) -> None:
        """Take over a rank that was just started."""
        self._workers.append(worker)
        if self._interrupts.asked:
            _send(worker, signal.SIGTERM)

    def wait(self) -> Any:
        """Return rank 0's value once all ranks are done; raise the first cause once one has failed."""
        while not reports.failures(self._reports) and len(self._reports) < len(self._workers):
            self._look(_LOOK_S)
            living = {worker.rank: worker.process.pid or 0 for worker in self._silent()}
            if frozen := self._frozen.look(living):
                raise frozen.error()
            if self._laggards.are_late(some_are_done=bool(self._reports)):
                raise reports.left_behind([worker.rank for worker in self._silent()], self._again).error()
        if reports.failures(self._reports):
            reports.listen(self._reports, len(self._workers), lambda: self._look(_LOOK_S))
            raise reports.error(self._reports, [worker.rank for worker in self._silent()], self._again)
        self._join(self._workers, _DONE_S, patient=False)
        return reports.value_of(self._reports[0].value)

    def _look(self, wait_s: float) -> None:
        """Take in reports and deaths, for at most `wait_s` seconds."""
        if self._interrupts.insisted:
            raise RunError(KILLED)
        silent = self._silent()
        dead = [worker for worker in silent if worker.process.exitcode is not None]
        ready = multiprocessing.connection.wait([worker.reports for worker in silent], 0 if dead else wait_s)
        for worker in silent:
            report = _heard(worker) if worker.reports in ready else None
            if report or worker in dead:
                self._reports[worker.rank] = report or self._obituary(worker)

    def _silent(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.rank not in self._reports]

    def _obituary(self, worker: Worker) -> Report:
        """Return what is reported of a rank that died without a word."""
        code, asked = worker.process.exitcode or 0, OUTSIDE if self._interrupts.asked else ""
        alone = self._aborts_when_alone
        return Report(
            worker.rank, failure=obituary(worker.rank, code, self._again, asked=asked, aborts_when_alone=alone)
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the first signal on as SIGTERM, so that ranks save and stop; at the second, kill."""
        heard = self._interrupts.hear()
        if heard is Heard.ECHO:
            return
        for worker in self._workers:
            _send(worker, signal.SIGTERM if heard is Heard.FIRST else signal.SIGKILL)

    def _join(self, workers: list[Worker], wait_s: float, *, patient: bool = True) -> None:
        """Wait for ends, until the user insists; where not `patient`, until the user asks."""
        deadline = time.monotonic() + wait_s
        for worker in workers:
            while worker.process.exitcode is None and time.monotonic() < deadline:
                if self._interrupts.insisted or (self._interrupts.asked and not patient):
                    return
                time.sleep(_LOOK_S / 5)

    def _end(self) -> None:
        """End every rank that is left, with all that it started, after a moment in which it may end by itself.

        It gets no SIGTERM, which asks a rank to go on until it has saved: without the others it cannot.
        """
        silent = self._silent()
        self._join([worker for worker in self._workers if worker not in silent], GRACE_S)
        self._join(silent, _SILENT_GRACE_S)
        for worker in self._workers:
            _kill_group(worker)
            worker.process.join(_KILLED_S)  # not where a disk that hangs keeps even what was killed
            worker.reports.close()
            worker.lifeline.close()


def _heard(worker: Worker) -> Report | None:
    with contextlib.suppress(EOFError, OSError):
        report: Report = worker.reports.recv()
        return report
    return None


def _send(worker: Worker, number: signal.Signals) -> None:
    if worker.process.exitcode is None and worker.process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)


def _kill_group(worker: Worker) -> None:
    """Kill the rank and its data workers, which are in the process group that it leads."""
    _send(worker, signal.SIGKILL)
    if worker.process.pid is not None:
        lifeline.end_group(worker.process.pid)
