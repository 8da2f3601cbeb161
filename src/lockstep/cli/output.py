"""What the command prints, past a full disk and a reader that has gone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from ..errors import RunError


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Flush what the block prints when it ends.

    Raises `RunError` where it cannot be written, such as on a full disk, BrokenPipeError where its reader has gone.
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
    """Print `usage` where the words `given` to a verb begin with --help; return whether they do."""
    asked = given[:1] in (["-h"], ["--help"])
    if asked:
        with written():
            print(usage, end="")
    return asked


def let_go() -> None:
    """Drop what could not be written, which the interpreter would try again as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
