"""Ranks on several nodes, by torch's elastic agent: restarted where one is lost, and where a node leaves or joins.

    lockstep train digits --nodes 1:4 --devices 2 --max-restarts 3 --init-method tcp://HOST:PORT --output RUN

The same command on each node starts one agent there (`torch.distributed.launcher`). The agents meet at HOST:PORT, which
HOST's agent serves, and start the ranks as torchrun would. An agent that loses another one, or is cut off, ends its
ranks at once; the remaining agents then start new ranks, which continue from the last checkpoint in RUN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .._torch import plain_rendezvous
from ..config.options import flatten_common
from ..config.schema import RunConfig
from ..errors import AbsentError, LockstepError, RequestError, RunError, Stopped
from ..monitor import failures, output
from ..monitor.failures import Failure
from ..monitor.keys import Keys
from . import hosts, join, rank, stores
from .plan import Entry, LaunchPlan, plan
from .process import end_with_parent, packed, value_of
from .supervisor import FINAL
from .variables import having, unset

_BACKEND = "lockstep"  # in torch's registry
_KEEP_ALIVE_S, _MISSED = 2, 3
_COUNTED_OUT_S = _KEEP_ALIVE_S * _MISSED  # an agent that is silent for so long is dropped, and ends its ranks itself
_ASK_AGAIN_S = 5.0
_LAST_CALL_S = 3  # for further nodes, once the least number has come
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"


def launch(entry: Entry, launch_plan: LaunchPlan, env: Mapping[str, str]) -> Any | None:
    """Run this node's ranks to completion; return rank 0's value, if local.

    Raises the error of this node's rank that failed after the last restart, `Stopped` after a signal to this node, and
    `RequestError` for a command without --output, and if too few nodes come within --timeout.
    """
    config, parallel = launch_plan.config, launch_plan.config.parallel
    hosts.check_interface(parallel.interface, env)
    if config.record.output is None:
        raise RequestError(
            f"--nodes {parallel.nodes_asked}: restarted ranks continue from the run's folder; give all nodes the same "
            "--output FOLDER, on a disk that they share."
        )
    host, port = hosts.host_and_port(parallel.init_method)
    options = json.dumps(flatten_common(config) | {"output": str(config.record.output)})
    agent = LaunchConfig(
        min_nodes=parallel.nodes,
        max_nodes=parallel.most_nodes,
        nproc_per_node=launch_plan.processes,
        run_id=stores.PREFIX,
        rdzv_backend=_BACKEND,
        rdzv_endpoint=hosts.url(host, port).removeprefix("tcp://"),
        rdzv_configs={
            "join_timeout": parallel.timeout,
            "options": hashlib.sha256(options.encode()).hexdigest(),
        },
        max_restarts=parallel.max_restarts,
        local_addr=hosts.own_address(host) or hosts.own_address(hosts.ANYWHERE) or host,
        signals_to_handle=_SIGNALS,
    )
    rendezvous_handler_registry.register(_BACKEND, _handler)
    payload = packed(entry, config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        last = stack.enter_context(stores.memory())  # the last failure of this node's ranks
        agent.rdzv_configs["last"] = last
        log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
        agent.logs_specs = DefaultLogsSpecs(log_dir=log_dir)
        try:
            value = elastic_launch(agent, _serve)(payload, str(last)).get(0)
        except Exception as error:
            if isinstance(error, SignalException) and error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise _error_to_raise(error, _failure(last), config) from error
    return None if value is None else value_of(value)


class _State(RendezvousBackend):
    """The state of torch's rendezvous in the agents' store: a pickle, checked before torch loads it."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.nodes, self.waiting = frozenset[Any](), frozenset[Any]()
        """torch's descriptions of the nodes that take part and that wait, from the last state read."""

    @property
    def name(self) -> str:
        return _BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return (state, token), or None without a state."""
        with _connected():
            return self._parse(self._keys.read("state"))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that has this token; return (state, token, success)."""
        with _connected():
            current = self._parse(self._keys.put("state", b64encode(state).decode(), token or ""))
        return None if current is None else (*current, current[0] == state)

    def _parse(self, text: str) -> tuple[bytes, Any] | None:
        if not text:
            return None
        try:
            state = b64decode(text)
            plain = plain_rendezvous(state)
            self.nodes, self.waiting = frozenset(plain.participants), frozenset(plain.wait_list)
        except Exception as error:  # a stranger's bytes may raise anything
            raise RendezvousStateError("The agents' store holds no state of a rendezvous.") from error
        return state, text


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RendezvousConnectionError("The agents' store does not answer.") from error


