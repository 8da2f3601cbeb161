"""The nodes that a start of the ranks began with, and whether one of them has been lost since.

Each agent says every two seconds that it lives. One that has not for six is counted out by torch's rendezvous; but
nothing follows from that until ranks fail, and ranks wait in a collective for as long as --stall-timeout. So the agents
look here, end ranks that wait for nobody, and go on without the lost node.
"""

from __future__ import annotations

import socket
import time
from collections import Counter

from .plain_state import PlainState

KEEP_ALIVE_S, MISSED = 2, 3
COUNTED_OUT_S = KEEP_ALIVE_S * MISSED
_ALONE_S = 3.0  # for ranks to find out by themselves that another node has lost its own, and how


class Members:
    """The nodes of one start of the ranks, by what the agents have last read or written of one another."""

    def __init__(self, state: PlainState, here: str) -> None:
        """`here` is this node's address among them."""
        self._state, self._here = state, here
        self._first = state.nodes
        self._fewer_since_s: float | None = None
        self._gone: list[str] = []

    def begin(self) -> None:
        """Begin anew, with the nodes that there are now."""
        self._first, self._fewer_since_s = self._state.nodes, None

    def fewer(self) -> bool:
        """Return whether nodes that there were at the beginning are no more, this one perhaps."""
        now, first = self._state.nodes, self._first
        return not now.closed and (now.round != first.round or len(now.addresses) < len(first.addresses))

    def lost(self) -> str:
        """Return what has happened where a node was lost, in a sentence without its full stop; "" where none was.

        Where this node itself was counted out, the others may train already: that is told at once. Where another one
        was, the ranks have a moment to find out by themselves.
        """
        now, first = self._state.nodes, self._first
        if not self.fewer():
            self._fewer_since_s = None
            return ""
        if now.round != first.round or self._here not in now.addresses:
            return (
                f"The other nodes heard nothing of this one ({socket.gethostname()}, {self._here}) for "
                f"{COUNTED_OUT_S} s, and have given it up"
            )
        if self._fewer_since_s is None:
            self._fewer_since_s = time.monotonic()
            self._gone = list(Counter(first.addresses) - Counter(now.addresses))  # others leave when they find out
        if time.monotonic() - self._fewer_since_s < _ALONE_S:
            return ""
        nodes = "Nodes" if self._gone[1:] else "Node"
        return f"{nodes} {' and '.join(self._gone)} died, left or cannot be reached by the network any more"
