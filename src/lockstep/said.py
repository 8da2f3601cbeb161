"""What each rank says, in a file of its own: rank 0's also on the console, the others' there alone.

A line that every rank prints would stand on the console as many times as there are ranks, and whatever a library
writes to the file descriptors (C++ warnings, NCCL's log, what a data worker says) would be mixed among them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_REDRAWS = re.compile(r"\x1b\[\??[0-9;]*[ABFGHJKhl]")
"""What moves a terminal's cursor: part of a bar that is drawn over and over."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@contextlib.contextmanager
def kept(path: Path, *, shown: bool) -> Iterator[None]:
    """Append what this process says within the block to the file at `path`; `shown` says that the console has it too.

    Where it is not shown, that is all which it and its data workers write to stdout and stderr; where it is, all that
    Python writes, progress bars left out; and the stacks of a crash in C code. Where the file cannot be written, the
    console has everything.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    except OSError:
        yield
        return
    try:
        with _with_crashes(file), _copied(file) if shown else _diverted(file):
            yield
    finally:
        with contextlib.suppress(OSError):  # what a full disk has not taken until now
            file.close()


@contextlib.contextmanager
def _with_crashes(file: IO[str]) -> Iterator[None]:
    """Have the stacks of this process written to the file where C code ends it, unless the user has them elsewhere."""
    if faulthandler.is_enabled():
        yield
        return
    faulthandler.enable(file)
    try:
        yield
    finally:
        faulthandler.disable()


@contextlib.contextmanager
def _diverted(file: IO[str]) -> Iterator[None]:
    saved = {number: os.dup(number) for number in (1, 2)}
    before = sys.stdout, sys.stderr
    flush()
    try:
        for number in saved:
            os.dup2(file.fileno(), number)
        _write_lines(sys.stdout)
        sys.stdout, sys.stderr = (_Unfailing(stream) if stream is not None else stream for stream in before)
        yield
    finally:
        sys.stdout, sys.stderr = before
        flush()
        for number, kept in saved.items():
            os.dup2(kept, number)
            os.close(kept)


@contextlib.contextmanager
def _copied(file: IO[str]) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Copied(stream, file) if stream is not None else stream for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Unfailing:
    """A stream that goes to a file: a full disk ends nobody who prints."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, as far as there is room."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is held back, as far as there is room."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Copied:
    """A stream whose text goes to a file as well."""

    def __init__(self, stream: Any, file: IO[str]) -> None:
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        """Write the text to both."""
        if not _REDRAWS.search(text):
            with contextlib.suppress(OSError, ValueError):  # a full disk is no reason to say nothing
                self._file.write(_COLOURS.sub("", text))
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write_lines(stream: IO[str] | None) -> None:
    """Have each line written when it ends, as on a terminal: a process that is killed has no last word."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)


def flush() -> None:
    """Write out what this process has said."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
