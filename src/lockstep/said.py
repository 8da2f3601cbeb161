"""What each rank says, in a file of its own: rank 0's also on the console, the others' there alone.

A line that every rank prints would stand on the console as many times as there are ranks, and whatever a library
writes to the file descriptors (C++ warnings, NCCL's log, what a data worker says) would be mixed among them. Of rank 0,
what Python writes goes to both by itself, so that a terminal stays one; the rest goes through a `relay`.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import io
import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from . import relay

_REDRAWS = re.compile(r"\x1b\[\??[0-9;]*[ABFGHJKhl]")
"""What moves a terminal's cursor: part of a bar that is drawn over and over."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PASS_S = 0.02
_LEAVE_S = 0.5

consoles: dict[int, int] = {}
"""Where stdout (1) and stderr (2) of this process really lead, while a relay is behind these descriptors."""


@contextlib.contextmanager
def kept(path: Path, *, shown: bool) -> Iterator[None]:
    """Append what this process says within the block to the file at `path`; `shown` says that the console has it too.

    That is all which it and what it starts write to stdout and stderr, progress bars left out where they are shown, and
    the stacks of a crash in C code. Where the file cannot be written, the console has everything.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    except OSError:
        yield
        return
    try:
        with _with_crashes(file), _copied(file, path) if shown else _diverted(file):
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
def _copied(file: IO[str], path: Path) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    with _relayed(path):
        shown = [_on_console(stream, number) for number, stream in enumerate(before, start=1)]
        sys.stdout, sys.stderr = (_Copied(stream, file) if stream is not None else None for stream in shown)
        try:
            yield
        finally:
            flush()
            sys.stdout, sys.stderr = before


@contextlib.contextmanager
def _relayed(path: Path) -> Iterator[None]:
    """Have a relay between the file descriptors 1 and 2 and the console; where none can be, they stay what they are."""
    if consoles:  # around this block there is one
        yield
        return
    flush()
    process = _start_relay(path)
    try:
        yield
    finally:
        flush()
        for number in list(consoles):
            _restore(number)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what the rank has started may write on
                process.wait(_LEAVE_S)


def _start_relay(path: Path) -> subprocess.Popen[bytes] | None:
    """Put a relay behind the file descriptors 1 and 2; return None where one is closed, or no process starts."""
    with contextlib.ExitStack() as undone:
        try:
            pipes = []
            for number in (1, 2):
                consoles[number] = os.dup(number)
                undone.callback(_restore, number)
                pipes.append(os.pipe())
                undone.callback(os.close, pipes[-1][0])
                undone.callback(os.close, pipes[-1][1])
            reads = [read for read, _ in pipes]
            # In a session of its own: what ends the rank's group, or comes from its terminal, leaves its last words.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, str(path.absolute()), *map(str, reads)],
                stdin=subprocess.DEVNULL,
                cwd="/",
                pass_fds=reads,
                start_new_session=True,
            )
        except OSError:
            return None
        undone.pop_all()
    for number, (read, write) in enumerate(pipes, start=1):
        os.dup2(write, number)
        os.close(write)
        os.close(read)
    return process


def _restore(number: int) -> None:
    kept = consoles.pop(number)
    os.dup2(kept, number)
    os.close(kept)


def _on_console(stream: IO[str] | None, number: int) -> IO[str] | None:
    """Return a stream to the console in the place of one that writes to a file descriptor with a relay behind it."""
    if number not in consoles or not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream  # a notebook's, or a test's
    return open(consoles[number], "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)


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
        _let_pass()
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _let_pass() -> None:
    """Return once the relay has taken what C code has said before, or after a moment: the console has it in order."""
    until_s = time.monotonic() + _PASS_S
    waiting = array.array("i", [0])
    for number in consoles:
        with contextlib.suppress(OSError):  # where this cannot be asked of a pipe
            while not fcntl.ioctl(number, termios.FIONREAD, waiting) and waiting[0] and time.monotonic() < until_s:
                time.sleep(_PASS_S / 40)


def _write_lines(stream: IO[str] | None) -> None:
    """Have each line written when it ends, as on a terminal: a process that is killed has no last word."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)


def flush() -> None:
    """Write out what this process has said."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
