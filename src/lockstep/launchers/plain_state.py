"""torch's rendezvous state, which its agents pickle, kept from running anything.

torch's dynamic rendezvous unpickles whatever lies under its key in the agents' store: whoever reaches that port could
have every agent run code of theirs. Here the bytes are vetted first: they may name the few types that such a state is
made of, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend


@dataclass(frozen=True)
class Nodes:
    """Those that take part, as the agents have agreed."""

    round: int = -1
    """How often they have agreed before."""
    addresses: tuple[str, ...] = ()
    """One for each agent, several of which may run on a host."""
    closed: bool = False
    """Whether one of them has ended the job."""


class PlainState(C10dRendezvousBackend):
    """The state of a rendezvous in a store, read only where it is nothing but that; `nodes` is what it said last."""

    def __init__(self, store: Store, job: str) -> None:
        super().__init__(store, job)
        self.nodes = Nodes()

    def get_state(self) -> Any:
        """Return (state, token). Raises `RendezvousStateError` where the state names anything but torch's own types."""
        found = super().get_state()
        if found is not None:
            self._read(found[0])
        return found

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Put the state there; return (state, token, whether it was put), the state checked as by `get_state`."""
        found = super().set_state(state, token)
        if found is not None:
            self._read(found[0])
        return found

    def _read(self, state: bytes) -> None:
        try:
            plain = _Plain(io.BytesIO(state)).load()
            addresses = tuple(sorted(node.addr for node in plain.participants))
            self.nodes = Nodes(plain.round, addresses, plain.closed)
        except Exception as error:
            raise RendezvousStateError("The agents' store holds something else than a rendezvous.") from error


class _Foreign(pickle.UnpicklingError):
    """A pickle names something that no rendezvous state is made of."""


class _Plain(pickle.Unpickler):
    _KNOWN = frozenset(
        {
            ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
            ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
            ("datetime", "datetime"),
            ("datetime", "timezone"),
            ("datetime", "timedelta"),
            ("builtins", "set"),
            ("copyreg", "_reconstructor"),
            ("builtins", "object"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise _Foreign(f"{module}.{name}")
        return super().find_class(module, name)
