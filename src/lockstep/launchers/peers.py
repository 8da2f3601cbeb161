"""The ranks that came to the roll call, and what they know of one another from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ..failures import RankLostError
from ..notes import NoNotes, Notes
from .claims import Claim, digest
from .stores import Meeting

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEAT_LIMIT = timedelta(seconds=30)  # for the server to wait for a key


def present(store: Store, size: int) -> tuple[Claim, ...]:
    """Return the claims that lie in the store, in the order of their ranks."""
    keys = [f"claim/{rank}" for rank in range(size)]
    texts = [store.get(key) for key in keys if store.check([key])]
    return tuple(Claim.from_json(text) for text in texts if text)


@dataclass(frozen=True)
class Peers:
    """All ranks of a world, as one of them sees them."""

    meeting: Meeting
    claims: tuple[Claim, ...]
    """In the order of the ranks."""
    mine: Claim

    def group_store(self) -> Store:
        """Return the store for the process group of these ranks, apart from any other world's keys."""
        from torch._C._distributed_c10d import PrefixStore

        # torch's own, not ours in Python around it: C++ threads ask it, which torch leaves running at the end.
        return PrefixStore(f"world/{digest(self.claims)}", getattr(self.meeting.store, "inner", self.meeting.store))

    def watch_store(self) -> Store:
        """Return the store for the beats of these ranks, on a connection of its own: others may wait on theirs.

        Raises RuntimeError where it does not answer.
        """
        from .bounded_store import KeptPrefixStore

        if not self.meeting.is_open():
            raise RuntimeError(f"{self.meeting.where} does not answer")
        store = self.meeting.store.clone()
        store.set_timeout(_BEAT_LIMIT)
        return KeptPrefixStore(f"watch/{digest(self.claims)}", store)

    def here(self, *, aside: bool = False) -> Sequence[Claim]:
        """Return those that have not taken their claim back; all of them where the store can no longer be asked.

        `aside` asks over a connection of its own, since others may wait on theirs.
        """
        if self.meeting.is_open():
            with contextlib.suppress(RuntimeError):
                store = self.meeting.store.clone() if aside else self.meeting.store
                nonces = {claim.nonce for claim in present(store, self.mine.size)}
                return [claim for claim in self.claims if claim.nonce in nonces]
        return self.claims

    def dead(self, *, aside: bool = False) -> list[Claim]:
        """Return those whose process has ended on this host without having left; `aside` is as in `here`."""
        return [claim for claim in self.here(aside=aside) if claim.is_dead()]

    def server_lost(self) -> RankLostError:
        """Return the error of a rank whose store went away before there was a world."""
        return RankLostError(
            f"Rank {self.mine.rank}: rank 0, or the agent that serves {self.meeting.where}, ended before training "
            "began: its own message says why; then start all ranks again."
        )

    @property
    def server(self) -> int | None:
        """The rank that serves the store; None where that is a file, or an agent that outlives the ranks."""
        return None if self.meeting.file or self.meeting.memory or self.meeting.notes else 0

    @property
    def notes(self) -> Notes:
        """What starts of the same ranks leave one another; nothing where the store ends with them."""
        return self.meeting.notes or NoNotes()
