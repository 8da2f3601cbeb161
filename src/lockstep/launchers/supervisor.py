"""One host's ranks, started, watched and ended by a parent without torch.

A rank sends its parent its value or its failure; one that dies without a report is known by its exit code. After the
first failure the others are heard a moment longer, since the first report is not always the first cause. Then all are
ended, and the parent raises the first cause, or prints it before a restart.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.schema import RunConfig
from ..errors import ProofError, RequestError, RunError, Stopped, ranks_in_short
from ..monitor import failures, tracebacks
from ..monitor.failures import Failure, first_cause
from ..monitor.output import say
from ..monitor.signals import KILLED, OUTSIDE, Interrupts
from ..world.topology import Topology
from . import stores
from .plan import Entry, LaunchPlan
from .process import UNGUARDED, Worker, guard, packed, start, value_of
from .stores import Endpoint

GRACE_S = 2.0
"""For a rank that has failed to end data workers and saves under way, before it is killed."""
_LEAVE_S = 30.0  # for ranks that save because a stop was asked for
_AFTER_ECHO_S, _AFTER_CAUSE_S = 1.0, 0.3  # for the others' reports, after an echo, and after a cause by itself
_DONE_S = 10.0  # for ranks that are done to end what they have started
_KILLED_S = 5.0
_LOOK_S = 0.05
_GUARD = (
    "Each rank imports the script that starts the ranks, and would start them again; put that script's start under "
    '`if __name__ == "__main__":`.'
)
_SIGNALS = {int(each): each.name for each in signal.Signals}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
FINAL = {RequestError.__name__, ProofError.__name__}
"""Failures that a restart would repeat."""


def launch(entry: Entry, planned: LaunchPlan, env: Mapping[str, str]) -> Any | None:
    """Run this host's ranks, restarting by --max-restarts; return rank 0's value.

    Raises the error of the rank that failed first; by then the others have been ended.
    """
    payload, places = packed(entry, planned.config), Topology.of_node(planned.processes)
    with Supervisor(planned.config) as supervisor:
        while True:
            with stores.memory() as memory:  # a new one, in which no rank that was killed has left half an entry
                ended = supervisor.run(places, payload, Endpoint(memory=memory))
            if not isinstance(ended, Failure):
                return value_of(ended)
            if not supervisor.starts_again(ended):
                raise ended.error()


class Supervisor:
    """Owner of the ranks' processes, of which none outlives a `run`."""

    def __init__(self, config: RunConfig) -> None:
        self._parallel, self._resume_hint = config.parallel, failures.resume_hint(config)
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
        what = cause.sentence.removesuffix(".").removesuffix(f"; {self._resume_hint}")
        say(f"{what}; the ranks start again (restart {self._restarts} of {most_restarts}).")
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
            failed = self._failures()
            listens_s = _AFTER_ECHO_S if first_cause(failed).is_echo else _AFTER_CAUSE_S
            if all(failure.kind == Stopped.__name__ for failure in failed):
                listens_s = _LEAVE_S
            if time.monotonic() - began_s > listens_s:
                break
            self._look()
        if failed := self._failures():
            return first_cause(failed)
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
                    found = worker.pipe.recv()
                    if isinstance(found, tuple):
                        self.notes |= dict([found])
                    else:
                        worker.report = found
        for worker in dead:
            worker.report = worker.report or self._obituary(worker)

    def _overdue(self, all_ran_s: float) -> Failure | None:
        """Return the failure of ranks that outlast the others, the first of which ended after `all_ran_s`."""
        ranks = [worker.rank for worker in self._silent()]
        if not ranks or time.monotonic() < all_ran_s + self._parallel.stall_timeout:
            return None
        who, since_s = ranks_in_short(ranks).capitalize(), self._parallel.stall_timeout
        told = f"{who} did not end within {since_s:g} s after the others; {self._resume_hint}."
        return Failure(ranks[0], "", told, "")

    def _obituary(self, worker: Worker) -> Failure:
        """Return the failure of a rank that ended without a report."""
        code, number = worker.process.exitcode or 0, worker.rank
        if self._interrupts.asked and code == -signal.SIGTERM:
            return Failure(number, Stopped.__name__, OUTSIDE, "")
        if code == UNGUARDED:
            return Failure(number, RequestError.__name__, _GUARD, "")
        how = f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
        if code >= 0:
            how = f"exited with code {code} before it was done and without a word: its output may say why"
        elif code == -signal.SIGKILL:
            how += " (out of memory?)"
        elif -code in _CRASHES:
            how += f" (if it trained, its stacks are in the run's output/rank_{number}.txt)"
        is_echo = self._parallel.accelerator == "cuda" and code == -signal.SIGABRT  # as NCCL ends a rank left alone
        return Failure(number, "", f"Rank {number} {how}; {self._resume_hint}.", "", is_echo=is_echo)

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
        """Kill the remaining ranks. Those that have reported get up to 2 s to end by themselves.

        None gets SIGTERM, which asks a rank to go on until it has saved: without the others it cannot.
        """
        self._join([worker for worker in self._workers if worker.report is not None], GRACE_S)
        tracebacks.ask(worker.process.pid for worker in self._silent() if worker.process.exitcode is None)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:  # which end at the same time
            worker.process.join(_KILLED_S)  # not for ever: a disk that hangs keeps even what was killed
            worker.pipe.close()
        self._workers = []
