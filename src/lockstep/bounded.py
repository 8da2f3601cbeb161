"""Calls that may never come back: made in threads, which are left behind where they hang.

Python ends such a thread when its call returns while the interpreter ends, and C++ code that the thread is in takes
that for an error of its own and aborts the process: "terminate called without an active exception", exit code −6 in the
place of the right one. So whoever ends a process asks first whether any call is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Call(threading.Thread):
    """A thread in a call that nothing can cut short; the process does not wait for it at its end."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)


def within(limit_s: float, work: Callable[[], object], name: str) -> bool:
    """Do `work` in a thread of this name; return whether it was done within `limit_s` seconds."""
    call = Call(work, name)
    call.start()
    call.join(limit_s)
    return not call.is_alive()


def any_left() -> bool:
    """Return whether a call of this process has not come back."""
    return any(isinstance(thread, Call) for thread in threading.enumerate())
