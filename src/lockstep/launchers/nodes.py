"""Ranks of several nodes that are started again when one of them is lost, or comes: one agent a node.

    lockstep train digits --nodes 1:4 --devices 2 --max-restarts 3 --init-method tcp://HOST:PORT      the same on each

The agents meet at a store that HOST's serves. Which nodes there are is torch's business (its dynamic rendezvous, by its
public interface); each agent then starts this node's ranks as on one host (see `supervisor`). After a loss the agents
end those that are left, agree anew, and start them again; the new ranks find the run's folder in that store's notes and
go on from its last checkpoint. For a node that comes later the ranks save, stop, and start again with it.

Each agent says every two seconds that it lives. One that has not for six is counted out by torch's rendezvous, and the
others end ranks that wait for it. An agent that gets no answer from the store knows that its node is the lost one, and
ends its ranks before the others, who wait for latecomers, begin anew.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import json
import logging
import secrets
import socket
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from .._torch import plain_rendezvous
from ..config.options import flatten_common
from ..config.schema import RunConfig
from ..errors import RequestError, RunError, Stopped
from ..monitor import bounded, failures
from ..monitor.failures import Failure
from ..monitor.keys import Keys, Unanswered
from ..world.topology import Topology
from . import hosts, stores
from .devices import Entry, host_and_port, processes
from .stores import PREFIX
from .supervisor import Door, Supervisor, packed, say, value_of
from .variables import having, unset

_KEEP_ALIVE_S, _MISSED = 2, 3
_COUNTED_OUT_S = _KEEP_ALIVE_S * _MISSED
_LAST_CALL_S = 5
_WORD_OF_ALL_S = 2.0 * _COUNTED_OUT_S  # for what each node says of itself, once all have come
_AGREEING = 3  # times, of which each but the last may lose a node
_ALONE_S = 3.0  # for ranks to find out by themselves that another node has lost its own, and how
_LOOK_S = 0.3
_OTHERS_S = 30.0  # for other nodes to be done


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
    """Keep this node's ranks running until they are done; return rank 0's value where that is one of them.

    Raises the error of the rank that failed first, once it is not to be started again.
    """
    payload, parallel = packed(entry, config), config.parallel
    secret = stores.of_job(env, on_one_host=False)
    meeting = stores.join(*host_and_port(parallel.init_method), parallel.timeout, secret=secret)
    if meeting.hosted and parallel.nodes < parallel.most_nodes and meeting.caution:
        say(f"{meeting.where}: nobody comes there from another host{meeting.caution}.")
    job = _agree_on_job(meeting, config)
    # The ranks meet at the agents' own store: torch need not serve another one.
    with having({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | unset(stores.QUIET_TORCH)), _quiet():
        return _Agent(meeting, job, secret, config, processes(config, env)).run(payload)


def _agree_on_job(meeting: stores.Meeting, config: RunConfig) -> str:
    """Return what all agents call this job; raise where those who meet here were asked for another one."""
    # Whoever joins writes to the run's folder, which the first start has named: another one was meant for another run.
    options = flatten_common(config) | {"output": str(config.record.output or "")}
    asked = hashlib.sha256(json.dumps(options).encode()).hexdigest()
    if meeting.keys.read("call"):
        raise RequestError(
            f"{meeting.where}: the ranks of another job, which were started by hand, meet there; give this job a port "
            "of its own."
        )
    job, _, theirs = meeting.keys.put("job", f"{secrets.token_hex(4)}/{asked}").partition("/")
    if theirs != asked:
        raise RequestError(
            f"{meeting.where}: the agents of another job meet there, or of this one with other flags; give each job a "
            "port of its own, and all nodes of a job the same command."
        )
    return job


class _State(RendezvousBackend):
    """Where torch's rendezvous keeps its state, a pickle: read only where it is nothing but that (see `_torch`)."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.round, self.nodes, self.closed = -1, tuple[str, ...](), False
        """How often nodes have agreed before, those that take part, by address, and whether one has ended the job."""

    @property
    def name(self) -> str:
        """The name of the backend."""
        return PREFIX

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return (state, token), None where there is none."""
        with _as_torch_tells_it():
            return self._seen(self._keys.read("nodes"))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Put the state there, in the place of the one with this token; return (state, token, whether it was put)."""
        with _as_torch_tells_it():
            found = self._seen(self._keys.put("nodes", b64encode(state).decode(), token or ""))
        return None if found is None else (*found, found[0] == state)

    def _seen(self, text: str) -> tuple[bytes, Any] | None:
        if not text:
            return None
        try:
            state = b64decode(text)
            plain = plain_rendezvous(state)
            self.round, self.closed = plain.round, plain.closed
            self.nodes = tuple(sorted(node.addr for node in plain.participants))
        except (binascii.Error, Exception) as error:
            raise RendezvousStateError("The agents' store holds something else than a rendezvous.") from error
        return state, text


