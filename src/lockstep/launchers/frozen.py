"""Ranks that were all stopped: none of them is left to say so, and whoever has started them finds out."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from ..errors import ranks_in_short
from ..failures import Failure

_LOOK_S = 0.2
_GAP_S = 2.0  # that a busy machine may leave between two looks


class Frozen:
    """Looks after the ranks of this host, as their parent: with one of them alive, their own watch would tell more."""

    def __init__(self, patience_s: float, again: str) -> None:
        """`patience_s` are the seconds for which all have to have been stopped; `again` is how to go on."""
        self._patience_s, self._again = patience_s, again
        self._next_s = 0.0
        self._since_s: float | None = None

    def look(self, ranks: Mapping[int, int]) -> Failure | None:
        """Return the failure of all `ranks` (rank: process) that live here, where all have been stopped for so long."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        # Time for which this process was stopped itself is none for which it saw the others stopped.
        if now_s > self._next_s + _GAP_S or not ranks or not all(map(_is_stopped, ranks.values())):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        self._next_s = now_s + _LOOK_S
        if self._since_s is None or now_s - self._since_s < self._patience_s:
            return None
        who, verb = ranks_in_short(ranks), "was" if len(ranks) == 1 else "were"
        told = f"{who[0].upper()}{who[1:]}, all that live here, {verb} stopped (SIGSTOP)"
        return Failure(min(ranks), "", f"{told} {now_s - self._since_s:.0f} s ago; {self._again}.", "")


def _is_stopped(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
