"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: the first asks the run to save and stop, a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from types import FrameType
from typing import Any

from ..errors import RunError
from ..printable import told

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to stop: SIGHUP comes when the terminal goes, and is left alone under nohup; SIGUSR1 is what
schedulers are told to send some time before a job's end."""

KILLED = "Killed by a second signal, without saving; the last checkpoint, if there is one, is whole."
OUTSIDE = "Stopped outside of training; nothing was left to save."
STOPPING = "stopping: finishes the step under way and saves"
INSIST = "; a second signal ends it at once"
"""What a person is told besides: SIGUSR1 comes from a scheduler, or from an agent that is to take in another node."""
SHOW_CURSOR = "\x1b[?25h"
_ECHO_S = 0.5
"""A closed terminal's kernel and shell both send SIGHUP, torchrun passes on what the terminal has sent already: so
close together, they are one."""


class Heard(Enum):
    """What one more signal means to a process."""

    FIRST = "save and stop"
    ECHO = "the first one once more, from somebody else"
    SECOND = "end at once"


class Interrupts:
    """The signals that a process has heard, by which the next one is judged."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a first one came."""
        self.insisted = False
        """Whether a second one came."""
        self._since_s = 0.0

    def hear(self) -> Heard:
        """Return what the signal that came just now means."""
        now_s = time.monotonic()
        if not self.asked:
            self.asked, self._since_s = True, now_s
            return Heard.FIRST
        if now_s - self._since_s <= _ECHO_S:
            return Heard.ECHO
        self.insisted = True
        return Heard.SECOND


@contextlib.contextmanager
def heeded(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `SIGNALS` call `handler` within the block, less those that are ignored, as SIGHUP is under nohup.

    Signals reach Python's main thread alone; entered from another thread, this changes nothing.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


class StopRequest:
    """A context in which `SIGNALS` set `asked` instead of ending the process; the first is answered on stderr.

    Entered from another thread than the main one, this changes nothing. `quiet` leaves the answer to another rank.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._interrupts = Interrupts()
        self._quiet = quiet
        self._heeding = contextlib.ExitStack()

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._interrupts.asked

    def __enter__(self) -> StopRequest:
        self._heeding.enter_context(heeded(self._heard))
        return self

    def __exit__(self, *_: object) -> None:
        self._heeding.close()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        heard = self._interrupts.hear()
        stderr = 2
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stderr = sys.stderr.fileno()
        if heard is Heard.SECOND:
            # Neither an `except` of the user's nor a save that is under way may hold this up. A terminal whose bar
            # has hidden the cursor gets it back.
            try:
                os.write(stderr, f"{SHOW_CURSOR if os.isatty(stderr) else ''}\n{told(KILLED)}".encode())
            finally:  # the terminal may be what has gone
                os._exit(RunError.exit_code)
        if heard is Heard.FIRST and not self._quiet:
            with contextlib.suppress(OSError):
                words = STOPPING if number == signal.SIGUSR1 else f"{STOPPING}{INSIST}"
                os.write(stderr, f"\n{told(words)}".encode())
