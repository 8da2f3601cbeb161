"""What each rank says, in a file of its own: rank 0's also on the console, the others' there alone.

A line that every rank prints would stand on the console as many times as there are ranks, and whatever a library
writes to the file descriptors (C++ warnings, NCCL's log, what a data worker says) would be mixed among them. Of rank 0,
what Python writes goes to both by itself, so that a terminal stays one; the rest goes through a `relay`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import faulthandler
import fcntl
import io
import os
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from . import relay
from .files import ours, own_folder

_REDRAWS = re.compile(r"\x1b\[\??[0-9;]*[ABFGHJKhl]")
"""What moves a terminal's cursor: part of a bar that is drawn over and over."""
_BAR = "━"  # of which rich makes the bars that it draws without moving the cursor first
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PASS_S = 0.02
_LEAVE_S = 0.5
_LOOK_S = 0.0005


@contextlib.contextmanager
def kept(path: Path, *, shown: bool) -> Iterator[None]:
    """Append what this process says within the block to the file at `path`; `shown` says that the console has it too.

    That is all which it and what it starts write to stdout and stderr, progress bars left out where they are shown, and
    the stacks of a crash in C code. Where the file cannot be written, the console has everything.
    """
    try:
        own_folder(path.parent)
        file = open(path, "a", buffering=1, encoding="utf-8", errors="replace", opener=ours)
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
    before: list[IO[str] | None] = [sys.stdout, sys.stderr]
    flush()
    between = _Relay.start(file.fileno())
    copied = [
        None if stream is None else _Copied(between.on_console(stream, number), file, between)
        for number, stream in enumerate(before, start=1)
    ]
    sys.stdout, sys.stderr = copied
    try:
        yield
    finally:
        flush()
        sys.stdout, sys.stderr = before
        flush()
        for stream, copy in zip(before, copied, strict=True):
            if copy is not None:
                copy.end(stream)
        between.end()


class _Relay:
    """What takes the place of the console behind the file descriptors 1 and 2, and passes on what comes."""

    def __init__(self, consoles: dict[int, int]) -> None:
        """`consoles` are descriptors of what the console was behind 1 and 2; none where they stay what they are."""
        self._consoles = consoles

    @classmethod
    def start(cls, file: int) -> _Relay:
        """Start a relay that writes to the descriptor `file` as well; where there can be none, nothing changes."""
        with contextlib.ExitStack() as undone:
            try:
                consoles, pipes = {}, []
                for number in (1, 2):
                    consoles[number] = os.dup(number)
                    undone.callback(os.close, consoles[number])
                    pipes.append(os.pipe())
                    undone.callback(os.close, pipes[-1][0])
                    undone.callback(os.close, pipes[-1][1])
                passed = [file, *(read for read, _ in pipes)]
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", relay.__file__, *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    cwd="/",
                    pass_fds=passed,
                    # In a session of its own: what ends the rank's group, or comes from its terminal, is not for it.
                    start_new_session=True,
                )
            except OSError:  # one of them was closed from the beginning, or there is no room for another process
                return cls({})
            undone.pop_all()
        for number, (read, write) in enumerate(pipes, start=1):
            os.dup2(write, number)
            os.close(write)
            os.close(read)
        # It ends with the last that can write: a program of the user's may go on, whose words it passes on.
        threading.Thread(target=process.wait, name="relay", daemon=True).start()
        return cls(consoles)

    def on_console(self, stream: IO[str], number: int) -> IO[str]:
        """Return a stream to the console in the place of one that writes to a descriptor with the relay behind it."""
        if number not in self._consoles or not isinstance(stream, io.TextIOWrapper) or _descriptor(stream) != number:
            return stream  # a notebook's, or a test's
        descriptor = self._consoles[number]
        return open(descriptor, "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)

    def let_pass(self, limit_s: float) -> None:
        """Return once the relay has taken what came before, or after `limit_s` seconds: so the console has it first."""
        until_s = time.monotonic() + limit_s
        waiting = array.array("i", [0])
        for number in self._consoles:
            with contextlib.suppress(OSError):  # where this cannot be asked of a pipe
                while not fcntl.ioctl(number, termios.FIONREAD, waiting) and waiting[0] and time.monotonic() < until_s:
                    time.sleep(_LOOK_S)

    def end(self) -> None:
        """Give the descriptors back what was behind them."""
        self.let_pass(_LEAVE_S)
        for number, console in self._consoles.items():
            os.dup2(console, number)
            os.close(console)
        self._consoles = {}


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

    def __init__(self, stream: Any, file: IO[str], between: _Relay) -> None:
        self._stream, self._between = stream, between
        self._file: IO[str] | None = file

    def end(self, stream: Any) -> None:
        """Be `stream`, and no more: a logger that was set up within the block may hold on to this one."""
        self._stream, self._file = stream, None

    def write(self, text: str) -> int:
        """Write the text to both."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk is no reason to say nothing
                self._file.write(_lasting(text))
        self._between.let_pass(_PASS_S)
        with _for_a_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is held back."""
        with _for_a_reader():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _for_a_reader() -> Iterator[None]:
    """Let it pass that nobody reads any more: who has seen enough, or closed the terminal, ends nobody who prints."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise


def _lasting(text: str) -> str:
    """Return what of a text for a terminal stays there: without colours, and without a bar, which ends no line."""
    plain = _COLOURS.sub("", text)
    if not _REDRAWS.search(plain) and _BAR not in plain:
        return plain
    lines = _REDRAWS.sub("", plain).replace("\r", "").splitlines(keepends=True)
    return "".join(line for line in lines if line.endswith("\n") and line.strip())


def _descriptor(stream: IO[str]) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return stream.fileno()
    return None


def _write_lines(stream: IO[str] | None) -> None:
    """Have each line written when it ends, as on a terminal: a process that is killed has no last word."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)


def flush() -> None:
    """Write out what this process has said."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
