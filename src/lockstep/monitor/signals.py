"""Signals to a run: the first saves and stops, the second kills."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from ..errors import RunError
from .output import say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Requests to stop a run: SIGHUP comes when a terminal closes, SIGUSR1 from schedulers before a job's time is over."""
KILLED = "Killed by a second signal, without saving; the last checkpoint, if any, is intact."
OUTSIDE = "Stopped outside of training; there was nothing to save."
_FINISHES = "stopping: after this step (with several ranks, after the steps up to the next record)"
STOPPING = f"{_FINISHES} and saves"
NOT_SAVED = "nothing is saved, since no output folder was given"
UNSAVED = f"{_FINISHES}; {NOT_SAVED}"
INSIST = "; a second signal ends it at once"
"""Added for a person; SIGUSR1 comes from a program."""
_ECHO_S = 0.5
"""A terminal that closes sends SIGHUP twice (kernel, shell), and torchrun passes on a signal that all have received."""


@contextlib.contextmanager
def heeded(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle `SIGNALS` by `handler` within the block, earlier blocked ones included.

    Except ignored signals, as SIGHUP under nohup, and in a thread other than the main one.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, handler) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, former in handlers.items():
            signal.signal(number, former)


class Interrupts:
    """A context that counts signals. The first sets `asked` (to stop), the second `insisted`; then calls `react`."""

    def __init__(self, react: Callable[[int], None] = lambda number: None) -> None:
        self.asked = self.insisted = False
        self._react, self._since_s = react, 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(heeded(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.asked:
            self.asked, self._since_s = True, now_s
        elif now_s - self._since_s <= _ECHO_S:
            return
        else:
            self.insisted = True
        self._react(number)


class StopRequest(Interrupts):
    """A context: the first signal sets `asked`, the second ends the process.

    The first one is answered on stderr, except with `quiet`, when another rank answers. `saves`: the run has a folder.
    """

    def __init__(self, *, quiet: bool = False, saves: bool = True) -> None:
        super().__init__(self._answer)
        self._quiet, self._answer_text = quiet, STOPPING if saves else UNSAVED

    def _answer(self, number: int) -> None:
        if self.insisted:
            try:
                say(KILLED, begin="\n")
            finally:  # an `except` of the user's code or a save under way must not delay this
                os._exit(RunError.exit_code)
        if not self._quiet:
            say(self._answer_text if number == signal.SIGUSR1 else f"{self._answer_text}{INSIST}", begin="\n")
