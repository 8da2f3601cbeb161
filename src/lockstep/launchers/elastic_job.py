"""One node's part in an elastic job: it agrees with the other nodes on who takes part, and says how the job ended.

An agent that gets no answer from the agents' store knows that its node is the lost one, and ends its ranks before the
others, who wait for latecomers, begin anew.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C import _DistError as DistError
from torch._C import _DistStoreError as DistStoreError
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from .. import failures
from ..config import RunConfig
from ..errors import RequestError, RunError, Stopped
from ..interrupts import KILLED, heeded
from ..printable import told
from . import hosts
from .agent import Agent
from .bounded_store import BoundedStore, Unanswered
from .members import COUNTED_OUT_S, KEEP_ALIVE_S, MISSED, Members
from .memory import MemoryNotes
from .plain_state import PlainState
from .reports import value_of
from .stores import QUIET_TORCH, Meeting, StoredNotes
from .variables import having, unset

_UNBEGUN = "Stopped before training began."
_LAST_CALL_S = 5
_KEEP_ALIVES_S = 2 * KEEP_ALIVE_S
_WORD_OF_ALL = timedelta(seconds=2 * COUNTED_OUT_S)  # for what each node says of itself, once all have come


class _Handler(DynamicRendezvousHandler):
    """torch's rendezvous, which takes nodes in where none is missing: a lost one is a failure, and told as one."""

    members: Members

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to be taken in."""
        waiting = int(super().num_nodes_waiting())
        return 0 if self.members.fewer() else waiting

    def leave(self) -> None:
        """Say no more that this node lives, though its process may: the others go on without it."""
        self._stop_heartbeats()


def _handler(store: Store, job: str, address: str, config: RunConfig) -> _Handler:
    """Return this node's part in the meetings of the agents."""
    parallel, state = config.parallel, PlainState(store, job)
    handler: _Handler = _Handler.from_backend(
        job,
        store,
        state,
        parallel.nodes,
        parallel.most_nodes,
        address,
        RendezvousTimeout(timedelta(seconds=_patience_s(config)), timedelta(seconds=_LAST_CALL_S)),
        KEEP_ALIVE_S,
        MISSED,
    )
    handler.members = Members(state, address)
    return handler


def _patience_s(config: RunConfig) -> float:
    """Return how long nodes are waited for: enough to find out that one is lost, and to wait for latecomers."""
    return max(config.parallel.timeout, COUNTED_OUT_S + _LAST_CALL_S + _KEEP_ALIVES_S)