class _TooFewLeftError(RendezvousTimeoutError):
    """Fewer nodes are left than the least number, and no others came."""


class _Handler(DynamicRendezvousHandler):
    """torch's dynamic rendezvous, which ends this node's ranks if a node is lost or this one is cut off.

    torch's agent would wait until they fail, and then give them half a minute.
    """

    state: _State
    last: Path
    _joined = frozenset[Any]()
    _missed = frozenset[Any]()

    def next_rendezvous(self) -> Any:
        """Wait for the other nodes. Raises `RendezvousClosedError` after a failure that a restart would repeat."""
        if (failure := _failure(self.last)) and failure.kind in FINAL:
            raise RendezvousClosedError
        try:
            info = super().next_rendezvous()
        except RendezvousTimeoutError as error:
            if self._joined:
                raise _TooFewLeftError from error
            raise
        self._joined, self._missed = self.state.nodes, frozenset()
        self.last.write_text("", encoding="utf-8")
        return info

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join."""
        try:
            waiting = super().num_nodes_waiting()
        except RendezvousError:
            _kill_ranks()
            raise
        if gone := self._joined - self.state.nodes - self._missed:
            self._missed |= gone
            _kill_ranks()
            if lost := sorted({str(node.addr) for node in gone - self.state.waiting}):
                output.say(
                    f"Node{'s' * (len(lost) > 1)} {' and '.join(lost)} died, left or cannot be reached any more; the "
                    "ranks here are ended, and start again where --max-restarts allows it."
                )
        return int(waiting)


def _kill_ranks() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return this node's handler; serve the store if the address is this host's and no other process serves it."""
    host, port = hosts.host_and_port(f"tcp://{parameters.endpoint}")
    patience_s = float(parameters.get("join_timeout"))
    opened = _open(host, port, patience_s)
    options, store, run = str(parameters.get("options")), opened.keys.store, parameters.run_id
    if opened.keys.put("options", options) != options:
        raise RequestError(
            f"{opened.name}: the agents of another job meet there, or of this one with other flags; give each job a "
            "separate port, and all nodes of a job the same command."
        )
    store.set_timeout(timedelta(seconds=2 * _COUNTED_OUT_S))
    state = _State(Keys(store, run, _COUNTED_OUT_S))
    handler: _Handler = _Handler.from_backend(
        *(run, store, state, parameters.min_nodes, parameters.max_nodes, parameters.local_addr),
        # Long enough to detect a lost node, and to wait for late ones.
        RendezvousTimeout(timedelta(seconds=max(patience_s, 2 * _COUNTED_OUT_S)), timedelta(seconds=_LAST_CALL_S)),
        *(_KEEP_ALIVE_S, _MISSED),
    )
    handler.state, handler.last = state, parameters.get("last")
    return handler


def _open(host: str, port: int, patience_s: float) -> stores.Rendezvous:
    """Serve the agents' store if the address is this host's; else open it there.

    Asks for the address again and again: a pod's name appears later than the pod, and may first mean its predecessor.
    """
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(RequestError):
            return stores.serve(host, port)
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return stores.connect(host, port, patience_s, attempt_s=min(left_s, _ASK_AGAIN_S))
        except AbsentError:
            if time.monotonic() >= deadline:
                raise


