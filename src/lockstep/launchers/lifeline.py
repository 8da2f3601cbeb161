"""No orphans: a rank ends when the process that started it ends, however that ended.

Two means, since each has a gap. On Linux the kernel itself kills the rank when its parent dies, even while the rank
holds Python's lock inside a library. Everywhere a thread waits on a pipe whose other end only the parent holds:
it closes with the parent, and the thread then ends the rank together with the processes that it started
(each rank leads a process group of its own, in which its data workers are too).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def lead_own_group() -> None:
    """Leave the terminal's foreground group, so that Ctrl-C reaches only the parent, which passes it on."""
    with contextlib.suppress(PermissionError):  # already a leader
        os.setsid()


def tie_to_parent(lifeline: Connection) -> None:
    """End this process when the parent is gone; `lifeline` is the end of a pipe which the parent never writes to."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True, name="lifeline").start()
    end_with_parent()


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; on Linux alone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(os.getpgrp(), signal.SIGKILL)
