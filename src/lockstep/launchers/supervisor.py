"""One host's ranks, started, watched and ended by one parent that never imports torch; started again where asked.

A rank tells its parent its value or its failure; one that dies without a word is known by its exit code. After the
first failure the others are heard a moment longer, since the loudest is not always the first; then all are ended, and
the first cause is what the parent raises, or says, before it starts them again.

No orphans: a rank ends when its parent does, however that ended. On Linux the kernel kills it, even while it holds
Python's lock inside a library; and a thread waits on the pipe whose other end only the parent holds, and then ends the
rank with its process group, data workers included. The parent itself ends that whole group.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..config.schema import RunConfig
from ..errors import ProofError, RequestError, RunError, Stopped, ranks_in_short
from ..monitor import bounded, failures
from ..monitor.failures import Failure, first_cause, one_line
from ..monitor.notes import Notes
from ..monitor.signals import KILLED, OUTSIDE, Heard, Interrupts, heeded
from ..printable import told
from ..screen import Screen
from ..world.topology import Topology
from . import rank, stores
from .devices import Entry, processes

GRACE_S = 2.0
"""For a rank that has failed to end data workers and saves that are under way, before it is killed."""
UNGUARDED = 87
"""The exit code of a rank whose import of the user's script would have started ranks again."""
_LEAVE_S = 30.0  # for ranks that are saving because a stop was asked for
_LISTEN_S, _LISTEN_ON_S = 1.0, 0.3  # for others, after the first failure, and after one that is a cause by itself
_DONE_S = 10.0  # for ranks that are done to end what they have started
_KILLED_S = 5.0
_SILENT_GRACE_S = 0.3  # for ranks that have not even said that they end, before they are killed
_LOOK_S = 0.05
_STOPPED_LOOK_S, _STOPPED_GAP_S = 0.2, 2.0  # between two looks, and how long a busy machine may take for one
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FINAL = {RequestError.__name__, ProofError.__name__}
"""What would be the same again."""
_PR_SET_PDEATHSIG = 1
_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "lockstep"


@dataclass(frozen=True)
class Door:
    """Where a rank finds the others: in memory of its parent's, or at the address where rank 0 or an agent serves."""

    memory: Path | None = None
    host: str = ""
    port: int = 0
    secret: bytes = b""
    job: str = ""
    start: str = ""
    served: bool = False
    """Whether an agent serves the store."""

    def open(self, rank: int, timeout_s: float, notes: Notes) -> stores.Meeting:
        """Open the store for a rank; on one host `notes` outlive the ranks."""
        if self.memory is not None:
            return stores.in_memory(self.memory, notes)
        if rank == 0 and not self.served:
            return stores.serve(self.host, self.port, timeout_s, secret=self.secret)
        return stores.connect(
            self.host, self.port, timeout_s, secret=self.secret, job=self.job, start=self.start, served=self.served
        )


@dataclass(frozen=True)
class Report:
    """A rank's last word: its pickled value, or why it failed."""

    rank: int
    value: bytes = b""
    failure: Failure | None = None


@dataclass(frozen=True)
class _Worker:
    """A rank's process, and the pipe to it, which closes when the parent ends, whereupon the rank ends too."""

    rank: int
    process: SpawnProcess
    pipe: Connection

    def send(self, number: signal.Signals) -> None:
        if self.process.exitcode is None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the rank and its data workers, which are in the process group that it leads."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.pid is not None:
                os.killpg(self.process.pid, signal.SIGKILL)


def launch(entry: Entry, config: RunConfig, env: Any) -> Any | None:
    """Start this host's ranks, again after a loss where --max-restarts says so; return rank 0's value.

    Raises the error of the rank that failed first; by then the others have been ended.
    """
    payload, size = packed(entry, config), processes(config, env)
    screen = Screen(stderr=True)
    if screen.is_terminal:  # what happens during the seconds in which ranks import torch; a log needs no such line
        screen.say((f"starting {size} {'process' if size == 1 else 'processes'} …", "dim"))
    with Supervisor(config) as supervisor:
        while True:
            with stores.memory() as memory:  # a new one, in which no rank that was killed has left half an entry
                ended = supervisor.run(Topology.of_node(size), payload, Door(memory=memory))
            if not isinstance(ended, Failure):
                return value_of(ended)
            if not supervisor.starts_again(ended):
                raise ended.error()