def _serve(payload: bytes, last: str) -> bytes | None:
    """Run as a rank that torch's agent has started; return rank 0's pickled value. After a failure, exit.

    Writes the failure to the file `last`, unless it is an echo of another rank's on this node.
    """
    end_with_parent()
    entry, config = pickle.loads(payload)  # from the parent
    with rank.console() as print_failure:
        try:
            value = join.launch(entry, plan(_as_rank(config), os.environ), os.environ)
            return None if value is None else pickle.dumps(value)
        except LockstepError as error:
            failure = failures.describe(error, int(os.environ["RANK"]))
            restart, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
            if not failure.is_echo or _failure(Path(last)) is None:
                Path(last).write_text(json.dumps(dataclasses.asdict(failure)), encoding="utf-8")
            if restart < most and not failure.is_echo and failure.kind not in FINAL:  # the agent reports the last one
                notice = f"; the ranks start again (restart {restart + 1} of {most})."
                print_failure(dataclasses.replace(failure, sentence=f"{failure.sentence.removesuffix('.')}{notice}"))
            output.flush()
            os._exit(error.exit_code)


def _failure(last: Path) -> Failure | None:
    """Return the failure that a rank of this node has written, or None."""
    with contextlib.suppress(ValueError):  # empty, or another rank is writing
        return Failure(**json.loads(last.read_text(encoding="utf-8")))
    return None


def _error_to_raise(error: Exception, failure: Failure | None, config: RunConfig) -> LockstepError:
    """Return the error to raise after this node's agent ended with `error`; `failure` is the last one of its ranks."""
    parallel, hint, url = config.parallel, failures.resume_hint(config), config.parallel.init_method
    # After ranks have saved and stopped, the agent that serves the store may be gone.
    if failure is not None and failure.kind == Stopped.__name__:
        return failure.error()
    if isinstance(error, SignalException):
        return Stopped(f"This node was stopped; {hint}.")
    if isinstance(error, RendezvousConnectionError):
        return RunError(
            f"{url}: the agent there, which all nodes need, has not answered {socket.gethostname()} for "
            f"{_COUNTED_OUT_S} s: this node is cut off, or that one is down. The ranks here were ended, so that they "
            "do not disturb the other nodes; start the same command here again, and this node rejoins."
        )
    if isinstance(error, LockstepError):  # of `stores`
        return error
    if isinstance(error, _TooFewLeftError):
        return RunError(f"{url}: fewer than --nodes {parallel.nodes} are left, and no others came; {hint}.")
    if failure is not None:
        return failure.error()
    if isinstance(error, RendezvousTimeoutError):
        host, _ = hosts.host_and_port(url)
        return RequestError(
            f"{url}: fewer than --nodes {parallel.nodes} came within --timeout {parallel.timeout:g} s; start the same "
            f"command on every node, with the same flags{hosts.caution(host)}."
        )
    if isinstance(error, ChildFailedError):
        return RunError(f"The ranks of this node ended without a report ({failures.one_line(error)}); {hint}.")
    return RunError(f"{url}: the agents could not continue together ({failures.one_line(error)}); {hint}.")


def _as_rank(config: RunConfig) -> RunConfig:
    """Return the config of a started rank, which continues the run if its folder has a checkpoint."""
    parallel = dataclasses.replace(
        config.parallel, launcher="environment", nodes_asked="1", max_restarts=0, init_method=""
    )
    checkpoint = dataclasses.replace(config.checkpoint, resume=config.checkpoint.resume or "auto")
    return dataclasses.replace(config, parallel=parallel, checkpoint=checkpoint)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's agent from logging failures that lockstep reports."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # torch 2.15 with a shared store: a node that joins waits in vain for the address of the first.
        with having({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | unset(stores.QUIET_TORCH)):
            yield
    finally:
        logging.disable(disabled)
