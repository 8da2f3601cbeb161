"""No orphans: a rank ends when the process that started it ends, however that ended.

Two means, since each has a gap. On Linux the kernel itself kills the rank when its parent dies, even while the rank
holds Python's lock inside a library; data workers look for their parent, and follow within seconds. Everywhere a thread
waits on a pipe whose other end only the parent holds: it closes with the parent, and the thread then ends the rank
together with what is in its process group. Where the parent lives, it ends that whole group itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1
_SAFE_PATH, _OURS = "PYTHONSAFEPATH", "lockstep"


def lead_own_group() -> None:
    """Leave the terminal's foreground group, so that Ctrl-C reaches only the parent, which passes it on."""
    with contextlib.suppress(PermissionError):  # already a leader
        os.setsid()


def settle() -> None:
    """Make a process that multiprocessing has spawned one like any other, before it does a rank's work."""
    lead_own_group()
    # Without this, what the user's code starts, such as data workers, would be spawned because the rank itself was:
    # seconds for each to import torch, and semaphores that are told as leaked when a rank is killed.
    multiprocessing.set_start_method(None, force=True)
    if os.environ.get(_SAFE_PATH) == _OURS:  # the user's own programs are started as ever
        os.environ.pop(_SAFE_PATH)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def starting_children() -> Iterator[None]:
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


def tie_to_parent(lifeline: Connection) -> None:
    """End this process when the parent is gone; `lifeline` is the end of a pipe which the parent never writes to."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True, name="lifeline").start()
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, on Linux; end it where it has already."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def end_group(leader: int) -> None:
    """Kill what is left of the process group that a rank has led, such as its data workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _end_with(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(os.getpgrp(), signal.SIGKILL)
