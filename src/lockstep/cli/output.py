"""Command output that survives a full disk or a closed pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ..errors import RunError


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Flush the block's output at its end.

    Raises `RunError` if that fails, such as on a full disk; BrokenPipeError if the reader is gone.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None if the command was started with `>&-`
                sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"The standard output cannot be written: {error.strerror}.") from error


def show(text: str) -> None:
    """Print a text without an additional newline."""
    with written():
        print(text, end="")


def let_go() -> None:
    """Drop unwritable output, which the interpreter would retry at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
