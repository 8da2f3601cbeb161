"""One output file per rank; rank 0 also prints.

A line that every rank prints would stand on the console as many times as there are ranks, and whatever a library writes
to the file descriptors (C++ warnings, NCCL's log) would be mixed among them. So behind the descriptors 1 and 2 of ranks
other than 0 is their file. Of rank 0, what Python writes goes to the console and to its file, so that a terminal stays
one; what C code writes goes to the console.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..files import ours, own_folder

_REDRAWS = re.compile(r"\x1b\[\??[0-9;]*[ABFGHJKhl]")
"""What moves a terminal's cursor: part of a bar that is drawn over and over."""
_BAR = "━"  # of which rich makes the bars that it draws without moving the cursor first
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@contextlib.contextmanager
def kept(path: Path, *, shown: bool) -> Iterator[None]:
    """Append what this process says within the block to the file at `path`; `shown` says that the console has it too.

    Progress bars are left out where they are shown; the stacks of a crash in C code are in it. Where the file cannot be
    written, the console has everything.
    """
    try:
        own_folder(path.parent)
        file = open(path, "a", buffering=1, encoding="utf-8", errors="replace", opener=ours)
    except OSError:
        yield
        return
    crashes = not faulthandler.is_enabled()  # else the user has them elsewhere
    try:
        if crashes:
            faulthandler.enable(file)
        with _streams(file) if shown else _diverted(file):
            yield
    finally:
        if crashes:
            faulthandler.disable()
        with contextlib.suppress(OSError):  # what a full disk has not taken until now
            file.close()


@contextlib.contextmanager
def _diverted(file: IO[str]) -> Iterator[None]:
    """Have the file behind the descriptors 1 and 2."""
    saved = {number: os.dup(number) for number in (1, 2)}
    flush()
    try:
        for number in saved:
            os.dup2(file.fileno(), number)
        if isinstance(sys.stdout, io.TextIOWrapper):  # a process that is killed has no last word
            sys.stdout.reconfigure(line_buffering=True)
        with _streams(None):
            yield
    finally:
        flush()
        for number, kept in saved.items():
            os.dup2(kept, number)
            os.close(kept)


@contextlib.contextmanager
def _streams(file: IO[str] | None) -> Iterator[None]:
    """Have Python's streams write to `file` as well, where there is one; no disk and no reader ends who prints."""
    before = sys.stdout, sys.stderr
    flush()
    ours = [None if stream is None else _Stream(stream, file) for stream in before]
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        flush()
        sys.stdout, sys.stderr = before
        for stream in filter(None, ours):
            stream.file = None  # a logger that was set up within the block may hold on to it


class _Stream:
    """A stream whose text goes to a file as well."""

    def __init__(self, stream: Any, file: IO[str] | None) -> None:
        self._stream, self.file, self._is_file = stream, file, file is None

    def write(self, text: str) -> int:
        """Write the text to both, as far as there is room."""
        if self.file is not None:
            with contextlib.suppress(OSError, ValueError):
                self.file.write(_lasting(text))
        with self._unfailing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is held back."""
        with self._unfailing():
            self._stream.flush()

    @contextlib.contextmanager
    def _unfailing(self) -> Iterator[None]:
        """Let a full disk pass, and that nobody reads any more: who has seen enough, or closed the terminal."""
        try:
            yield
        except (OSError, ValueError) as error:
            if not self._is_file and getattr(error, "errno", None) not in (errno.EPIPE, errno.EIO):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lasting(text: str) -> str:
    """Return what of a text for a terminal stays there: without colours, and without a bar, which ends no line."""
    plain = _COLOURS.sub("", text)
    if not _REDRAWS.search(plain) and _BAR not in plain:
        return plain
    lines = _REDRAWS.sub("", plain).replace("\r", "").splitlines(keepends=True)
    return "".join(line for line in lines if line.endswith("\n") and line.strip())


def flush() -> None:
    """Write out what this process has said."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
