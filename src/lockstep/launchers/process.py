"""A rank's process, from both ends of its pipe: the parent's, without torch, and the rank's.

No orphans: a rank ends with its parent, even if that is killed. On Linux the kernel kills the rank at once. A *guard*,
a shell that waits on a pipe from the parent, kills the rank's process group, with all processes of the user's code.
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

from .. import user_code
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
_SAFE_PATH, _MARK = "PYTHONSAFEPATH", "lockstep"


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

    cloudpickle sends a function that they cannot import, such as one of a notebook, by value. Raises `RequestError` if
    that is not installed, or the function cannot be sent.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a rank imports the script that started it, and that would start ranks again
    function = user_code.within(getattr(entry, "function", entry))  # the user's, within an entry of lockstep
    name = user_code.name_of(function)
    try:
        if _is_in_no_file() and getattr(function, "__module__", "") == "__main__":
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
        except Exception as cause:
            raise RequestError(
                f"{name} cannot be sent to other processes ({failures.one_line(cause)}); make what it uses within it."
            ) from cause


def _by_value(value: Any) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        if "cloudpickle" not in sys.modules:  # else it has sent the function
            raise
        return _by_value(value)


def _is_in_no_file() -> bool:
    """Return whether this program is a notebook, a prompt, `python -c`, or standard input."""
    return str(getattr(sys.modules["__main__"], "__file__", "<")).startswith("<")


def value_of(value: bytes) -> Any:
    """Return the value that a rank of this process has sent, or raise `RunError`."""
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RunError(
            f"What rank 0 returned cannot be read here ({failures.one_line(error)}); return plain values."
        ) from error


def start(place: Topology, payload: bytes, endpoint: Endpoint, notes: dict[str, str]) -> Worker:
    """Start a rank's process.

    SIGINT is blocked: until the rank leads its own group, the terminal's Ctrl-C would reach it. Python's path is safe:
    `python -c`, which multiprocessing calls, would import a `pickle.py` of the current folder.
    """
    pipe, child_pipe = multiprocessing.Pipe()
    arguments = (place, payload, child_pipe, endpoint, notes)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, name=f"rank-{place.rank}")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    method = multiprocessing.get_start_method(allow_none=True)  # otherwise starting a child would fix the method
    safe_path = os.environ.setdefault(_SAFE_PATH, _MARK)
    main = vars(sys.modules["__main__"])
    file = {"__file__": main.pop("__file__")} if _is_in_no_file() and "__file__" in main else {}  # else it is read
    try:
        process.start()
    finally:
        main |= file
        if safe_path == _MARK:
            os.environ.pop(_SAFE_PATH)
        multiprocessing.set_start_method(method, force=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    child_pipe.close()
    return Worker(place.rank, process, pipe)


def _serve(place: Topology, payload: bytes, pipe: Connection, endpoint: Endpoint, texts: dict[str, str]) -> None:
    _settle()
    config = RunConfig()

    def write(name: str, text: str) -> None:
        texts[name] = text
        pipe.send((name, text))

    try:
        entry, config = pickle.loads(payload)  # from the parent, through a pipe that no other process holds
        rendezvous = endpoint.open(place.rank, config.parallel.timeout, Notes(texts.get, write))
        with rank.join(config, os.environ, rendezvous, place, knows_node=True, report=pipe.send) as joined_rank:
            value = joined_rank.run(entry)
        try:
            report = _pickled(value)
        except Exception as error:  # a restart would fail in the same way
            raise RequestError(
                f"What rank 0 returned cannot be sent ({failures.one_line(error)}); return plain values."
            ) from error
    except BaseException as error:
        pipe.send(failures.account(error, place.rank, config))
        rank.exit_silently(error)
    pipe.send(report)
    if bounded.any_left():
        bounded.leave(0)


def _settle() -> None:
    """Undo multiprocessing's changes to a spawned process."""
    with contextlib.suppress(PermissionError):  # a leader already
        os.setsid()  # out of the terminal's foreground group: Ctrl-C reaches only the parent, which passes it on
    # A spawned process would spawn its children, such as data workers, too: each would import torch for seconds, and
    # Python would warn of leaked semaphores when a rank is killed.
    multiprocessing.set_start_method(None, force=True)
    if os.environ.get(_SAFE_PATH) == _MARK:  # not for programs of the user
        os.environ.pop(_SAFE_PATH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    survive()  # as the command itself does
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process with its parent thread (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


@contextlib.contextmanager
def guard() -> Iterator[Callable[[Worker], None]]:
    """Yield a function that adds a rank whose process group ends with this process."""
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
