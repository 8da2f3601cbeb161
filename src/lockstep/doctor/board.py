"""What ranks tell one another while it is not known yet whether they can compute together.

Through the store at which they met, not through the process group: that one may be what is broken, and after one rank
has stayed away from a collective it is of no use any more. Here a silent rank is a name on a list.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from ..failures import RankLostError
from ..launchers.bounded_store import BoundedStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

_LOOK_S = 0.01


class Board:
    """One rank's access to what all of them post, topic by topic, in the same order on each."""

    def __init__(self, store: Store, rank: int, size: int, patience_s: float) -> None:
        """`patience_s` is how long a rank is waited for before the others go on without it."""
        self.absent: dict[int, str] = {}
        """Ranks that fell silent, and at which topic."""
        self.patience_s = patience_s
        self._store = BoundedStore(store, 2 * patience_s + 1)  # torch waits without end for a server that was stopped
        self._rank, self._size = rank, size

    def all(self, topic: str, mine: Any) -> list[Any]:
        """Return what every rank posts under `topic`, in their order; None for one that is absent (*collective*).

        `mine` is JSON-able and not None. Every rank hears the same. Raises `RunError` on a rank that the others have
        given up, or that rank 0 has left alone.
        """
        try:
            self._store.set(f"{topic}/{self._rank}", json.dumps(mine))
            everything = self._collect(topic) if self._rank == 0 else self._hear(topic)
        except RuntimeError as error:  # the store's own: its server has gone
            raise RankLostError(
                f"Rank {self._rank}: rank 0, or the agent that serves the store, ended during {topic}: its own message "
                "says why."
            ) from error
        for rank, told in enumerate(everything):
            if told is None:
                self.absent.setdefault(rank, topic)
        if self._rank in self.absent:
            raise RunError(
                f"Rank {self._rank} came to {topic} more than {self.patience_s:g} s late, and the others went on "
                "without it: it was stopped, or its host is overloaded."
            )
        return everything

    def _collect(self, topic: str) -> list[Any]:
        deadline = time.monotonic() + self.patience_s
        everything: list[Any] = [None] * self._size
        missing = [rank for rank in range(self._size) if rank not in self.absent]
        while missing:
            for rank in list(missing):
                if self._store.check([f"{topic}/{rank}"]):
                    everything[rank] = json.loads(self._store.get(f"{topic}/{rank}"))
                    missing.remove(rank)
            if missing and time.monotonic() >= deadline:
                break
            if missing:
                time.sleep(_LOOK_S)
        self._store.set(f"{topic}/all", json.dumps(everything))
        return everything

    def _hear(self, topic: str) -> list[Any]:
        # Rank 0 may itself have waited for a rank before it came here.
        deadline = time.monotonic() + 2 * self.patience_s + 1
        while not self._store.check([f"{topic}/all"]):
            if time.monotonic() >= deadline:
                raise RankLostError(
                    f"Rank {self._rank}: rank 0 has not come to {topic} within {2 * self.patience_s:g} s: it was "
                    "stopped, or cannot be reached any more."
                )
            time.sleep(_LOOK_S)
        everything: list[Any] = json.loads(self._store.get(f"{topic}/all"))
        return everything
