"""Variants that live at the same time and run by turns, some steps each: what slows the machine slows all of them.

On a machine that others share, a second is not like the next: here one and the same loop's turns of a tenth of a second
vary by a seventh, and so do those of half a second. Many short turns, A B C C B A, see the same machine, and a race has
hundreds of them in the time that ten trials from the start would take.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ..errors import LockstepError, RunError
from ..verify.commands import Command, Running

_LOOK_S = 0.2
_TURN = 50.0
"""Times what a turn should take, after which a variant hangs; at least `_LEAST_TURN_S`."""
_LEAST_TURN_S = 60.0


@dataclass
class Runner:
    """A variant in a race: its command, its ranks' connections, and the steps a second of its turns."""

    name: str
    command: Running
    listener: socket.socket
    steps: int
    turn_s: float
    """What a turn should take."""
    ranks: list[_Rank] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def meet(self, until_s: float) -> None:
        """Return once all ranks have come to their first turn. Raises what the command has told where it ends."""
        size = 1
        while len(self.ranks) < size:
            self._check(until_s)
            with contextlib.suppress(TimeoutError):
                rank = _Rank(self.listener.accept()[0])
                rank.number, size = map(int, self._hear(rank, until_s).split())
                self.ranks.append(rank)
        for rank in self.ranks:
            self._hear(rank, until_s)
        self.ranks.sort(key=lambda rank: rank.number)

    def turn(self) -> None:
        """Run some steps, and note their speed, by rank 0's clock."""
        for rank in self.ranks:
            rank.say(str(self.steps))
        until_s = time.monotonic() + max(_LEAST_TURN_S, _TURN * self.turn_s)
        took_s = [float(self._hear(rank, until_s)) for rank in self.ranks]
        self.rates.append(self.steps / took_s[0])

    def _hear(self, rank: _Rank, until_s: float) -> str:
        """Return the rank's next line. Raises what the command has told where it ends, or `RunError` where it hangs."""
        while (line := rank.heard()) is None:
            self._check(until_s)
        return line

    def _check(self, until_s: float) -> None:
        self.command.check()
        if time.monotonic() > until_s:
            raise RunError(
                f"The variant {self.name} failed: it did not come to its next turn; its log in the race's folder may "
                "say why."
            )


class _Rank:
    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_LOOK_S)
        self.number = 0
        self._connection = connection
        self._heard = b""

    def say(self, text: str) -> None:
        with contextlib.suppress(ConnectionError):  # its command has ended, and tells why
            self._connection.sendall(f"{text}\n".encode())

    def heard(self) -> str | None:
        """Return the next line; None where it has not come within a moment."""
        if b"\n" not in self._heard:
            begun_s = time.monotonic()
            with contextlib.suppress(TimeoutError, ConnectionError):
                self._heard += self._connection.recv(4096)
            if b"\n" not in self._heard:
                time.sleep(max(0.0, _LOOK_S - (time.monotonic() - begun_s)))  # it went away, and its command ends too
                return None
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        self._connection.close()


class Race(contextlib.AbstractContextManager["Race"]):
    """Variants that have come to their first turns. At its end none of their processes is left."""

    def __init__(self) -> None:
        self.runners: list[Runner] = []
        self._kept = contextlib.ExitStack()
        # Of this user alone, and short: a socket's path has at most 107 bytes.
        self._folder = Path(self._kept.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner in self.runners:
            for rank in runner.ranks:
                rank.close()
        self._kept.__exit__(kind, error, trace)

    def address(self) -> str:
        """Return where the next variant's ranks are to connect."""
        return str(self._folder / str(len(self.runners)))

    def add(self, name: str, command: Command, log: Path, *, steps: int, turn_s: float) -> None:
        """Start a variant that was given `address`."""
        listener = self._kept.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(self.address())
        listener.listen()
        listener.settimeout(_LOOK_S)
        running = self._kept.enter_context(Running(name, command, log))
        self.runners.append(Runner(name, running, listener, steps, turn_s))

    def meet(self, limit_s: float) -> dict[str, str]:
        """Wait until all are ready; end those that are not, and return by name why."""
        failed, until_s = {}, time.monotonic() + limit_s
        for runner in list(self.runners):
            try:
                runner.meet(until_s)
            except LockstepError as error:
                failed[runner.name] = str(error)
                self.runners.remove(runner)
                runner.command.__exit__()
        return failed

    def run(self, turns: int) -> None:
        """Give each variant so many turns: A B C, C B A, …"""
        for number in range(turns):
            for runner in self.runners[:: -1 if number % 2 else 1]:
                runner.turn()

    @property
    def rates(self) -> Mapping[str, Sequence[float]]:
        """Steps a second by variant and turn."""
        return {runner.name: runner.rates for runner in self.runners}
