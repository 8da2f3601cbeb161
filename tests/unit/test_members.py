"""What an elastic agent reads of the other nodes, from a store that others can reach."""

from __future__ import annotations

import contextlib
import pickle
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from lockstep.errors import RunError
from lockstep.launchers import nodes, stores
from lockstep.launchers.nodes import _State
from lockstep.monitor.keys import Keys

from ..command import until
from ..ports import free_port
from ..starting import config


class _Touches:
    """A pickle of this makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_state_that_would_run_something_is_refused(tmp_path: Path) -> None:
    marker, keys = tmp_path / "ran", Keys(HashStore(), "job")
    for foreign in (_Touches(marker), {"participants": _Touches(marker)}):
        keys.write("nodes", b64encode(pickle.dumps(foreign)).decode())
        with pytest.raises(RendezvousStateError):
            _State(keys).get_state()
        with pytest.raises(RendezvousStateError):
            _State(keys).set_state(b"ours", "an older token")  # which hands back what is there
        assert not marker.exists()
        pickle.loads(pickle.dumps(foreign))
        assert marker.exists()  # so it would
        marker.unlink()


@pytest.mark.long
def test_an_agent_that_waits_for_a_lost_node_goes_on_with_its_own_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_WORD_OF_ALL_S", 4.0)
    monkeypatch.setattr(nodes, "_AGREEING", 1)
    rendezvous = stores.serve("127.0.0.1", free_port())
    agent = nodes._Agent(rendezvous, "job", b"", config(nodes="1:2", devices=1), 1)
    agreed = SimpleNamespace(store=PrefixStore("round", rendezvous.keys.store), rank=0, world_size=2)
    agent._handler = SimpleNamespace(next_rendezvous=lambda: agreed)
    begun_s = time.monotonic()
    with ThreadPoolExecutor() as threads:
        agreeing = threads.submit(agent._agree)
        until(lambda: Keys(agreed.store, stores.PREFIX).check(["node/0"]))  # and never the other one's
        time.sleep(0.5)
        agent._state.get_state()
        assert time.monotonic() - begun_s < 3
        with pytest.raises(TimeoutError):
            agreeing.result()


def test_a_node_that_left_before_it_heard_of_all_is_not_taken_for_one_that_comes() -> None:
    """It gave up waiting, and waits to be taken in: this node's ranks would wait for those of its first coming."""
    rendezvous = stores.serve("127.0.0.1", free_port())
    agent = nodes._Agent(rendezvous, "job", b"", config(nodes="1:2", devices=1), 1)
    came: list[int] = []

    def agree() -> SimpleNamespace:
        came.append(2 if came else 1)  # nodes that take part by the time that this one hears of it
        agent._state.round, agent._state.nodes = len(came), ("10.0.0.1", "10.0.0.2")[: came[-1]]
        store = PrefixStore(f"round{len(came)}", rendezvous.keys.store)
        Keys(store, stores.PREFIX).write("node/1", "1")
        return SimpleNamespace(store=store, rank=0, world_size=2)

    agent._handler = SimpleNamespace(next_rendezvous=agree)
    places, _, _ = agent._agree()
    assert came == [1, 2]
    assert (places[0].size, agent._first) == (2, (2, ("10.0.0.1", "10.0.0.2")))


@pytest.mark.parametrize("insisted", [True, False])
def test_a_second_signal_ends_this_node_and_a_failure_the_job(insisted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RunError("killed or failed")

    supervisor = SimpleNamespace(insisted=insisted, run=fail)
    monkeypatch.setattr(nodes, "Supervisor", lambda config: contextlib.nullcontext(supervisor))
    agent = nodes._Agent(stores.serve("127.0.0.1", free_port()), "job", b"", config(nodes="1:2", devices=1), 1)
    monkeypatch.setattr(agent, "_agree", lambda: ([], None, None))
    with pytest.raises(RunError):
        agent.run(b"")
    assert agent._handler.is_closed() != insisted
