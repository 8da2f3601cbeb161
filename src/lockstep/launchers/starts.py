"""Which start of a job's ranks this is, where whoever starts them does not say so to all alike.

torchrun counts restarts on each node for itself, and a node that joins is none. So the ranks count: one that finds its
place taken, as it was in an earlier start, or a world of another size, opens the next, and those that found nothing of
the kind in the one before follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .claims import Claim

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

_LAST = "start"


class Starts:
    """The starts of one job, as a rank of the last one sees them."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """`store` is the job's, which outlives its ranks; each start has its keys under its number there."""
        self._store = store
        store.compare_set(_LAST, "", "0")
        last = self._last()
        counted = self._claim(f"{last}/size")
        if self._claim(f"{last}/claim/{rank}") or (counted and counted.size != size):
            store.compare_set(_LAST, f"{last}", f"{last + 1}")
            last = self._last()
        self._mine = last

    @property
    def name(self) -> str:
        """What parts the keys of this rank's start from those of others."""
        return f"{self._mine}"

    def has_moved(self) -> bool:
        """Return whether a later start has begun, to which this rank belongs if it has only just come."""
        return self._last() > self._mine

    def _claim(self, key: str) -> Claim | None:
        text = self._store.get(key) if self._store.check([key]) else b""
        return Claim.from_json(text) if text else None

    def _last(self) -> int:
        return int(self._store.get(_LAST) or 0)
