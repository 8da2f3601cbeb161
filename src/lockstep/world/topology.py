"""One rank's place among the ranks, known before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One rank's place.

    It is `rank` of `size`, and `local_rank` of `local_size` on its `node` of `nodes`.
    Rank 0 listens at `address` and `port` where these are known: not with a file, or a store that was handed over.
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
    def of_node(cls, here: int, *, first: int = 0, size: int = 0, node: int = 0, nodes: int = 1) -> list[Topology]:
        """Return the places of a node's `here` ranks, from `first` on."""
        return [
            cls(rank=first + at, size=size or here, local_rank=at, local_size=here, node=node, nodes=nodes)
            for at in range(here)
        ]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0
