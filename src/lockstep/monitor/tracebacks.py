"""The stacks of this process, told by Python, and those of other processes of this host, told by C code on request.

A process that hangs in C code which keeps Python's lock cannot say where: none of its threads runs. faulthandler's
handler of a signal needs no lock: it writes, on the thread that is stopped for it, what that one is doing. (Its timer
writes what others do while they run: where a process was stopped for longer, that crashes it.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

_ASKED = signal.SIGUSR2
_MEMORY = "lockstep-stack-{process}"
_OUTERMOST = " in _worker_loop"  # of a DataLoader's workers
_LOOK_S = 0.02


def of_all() -> str:
    """Return the stacks of all threads of this process, the main thread's first, and of its workers."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames, first = sys._current_frames(), threading.main_thread().ident
    own = [
        f"Thread {names.get(ident, ident)}, innermost call last:\n{''.join(traceback.format_stack(frames[ident]))}\n"
        for ident in sorted(frames, key=lambda ident: ident != first)
    ]
    workers = [f"Data worker, process {each}, innermost call first:\n{text}\n" for each, text in of_workers().items()]
    return "".join([*own, *workers])


def answer() -> Callable[[], None]:
    """Have this process write its main thread's stack whenever another one asks for it; return what ends that.

    On Linux alone, and not where the signal that asks is the user's. The stack is written into memory that others of
    the same user can read while this process lives.
    """
    if not hasattr(os, "memfd_create") or signal.getsignal(_ASKED) is not signal.SIG_DFL:
        return lambda: None
    memory = os.memfd_create(_MEMORY.format(process=os.getpid()))
    faulthandler.register(_ASKED, file=memory, all_threads=False)

    def end() -> None:
        faulthandler.unregister(_ASKED)
        os.close(memory)

    return end


def of_workers() -> dict[int, str]:
    """Return the stacks of this process's children, as `of_processes` does."""
    return of_processes(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def of_processes(ids: Iterable[int], limit_s: float = 0.5) -> dict[int, str]:
    """Return the stacks, innermost call first, of those processes of this host that `answer`, by their id."""
    found, until_s = {}, time.monotonic() + limit_s
    for process in ids:
        with contextlib.suppress(OSError, StopIteration):  # it has ended meanwhile, or does not answer at all
            found[process] = _asked(process, until_s)
    return found


def _asked(process: int, until_s: float) -> str:
    links = Path(f"/proc/{process}/fd").iterdir()
    name = f"/memfd:{_MEMORY.format(process=process)} "  # a child that was forked has its parent's too
    memory = next(link for link in links if str(link.readlink()).startswith(name))
    before = memory.stat().st_size
    os.kill(process, _ASKED)
    said = b""
    while not said and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        said = memory.read_bytes()[before:]
    lines = said.decode(errors="replace").splitlines(keepends=True)
    # A process that was forked has its parent's calls below its own.
    own = next((number for number, line in enumerate(lines, 1) if line.rstrip().endswith(_OUTERMOST)), len(lines))
    return "".join(lines[:own])
