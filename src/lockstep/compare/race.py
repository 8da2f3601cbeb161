"""A race: variants live simultaneously and run turns of steps.

A slower machine slows all of them. On a shared machine, no second is like the next: turns of one and the same loop vary
by a seventh, whether they last a tenth or half of a second. Many short turns, A B C C B A, see the same machine, and a
race has hundreds of them in the time that ten trials from the start would take.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import LockstepError, RunError
from ..verify.commands import Running, python
from .grid import Words
from .trials import reason

_LOOK_S = 0.2
_TURN, _LEAST_TURN_S = 50.0, 60.0  # limit of a turn: a multiple of its expected time, and seconds at least


class Entrant(NamedTuple):
    """A variant in a race."""

    name: str
    words: Words  # of its command, after lockstep compare raced ADDRESS, to which its ranks connect
    log: Path
    steps: int
    turn_s: float  # expected


def run(entrants: Sequence[Entrant], turns: int, limit_s: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run turns of all entrants; return steps per second, and failures.

    Turns go A B C, C B A, …; results are by variant. Leaves out a variant that is not ready within `limit_s`; a later
    failure ends the race. No process outlives this call.
    """
    with contextlib.ExitStack() as stack:
        # Private to this user, and short: a socket's path has at most 107 bytes.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
        runners = [stack.enter_context(_Runner(entrant, f"{folder}/{index}")) for index, entrant in enumerate(entrants)]
        until_s = time.monotonic() + limit_s
        ready = [runner for runner in runners if runner.attempt(partial(runner.meet, until_s))]
        for runner in (runner for number in range(turns) for runner in ready[:: -1 if number % 2 else 1]):
            if not runner.attempt(runner.turn):
                break
    failures = {runner.name: runner.failed for runner in runners if runner.failed}
    return {runner.name: runner.rates for runner in ready}, failures


class _Runner(contextlib.ExitStack):
    """A variant's command, its ranks' connections, and its turns."""

    def __init__(self, entrant: Entrant, address: str) -> None:
        super().__init__()
        self.name, self.failed, self.rates = entrant.name, "", list[float]()
        self._entrant, self._ranks = entrant, dict[int, socket.socket]()
        self._listener = self.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(address)
        self._listener.listen()
        self._listener.settimeout(_LOOK_S)
        words = python("lockstep", "compare", "raced", address, *entrant.words)
        self._running = self.enter_context(Running(self.name, words, entrant.log))

    def attempt(self, action: Callable[[], None]) -> bool:
        """Return whether the action succeeds; on failure, end the command and keep the reason."""
        try:
            action()
        except LockstepError as error:
            self.failed = reason(self.name, error)
            self.close()
        return not self.failed

    def meet(self, until_s: float) -> None:
        """Wait until all ranks are ready for their first turn."""
        size = 1
        while len(self._ranks) < size:
            self._check(until_s)
            with contextlib.suppress(TimeoutError):
                connection = self.enter_context(self._listener.accept()[0])
                connection.settimeout(_LOOK_S)
                rank, size = map(int, self._hear(connection, until_s).split())
                self._ranks[rank] = connection

    def turn(self) -> None:
        """Run a turn, and record its speed by rank 0's clock."""
        steps, until_s = self._entrant.steps, time.monotonic() + max(_LEAST_TURN_S, _TURN * self._entrant.turn_s)
        for connection in self._ranks.values():
            with contextlib.suppress(ConnectionError):  # the command has ended; `_hear` raises its error
                connection.sendall(f"{steps}\n".encode())
        took_s = {rank: float(self._hear(connection, until_s)) for rank, connection in self._ranks.items()}
        self.rates.append(steps / took_s[0])

    def _hear(self, connection: socket.socket, until_s: float) -> str:
        """Return the rank's next line, after which it waits for a turn."""
        line = b""
        while not line.endswith(b"\n"):
            self._check(until_s)
            with contextlib.suppress(TimeoutError, ConnectionError):
                if chunk := connection.recv(4096):
                    line += chunk
                else:
                    time.sleep(_LOOK_S)  # the rank is gone, and its command is about to end
        return line.decode()

    def _check(self, until_s: float) -> None:
        """Raise the error of a command that ended or hangs."""
        self._running.check()
        if time.monotonic() > until_s:
            raise RunError("it did not reach its next turn; its log in the race's folder may say why.")
