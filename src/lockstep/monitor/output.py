"""One output file per rank; rank 0 also prints.

On the other ranks, descriptors 1 and 2 point to the file, which therefore has C code's output too. On rank 0, Python's
output goes to the console and to the file, C code's to the console.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..files import own_folder, unlinked
from ..printable import format_message
from .tracebacks import REQUEST

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REDRAWS = re.compile(r"\x1b\[\??[0-9;]*[ABFGHJKhl]")
"""Moves of a terminal's cursor, with which progress bars redraw."""
_SHOW_CURSOR = "\x1b[?25h"
_BAR = "━"  # of rich's bars, the first of which moves no cursor


@contextlib.contextmanager
def logged_to_file(path: Path, *, shown: bool) -> Iterator[None]:
    """Append this process's output to a file; with `shown`, print it too.

    With `shown`, the file has no progress bars. It has stacks after a crash in C code and after the signal `REQUEST`.
    If the file cannot be written, the console has everything.
    """
    try:
        own_folder(path.parent)
        file = open(path, "a", buffering=1, encoding="utf-8", errors="replace", opener=unlinked)
    except OSError:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(_close, file)
        if not faulthandler.is_enabled():  # else the user's program receives the stacks
            faulthandler.enable(file)
            stack.callback(faulthandler.disable)
        if signal.getsignal(REQUEST) is signal.SIG_DFL:
            faulthandler.register(REQUEST, file=file, all_threads=False)
            stack.callback(faulthandler.unregister, REQUEST)
        if not shown:
            stack.enter_context(_diverted(file))
        stack.enter_context(_streams(file if shown else None))
        yield


def say(sentence: str, descriptor: int | None = None, *, begin: str = "") -> None:
    """Write a sentence of lockstep's to stderr, or to a descriptor."""
    number = 2 if descriptor is None else descriptor
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = sys.stderr.fileno() if descriptor is None else descriptor
    with contextlib.suppress(OSError):
        cursor = _SHOW_CURSOR if os.isatty(number) else ""  # a progress bar may have hidden it
        os.write(number, f"{cursor}{begin}{format_message(sentence)}".encode(errors="replace"))


def survive() -> None:
    """Print a question mark for characters that the output cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _close(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk may refuse buffered text
        file.close()


@contextlib.contextmanager
def _diverted(file: IO[str]) -> Iterator[None]:
    """Point the descriptors 1 and 2 to the file."""
    flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    for number in saved:
        os.dup2(file.fileno(), number)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a process that is killed flushes nothing
        sys.stdout.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        flush()
        for number, descriptor in saved.items():
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextlib.contextmanager
def _streams(file: IO[str] | None) -> Iterator[None]:
    """Copy Python's streams to `file`; ignore full disks and closed pipes."""
    originals = sys.stdout, sys.stderr
    flush()
    copies = [None if stream is None else _Stream(stream, file) for stream in originals]
    sys.stdout, sys.stderr = copies
    try:
        yield
    finally:
        flush()
        sys.stdout, sys.stderr = originals
        for stream in filter(None, copies):
            stream.file = None  # a logger that was set up within the block may keep the stream


class _Stream:
    """A stream whose text goes to a file too."""

    def __init__(self, stream: Any, file: IO[str] | None) -> None:
        self._stream, self.file = stream, file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self.file is not None:
                self.file.write(_plain(text))
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _plain(text: str) -> str:
    """Return text without colours and progress bars."""
    plain = _COLOURS.sub("", text)
    if not _REDRAWS.search(plain) and _BAR not in plain:
        return plain
    lines = _REDRAWS.sub("", plain).replace("\r", "").splitlines(keepends=True)
    return "".join(line for line in lines if line.endswith("\n") and line.strip())