_FOR_TORCHS_AGENT = {
    # The ranks meet at the agents' own store: torch need not serve another one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Signals are ours to handle, and what nohup ignores is not to be.
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
}


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch from telling what is told in our words: its agent here, its C++ code in the ranks."""
    # Each of the agent's modules sets a level of its own.
    theirs = ("torch.distributed.elastic", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(theirs)]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with having(unset(QUIET_TORCH)):
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@having(_FOR_TORCHS_AGENT)
@_quiet_torch()
def run(
    meeting: Meeting,
    config: RunConfig,
    *,
    job: str,
    processes: int,
    serve: Callable[..., object],
    payload: tuple[Any, ...],
    folder: Path,
    notes: Path | None,
) -> Any | None:
    """Keep `processes` ranks running `serve(*payload, start)` until they are done; return rank 0's value, or None.

    The agents meet at `meeting` and call this job `job`; `folder` is an empty one, for what ranks leave, and `notes` a
    file in memory for what outlives a start, on one node. Raises the error of the rank that failed first, once it is
    not to be started again.
    """
    parallel, where = config.parallel, meeting.where
    if meeting.hosted and parallel.nodes < parallel.most_nodes and meeting.caution:
        _say(f"{where}: nobody comes there from another host{meeting.caution}.")
    address = hosts.own_address(meeting.host) or meeting.host  # this host's, among the agents
    store = meeting.store if meeting.hosted else BoundedStore(meeting.store, COUNTED_OUT_S)
    store.set_timeout(_WORD_OF_ALL)
    handler = _handler(store, job, address, config)
    spec = WorkerSpec(
        role="rank",
        local_world_size=processes,
        rdzv_handler=handler,
        entrypoint=serve,
        args=payload,
        max_restarts=parallel.max_restarts,
        monitor_interval=0.1,
        local_addr=address,
    )
    lasting = MemoryNotes(notes) if notes else StoredNotes(store, job)
    agent = Agent(spec, handler.members, folder, config, lasting, _say)
    stopped = False
    heeding = ExitStack()
    heeding.enter_context(heeded(agent.hear))
    try:
        result = agent.run()
    except SignalException as error:
        if (values := agent.values()) is not None:  # the signal came too late
            return _value(values)
        stopped = True
        if agent.insisted:
            raise RunError(KILLED) from error
        raise _cause(agent, Stopped(agent.stopped_between if agent.has_begun else _UNBEGUN)) from error
    except RendezvousTimeoutError as error:
        raise _too_few(agent, meeting, config) from error
    except RendezvousClosedError as error:
        raise _cause(agent, RunError(f"{where}: the agent of another node has ended the job; it says why.")) from error
    except (RendezvousConnectionError, RendezvousStateError, Unanswered, TimeoutError, DistError) as error:
        if isinstance(store, BoundedStore) and not store.answers:
            raise _cut_off(where) from error
        if isinstance(error, TimeoutError | DistStoreError) and meeting.is_open():
            raise RunError(
                f"{where}: nodes came there and fell silent, again and again; their agents say why."
            ) from error
        raise _left_alone(agent, where, failures.again(config)) from error
    finally:
        agent.close()
        if stopped:  # a node that is stopped leaves; one that is done, or has failed, ends the job
            handler.leave()
        else:
            handler.shutdown()
        heeding.close()
    if result is None:
        _say(f"{where}: the job has ended, and this node was not needed.")
        return None
    if result.is_failed():
        raise _cause(agent, RunError("The ranks ended without a reason."))
    return _value(result.return_values)


def _too_few(agent: Agent, meeting: Meeting, config: RunConfig) -> Exception:
    """Return the error where nodes did not come, or not again."""
    nodes, patience_s = config.parallel.nodes, _patience_s(config)
    if agent.cause is None:
        return RequestError(
            f"{meeting.where}: fewer than --nodes {nodes} came within {patience_s:g} s; start the command on every "
            f"node, or raise --timeout{meeting.caution}."
        )
    return _stopped(agent) or RunError(
        f"{meeting.where}: fewer than --nodes {nodes} are left, and no others came within {patience_s:g} s; "
        f"{failures.again(config)}."
    )


def _cut_off(where: str) -> Exception:
    """Return the error of a node that does not reach the agents' store any more."""
    return RunError(
        f"{where}: the agent there, which all nodes need, has not answered {socket.gethostname()} for {COUNTED_OUT_S} "
        "s: this node is cut off, or that one is down. The ranks here were ended, lest they disturb those of nodes "
        "that go on; give the same command here again, and it is taken in, or, where no node goes on, start all of "
        "them with --resume auto."
    )


def _left_alone(agent: Agent, where: str, again: str) -> Exception:
    """Return the error of a node whose agents' store has ended."""
    if not agent.has_begun:
        return RunError(f"{where}: the agent there has ended, and the job with it, before this node had a part in it.")
    return _stopped(agent) or RunError(
        f"{where}: the agent there, which all nodes need, has ended or cannot be reached any more; {again}."
    )


def _stopped(agent: Agent) -> Exception | None:
    """Return the ranks' word where they had saved and stopped: another node was asked to, and does not come back."""
    return agent.cause.error() if agent.cause is not None and agent.cause.kind == Stopped.__name__ else None


def _value(values: Mapping[int, bytes]) -> Any | None:
    return value_of(values[0]) if 0 in values else None


def _cause(agent: Agent, otherwise: Exception) -> Exception:
    return agent.cause.error() if agent.cause is not None else otherwise


def _say(text: str) -> None:
    with suppress(OSError):
        print(told(text), end="", file=sys.stderr, flush=True)
