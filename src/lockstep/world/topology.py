"""One rank's place among the ranks, known before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One rank's place: `rank` of `size`, and `local_rank` of `local_size` on its `node` of `nodes`.

    Rank 0 listens at `address` and `port`. They are unset for a file store, and for a store that the caller passes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    address: str = ""
    port: int = 0

    @classmethod
    def of_host(cls, size: int) -> list[Topology]:
        """Return the places of `size` ranks on one host."""
        return [cls(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0
