"""Who am I among the ranks: a value, known before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One rank's place in the world.

    `rank` of `size` in all; `local_rank` of `local_size` on this node; `node` of `nodes`. `address` and `port`
    say where rank 0 listens, where that is known (not with a file or a store that was handed over).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    address: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        # Launchers build topologies; a user's own numbers are checked with sentences before they come here.
        assert 0 <= self.rank < self.size, (self.rank, self.size)
        assert 0 <= self.local_rank < self.local_size <= self.size, (self.local_rank, self.local_size, self.size)
        assert 0 <= self.node < self.nodes, (self.node, self.nodes)

    @classmethod
    def of_node(cls, here: int, *, first: int = 0, size: int = 0, node: int = 0, nodes: int = 1) -> list[Topology]:
        """Return the places of a node's ranks, of which there are `here`, from rank `first` on; by default all."""
        return [
            cls(rank=first + at, size=size or here, local_rank=at, local_size=here, node=node, nodes=nodes)
            for at in range(here)
        ]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0
