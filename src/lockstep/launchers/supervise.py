"""Watching ranks from their parent: pass on signals, find the first cause, leave nobody behind.

A rank reports its value or its failure through a pipe; one that dies without a word is known by its exit status.
After the first failure the parent listens a moment longer, since the loudest is not always the first, ends the
other ranks, and raises the first cause as its own error.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import Any

from ..errors import LockstepError, RequestError, RunError, Stopped
from ..failures import Failure, first_cause
from ..interrupts import KILLED, SIGNALS, Heard, Interrupts

UNGUARDED = 87
"""The exit code of a rank whose import of the user's script would have started ranks again."""

_LOOK_S = 0.05
_LISTEN_S = 1.0  # for other reports, after the first failure
_LISTEN_ON_S = 0.3  # for others that may have come before it, once one is there that is a cause by itself
_GRACE_S = 2.0  # for ranks to end data workers and saves that are under way, before they are killed
_SILENT_GRACE_S = 0.3  # for those that have not even said that they end
_LEAVE_S = 30.0  # for ranks that are done, or are saving because a stop was asked for


@dataclass(frozen=True)
class Report:
    """A rank's last word: rank 0's pickled value, or why the rank failed."""

    rank: int
    value: bytes = b""
    failure: Failure | None = None


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

    def __init__(self, again: str, *, aborts_when_alone: bool = False) -> None:
        """`again` says how to go on after a rank was killed, such as "continue with --resume auto".

        `aborts_when_alone` says that a rank which waits in vain for another one ends by SIGABRT, as NCCL has it.
        """
        self._again = again
        self._aborts_when_alone = aborts_when_alone
        self._workers: list[Worker] = []
        self._reports: dict[int, Report] = {}
        self._interrupts = Interrupts()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Supervisor:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's is not
            self._handlers = {number: signal.signal(number, self._on_signal) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def add(self, worker: Worker) -> None:
        """Take over a rank that was just started."""
        self._workers.append(worker)
        if self._interrupts.asked:
            _send(worker, signal.SIGTERM)

    def wait(self) -> Any:
        """Return rank 0's value once all ranks are done; raise the first cause once one has failed."""
        while not self._failures() and len(self._reports) < len(self._workers):
            self._look(_LOOK_S)
        if self._failures():
            self._listen()
            raise self._error()
        self._join(self._workers, _LEAVE_S)
        return pickle.loads(self._reports[0].value)  # our own child's

    def _look(self, wait_s: float) -> None:
        """Take in reports and deaths, for at most `wait_s` seconds."""
        if self._interrupts.insisted:
            raise RunError(KILLED)
        silent = [worker for worker in self._workers if worker.rank not in self._reports]
        dead = [worker for worker in silent if worker.process.exitcode is not None]
        ready = multiprocessing.connection.wait([worker.reports for worker in silent], 0 if dead else wait_s)
        for worker in silent:
            report = _heard(worker) if worker.reports in ready else None
            if report or worker in dead:
                self._reports[worker.rank] = report or Report(worker.rank, failure=self._obituary(worker))

    def _listen(self) -> None:
        """Wait a little for what the other ranks have to say about the failure."""
        stopping = all(failure.kind == Stopped.__name__ for failure in self._failures())
        deadline = time.monotonic() + (_LEAVE_S if stopping else _LISTEN_S)
        found = False
        while len(self._reports) < len(self._workers) and time.monotonic() < deadline:
            if not stopping and not found and not first_cause(self._failures()).is_echo:
                found, deadline = True, min(deadline, time.monotonic() + _LISTEN_ON_S)
            self._look(_LOOK_S)

    def _failures(self) -> list[Failure]:
        return [report.failure for report in self._reports.values() if report.failure]

    def _error(self) -> LockstepError:
        cause = first_cause(self._failures())
        silent = [f"rank {worker.rank}" for worker in self._workers if worker.rank not in self._reports]
        if cause.is_echo and silent:  # so they live, and yet the others gave them up
            who = " and ".join(silent)
            return RunError(
                f"{who[0].upper()}{who[1:]} did not come to a collective in which the others waited for --stall-timeout"
                f" seconds: a process hangs, or was stopped; {self._again}."
            )
        return cause.error()

    def _obituary(self, worker: Worker) -> Failure:
        """Return the failure of a rank that died without a word."""
        code = worker.process.exitcode or 0
        if self._interrupts.asked and code == -signal.SIGTERM:
            return Failure(worker.rank, Stopped.__name__, "Stopped outside of training; there was nothing to save.", "")
        return obituary(worker.rank, code, self._again, aborts_when_alone=self._aborts_when_alone)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the first signal on as SIGTERM, so that ranks save and stop; at the second, kill."""
        heard = self._interrupts.hear()
        if heard is Heard.ECHO:
            return
        for worker in self._workers:
            _send(worker, signal.SIGTERM if heard is Heard.FIRST else signal.SIGKILL)

    def _join(self, workers: list[Worker], wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        for worker in workers:
            while worker.process.exitcode is None and time.monotonic() < deadline and not self._interrupts.insisted:
                time.sleep(_LOOK_S / 5)

    def _end(self) -> None:
        """End every rank that is left, with all that it started, after a moment in which it may end by itself.

        It gets no SIGTERM, which asks a rank to go on until it has saved: without the others it cannot.
        """
        silent = [worker for worker in self._workers if worker.rank not in self._reports]
        self._join([worker for worker in self._workers if worker not in silent], _GRACE_S)
        self._join(silent, _SILENT_GRACE_S)
        for worker in self._workers:
            _kill_group(worker)
            worker.process.join()
            worker.reports.close()
            worker.lifeline.close()


def obituary(rank: int, code: int, again: str, *, aborts_when_alone: bool = False) -> Failure:
    """Return the failure of a rank that ended without a word; `code` is its exit code, or minus the signal's number."""
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        how = f"Rank {rank} was killed by {signal.Signals(-code).name}{hint}"
        return Failure(rank, "", f"{how}; {again}.", "", is_echo=aborts_when_alone and code == -signal.SIGABRT)
    if code == UNGUARDED:
        return Failure(
            rank,
            RequestError.__name__,
            "Each rank imports the script that starts the ranks, and would start them again; put that script's "
            'start under `if __name__ == "__main__":`.',
            "",
        )
    how = f"Rank {rank} exited with code {code} before it was done and without a word"
    return Failure(rank, "", f"{how}: what was printed above may say why; {again}.", "")


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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
