"""What the command says: past terminals that lack a character, disks that are full, and readers that have gone."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence

from ..errors import RunError


def survive() -> None:
    """Show a question mark for a character that this process's output cannot encode, such as × in plain ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def written() -> Iterator[None]:
    """See to it that what the block prints is written when it ends.

    Raises `RunError` where it cannot be, such as on a full disk, and BrokenPipeError where its reader has gone.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is where the command was started with `>&-`
                sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"What there is to say cannot be written to the standard output: {error.strerror}.") from error


def helped(given: Sequence[str], usage: str) -> bool:
    """Print `usage` where the words `given` to a verb begin with --help; return whether they do."""
    asked = bool(given) and given[0] in ("-h", "--help")
    if asked:
        with written():
            print(usage, end="")
    return asked


def let_go() -> None:
    """Drop what could not be written: the interpreter would try once more as it ends, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
