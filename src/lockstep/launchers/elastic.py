"""Ranks that are started again when one of them is lost, by torch's elastic agent: one agent a node.

    lockstep train digits --devices 2 --max-restarts 3                                       on one node
    lockstep train digits --nodes 1:4 --devices 2 --max-restarts 3 --init-method tcp://HOST:PORT      the same on each

The agents meet at a store that HOST's serves, agree on which nodes there are, and start the ranks. After a loss they
end those that are left, agree anew, and start them again; the new ranks find the run's folder in that store's notes and
go on from its last checkpoint. A node that comes later is taken in: the ranks save, stop, and start again with it. On
one node there is no address: the agent agrees with itself, and its ranks meet in its memory.

Which nodes there are is torch's business (its dynamic rendezvous), and so is keeping the processes. Ours is how the
ranks meet (by our roll call, over the agents' store), how they are ended, and what the user reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import pickle
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .. import bounded, failures
from ..config import RunConfig
from ..errors import RequestError
from ..options import flatten_common
from . import dialects, lifeline, manual, memory, rank, reasons, secret, stores
from .base import Entry
from .devices import processes
from .reports import pickled
from .spawn import packed


class ElasticLauncher:
    """Starts one process for each device of this host, as agents of other hosts do of theirs, and starts them again."""

    name = "elastic"

    def starts_here(self, config: RunConfig) -> bool:
        """Return whether there is no other node, on which rank 0 might be."""
        return config.parallel.most_nodes == 1

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return False: flags ask for it, never the environment."""
        return False

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Keep ranks of this node running until they are done; return rank 0's value where that is one of them.

        Raises the error of the rank that failed first, once it is not to be started again.
        """
        payload = packed(entry, config)
        size = processes(config, env)
        with contextlib.ExitStack() as kept:
            folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-")))
            meeting = _meeting(config, env)
            from . import elastic_job  # which imports torch, when the user has read what was wrong with the flags

            job = _agree_on_job(meeting, config)
            known = secret.of_job(env, on_one_host=False)
            notes = kept.enter_context(memory.file()) if config.parallel.most_nodes == 1 else None
            door = _Door(meeting.host, meeting.port, job, known, notes)
            return elastic_job.run(
                meeting,
                config,
                job=job,
                processes=size,
                serve=serve,
                payload=(payload, door),
                folder=folder,
                notes=notes,
            )


def _meeting(config: RunConfig, env: Mapping[str, str]) -> stores.Meeting:
    """Return the store at which the agents meet: one of this process alone, or that of the agent at the address."""
    parallel = config.parallel
    if parallel.most_nodes == 1:
        return stores.alone()
    if parallel.init_method.startswith("tcp:"):
        known = secret.of_job(env, on_one_host=False)
        return stores.join(*manual.host_and_port(parallel.init_method), parallel.timeout, secret=known)
    raise RequestError(
        f"--nodes {parallel.nodes_asked}: nothing says where the nodes meet; give the same --init-method "
        "tcp://HOST:PORT on each, with the address of a node that will not leave, or start with torchrun."
    )


@dataclass(frozen=True)
class _Door:
    """Where a rank that an agent has started finds the others."""

    host: str
    port: int
    job: str
    secret: bytes
    notes: Path | None
    """On one node: the file in memory for what outlives a start."""

    def open(self, start: str, timeout_s: float) -> stores.Meeting:
        """Open the store of this `start`: on one node the path of a file in memory, else a name among the agents'."""
        if self.notes is not None:
            return stores.open_memory(Path(start), memory.MemoryNotes(self.notes))
        return stores.connect(self.host, self.port, timeout_s, secret=self.secret, job=self.job, start=start)


def _agree_on_job(meeting: stores.Meeting, config: RunConfig) -> str:
    """Return what all agents call this job; raise where those who meet here were asked for another one."""
    # Whoever joins writes to the run's folder, which the first start has named: another one was meant for another run.
    options = flatten_common(config) | {"output": str(config.record.output or "")}
    asked = hashlib.sha256(json.dumps(options).encode()).hexdigest()
    _check_no_roll_call(meeting)
    job, _, theirs = meeting.store.compare_set("job", "", f"{secrets.token_hex(4)}/{asked}").decode().partition("/")
    if theirs != asked:
        raise RequestError(
            f"{meeting.where}: the agents of another job meet there, or of this one with other flags; give each job a "
            "port of its own, and all nodes of a job the same command."
        )
    return job


def _check_no_roll_call(meeting: stores.Meeting) -> None:
    """Raise where ranks of a job without agents have met."""
    key = "claim/0"
    if not meeting.hosted and meeting.store.check([key]) and meeting.store.get(key):
        raise RequestError(
            f"{meeting.where}: the ranks of another job, which were started by hand, meet there; give this job a port "
            "of its own."
        )


def serve(payload: bytes, door: _Door, start: str) -> NoReturn:
    """Be one rank that an agent has started: run the entry, leave its pickled value for the agent, end."""
    lifeline.settle()
    lifeline.end_with_parent()
    faulthandler.disable()  # which torch has set to the console, and a run sets to its own file
    place = dialects.read(os.environ)
    index = place.topology.rank
    config = RunConfig()
    try:
        entry, config = pickle.loads(payload)  # from our own parent
        value = pickled(
            rank.run_met(
                entry,
                config,
                os.environ,
                lambda: door.open(start, config.parallel.timeout),
                index=index,
                size=place.topology.size,
                known=place.topology,
                tell=lambda failure: reasons.leave(failure, place.error_file),
            )
        )
    except BaseException as error:
        reasons.leave(failures.account(error, index, config), place.error_file)
        rank.vanish(error)
    reasons.leave_value(value, place.error_file)
    bounded.leave(0)  # and not as torch has it, where a rank waits until its agent has heard it
