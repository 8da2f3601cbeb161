"""Calls that may never return, each in a separate thread.

If such a thread returns while the interpreter ends, Python ends it inside C++ code, which then aborts the process with
exit code −6. So code that ends a process checks `any_left` first, and calls `leave`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

from .output import flush

T = TypeVar("T")


class Late(RuntimeError):
    """A call did not return in time."""


class _Call(threading.Thread):
    """A thread in a call that cannot be cancelled."""


def within(limit_s: float, work: Callable[[], T], name: str) -> T:
    """Return `work()`, or raise its error; `Late` after `limit_s` seconds."""
    outcome: Future[T] = Future()

    def attempt() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    call = _Call(target=attempt, name=name, daemon=True)
    call.start()
    call.join(limit_s)
    if not outcome.done():
        raise Late(f"{name}: no answer within {limit_s:g} s")
    return outcome.result()


def any_left() -> bool:
    """Return whether a call of this process has not returned."""
    return any(isinstance(thread, _Call) for thread in threading.enumerate())


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, without waiting for hung calls."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    flush()
    os._exit(code)
