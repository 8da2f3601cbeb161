"""What ranks tell of their end, and what it amounts to: one account, whoever has started them and hears them.

A rank reports its value or its failure; one that dies without a word is known by its exit code. After the first
failure the others are heard a moment longer, since the loudest is not always the first.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LockstepError, RequestError, RunError, Stopped, ranks_named
from ..failures import Failure, first_cause, one_line

UNGUARDED = 87
"""The exit code of a rank whose import of the user's script would have started ranks again."""

GRACE_S = 2.0
"""For a rank that has failed to end data workers and saves that are under way, before it is killed."""
LEAVE_S = 30.0
"""For ranks that are done, or are saving because a stop was asked for."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_LISTEN_S = 1.0  # for other reports, after the first failure
_LISTEN_ON_S = 0.3  # for others that may have come before it, once one is there that is a cause by itself


@dataclass(frozen=True)
class Report:
    """A rank's last word: rank 0's pickled value, or why the rank failed."""

    rank: int
    value: bytes = b""
    failure: Failure | None = None


def pickled(value: Any) -> bytes:
    """Return the pickle of what rank 0 came to. Raises `RequestError` where it has none: nor would it the next time."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise RequestError(
            f"The ranks are done, but what rank 0 returned cannot be sent to the process that started it "
            f"({one_line(error)}); return plain values, or objects of a class that this process can import."
        ) from error


def value_of(value: bytes) -> Any:
    """Return what rank 0 came to, from its pickle, which has to be that of a rank of our own.

    Raises `RunError` where it cannot be read in this process: it is of a class that only the rank knows.
    """
    try:
        return pickle.loads(value)  # our own rank's
    except Exception as error:
        raise RunError(
            f"The ranks are done, but what rank 0 returned cannot be read here ({one_line(error)}); return plain "
            "values, or objects of a class that this process can import."
        ) from error


def failures(reports: Mapping[int, Report]) -> list[Failure]:
    """Return the failures that were told."""
    return [report.failure for report in reports.values() if report.failure]


def listen(reports: Mapping[int, Report], size: int, look: Callable[[], None]) -> None:
    """Wait a little for what others of `size` ranks have to say about a failure; `look()` adds what has come."""
    stopping = all(failure.kind == Stopped.__name__ for failure in failures(reports))
    deadline = time.monotonic() + (LEAVE_S if stopping else _LISTEN_S)
    found = False
    while len(reports) < size and time.monotonic() < deadline:
        if not stopping and not found and not first_cause(failures(reports)).is_echo:
            found, deadline = True, min(deadline, time.monotonic() + _LISTEN_ON_S)
        look()


def error(reports: Mapping[int, Report], silent: Sequence[int], again: str, where: str = "") -> LockstepError:
    """Return the first cause of the failures; `silent` are the ranks that live and have told nothing.

    `where` is what is said of these besides, such as " on node 10.0.0.2"; `again` is how to go on.
    """
    cause = first_cause(failures(reports))
    if not (cause.is_echo and silent):
        return cause.error()
    who = ranks_named(silent)  # who lives, and yet the others gave up
    return RunError(
        f"{who[0].upper()}{who[1:]}{where} did not come to a collective in which the others waited for --stall-timeout "
        f"seconds: a process hangs, or was stopped; {again}."
    )


class Laggards:
    """Ranks that are still not done --stall-timeout after others were."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._patience_s = stall_timeout_s + GRACE_S
        self._since_s: float | None = None

    def are_late(self, *, some_are_done: bool) -> bool:
        """Return whether those that are not done are given up; called again and again."""
        if not some_are_done:
            self._since_s = None
            return False
        self._since_s = self._since_s or time.monotonic()
        return time.monotonic() - self._since_s > self._patience_s


def left_behind(ranks: Sequence[int], again: str) -> Failure:
    """Return the failure of ranks that have not ended long after the others were done."""
    who = ranks_named(ranks)
    told = f"{who[0].upper()}{who[1:]} did not end within --stall-timeout after the other ranks were done"
    return Failure(ranks[0], "", f"{told}: a process hangs, or was stopped; {again}.", "")


def unsaved(ranks: Sequence[int], again: str) -> Failure:
    """Return the failure of ranks that were asked to save and end, and did not in time."""
    who = ranks_named(ranks)
    told = f"{who[0].upper()}{who[1:]} did not save and end within --stall-timeout of the signal, and had to be killed"
    return Failure(ranks[0], "", f"{told}: what was done since the last checkpoint is lost; {again}.", "")


def _name(number: int) -> str:
    """Return what a signal is called; Linux has some without a name."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def obituary(
    rank: int,
    code: int,
    again: str,
    *,
    where: str = "",
    said: str = "printed above",
    asked: str = "",
    aborts_when_alone: bool = False,
) -> Failure:
    """Return the failure of a rank that ended without a word; `code` is its exit code, or minus the signal's number.

    `where` is what is told of it besides, `said` where its output is. `asked` is what is told of a rank that ended as
    it was asked to, before it could heed that; empty where it was not. `aborts_when_alone` says that a rank which waits
    in vain for another one ends by SIGABRT, as NCCL has it.
    """
    if asked and code == -signal.SIGTERM:
        return Failure(rank, Stopped.__name__, asked, "")
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        if -code in _CRASHES:
            hint = f" (if it trained, its stacks are in the run's output/rank_{rank}.txt)"
        how = f"Rank {rank}{where} was killed by {_name(-code)}{hint}"
        return Failure(rank, "", f"{how}; {again}.", "", is_echo=aborts_when_alone and code == -signal.SIGABRT)
    if code == UNGUARDED:
        return Failure(
            rank,
            RequestError.__name__,
            "Each rank imports the script that starts the ranks, and would start them again; put that script's "
            'start under `if __name__ == "__main__":`.',
            "",
        )
    how = f"Rank {rank}{where} exited with code {code} before it was done and without a word"
    return Failure(rank, "", f"{how}: what was {said} may say why; {again}.", "")
