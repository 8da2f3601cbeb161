"""What an elastic agent knows of the other nodes, from a store that others can reach and that may not answer."""

from __future__ import annotations

import pickle
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from lockstep.launchers import members
from lockstep.launchers.bounded_store import BoundedStore, Unanswered
from lockstep.launchers.members import Members
from lockstep.launchers.plain_state import Nodes, PlainState

HERE, OTHER, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class _Agreed(PlainState):
    """A state that says what a test has it say."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(HashStore(), "job")
        self.nodes = nodes


def test_another_node_that_is_lost_is_told_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _Agreed(Nodes(3, (HERE, OTHER, THIRD)))
    begun = Members(state, HERE)
    assert (begun.fewer(), begun.lost()) == (False, "")
    state.nodes = Nodes(3, (HERE, OTHER))
    assert begun.fewer()
    assert begun.lost() == ""  # its ranks may know more
    state.nodes = Nodes(3, (HERE,))  # another one has left, to begin again
    monkeypatch.setattr(members, "_ALONE_S", 0.0)
    assert begun.lost() == f"Node {THIRD} died, left or cannot be reached by the network any more"
    begun.begin()
    assert not begun.fewer()


@pytest.mark.parametrize("now", [Nodes(4, (OTHER, THIRD)), Nodes(4, (HERE, OTHER, THIRD)), Nodes(3, (OTHER, THIRD))])
def test_a_node_that_was_given_up_knows_at_once(now: Nodes) -> None:
    state = _Agreed(Nodes(3, (HERE, OTHER, THIRD)))
    begun = Members(state, HERE)
    state.nodes = now
    assert begun.lost().endswith(f"{HERE}) for 6 s, and have given it up")


def test_a_job_that_ends_has_lost_nobody() -> None:
    state = _Agreed(Nodes(3, (HERE, OTHER)))
    begun = Members(state, HERE)
    state.nodes = Nodes(3, (HERE,), closed=True)
    assert not begun.fewer()


@dataclass
class _Stuck:
    """A store whose server was lost by the network: requests never return, until the test lets them."""

    free: threading.Event = field(default_factory=threading.Event)

    def __getattr__(self, name: str) -> object:
        return lambda *_: self.free.wait(60)


def test_a_store_that_never_answers_is_given_up() -> None:
    stuck = _Stuck()
    store = BoundedStore(stuck, 0.2)  # type: ignore[arg-type]
    under = PrefixStore("job", store)
    begun_s = time.monotonic()
    with pytest.raises(Unanswered, match=r"no answer within 0\.2 s"):
        under.get("key")
    assert not store.answers
    for _ in range(20):  # at once, from then on
        with pytest.raises(Unanswered):
            under.set("key", "value")
    assert time.monotonic() - begun_s < 2
    stuck.free.set()


class _Touches:
    """A pickle of this makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def _put(store: Store, state: object) -> None:
    store.set("torch.rendezvous.job", b64encode(pickle.dumps(state)).decode())


def _state() -> _RendezvousState:
    state = _RendezvousState()
    node = _NodeDesc("10.0.0.1", 4711, 0)
    state.participants[node] = 0
    state.wait_list.add(_NodeDesc("10.0.0.2", 4712, 0))
    state.last_heartbeats[node] = datetime.now(UTC)
    state.deadline = datetime.now(UTC)
    return state


def test_a_state_that_would_run_something_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(_Touches(marker)))
    assert marker.exists()  # so it would
    marker.unlink()
    store = HashStore()
    backend = PlainState(store, "job")
    for foreign in (_Touches(marker), {"participants": _Touches(marker)}):
        _put(store, foreign)
        with pytest.raises(RendezvousStateError, match="something else than a rendezvous"):
            backend.get_state()
        with pytest.raises(RendezvousStateError, match="something else than a rendezvous"):
            backend.set_state(pickle.dumps(_state()), b"an older token")  # which hands back what is there
    assert not marker.exists()
