"""Who has a run's folder: `.lock` in it is locked by rank 0's process, and by our agents, which start ranks again.

Rank 0 has one byte of the file and the agents share another, so that the folder is the run's between two starts of its
ranks too (not under torchrun, whose agent knows of no folder). The system gives a lock back however its process ends: a
killed run never blocks the next one. Locks are a process's: of two runs in one process neither is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from pathlib import Path
from typing import IO

from .errors import RequestError, RunError
from .files import ours

LOCK = ".lock"
_RANK_0, _AGENT = 0, 1  # their bytes
_LOOK_S = 0.2
_NAME_BYTES = 200  # read of a file that may come from elsewhere


def this_process() -> str:
    """Return what the lock file says of this process while it has the folder."""
    return f"process {os.getpid()} on {platform.node()}"


def acquire(folder: Path, patience_s: float = 0.0, before: str = "") -> IO[bytes]:
    """Return the folder's lock file, locked for rank 0, with this process's name in it; closing it gives it back.

    Where the one who has it is the process `before`, of an earlier start, it may take `patience_s` seconds to end.
    Raises what `check_free` does, and `RunError` where that process does not end.
    """
    lock = _locked(folder, patience_s, before)
    with contextlib.suppress(OSError):  # a full disk is told of by what has to be written next
        lock.truncate(0)
        lock.write(this_process().encode())
    return lock


def check_free(folder: Path) -> None:
    """Raise `RequestError` where another run has the folder, OSError where its lock file cannot be written."""
    if os.path.lexists(folder / LOCK):
        _locked(folder).close()


def acquire_for_agent(folder: Path) -> IO[bytes] | None:
    """Return the folder's lock file, locked for an agent of the run, as for others; closing it gives it back.

    None where there is no such folder here.
    """
    try:
        lock = open(folder / LOCK, "r+b", buffering=0, opener=ours)
    except OSError:
        return None
    if _try_lock(lock, _AGENT, fcntl.LOCK_SH):
        return lock
    lock.close()  # a run that comes just now looks whether it is free
    return None


def _locked(folder: Path, patience_s: float = 0.0, before: str = "") -> IO[bytes]:
    """Return the folder's lock file, locked for rank 0."""
    lock = open(folder / LOCK, "a+b", buffering=0, opener=ours)
    try:
        _wait(lock, folder, patience_s, before)
    except BaseException:
        lock.close()
        raise
    return lock


def _wait(lock: IO[bytes], folder: Path, patience_s: float, before: str) -> None:
    """Lock the file for rank 0, once it can be."""
    until_s = time.monotonic() + patience_s
    while not _try_lock(lock, _RANK_0):
        holder = _named(lock) or before or "another process"
        if holder != before:
            raise _taken(folder, holder)
        if time.monotonic() >= until_s:
            raise RunError(
                f"{folder} is still held by rank 0 of the start before this one ({holder}), which might write there, "
                f"and has not ended within {patience_s:g} s: end that process."
            )
        time.sleep(_LOOK_S)
    if not before and not _try_lock(lock, _AGENT):
        raise _taken(folder, f"its rank 0, {_named(lock) or 'a process'}, has ended, and its ranks are started again")
    with contextlib.suppress(OSError):  # free, which is all that was asked: our own agents will want it
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, _AGENT)


def _named(lock: IO[bytes]) -> str:
    """Return the last holder's name; "" where a full disk has left none."""
    lock.seek(0)
    return lock.read(_NAME_BYTES).decode(errors="replace")


def _taken(folder: Path, how: str) -> RequestError:
    return RequestError(
        f"{folder} is in use by another run ({how}): wait until it has ended, or give another --output."
    )


def _try_lock(lock: IO[bytes], byte: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock a byte of the file; return False where another process has it."""
    try:
        # lockf, not flock: data workers that are forked do not inherit it, nor keep it when this process is killed.
        fcntl.lockf(lock, how | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # a file system without locks, as on some clusters: runs go on there without this guard
    return True
