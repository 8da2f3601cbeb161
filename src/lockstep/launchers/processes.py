"""Processes of this host, known from others that had their numbers before or get them later."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def begun(pid: int) -> str:
    """Return what parts a process from others with its number: the same text for whoever asks, whatever the clock does.

    On Linux, ticks since the boot: psutil's time of day moves where the clock is set. Raises `psutil.NoSuchProcess`.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return str(psutil.Process(pid).create_time())


def has_ended(pid: int, since: str) -> bool:
    """Return whether the process with that number which began so is no more; a zombie is none."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE) or begun(pid) != since
    except psutil.NoSuchProcess:
        return True