class Supervisor:
    """Owns the ranks' processes: after each `run` none of them is left, nor anything they started."""

    def __init__(self, config: RunConfig, where: str = "") -> None:
        """`where` is what is told of ranks that die besides, such as " on node 10.0.0.2"."""
        parallel = config.parallel
        self._again, self._where = failures.again(config), where
        self._stall_s = parallel.stall_timeout
        # Ranks of other nodes say it better, and first.
        self._stopped_s = self._stall_s + GRACE_S * (parallel.most_nodes > 1)
        self._aborts_when_alone = parallel.accelerator == "cuda"  # by SIGABRT, as NCCL has it
        self._most_restarts, self._restarts = parallel.max_restarts, 0
        self._restarts_at_all = parallel.max_restarts > 0 or parallel.most_nodes > 1
        self._workers: list[_Worker] = []
        self._reports: dict[int, Report] = {}
        self.notes: dict[str, str] = {}
        """What ranks have left for the next start."""
        self._interrupts = Interrupts()
        self._waits = self._has_begun = False
        self._heeding = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        self._heeding.enter_context(heeded(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._heeding.close()

    def run(
        self, places: Sequence[Topology], payload: bytes, door: Door, look: Callable[[], Failure | None] = lambda: None
    ) -> bytes | Failure:
        """Start ranks at these places, and return the first one's pickled value once all are done, or the first cause.

        `look` is asked again and again for what else may end them. Raises `RunError` when a second signal came.
        """
        if self._is_asked():
            return self._stop_between()
        self._workers, self._reports, self._has_begun = [], {}, True
        try:
            for place in places:
                self._workers.append(worker := _start(place, payload, door, dict(self.notes)))
                if self._is_asked():
                    worker.send(signal.SIGTERM)
            return self._watch(look)
        finally:
            self._end()

    def starts_again(self, cause: Failure) -> bool:
        """Return whether the ranks are to be started again after they have ended so; tell the user, if so."""
        is_stop = cause.kind == Stopped.__name__
        if cause.kind in _FINAL or not self._restarts_at_all or (is_stop and self._interrupts.asked):
            return False
        if is_stop:  # which is no failure
            say(
                "The ranks were asked to stop, as another node leaves or comes, or by a signal of a rank's own; "
                "where the job goes on, they start again."
            )
        elif self._restarts < self._most_restarts:
            self._restarts += 1
            what = cause.sentence.removesuffix(".").removesuffix(f"; {self._again}")
            say(f"{what}; the ranks start again (restart {self._restarts} of {self._most_restarts}).")
        else:
            return False
        return True

    def ask_to_stop(self) -> None:
        """Have the ranks save and end."""
        for worker in self._workers:
            worker.send(signal.SIGUSR1)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Raise `Stopped` in the block where the user asks: no rank is there to be told."""
        if self._interrupts.asked:
            raise self._stop_between().error()
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _is_asked(self) -> bool:
        return self._interrupts.asked

    def _stop_between(self) -> Failure:
        began = f"while ranks were to start again; {self._again}" if self._has_begun else "before training began"
        return Failure(0, Stopped.__name__, f"Stopped {began}.", "")

    def _watch(self, look: Callable[[], Failure | None]) -> bytes | Failure:
        since: dict[str, float] = {}
        while not self._failures() and len(self._reports) < len(self._workers):
            self._look()
            if failure := look() or self._stuck(since):
                return failure
        if not self._failures():
            self._join(self._workers, _DONE_S, patient=False)
            return self._reports[self._workers[0].rank].value
        began_s = time.monotonic()
        while len(self._reports) < len(self._workers):
            is_stop = all(failure.kind == Stopped.__name__ for failure in self._failures())
            on_s = _LISTEN_S if first_cause(self._failures()).is_echo else _LISTEN_ON_S
            if time.monotonic() - began_s > (_LEAVE_S if is_stop else on_s):
                break
            self._look()
        return first_cause(self._failures())

    def _failures(self) -> list[Failure]:
        return [report.failure for report in self._reports.values() if report.failure]

    def _silent(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.rank not in self._reports]

    def _look(self) -> None:
        """Take in reports and deaths, for a moment."""
        if self._interrupts.insisted:
            raise RunError(KILLED)
        silent = self._silent()
        dead = [worker for worker in silent if worker.process.exitcode is not None]
        ready = multiprocessing.connection.wait([worker.pipe for worker in silent], 0 if dead else _LOOK_S)
        for worker in silent:
            report = self._heard(worker) if worker.pipe in ready else None
            if report or worker in dead:
                self._reports[worker.rank] = report or Report(worker.rank, failure=self._obituary(worker))

    def _heard(self, worker: _Worker) -> Report | None:
        """Return the rank's last word, if it has come; keep its notes."""
        with contextlib.suppress(EOFError, OSError):
            while worker.pipe.poll():
                if isinstance(found := worker.pipe.recv(), Report):
                    return found
                self.notes |= dict([found])
        return None

    def _stuck(self, since: dict[str, float]) -> Failure | None:
        """Return the failure of ranks that nobody else tells of: all are stopped, or the others were done long ago."""
        silent, now_s = self._silent(), time.monotonic()
        again = f"; {self._again}."
        if now_s < since.get("looked", 0.0) + _STOPPED_LOOK_S or not silent:
            return None
        # Time for which this process was stopped itself is none for which it saw the others stopped.
        was_away = now_s > since.get("looked", now_s) + _STOPPED_GAP_S
        since["looked"] = now_s
        if was_away or not all(_is_stopped(worker.process.pid) for worker in silent):
            since.pop("stopped", None)
        if not self._reports:
            since["done"] = now_s
        who = ranks_in_short(ranks := [worker.rank for worker in silent])
        who = f"{who[0].upper()}{who[1:]}"
        if now_s - since.setdefault("done", now_s) > self._stall_s + GRACE_S:
            late = "did not end within --stall-timeout after the other ranks were done: a process hangs, or was stopped"
            return Failure(ranks[0], "", f"{who} {late}{again}", "")
        if was_away or now_s - since.setdefault("stopped", now_s) < self._stopped_s:
            return None
        verb = "was" if len(ranks) == 1 else "were"
        for_s = now_s - since["stopped"]
        return Failure(
            ranks[0], "", f"{who}, all that live here, {verb} stopped (SIGSTOP) {for_s:.0f} s ago{again}", ""
        )

    def _obituary(self, worker: _Worker) -> Failure:
        """Return the failure of a rank that ended without a word."""
        code, number = worker.process.exitcode or 0, worker.rank
        if self._interrupts.asked and code == -signal.SIGTERM:
            return Failure(number, Stopped.__name__, OUTSIDE, "")
        if code == UNGUARDED:
            return Failure(
                number,
                RequestError.__name__,
                "Each rank imports the script that starts the ranks, and would start them again; put that script's "
                'start under `if __name__ == "__main__":`.',
                "",
            )
        who = f"Rank {number}{self._where}"
        if code >= 0:
            how = f"{who} exited with code {code} before it was done and without a word: its output may say why"
            return Failure(number, "", f"{how}; {self._again}.", "")
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        if -code in _CRASHES:
            hint = f" (if it trained, its stacks are in the run's output/rank_{number}.txt)"
        how = f"{who} was killed by {_name(-code)}{hint}"
        is_echo = self._aborts_when_alone and code == -signal.SIGABRT
        return Failure(number, "", f"{how}; {self._again}.", "", is_echo=is_echo)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the first signal on as SIGTERM, so that ranks save and stop; at the second, kill."""
        heard = self._interrupts.hear()
        if heard is Heard.ECHO:
            return
        if self._waits:
            raise self._stop_between().error()
        for worker in self._workers:
            worker.send(signal.SIGTERM if heard is Heard.FIRST else signal.SIGKILL)

    def _join(self, workers: Sequence[_Worker], wait_s: float, *, patient: bool = True) -> None:
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
            worker.kill()
            worker.process.join(_KILLED_S)  # not where a disk that hangs keeps even what was killed
            worker.pipe.close()
        self._workers = []


def say(text: str) -> None:
    """Tell the user on stderr."""
    with contextlib.suppress(OSError, AttributeError):
        print(told(text), end="", file=sys.stderr, flush=True)


def _name(number: int) -> str:
    """Return what a signal is called; Linux has some without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _is_stopped(process: int | None) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    return False


def packed(entry: Entry, config: RunConfig) -> bytes:
    """Return both as other processes of this program can read them.

    Raises `RequestError` for an entry, or a program, that they could not find.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a rank that imports the script which started it, and is told to start ranks in turn
    script = getattr(sys.modules["__main__"], "__file__", None)
    called = getattr(entry, "function", entry)  # what an entry of ours calls
    name = getattr(called, "__qualname__", str(called))
    if script is not None and script.startswith("<"):
        raise RequestError(
            f"A script that is read from {script} cannot start other processes, each of which has to read it too; "
            "save it to a file and start that."
        )
    if script is None and getattr(called, "__module__", "") == "__main__":
        raise RequestError(
            f"{name} was defined in an interactive session, where other processes do not find it; define it at the "
            "top level of a module and import it."
        )
    try:
        return pickle.dumps((entry, config))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{name} cannot be run in other processes ({error}); define it at the top level of a module."
        ) from error


def value_of(value: bytes) -> Any:
    """Return what rank 0 came to, from its pickle, which has to be that of a rank of our own.

    Raises `RunError` where it cannot be read in this process: it is of a class that only the rank knows.
    """
    try:
        return pickle.loads(value)  # our own rank's
    except Exception as error:
        raise RunError(
            f"The ranks are done, but what rank 0 returned cannot be read here ({one_line(error)}); return plain "
            "values, or objects of a class that this process can import."
        ) from error


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise RequestError(
            f"The ranks are done, but what rank 0 returned cannot be sent to the process that started it "
            f"({one_line(error)}); return plain values, or objects of a class that this process can import."
        ) from error


def _start(place: Topology, payload: bytes, door: Door, notes: dict[str, str]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(place, payload, theirs, door, notes), name=f"lockstep-rank-{place.rank}"
    )
    with _starting_children():
        process.start()
    theirs.close()
    return _Worker(place.rank, process, ours)


@contextlib.contextmanager
def _starting_children() -> Iterator[None]:
    """Start children with SIGINT blocked: until one leads its own group, the terminal's Ctrl-C would reach it.

    Nor do they take a `pickle.py` of the current folder for Python's, as `python -c` does, which multiprocessing calls.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    method = multiprocessing.get_start_method(allow_none=True)  # which a spawned child would have settled for good
    kept = os.environ.setdefault(_SAFE_PATH, _OURS)
    try:
        yield
    finally:
        if kept == _OURS:
            os.environ.pop(_SAFE_PATH)
        multiprocessing.set_start_method(method, force=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a rank's process


class _Piped:
    """Notes that the parent keeps for the next start."""

    def __init__(self, held: dict[str, str], pipe: Connection) -> None:
        self._held, self._pipe = held, pipe

    def read(self, name: str) -> str:
        return self._held.get(name, "")

    def write(self, name: str, text: str) -> None:
        self._held[name] = text
        self._pipe.send((name, text))


def _serve(place: Topology, payload: bytes, pipe: Connection, door: Door, notes: dict[str, str]) -> None:
    """Be one rank: run the pickled (entry, config), tell the parent its value or its failure."""
    _settle()
    threading.Thread(target=end_with, args=(pipe,), daemon=True, name="lifeline").start()
    config = RunConfig()
    try:
        entry, config = pickle.loads(payload)  # from our own parent, through a pipe that nobody else holds
        with rank.met(
            config,
            os.environ,
            lambda: door.open(place.rank, config.parallel.timeout, _Piped(notes, pipe)),
            index=place.rank,
            size=place.size,
            known=place,
            tell=lambda failure: pipe.send(Report(place.rank, failure=failure)),
        ) as seat:
            value = seat.run(entry, config)
        report = Report(place.rank, value=_pickled(value))
    except BaseException as error:
        pipe.send(Report(place.rank, failure=failures.account(error, place.rank, config)))
        rank.vanish(error)
    pipe.send(report)
    if bounded.any_left():
        bounded.leave(0)


def _settle() -> None:
    """Make a process that multiprocessing has spawned one like any other, before it does a rank's work."""
    with contextlib.suppress(PermissionError):  # a leader already
        os.setsid()  # out of the terminal's foreground group: Ctrl-C reaches only the parent, which passes it on
    # Without this, what the user's code starts, such as data workers, would be spawned because the rank itself was:
    # seconds for each to import torch, and semaphores that are told as leaked when a rank is killed.
    multiprocessing.set_start_method(None, force=True)
    if os.environ.get(_SAFE_PATH) == _OURS:  # the user's own programs are started as ever
        os.environ.pop(_SAFE_PATH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, on Linux; end it where it has already."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def end_with(pipe: Connection) -> None:
    """End this process, with its group, when the other end of the pipe closes."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os.killpg(os.getpgrp(), signal.SIGKILL)
