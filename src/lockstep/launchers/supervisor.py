"""One host's ranks, started, watched and ended by a parent without torch.

A rank sends its parent its value or its failure; if it dies without a report, its exit code is reported. After the
first failure the parent waits a moment for the other reports, since the first one is not always the first cause. Then
it ends all ranks, and raises the first cause, or prints it before a restart.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.schema import RunConfig
from ..errors import ProofError, RequestError, RunError, Stopped, ranks_in_short
from ..files import read_end
from ..monitor import tracebacks
from ..monitor.failures import Failure, first_cause, resume_hint
from ..monitor.notes import FOLDER
from ..monitor.output import say
from ..monitor.signals import KILLED, OUTSIDE, Interrupts
from ..printable import visible
from ..world.topology import Topology
from . import stores
from .plan import Entry, LaunchPlan
from .process import UNGUARDED, Worker, guard, packed, start, value_of
from .stores import Endpoint

GRACE_S = 2.0
"""For a rank that has failed to end data workers and saves under way, before it is killed."""
_LEAVE_S = 30.0  # for ranks that save because a stop was requested
_AFTER_ECHO_S, _AFTER_CAUSE_S = 1.0, 0.3  # for the others' reports, after an echo, and after a cause
_DONE_S = 10.0  # for finished ranks to end the processes that they have started
_KILLED_S = 5.0
_LOOK_S = 0.05
_GUARD = (
    "Each rank imports the script that starts the ranks, and would start them again; put that script's start under "
    '`if __name__ == "__main__":`.'
)
_DEVICE_ERROR = re.compile(rb"(CUDA|HIP) error: [^\n]*")  # as torch writes it, also for an assertion in a kernel
_ERROR_BYTES = 1 << 20  # of the output's end, in which such an error is looked for
_SIGNALS = {int(number): number.name for number in signal.Signals}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
FINAL = {RequestError.__name__, ProofError.__name__}
"""Failures that a restart would repeat."""


def launch(entry: Entry, launch_plan: LaunchPlan, env: Mapping[str, str]) -> Any | None:
    """Run this host's ranks, restarting by --max-restarts; return rank 0's value.

    Raises the error of the rank that failed first; by then the others have been ended.
    """
    payload, places = packed(entry, launch_plan.config), Topology.of_host(launch_plan.processes)
    with Supervisor(launch_plan.config) as supervisor:
        while True:
            with stores.memory() as memory:  # a new one: a killed rank may leave half an entry
                outcome = supervisor.run(places, payload, Endpoint(memory=memory))
            if not isinstance(outcome, Failure):
                return value_of(outcome)
            if not supervisor.starts_again(outcome):
                raise outcome.error()


class Supervisor:
    """Owner of the ranks' processes, all of which end with a `run`."""

    def __init__(self, config: RunConfig) -> None:
        self._parallel, self._resume_hint = config.parallel, resume_hint(config)
        self._sizes: dict[int, int] = {}  # of the ranks' outputs, which earlier starts have begun
        self._restarts = 0
        self._interrupts = Interrupts(self._pass_on)
        self._workers: list[Worker] = []
        self.notes: dict[str, str] = {}

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, places: Sequence[Topology], payload: bytes, endpoint: Endpoint) -> bytes | Failure:
        """Run the ranks; return the first place's pickled value, or the first cause.

        Raises `RunError` after a second signal.
        """
        with self._interrupts, guard() as add:
            try:
                self._sizes = {place.rank: self._output_size(place.rank) for place in places}
                for place in places:
                    self._workers.append(worker := start(place, payload, endpoint, dict(self.notes)))
                    add(worker)
                    if self._interrupts.asked:
                        worker.send(signal.SIGTERM)
                return self._watch()
            finally:
                self._end()

    def starts_again(self, cause: Failure) -> bool:
        """Return whether the ranks start again; announce a restart."""
        is_stop, most_restarts = cause.kind == Stopped.__name__, self._parallel.max_restarts
        if is_stop or cause.kind in FINAL or self._restarts == most_restarts:
            return False
        self._restarts += 1
        sentence = cause.sentence.removesuffix(".").removesuffix(f"; {self._resume_hint}")
        say(f"{sentence}; the ranks start again (restart {self._restarts} of {most_restarts}).")
        return True

    def _watch(self) -> bytes | Failure:
        all_ran_s = time.monotonic()
        while self._silent() and not self._failures():
            self._look()
            if len(self._silent()) == len(self._workers):
                all_ran_s = time.monotonic()
            if failure := self._overdue(all_ran_s):
                return failure
        began_s = time.monotonic()
        while self._silent():
            failures = self._failures()
            wait_s = _AFTER_ECHO_S if first_cause(failures).is_echo else _AFTER_CAUSE_S
            if all(failure.kind == Stopped.__name__ for failure in failures):
                wait_s = _LEAVE_S
            if time.monotonic() - began_s > wait_s:
                break
            self._look()
        if failures := self._failures():
            return first_cause(failures)
        self._join(self._workers, _DONE_S)
        value = self._workers[0].report
        assert isinstance(value, bytes)
        return value

    def _failures(self) -> list[Failure]:
        return [worker.report for worker in self._workers if isinstance(worker.report, Failure)]

    def _silent(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.report is None]

    def _look(self) -> None:
        """Collect the ranks' reports and deaths, waiting 0.05 s at most."""
        if self._interrupts.insisted:
            raise RunError(KILLED)
        silent = self._silent()
        dead = [worker for worker in silent if worker.process.exitcode is not None]
        multiprocessing.connection.wait([worker.pipe for worker in silent], 0 if dead else _LOOK_S)
        for worker in silent:
            with contextlib.suppress(EOFError, OSError):
                while worker.report is None and worker.pipe.poll():
                    message = worker.pipe.recv()
                    if isinstance(message, tuple):
                        self.notes |= dict([message])
                    else:
                        worker.report = message
        for worker in dead:
            worker.report = worker.report or self._death(worker)

    def _overdue(self, all_ran_s: float) -> Failure | None:
        """Return the failure of ranks that still run long after the others, all of which ran until `all_ran_s`."""
        ranks = [worker.rank for worker in self._silent()]
        if not ranks or time.monotonic() < all_ran_s + self._parallel.stall_timeout:
            return None
        names, limit_s = ranks_in_short(ranks).capitalize(), self._parallel.stall_timeout
        sentence = f"{names} did not end within {limit_s:g} s after the others; {self._resume_hint}."
        return Failure(ranks[0], "", sentence, "")

    def _death(self, worker: Worker) -> Failure:
        """Return the failure of a rank that ended without a report."""
        code, number = worker.process.exitcode or 0, worker.rank
        if self._interrupts.asked and code == -signal.SIGTERM:
            return Failure(number, Stopped.__name__, OUTSIDE, "")
        if code == UNGUARDED:
            return Failure(number, RequestError.__name__, _GUARD, "")
        end = f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
        if code >= 0:
            end = f"exited with code {code} before it was done; its output may give the reason"
        elif code == -signal.SIGKILL:
            end += " (out of memory?)"
        elif -code in _CRASHES:
            end += f" (if it trained, its stacks are in the run's output/rank_{number}.txt)"
        is_echo = self._parallel.accelerator != "cpu" and code == -signal.SIGABRT
        if is_echo:
            # NCCL's thread aborts a rank left alone, but also one whose kernel has failed. Rank 0's C code writes to
            # the console: its failure is reported if it is the first.
            errors = [*_DEVICE_ERROR.finditer(self._end_of_output(number))]
            if errors:
                is_echo, end = False, f"{end}: {visible(errors[-1][0].decode(errors='replace'))}"
        return Failure(number, "", f"Rank {number} {end}; {self._resume_hint}.", "", is_echo=is_echo)

    def _output(self, number: int) -> Path:
        """Return the path of a rank's output. Raises `KeyError` without a folder."""
        return Path(self.notes[FOLDER]) / "output" / f"rank_{number}.txt"

    def _output_size(self, number: int) -> int:
        with contextlib.suppress(OSError, KeyError):
            return self._output(number).stat().st_size
        return 0

    def _end_of_output(self, number: int) -> bytes:
        """Return the end of what a rank has written since this start; b"" without a folder."""
        with contextlib.suppress(OSError, KeyError):
            return read_end(self._output(number), self._sizes.get(number, 0), _ERROR_BYTES)
        return b""

    def _pass_on(self, number: int) -> None:
        for worker in self._workers:
            worker.send(signal.SIGKILL if self._interrupts.insisted else signal.SIGTERM)

    def _join(self, workers: Sequence[Worker], wait_s: float) -> None:
        """Wait until these ranks end, or a second signal comes."""
        deadline = time.monotonic() + wait_s
        while any(worker.process.exitcode is None for worker in workers) and time.monotonic() < deadline:
            if self._interrupts.insisted:
                return
            time.sleep(_LOOK_S / 5)

    def _end(self) -> None:
        """Kill the remaining ranks; those that have reported get up to 2 s to end first.

        By SIGKILL: after SIGTERM, a rank would continue until it has saved, which takes the others.
        """
        self._join([worker for worker in self._workers if worker.report is not None], GRACE_S)
        tracebacks.request(worker.process.pid for worker in self._silent() if worker.process.exitcode is None)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.process.join(_KILLED_S)  # a limit: on a disk that hangs, killed processes stay
            worker.pipe.close()
        self._workers = []
