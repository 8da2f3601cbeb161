"""Calls that may never come back: made in threads, which are left behind where they hang.

Python ends such a thread when its call returns while the interpreter ends, and C++ code that the thread is in takes
that for an error of its own and aborts the process: "terminate called without an active exception", exit code −6 in the
place of the right one. So whoever ends a process asks first whether any call is left.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Late(RuntimeError):
    """A call has not come back in time."""


class Call(threading.Thread):
    """A thread in a call that nothing can cut short; the process does not wait for it at its end."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def within(limit_s: float, work: Callable[[], T], name: str) -> T:
    """Return what `work` does, or raise what it raises, in a thread of this name.

    Raises `Late` where it is not done within `limit_s` seconds.
    """
    outcome: Future[T] = Future()

    def attempt() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    call = Call(attempt, name)
    call.start()
    call.join(limit_s)
    if not outcome.done():
        raise Late(f"{name}: no answer within {limit_s:g} s")
    return outcome.result()


def any_left() -> bool:
    """Return whether a call of this process has not come back."""
    return any(isinstance(thread, Call) for thread in threading.enumerate())


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, but for the calls that are left."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():  # the user's own
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
