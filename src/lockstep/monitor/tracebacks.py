"""The stacks of this process: told by Python, or by C code where Python no longer runs.

A rank that hangs in C code which keeps Python's lock cannot say where: none of its threads runs. A timer of
faulthandler's, which needs no lock, is put off again and again for as long as Python does run, and else writes what
every thread is doing to a hidden file in the run's folder. A rank that lives on finds it there.
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
from pathlib import Path
from typing import IO

from ..files import check_own, ours, read
from . import bounded

_NAME = ".rank_{rank}.stacks"
_PUT_OFF = 0.1
"""Share of the time to the dump after which it is put off."""
_NEVER = float("inf")
_ASKED = signal.SIGUSR2
_MEMORY = "lockstep-stack"
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


def answer() -> None:
    """Have this process, a worker of a rank's, write its stack whenever the rank asks for it; on Linux alone.

    C code writes it, wherever Python may hang, into memory that the rank can read while this process lives.
    """
    if hasattr(os, "memfd_create"):
        faulthandler.register(_ASKED, file=os.memfd_create(_MEMORY), all_threads=False)


def of_workers(limit_s: float = 0.5) -> dict[int, str]:
    """Return the stacks, innermost call first, of those children of this process that `answer`, by their id."""
    found, until_s = {}, time.monotonic() + limit_s
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, StopIteration):  # it has ended meanwhile, or does not answer at all
            assert child.pid is not None
            found[child.pid] = _asked(child.pid, until_s)
    return found


def _asked(process: int, until_s: float) -> str:
    links = Path(f"/proc/{process}/fd").iterdir()
    memory = next(link for link in links if str(link.readlink()).startswith(f"/memfd:{_MEMORY}"))
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


def left_by(rank: int, folder: Path) -> str:
    """Return the stacks that C code has written for a rank of the run in `folder`; "" for none."""
    with contextlib.suppress(OSError):
        return read(_file(rank, folder)).decode(errors="replace")
    return ""


def remove(rank: int | str, folder: Path) -> None:
    """Remove the file for a rank of the run in `folder`; for all of them where that is "*"."""
    with contextlib.suppress(OSError):  # a link, behind which others' files lie
        check_own(folder / "output")
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
            check_own(path.parent)
            file = open(path, "wb", opener=ours)
            with self._lock:
                if self._next_s != _NEVER:
                    self._file = file
                    return
            file.close()  # it was called off meanwhile
            path.unlink()


def _file(rank: int, folder: Path) -> Path:
    return folder / "output" / _NAME.format(rank=rank)
