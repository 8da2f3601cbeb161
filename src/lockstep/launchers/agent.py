"""torch's elastic agent, ending ranks as ours want to be ended and saying what happens in sentences.

torch's agent restarts whatever fails, gives ranks 30 seconds after SIGTERM even where one of them is gone and the
others can only wait for it, and logs; its reasons are read from files. This one does not restart what would fail again
(a refused request, a failed proof), kills what is left of a lost world at once, lets the ranks save where a node has
come to join them, and passes a signal of the user's on. Where a node is lost, it ends its ranks, to go on without it.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C import _DistStoreError as DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from .. import failures
from ..config import RunConfig
from ..errors import ProofError, RequestError, Stopped
from ..failures import Failure
from ..interrupts import OUTSIDE, Heard, Interrupts
from ..notes import Notes
from . import lifeline, memory, reasons
from .frozen import Frozen
from .members import Members
from .reports import GRACE_S, Laggards, left_behind, obituary, unsaved

_FINAL = {RequestError.__name__, ProofError.__name__}
"""What would be the same again."""
_WORD_S = 0.5  # for the other ranks of this node to say why they end, before they are ended
_KILLED_S = 5.0  # for ranks to be gone once they are killed
_DONE_S = 10.0  # for ranks that are done to end what they have started
_OTHERS_S = 30.0  # for other nodes to be done
_LOOK_S = 0.02
_AGREEING = 3  # times, of which each but the last may lose a node


class Agent(LocalElasticAgent):
    """Keeps the ranks of one node; `cause` is why they ended last, where they did not end well."""

    def __init__(
        self,
        spec: WorkerSpec,
        members: Members,
        folder: Path,
        config: RunConfig,
        notes: Notes,
        say: Callable[[str], None],
    ) -> None:
        """`folder` is for the reasons that ranks leave, `notes` are theirs; `say` tells the user of a restart."""
        logs = DefaultLogsSpecs(log_dir=str(folder))
        super().__init__(spec, logs, start_method="spawn", exit_barrier_timeout=_OTHERS_S)
        self._arguments = spec.args
        self._members, self._notes = members, notes
        self._aborts_when_alone = config.parallel.accelerator == "cuda"
        self._folder, self._again, self._say = folder, failures.again(config), say
        self._patience_s = config.parallel.stall_timeout + GRACE_S
        self._laggards = Laggards(config.parallel.stall_timeout)
        # Ranks of other nodes say it better, and first.
        self._frozen = Frozen(config.parallel.stall_timeout + GRACE_S * (config.parallel.most_nodes > 1), self._again)
        self._interrupts = Interrupts()
        self._starts = 0
        self._is_alone, self._memory = config.parallel.most_nodes == 1, ExitStack()
        self._is_starting = False
        self._are_asked = False
        """Whether the ranks of this start were asked to save and end."""
        self.is_over = False
        """Whether the job has ended: a signal that comes then comes too late."""
        self.cause: Failure | None = None

    @property
    def insisted(self) -> bool:
        """Whether a second signal asked to end at once."""
        return self._interrupts.insisted

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Take a signal of the user's: the first has the ranks save and stop, a second ends them."""
        if self._interrupts.hear() is Heard.FIRST and not self._is_starting and not self.is_over:
            raise SignalException("asked to stop", signal.Signals(number))

    @property
    def has_begun(self) -> bool:
        """Whether ranks were ever started."""
        return self._starts > 0

    @property
    def stopped_between(self) -> str:
        """What is told of a stop that came between two starts of ranks."""
        return f"Stopped while ranks were to start again; {self._again}."

    def values(self) -> dict[int, bytes] | None:
        """Return what the ranks of this node have come to, by their rank, once all are done."""
        workers = self._worker_group.workers
        told = self._told()
        if not workers or len(told) < len(workers):
            return None
        return {workers[local].global_rank: value for local, value in told.items()}

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Agree with the other nodes on who takes part; where one that had come is lost over it, agree without it."""
        for left in reversed(range(_AGREEING)):
            try:
                super()._rendezvous(worker_group)
            except (DistStoreError, TimeoutError):  # what each node says of itself was waited for
                if not left:
                    raise
                self._say("A node was lost while the nodes agreed on who takes part; the others agree anew.")
            else:
                break

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        worker_group.spec.args = (*self._arguments, self._new_start(worker_group.store))
        self._starts += 1
        reasons.clear(self._folder)  # those of an earlier start
        self._members.begin()
        self._are_asked = False
        self._is_starting = True  # a signal that came between would leave ranks that nobody knows of
        try:
            with lifeline.starting_children():
                started = dict(super()._start_workers(worker_group))
        finally:
            self._is_starting = False
        if self._interrupts.asked:
            raise SignalException("asked to stop", signal.SIGTERM)
        return started

    def _new_start(self, store: Any) -> str:
        """Return where the ranks of this start meet: the same on all its nodes, and another one at the next start.

        `store` is the agents'; torch says that it is None, which it is before they have agreed.
        """
        if not self._is_alone:
            return str(store.compare_set("lockstep/start", "", secrets.token_hex(8)).decode())
        self._memory.close()  # in which a rank that was killed may have left half an entry
        return str(self._memory.enter_context(memory.file()))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._ended_badly()
        if not ended and (values := self.values()) is not None:
            # torch's way to its end waits without limit for ranks that have died or were stopped since.
            self._wait_for_end(_DONE_S)
            self._kill()
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        if ended:
            until_s = time.monotonic() + _WORD_S
            while len(ended) < len(self._pids()) and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
                ended = self._ended_badly()
            return self._failed(self._find_cause(ended, worker_group))
        alive = self._alive()
        living = {worker_group.workers[local].global_rank: pid for local, pid in self._pids().items() if pid in alive}
        if frozen := self._frozen.look(living):
            return self._failed(frozen)
        if self._laggards.are_late(some_are_done=bool(self._told())):
            late = [worker_group.workers[local].global_rank for local in self._pids() if local not in self._told()]
            return self._failed(left_behind(sorted(late), self._again))
        if alive and (lost := self._members.lost()):
            return self._failed(Failure(worker_group.workers[0].global_rank, "", f"{lost}; {self._again}.", ""))
        # Not torch's own look, which would come upon a rank that has died since, and end the others without a cause.
        return RunResult(state=WorkerState.HEALTHY)

    def _failed(self, cause: Failure) -> RunResult:
        """End what is left of the ranks, at once: torch would ask them first, and wait."""
        self.cause = cause
        self._kill()
        self._wait_for_end(_KILLED_S)
        self._decide(cause)
        return RunResult(state=WorkerState.FAILED)

    def close(self) -> None:
        """Note that the job is over."""
        self.is_over = True
        self._memory.close()

    def _decide(self, cause: Failure) -> None:
        """Let torch start the ranks again, or not."""
        if cause.kind in _FINAL:
            self._remaining_restarts = 0
        elif cause.kind == Stopped.__name__:
            self._remaining_restarts += 1  # it is no failure
            if not self._interrupts.asked:
                self._say(
                    "The ranks were asked to stop, as another node leaves or comes, or by a signal of a rank's own; "
                    "where the job goes on, they start again."
                )
        elif self._remaining_restarts > 0:
            number = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
            what = cause.sentence.removesuffix(".").removesuffix(f"; {self._again}")
            self._say(f"{what}; the ranks start again (restart {number} of {self._worker_group.spec.max_restarts}).")

    def _find_cause(self, ended: dict[int, int], worker_group: WorkerGroup) -> Failure:
        told = reasons.find(self._folder)
        known = {failure.rank for failure in told}
        silent = {worker_group.workers[local].global_rank: code for local, code in ended.items()}
        stopped = self.stopped_between if self._starts > 1 else OUTSIDE
        asked, alone = stopped if self._interrupts.asked else "", self._aborts_when_alone
        died = [
            obituary(rank, code, self._again, asked=asked, aborts_when_alone=alone)
            for rank, code in silent.items()
            if rank not in known
        ]
        return failures.first_cause([*told, *died])

    def _stop_workers(self, worker_group: WorkerGroup, *arguments: Any, **options: Any) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            self._say("Another node has come: the ranks save, and start again with it.")
            self._ask_to_stop(signal.SIGUSR1)
        self._kill()
        super()._stop_workers(worker_group, *arguments, **options)
        self._pcontext = None  # they are gone: their ids may soon be others'

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *arguments: Any, **options: Any) -> None:
        if self._interrupts.asked:
            late = self._ask_to_stop()
            self.cause = self._find_cause(self._ended_badly(), self._worker_group) if self._ended_badly() else late
        self._kill()
        super()._shutdown(signal.SIGKILL)

    def _ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> Failure | None:
        """Have the ranks save and end; a second signal of the user's ends the wait. Return why some have not, if so."""
        if not self._are_asked:  # a second time would end them in the midst of it
            self._are_asked = True
            self._send(number)
        self._wait_for_end(self._patience_s)
        if self.insisted or not (alive := self._alive()):
            return None
        workers = self._worker_group.workers
        late = [workers[local].global_rank for local, pid in self._pids().items() if pid in alive]
        return unsaved(sorted(late), self._again)

    def _wait_for_end(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while self._alive() and not self.insisted and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _kill(self) -> None:
        """Kill what is left of the ranks, and what they started: each leads a process group of its own."""
        for pid in self._pids().values():
            lifeline.end_group(pid)
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._alive():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids(self) -> dict[int, int]:
        return {} if self._pcontext is None else self._pcontext.pids()

    def _alive(self) -> list[int]:
        return [pid for pid in self._pids().values() if _exit_of(pid) is None]

    def _ended_badly(self) -> dict[int, int]:
        """Return the exit codes, by local rank, of the ranks that have ended before they were done."""
        codes = {local: _exit_of(pid) for local, pid in self._pids().items()}
        told = self._told()
        return {local: code for local, code in codes.items() if code is not None and local not in told}

    def _told(self) -> dict[int, bytes]:
        """Return the values, by local rank, of the ranks that are done."""
        files = {} if self._pcontext is None else self._pcontext.error_files
        found = {local: reasons.value(Path(file)) for local, file in files.items()}
        return {local: value for local, value in found.items() if value is not None}


def _exit_of(pid: int) -> int | None:
    """Return a child's exit code, or minus the signal that ended it; None while it lives, 0 once it was waited for."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
