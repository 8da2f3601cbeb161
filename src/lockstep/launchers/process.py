"""A rank's process, from both ends of its pipe: its parent's, which has no torch, and its own.

No orphans: a rank ends with its parent, also where that is killed. On Linux the kernel kills the rank at once; a
*guard*, a shell that waits on a pipe from the parent, kills the rank's process group, and so what the user's code has
started.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil

from ..config.schema import RunConfig
from ..errors import RequestError, RunError
from ..monitor import bounded, failures
from ..monitor.failures import Failure
from ..monitor.notes import Notes
from ..monitor.output import survive
from ..world.topology import Topology
from . import rank
from .plan import Entry
from .stores import Endpoint

UNGUARDED = 87
"""The exit code of a rank whose import of the user's script would have started ranks again."""
_PR_SET_PDEATHSIG = 1
_GUARD = 'groups=; while read -r pid; do groups="$groups -$pid"; done; [ -z "$groups" ] || kill -9 $groups 2>&-'
_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "lockstep"


@dataclass
class Worker:
    """A rank's process, and the pipe to it."""

    rank: int
    process: SpawnProcess
    pipe: Connection
    report: bytes | Failure | None = None
    """The rank's pickled value, or its failure."""

    def send(self, number: signal.Signals) -> None:
        if self.process.exitcode is None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the rank and the process group that it leads."""
        self.send(signal.SIGKILL)
        pid = self.process.pid
        # Once the rank is reaped, a process of its number is another one; while its group lives, there can be none.
        if pid is not None and (self.process.exitcode is None or not psutil.pid_exists(pid)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def packed(entry: Entry, config: RunConfig) -> bytes:
    """Pickle entry and config for other processes of this program.

    A function that those cannot import, such as one of a notebook, is sent by value, by cloudpickle. Raises
    `RequestError` where that is not installed, and for what cannot be sent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a rank that imports the script which started it, and is told to start ranks in turn
    called = getattr(entry, "function", entry)  # what an entry of ours calls
    name = getattr(called, "__qualname__", str(called))
    try:
        if _is_in_no_file() and getattr(called, "__module__", "") == "__main__":
            raise TypeError("this program is in no file that they could read")
        return pickle.dumps((entry, config))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        try:
            return _by_value((entry, config))
        except ImportError:
            raise RequestError(
                f"{name} cannot be run in other processes ({error}); define it at the top level of a module, or "
                "pip install cloudpickle, which sends the functions of a notebook."
            ) from error
        except Exception as other:
            raise RequestError(
                f"{name} cannot be sent to other processes ({failures.one_line(other)}); make what it uses within it."
            ) from other


def _by_value(value: Any) -> bytes:
    import cloudpickle

    found: bytes = cloudpickle.dumps(value)
    return found


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        if "cloudpickle" not in sys.modules:  # by which the function came
            raise
        return _by_value(value)


def _is_in_no_file() -> bool:
    """Return whether this program is typed in: a notebook, a prompt, `python -c`, or standard input."""
    return str(getattr(sys.modules["__main__"], "__file__", "<")).startswith("<")


def value_of(value: bytes) -> Any:
    """Return what our own rank has sent. Raises `RunError` where it cannot be read here."""
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RunError(
            f"What rank 0 returned cannot be read here ({failures.one_line(error)}); return plain values."
        ) from error


def start(place: Topology, payload: bytes, endpoint: Endpoint, notes: dict[str, str]) -> Worker:
    """Start a rank's process.

    SIGINT is blocked: until the rank leads its own group, the terminal's Ctrl-C would reach it. And Python's path is
    safe: `python -c`, which
    multiprocessing calls, would take a `pickle.py` of the current folder for Python's.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (place, payload, theirs, endpoint, notes)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, name=f"rank-{place.rank}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    method = multiprocessing.get_start_method(allow_none=True)  # which starting a child would settle for good
    kept = os.environ.setdefault(_SAFE_PATH, _OURS)
    main = vars(sys.modules["__main__"])
    named = {"__file__": main.pop("__file__")} if _is_in_no_file() and "__file__" in main else {}  # else it is read
    try:
        process.start()
    finally:
        main |= named
        if kept == _OURS:
            os.environ.pop(_SAFE_PATH)
        multiprocessing.set_start_method(method, force=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return Worker(place.rank, process, ours)


def _serve(place: Topology, payload: bytes, pipe: Connection, endpoint: Endpoint, held: dict[str, str]) -> None:
    _settle()
    config = RunConfig()

    def write(name: str, text: str) -> None:
        held[name] = text
        pipe.send((name, text))

    notes = Notes(held.get, write)
    try:
        entry, config = pickle.loads(payload)  # from our own parent, through a pipe that nobody else holds
        rendezvous = endpoint.open(place.rank, config.parallel.timeout, notes)
        with rank.met(config, os.environ, rendezvous, place, knows_node=True, tell=pipe.send) as seat:
            value = seat.run(entry)
        try:
            report = _pickled(value)
        except Exception as error:  # one that another start would not change
            raise RequestError(
                f"What rank 0 returned cannot be sent ({failures.one_line(error)}); return plain values."
            ) from error
    except BaseException as error:
        pipe.send(failures.account(error, place.rank, config))
        rank.vanish(error)
    pipe.send(report)
    if bounded.any_left():
        bounded.leave(0)


def _settle() -> None:
    """Undo multiprocessing's changes to a spawned process."""
    with contextlib.suppress(PermissionError):  # a leader already
        os.setsid()  # out of the terminal's foreground group: Ctrl-C reaches only the parent, which passes it on
    # Without this, what the user's code starts, such as data workers, would be spawned because the rank itself was:
    # seconds for each to import torch, and semaphores that are told as leaked when a rank is killed.
    multiprocessing.set_start_method(None, force=True)
    if os.environ.get(_SAFE_PATH) == _OURS:  # the user's own programs are started as ever
        os.environ.pop(_SAFE_PATH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    survive()  # as the command itself does
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process with its parent thread (Linux alone)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


@contextlib.contextmanager
def guard() -> Iterator[Callable[[Worker], None]]:
    """Yield a function that adds a rank to those whose process groups end with this process, however it ends."""
    with subprocess.Popen(["sh", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True) as shell:
        assert shell.stdin is not None
        lines = shell.stdin

        def add(worker: Worker) -> None:
            with contextlib.suppress(BrokenPipeError):
                lines.write(f"{worker.process.pid}\n".encode())
                lines.flush()

        try:
            yield add
        finally:
            shell.kill()  # the ranks have ended
