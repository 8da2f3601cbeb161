"""Elastic ranks on several nodes; restart when a node leaves or joins.

    lockstep train digits --nodes 1:4 --devices 2 --max-restarts 3 --init-method tcp://HOST:PORT      the same on each

Each node has one agent. The agents meet at a store that HOST's serves, and agree through torch's dynamic rendezvous;
each starts its node's ranks as on one host (see `supervisor`). After a loss they end the ranks that are left, agree
anew, and start others, which find the run's folder in that store's notes and go on from its last checkpoint. For a node
that comes later the ranks save, stop, and start again with it. A node without a heartbeat for six seconds is dropped.
An agent that gets no answer from the store knows that its own node is the lost one, and ends its ranks before the
others begin anew.
"""

from __future__ import annotations

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

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from .._torch import plain_rendezvous
from ..config.options import flatten_common
from ..config.schema import RunConfig
from ..errors import RequestError, RunError, Stopped
from ..monitor import bounded, failures
from ..monitor.failures import Failure
from ..monitor.keys import Keys, Unanswered
from ..monitor.notes import FOLDER
from ..monitor.output import say
from ..world.topology import Topology
from . import hosts, stores
from .plan import Entry, LaunchPlan
from .process import packed, value_of
from .stores import PREFIX, Endpoint
from .supervisor import Supervisor
from .variables import having, unset

_KEEP_ALIVE_S, _MISSED = 2, 3
_COUNTED_OUT_S = _KEEP_ALIVE_S * _MISSED
_LAST_CALL_S = 5
_WORD_OF_ALL_S = 2.0 * _COUNTED_OUT_S  # for what each node says of itself, once all have come
_AGREEING = 3  # times, of which each but the last may lose a node
_LOOK_S = 0.3
_OTHERS_S = 30.0  # for other nodes to be done


