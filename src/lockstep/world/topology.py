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
    def of_node(
        cls, local_size: int, *, first: int = 0, size: int = 0, node: int = 0, nodes: int = 1
    ) -> list[Topology]:
        """Return the places of a node's `local_size` ranks, from rank `first` on."""
        return [
            cls(
                rank=first + local_rank,
                size=size or local_size,
                local_rank=local_rank,
                local_size=local_size,
                node=node,
                nodes=nodes,
            )
            for local_rank in range(local_size)
        ]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0
