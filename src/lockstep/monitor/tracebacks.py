"""Stacks of this process, and of others of this host.

Other processes write theirs by faulthandler on a signal, even while they hang in C code that holds Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

REQUEST = signal.SIGUSR2
"""Makes a rank and its data workers write their stacks to the rank's output file (see `output.logged_to_file`)."""
_WRITES_S = 0.1


def of_all() -> str:
    """Return the stacks of all threads, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames, main = sys._current_frames(), threading.main_thread().ident
    return "".join(
        f"Thread {names.get(ident, ident)}, innermost call last:\n{''.join(traceback.format_stack(frames[ident]))}\n"
        for ident in sorted(frames, key=lambda ident: ident != main)
    )


def request(processes: Iterable[int | None]) -> None:
    """Have the processes that catch `REQUEST` write their stacks (Linux only)."""
    # One after the other: a stack is written in many pieces, which would mix with those of others.
    for process in [process for process in processes if process is not None and _catches(process)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, REQUEST)
            time.sleep(_WRITES_S)


def _catches(process: int) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
        caught = re.search(r"SigCgt:\s*(\w+)", status)
        return caught is not None and bool(int(caught[1], 16) >> (REQUEST - 1) & 1)
    return False
