"""The stacks of this process: told by Python, or by C code where Python no longer runs.

A rank that hangs in C code which keeps Python's lock cannot say where: none of its threads runs. A timer of
faulthandler's, which needs no lock, is put off again and again for as long as Python does run, and else writes what
every thread is doing to a hidden file in the run's folder. A rank that lives on finds it there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from . import bounded

_NAME = ".rank_{rank}.stacks"
_PUT_OFF = 0.1
"""Share of the time to the dump after which it is put off."""
_NEVER = float("inf")


def of_threads() -> str:
    """Return the stacks of all threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    first = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: ident != first)
    return "".join(
        f"Thread {names.get(ident, ident)}, innermost call last:\n{''.join(traceback.format_stack(frames[ident]))}\n"
        for ident in order
    )


def left_by(rank: int, folder: Path) -> str:
    """Return the stacks that C code has written for a rank of the run in `folder`; "" for none."""
    with contextlib.suppress(OSError):
        return _file(rank, folder).read_text(encoding="utf-8", errors="replace")
    return ""


def remove(rank: int | str, folder: Path) -> None:
    """Remove the file for a rank of the run in `folder`; for all of them where that is "*"."""
    for path in (folder / "output").glob(_NAME.format(rank=rank)):
        path.unlink(missing_ok=True)


class DeadMansSwitch:
    """Has the stacks of this process written unless `put_off` is called again and again. One at a time in a process."""

    def __init__(self, rank: int, after_s: float) -> None:
        """`after_s` are the seconds from the last call to the dump."""
        self._rank, self._after_s = rank, after_s
        self._next_s = 0.0
        self._lock = threading.Lock()  # it is put off by one thread, and called off by another
        self._file: IO[bytes] | None = None
        self._opens: bounded.Call | None = None

    def put_off(self, folder: Path | None) -> None:
        """Put the dump off; it is to go to the run's `folder`, and there is none where that is None. Never waits."""
        now_s = time.monotonic()
        if folder is None or now_s < self._next_s:
            return
        with self._lock:
            if self._next_s == _NEVER:
                return
            if self._opens is None:
                self._opens = bounded.Call(lambda: self._open(_file(self._rank, folder)), "stacks")
                self._opens.start()
            if self._file is not None:
                faulthandler.dump_traceback_later(self._after_s, file=self._file)
                self._next_s = now_s + _PUT_OFF * self._after_s

    def call_off(self) -> None:
        """Have nothing written any more. Never waits."""
        with self._lock:
            self._next_s = _NEVER
            if self._file is not None:
                faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Call it off and remove the file."""
        self.call_off()
        if self._file is not None:
            self._file.close()
            remove(self._rank, Path(self._file.name).parents[1])

    def _open(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # without a file there is no dump, which is no reason to fail
            file = path.open("wb")
            with self._lock:
                if self._next_s != _NEVER:
                    self._file = file
                    return
            file.close()  # it was called off meanwhile
            path.unlink()


def _file(rank: int, folder: Path) -> Path:
    return folder / "output" / _NAME.format(rank=rank)
