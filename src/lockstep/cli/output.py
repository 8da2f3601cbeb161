"""Command output that survives a full disk or a closed pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from ..errors import RunError


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Flush the block's output at its end.

    Raises `RunError` where that fails, such as on a full disk, BrokenPipeError where the reader is gone.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None where the command was started with `>&-`
                sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"The standard output cannot be written: {error.strerror}.") from error


def helped(given: Sequence[str], usage: str) -> bool:
    """Print `usage` if the verb's words begin with --help. Returns whether they do."""
    asked = given[:1] in (["-h"], ["--help"])
    if asked:
        with written():
            print(usage, end="")
    return asked


def let_go() -> None:
    """Drop unwritable output, which the interpreter would retry at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
