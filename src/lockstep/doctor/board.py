"""What ranks tell one another, through the store at which they met, while no process group is known to work.

After one rank has stayed away from a collective, a group is of no use any more; here a silent rank is a name on a list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from ..monitor.failures import RankLostError
from ..monitor.keys import Keys
from .finding import RED, Finding, found

if TYPE_CHECKING:
    from .._torch import Store

_LOOK_S = 0.02
_FIX = "see whether it was stopped, and what its host is busy with; end it before a job starts"


class Board:
    """What ranks post, topic by topic, in the same order on each."""

    def __init__(self, store: Store, rank: int, size: int, patience_s: float) -> None:
        """`patience_s` is how long a rank is waited for before the others go on without it."""
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self.absent: dict[int, Finding] = {}
        """What there is to say of ranks that fell silent."""
        self._hears_s = 2 * patience_s + 1  # rank 0 may itself have waited for a rank
        self._keys = Keys(store, "board", limit_s=self._hears_s)

    def all(self, topic: str, mine: Any) -> dict[int, Any]:
        """Return what every rank posts under `topic`, by rank, without those that are absent (*collective*).

        `mine` is JSON-able. Raises `RunError` on a rank that the others have given up, or that rank 0 has left alone.
        """
        try:
            self._keys.write(f"{topic}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                self._collect(topic)
            if not self._comes(f"{topic}/all", time.monotonic() + self._hears_s):
                raise TimeoutError
            told: dict[int, Any] = dict(json.loads(self._keys.read(f"{topic}/all")))
        except (RuntimeError, TimeoutError) as error:  # the store's own: its server has gone, or rank 0
            who = "rank 0, or the agent that serves the store, ended or was stopped"
            raise RankLostError(f"Rank {self.rank}: {who} during {topic}: its own message says why.") from error
        for rank in set(range(self.size)) - told.keys() - self.absent.keys():
            words = f"rank {rank} fell silent at {topic}, and was waited for {self.patience_s:g} s"
            self.absent[rank] = found("collectives", "ranks", words, _FIX, bad=RED)
        if self.rank in self.absent:
            raise RunError(
                f"Rank {self.rank} came to {topic} more than {self.patience_s:g} s late, and the others went on "
                "without it: it was stopped, or its host is overloaded."
            )
        return told

    def findings(self, topic: str, mine: Iterable[Finding]) -> list[Finding]:
        """Return the findings of all ranks, each as that rank's (*collective*)."""
        told = self.all(topic, [asdict(each) for each in mine])
        return [Finding(**{**each, "ranks": (rank,)}) for rank, theirs in told.items() for each in theirs]

    def _collect(self, topic: str) -> None:
        """Post what all ranks have posted, as pairs, once they have or are waited for no longer."""
        deadline = time.monotonic() + self.patience_s
        told = []
        for rank in sorted(set(range(self.size)) - self.absent.keys()):
            if self._comes(f"{topic}/{rank}", deadline):
                told.append((rank, json.loads(self._keys.read(f"{topic}/{rank}"))))
        self._keys.write(f"{topic}/all", json.dumps(told))

    def _comes(self, key: str, deadline: float) -> bool:
        while not self._keys.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True