def launch(entry: Entry, planned: LaunchPlan, env: Mapping[str, str]) -> Any | None:
    """Run this node's ranks to completion; return rank 0's value, if local.

    Raises the error of the rank that failed first, once it is not to be started again.
    """
    config, parallel = planned.config, planned.config.parallel
    payload = packed(entry, config)
    hosts.check_interface(parallel.interface, env)
    (host, port), secret = hosts.host_and_port(parallel.init_method), stores.of_job(env, on_one_host=False)
    try:  # the store is served where the address is this host's and nobody serves it yet
        rendezvous = stores.serve(host, port, secret=secret)
        if parallel.nodes < parallel.most_nodes and rendezvous.caution:
            say(f"{rendezvous.where}: nobody comes there from another host{rendezvous.caution}.")
    except RequestError:
        rendezvous = stores.connect(host, port, parallel.timeout, secret=secret)
    # A node that joins writes to the run's folder, which the first start has named: another folder is another run's.
    options = flatten_common(config) | {"output": str(config.record.output or "")}
    asked = hashlib.sha256(json.dumps(options).encode()).hexdigest()
    job, _, theirs = rendezvous.keys.put("job", f"{secrets.token_hex(4)}/{asked}").partition("/")
    if theirs != asked:
        raise RequestError(
            f"{rendezvous.where}: the agents of another job meet there, or of this one with other flags; give each job "
            "a port of its own, and all nodes of a job the same command."
        )
    # The ranks meet at the agents' own store: torch need not serve another one.
    quiet = unset(stores.QUIET_TORCH)
    with having({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | quiet), contextlib.ExitStack() as kept:
        kept.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # what torch's rendezvous logs is told in our words
        value = _Agent(rendezvous, job, secret, config, planned.processes).run(payload)
    return None if value is None else value_of(value)


class _State(dynamic.RendezvousBackend):
    """The state of torch's rendezvous: a pickle, checked before torch reads it."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.round, self.nodes, self.closed = -1, tuple[str, ...](), False
        """The rendezvous round, the participating nodes by address, and whether a node has ended the job."""

    @property
    def name(self) -> str:
        return PREFIX

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return (state, token), None where there is none."""
        with _connected():
            return self._seen(self._keys.read("nodes"))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state with this token; return (state, token, success)."""
        with _connected():
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
        except Exception as error:
            raise rendezvous.RendezvousStateError(
                "The agents' store holds something else than a rendezvous."
            ) from error
        return state, text


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Raise torch's `RendezvousConnectionError` for a store that does not answer."""
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise rendezvous.RendezvousConnectionError("The agents' store does not answer.") from error


class _Agent:
    """One node's part in the job."""

    def __init__(self, rendezvous: stores.Rendezvous, job: str, secret: bytes, config: RunConfig, here: int) -> None:
        self._rendezvous, self._job, self._secret, self._config, self._here = rendezvous, job, secret, config, here
        parallel, store = config.parallel, rendezvous.keys.store
        store.set_timeout(timedelta(seconds=_WORD_OF_ALL_S))
        self._state = _State(Keys(store, f"{PREFIX}/{job}", secret, _COUNTED_OUT_S))
        self._address = hosts.own_address(rendezvous.host) or rendezvous.host  # this host's, among the agents
        # Enough to find out that a node is lost, and to wait for latecomers.
        self._patience_s = max(parallel.timeout, _COUNTED_OUT_S + _LAST_CALL_S + 2 * _KEEP_ALIVE_S)
        times = dynamic.RendezvousTimeout(timedelta(seconds=self._patience_s), timedelta(seconds=_LAST_CALL_S))
        self._handler = dynamic.DynamicRendezvousHandler.from_backend(
            job, store, self._state, parallel.nodes, parallel.most_nodes, self._address, times, _KEEP_ALIVE_S, _MISSED
        )
        self._first: tuple[int, tuple[str, ...]] = (-1, ())
        self._looked_s = 0.0
        self._has_asked = False

    def run(self, payload: bytes) -> bytes | None:
        """Return the pickled value of this node's first rank once all ranks are done. None if it was not needed."""
        cause: Failure | None = None
        is_stopped = False
        try:
            with Supervisor(self._config) as supervisor:
                while True:
                    places, endpoint, shared = self._agree()
                    ended = supervisor.run(places, payload, endpoint, lambda: self._look(supervisor))
                    if not isinstance(ended, Failure):
                        shared.write(f"done/{places[0].node}", "1")
                        if self._rendezvous.hosted:  # the others need the store
                            shared.await_all([f"done/{node}" for node in range(places[0].nodes)], _OTHERS_S)
                        return ended
                    cause = ended
                    if not supervisor.starts_again(cause):
                        raise cause.error()
                    supervisor.keep(self._rendezvous.keys.read(f"{self._job}/lasting/{FOLDER}"))
        except (Stopped, KeyboardInterrupt):
            is_stopped = True  # a node that is stopped leaves; one that is done, or has failed, ends the job
            raise
        except RunError:
            is_stopped = supervisor.insisted
            raise
        except rendezvous.RendezvousGracefulExitError:
            say(f"{self._rendezvous.where}: the job has ended, and this node was not needed.")
            return None
        except (rendezvous.RendezvousError, RuntimeError, TimeoutError) as error:
            raise self._told(error, cause) from error
        finally:
            with contextlib.suppress(rendezvous.RendezvousError, RuntimeError):
                if not is_stopped:
                    self._handler.shutdown()

    def _agree(self) -> tuple[list[Topology], Endpoint, Keys]:
        """Agree on the participating nodes; return this node's ranks, endpoint and keys."""
        for left in reversed(range(_AGREEING)):
            late: Exception = TimeoutError()
            try:
                info = bounded.within(self._patience_s + _OTHERS_S, self._handler.next_rendezvous, "rendezvous")
                # Now: a node that gives up waiting below, and comes again, would count as another node.
                self._first, self._has_asked = (self._state.round, self._state.nodes), False
                # A wait occupies its connection: on the agent's own it would silence this node's heartbeats.
                shared = Keys(info.store, PREFIX, self._secret).clone(limit_s=_COUNTED_OUT_S)
                nodes = [f"node/{node}" for node in range(info.world_size)]
                shared.write(nodes[info.rank], f"{self._here}")
                sizes = shared.await_all(nodes, _WORD_OF_ALL_S)
                if sizes and len(self._state.nodes) == info.world_size:
                    break
            except RuntimeError as error:  # torch has waited in vain for what each node says of itself
                if isinstance(error, Unanswered):
                    raise
                late = error
            if not left:
                raise late
            say("A node was lost while the nodes agreed on who takes part; the others agree anew.")
        ranks = list(map(int, sizes))
        places = Topology.of_node(
            self._here, first=sum(ranks[: info.rank]), size=sum(ranks), node=info.rank, nodes=info.world_size
        )
        host, port, start = self._rendezvous.host, self._rendezvous.port, shared.put("start", secrets.token_hex(8))
        return (
            places,
            Endpoint(host=host, port=port, secret=self._secret, job=self._job, start=start, served=True),
            shared,
        )

    def _look(self, supervisor: Supervisor) -> Failure | None:
        """Return the failure of a lost node. Ask the ranks to save and stop if a new node waits."""
        if time.monotonic() < self._looked_s + _LOOK_S:
            return None
        self._looked_s = time.monotonic()
        is_waited = self._handler.num_nodes_waiting() > 0
        state, (first, nodes) = self._state, self._first
        gone = list((Counter(nodes) - Counter(state.nodes)).elements())
        if not state.closed and (state.round != first or gone):
            lost = f"Node{'s' * (len(gone) > 1)} {' and '.join(gone)} died, left or cannot be reached any more"
            if state.round != first or self._address in gone:
                lost = (
                    f"The other nodes heard nothing of this one ({socket.gethostname()}, {self._address}) for "
                    f"{_COUNTED_OUT_S} s, and have given it up"
                )
            return Failure(0, "", f"{lost}; {failures.resume_hint(self._config)}.", "")
        if is_waited and not self._has_asked:
            self._has_asked = True
            say("Another node has come: the ranks save, and start again with it.")
            supervisor.ask_to_stop()
        return None

    def _told(self, error: Exception, cause: Failure | None) -> Exception:
        where, nodes, hint = self._rendezvous.where, self._config.parallel.nodes, failures.resume_hint(self._config)
        is_late, patience_s = isinstance(error, rendezvous.RendezvousTimeoutError), self._patience_s
        if is_late and cause is None:
            return RequestError(
                f"{where}: fewer than --nodes {nodes} came within {patience_s:g} s; start the command on every node, "
                f"or raise --timeout{self._rendezvous.caution}."
            )
        if isinstance(error, Unanswered) or isinstance(error.__cause__, Unanswered):
            return RunError(
                f"{where}: the agent there, which all nodes need, has not answered {socket.gethostname()} for "
                f"{_COUNTED_OUT_S} s: this node is cut off, or that one is down. The ranks here were ended, lest they "
                "disturb those of nodes that go on; give the same command here again, and it is taken in, or, where "
                "no node goes on, start all of them with --resume auto."
            )
        is_closed = isinstance(error, rendezvous.RendezvousClosedError)
        if cause is not None and (is_closed or cause.kind == Stopped.__name__):
            return cause.error()  # where ranks had saved and stopped, another node was asked to, and does not come back
        ended = "the agent of another node has ended the job, or cannot be reached any more: see its own message"
        few = f"fewer than --nodes {nodes} are left, and no others came within {patience_s:g} s"
        return RunError(f"{where}: {few if is_late else ended}; {hint}.")
