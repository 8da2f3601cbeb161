"""What the elastic agent reads from a store that others can reach: torch's rendezvous state, and nothing that runs."""

from __future__ import annotations

import pickle
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from lockstep.launchers.plain_state import PlainState


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


def test_torchs_own_state_is_read() -> None:
    store = HashStore()
    _put(store, _state())
    found = PlainState(store, "job").get_state()
    assert found is not None
    assert pickle.loads(found[0]).participants == _state().participants


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
