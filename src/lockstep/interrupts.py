"""Ctrl-C and SIGTERM: the first one asks the run to save and stop, a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from .errors import RunError

KILLED = "Killed by a second signal, without saving; the last checkpoint, if there is one, is whole."
SHOW_CURSOR = "\x1b[?25h"
_ECHO_S = 0.5
"""A launcher may pass on a signal that the terminal has sent already; so close together they are one."""


class StopRequest:
    """A context in which SIGINT and SIGTERM set `asked` instead of ending the process.

    Signals reach Python's main thread alone; entered from another thread, this changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._since_s = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.asked and now_s - self._since_s > _ECHO_S:
            # Neither an `except` of the user's nor a save that is under way may hold this up. A terminal whose bar
            # has hidden the cursor gets it back.
            os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}\nlockstep: {KILLED}\n".encode())
            os._exit(RunError.exit_code)
        if not self.asked:
            self.asked, self._since_s = True, now_s