@contextlib.contextmanager
def _as_torch_tells_it() -> Iterator[None]:
    """Raise what torch's thread that says that this node lives takes for a store which does not answer."""
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RendezvousConnectionError("The agents' store does not answer.") from error


class _Agent:
    """One node's part in the job."""

    def __init__(self, meeting: stores.Meeting, job: str, secret: bytes, config: RunConfig, here: int) -> None:
        self._meeting, self._job, self._secret, self._config, self._here = meeting, job, secret, config, here
        parallel = config.parallel
        meeting.store.set_timeout(timedelta(seconds=_WORD_OF_ALL_S))
        self._keys = Keys(meeting.store, f"{PREFIX}/{job}", secret, _COUNTED_OUT_S)
        self._state = _State(self._keys)
        self._address = hosts.own_address(meeting.host) or meeting.host  # this host's, among the agents
        # Enough to find out that a node is lost, and to wait for latecomers.
        self._patience_s = max(parallel.timeout, _COUNTED_OUT_S + _LAST_CALL_S + 2 * _KEEP_ALIVE_S)
        times = RendezvousTimeout(timedelta(seconds=self._patience_s), timedelta(seconds=_LAST_CALL_S))
        self._handler = DynamicRendezvousHandler.from_backend(
            job,
            meeting.store,
            self._state,
            parallel.nodes,
            parallel.most_nodes,
            self._address,
            times,
            _KEEP_ALIVE_S,
            _MISSED,
        )
        self._first: tuple[int, tuple[str, ...]] = (-1, ())
        self._fewer_since_s = self._looked_s = 0.0
        self._has_asked = False

    def run(self, payload: bytes) -> Any | None:
        """Return rank 0's value where it is one of this node's, once all are done."""
        cause: Failure | None = None
        supervisor = Supervisor(self._config)
        is_stopped = False
        try:
            with supervisor:
                while True:
                    places, door, shared = self._agree(supervisor)
                    ended = supervisor.run(places, payload, door, lambda: self._look(supervisor))
                    if not isinstance(ended, Failure):
                        shared.write(f"done/{places[0].node}", "1")
                        if self._meeting.hosted:  # the others need the store
                            self._await([f"done/{node}" for node in range(places[0].nodes)], shared, _OTHERS_S)
                        return value_of(ended)
                    cause = ended
                    if not supervisor.starts_again(cause):
                        raise cause.error()
        except Stopped:
            is_stopped = True  # a node that is stopped leaves; one that is done, or has failed, ends the job
            raise
        except RendezvousGracefulExitError:
            say(f"{self._meeting.where}: the job has ended, and this node was not needed.")
            return None
        except (RendezvousError, RuntimeError, TimeoutError) as error:
            raise self._told(error, cause) from error
        finally:
            with contextlib.suppress(RendezvousError, RuntimeError):
                if not is_stopped:
                    self._handler.shutdown()

    def _agree(self, supervisor: Supervisor) -> tuple[list[Topology], Door, Keys]:
        """Agree with the other nodes on who takes part; return this node's ranks, and where all ranks meet."""
        for left in reversed(range(_AGREEING)):
            try:
                with supervisor.waiting():
                    info = bounded.within(self._patience_s + _OTHERS_S, self._handler.next_rendezvous, "rendezvous")
                    shared = Keys(info.store, PREFIX, self._secret, _COUNTED_OUT_S)
                    nodes = [f"node/{node}" for node in range(info.world_size)]
                    shared.write(nodes[info.rank], f"{self._here}")
                    if self._await(nodes, shared, _WORD_OF_ALL_S):
                        break
            except RuntimeError as error:  # torch has waited in vain for what each node says of itself
                if not left or isinstance(error, Unanswered):
                    raise
            if not left:
                raise TimeoutError
            say("A node was lost while the nodes agreed on who takes part; the others agree anew.")
        sizes = [int(text) for text in shared.read_all(nodes)]
        start = shared.put("start", secrets.token_hex(8))
        self._first, self._fewer_since_s, self._has_asked = (self._state.round, self._state.nodes), 0.0, False
        first, size = sum(sizes[: info.rank]), sum(sizes)
        places = Topology.of_node(self._here, first=first, size=size, node=info.rank, nodes=info.world_size)
        host, port = self._meeting.host, self._meeting.port
        return places, Door(host=host, port=port, secret=self._secret, job=self._job, start=start, served=True), shared

    @staticmethod
    def _await(keys: list[str], shared: Keys, limit_s: float) -> bool:
        until_s = time.monotonic() + limit_s
        while not shared.check(keys):
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def _look(self, supervisor: Supervisor) -> Failure | None:
        """Return why this node's ranks are to end: a node was lost. Have them save where one waits to be taken in."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now_s
        waiting = self._handler.num_nodes_waiting()
        if lost := self._lost():
            return Failure(0, "", f"{lost}; {failures.again(self._config)}.", "")
        if waiting and not self._fewer() and not self._has_asked:
            self._has_asked = True
            say("Another node has come: the ranks save, and start again with it.")
            supervisor.ask_to_stop()
        return None

    def _fewer(self) -> bool:
        """Return whether nodes that there were at the beginning are no more, this one perhaps."""
        state, (first, nodes) = self._state, self._first
        return not state.closed and (state.round != first or len(state.nodes) < len(nodes))

    def _lost(self) -> str:
        """Return what has happened where a node was lost, in a sentence without its full stop; "" where none was.

        Where this node itself was counted out, the others may train already: that is told at once. Where another one
        was, the ranks have a moment to find out by themselves.
        """
        state, (first, nodes) = self._state, self._first
        if not self._fewer():
            self._fewer_since_s = 0.0
            return ""
        if state.round != first or self._address not in state.nodes:
            return (
                f"The other nodes heard nothing of this one ({socket.gethostname()}, {self._address}) for "
                f"{_COUNTED_OUT_S} s, and have given it up"
            )
        if not self._fewer_since_s:
            self._fewer_since_s = time.monotonic()
            self._gone = list(Counter(nodes) - Counter(state.nodes))  # others leave when they find out
        if time.monotonic() - self._fewer_since_s < _ALONE_S:
            return ""
        some = "Nodes" if self._gone[1:] else "Node"
        return f"{some} {' and '.join(self._gone)} died, left or cannot be reached by the network any more"

    def _told(self, error: Exception, cause: Failure | None) -> Exception:
        """Return what is raised where the nodes did not come together, or the store is gone."""
        where, nodes, again = self._meeting.where, self._config.parallel.nodes, failures.again(self._config)
        # Where the ranks had saved and stopped, another node was asked to, and does not come back.
        stopped = cause.error() if cause is not None and cause.kind == Stopped.__name__ else None
        if isinstance(error, RendezvousTimeoutError):
            if cause is None:
                return RequestError(
                    f"{where}: fewer than --nodes {nodes} came within {self._patience_s:g} s; start the command on "
                    f"every node, or raise --timeout{self._meeting.caution}."
                )
            return stopped or RunError(
                f"{where}: fewer than --nodes {nodes} are left, and no others came within {self._patience_s:g} s; "
                f"{again}."
            )
        if isinstance(error, RendezvousClosedError):
            ended = RunError(f"{where}: the agent of another node has ended the job; it says why.")
            return ended if cause is None else cause.error()
        if isinstance(error, Unanswered) or isinstance(error.__cause__, Unanswered):
            return RunError(
                f"{where}: the agent there, which all nodes need, has not answered {socket.gethostname()} for "
                f"{_COUNTED_OUT_S} s: this node is cut off, or that one is down. The ranks here were ended, lest they "
                "disturb those of nodes that go on; give the same command here again, and it is taken in, or, where "
                "no node goes on, start all of them with --resume auto."
            )
        return stopped or RunError(
            f"{where}: the agent there, which all nodes need, has ended or cannot be reached any more; {again}."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from telling what is told in our words; each of its modules sets a level of its own."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
