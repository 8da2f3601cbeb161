"""What ranks tell one another through torch's store, while no process group is known to work.

After one rank has stayed away from a collective, a group is of no use any more; here a silent rank is a finding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from .._torch import Store
from ..errors import RunError
from ..monitor.failures import RankLostError
from ..monitor.keys import Keys
from .finding import RED, Finding, found

_LOOK_S = 0.02


class Board:
    """What ranks post, topic by topic, in the same order on each."""

    def __init__(self, store: Store, rank: int, size: int, patience_s: float) -> None:
        """`patience_s` is how long a rank is waited for before the others go on without it."""
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self.absent: dict[int, Finding] = {}
        """Ranks that fell silent, and what there is to say of each."""
        self._hears_s = 2 * patience_s + 1  # rank 0 may itself have waited for a rank
        self._keys = Keys(store, "board", limit_s=self._hears_s)

    def all(self, topic: str, mine: Any) -> dict[int, Any]:
        """Return what every rank posts under `topic` (JSON-able), without those that are absent (*collective*).

        Raises `RunError` on a rank that the others have given up, or that rank 0 has left alone.
        """
        try:
            self._keys.write(f"{topic}/{self.rank}", json.dumps(mine))
            if self.rank == 0:  # which alone decides who is absent
                deadline = time.monotonic() + self.patience_s
                here = [rank for rank in range(self.size) if rank not in self.absent]
                came = [rank for rank in here if self._comes(f"{topic}/{rank}", deadline)]
                told = [(rank, json.loads(self._keys.read(f"{topic}/{rank}"))) for rank in came]
                self._keys.write(f"{topic}/all", json.dumps(told))
            if not self._comes(f"{topic}/all", time.monotonic() + self._hears_s):
                raise TimeoutError
            everyone: dict[int, Any] = dict(json.loads(self._keys.read(f"{topic}/all")))
        except (RuntimeError, TimeoutError) as error:  # the store's own: its server has gone, or rank 0
            gone = "rank 0, or the agent that serves the store, ended or was stopped"
            raise RankLostError(f"Rank {self.rank}: {gone} during {topic}: its own message says why.") from error
        for rank in set(range(self.size)) - everyone.keys() - self.absent.keys():
            words = f"rank {rank} fell silent at {topic}, and was waited for {self.patience_s:g} s"
            fix = "see whether it was stopped, and what its host is busy with; end it before a job starts"
            self.absent[rank] = found("collectives", "ranks", words, fix, bad=RED)
        if self.rank in self.absent:
            raise RunError(
                f"Rank {self.rank} came to {topic} more than {self.patience_s:g} s late, and the others went on "
                "without it: it was stopped, or its host is overloaded."
            )
        return everyone

    def findings(self, topic: str, mine: Iterable[Finding]) -> list[Finding]:
        """Return the findings of all ranks, each as that rank's (*collective*)."""
        told = self.all(topic, [asdict(each) for each in mine])
        return [Finding(**{**each, "ranks": (rank,)}) for rank, theirs in told.items() for each in theirs]

    def _comes(self, key: str, deadline: float) -> bool:
        while not self._keys.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True
