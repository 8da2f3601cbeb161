"""The driver's side of ranks under Ray: start the actors, show what rank 0 says, find the first cause, leave nobody."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import LockstepError, RequestError, RunError, Stopped, ranks_named
from ..failures import Failure, first_cause
from ..interrupts import KILLED, SIGNALS, STOPPING, Heard, Interrupts
from ..topology import Topology
from .ray import module_paths
from .ray_actor import Rank
from .supervise import Report

_LOOK_S = 0.1
_LISTEN_S = 1.0  # for other reports, after the first failure
_ANSWER_S = 3.0  # for an actor to say that it lives
_LEAVE_S = 30.0  # for ranks that save because a stop was asked for
_CONTROL = "control"  # what is asked of an actor while its rank runs


class Ranks:
    """The actors of a run: on leaving the `with` block none of them is left, nor anything they started."""

    def __init__(self, group: PlacementGroup, layout: Sequence[tuple[Topology, dict[str, int]]], again: str) -> None:
        """`layout` is each rank's place, and the resources it takes of the bundle of its node."""
        self._again = again
        self._places = [place for place, _ in layout]
        self._interrupts = Interrupts()
        self._handlers: dict[int, Any] = {}
        self._reports: dict[int, Report] = {}
        self._nodes: dict[int, str] = {}
        self._told = False
        actor = ray.remote(concurrency_groups={_CONTROL: 2}, max_restarts=0)(Rank)
        self._actors = [
            actor.options(
                **takes,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.node),
            ).remote()
            for place, takes in layout
        ]

    def __enter__(self) -> Ranks:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._on_signal) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RayError):
            self._show()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, payload: bytes, folder: str, timeout_s: float) -> Any:
        """Run the pickled (entry, config) on all ranks and return rank 0's value; raise the first cause of a failure.

        `folder` is where relative paths begin, on nodes that have it.
        """
        address, port = self._meeting_place(timeout_s)
        paths = module_paths()
        waiting: dict[Any, int] = {}
        for actor, place in zip(self._actors, self._places, strict=True):
            met = Topology(**vars(place) | {"address": address, "port": port})
            waiting[actor.run.remote(met, payload, folder, paths, self._again)] = place.rank
        while waiting and not self._failures():
            self._look(waiting)
        if self._failures():
            self._listen(waiting)
            raise self._error(waiting)
        return pickle.loads(self._reports[0].value)  # our own rank's

    def _meeting_place(self, timeout_s: float) -> tuple[str, int]:
        """Return where rank 0 listens: at its node's address, or at the loopback's where no rank is elsewhere."""
        try:
            found = ray.get([self._control(actor, "where") for actor in self._actors], timeout=timeout_s)
            self._nodes = {rank: f"{address} ({name})" for rank, (address, name) in enumerate(found)}
            host = "127.0.0.1" if self._places[0].nodes == 1 else found[0][0]
            address, port = ray.get(self._control(self._actors[0], "listen", host), timeout=timeout_s)
        except (RayError, TimeoutError) as error:
            raise RequestError(
                f"--launcher ray: the ranks' actors did not start ({_brief(error)}); every node needs lockstep-torch "
                "and Ray in the same versions as here."
            ) from error
        return address, port

    def _control(self, actor: Any, method: str, *given: Any) -> Any:
        return getattr(actor, method).options(concurrency_group=_CONTROL).remote(*given)

    def _look(self, waiting: dict[Any, int]) -> None:
        """Take in reports and deaths, and pass signals on."""
        if self._interrupts.insisted:
            raise RunError(KILLED)
        if self._interrupts.asked and not self._told:
            self._told = True
            print(f"\nlockstep: {STOPPING}", file=sys.stderr, flush=True)
            for actor in self._actors:
                self._control(actor, "signal", int(signal.SIGTERM))
        ready, _ = ray.wait([*waiting], timeout=_LOOK_S)
        for each in ready:
            rank = waiting.pop(each)
            try:
                self._reports[rank] = ray.get(each)
            except RayError as error:
                self._reports[rank] = Report(rank, failure=self._obituary(rank, error))
        with contextlib.suppress(RayError):
            self._show()

    def _show(self) -> None:
        """Write what rank 0 has said since."""
        with contextlib.suppress(TimeoutError):
            for number, data in ray.get(self._control(self._actors[0], "read"), timeout=_ANSWER_S):
                stream = sys.stdout if number == 1 else sys.stderr
                stream.flush()
                stream.buffer.write(data)
                stream.flush()

    def _listen(self, waiting: dict[Any, int]) -> None:
        """Wait a little for what the other ranks have to say about the failure."""
        stopping = all(failure.kind == Stopped.__name__ for failure in self._failures())
        deadline = time.monotonic() + (_LEAVE_S if stopping else _LISTEN_S)
        while waiting and time.monotonic() < deadline:
            self._look(waiting)

    def _failures(self) -> list[Failure]:
        return [report.failure for report in self._reports.values() if report.failure]

    def _error(self, waiting: dict[Any, int]) -> LockstepError:
        cause = first_cause(self._failures())
        if not (cause.is_echo and waiting):
            return cause.error()
        # Those that have told were left alone. Who left them answers no more, or lives and hangs.
        asked = {self._control(self._actors[rank], "where"): rank for rank in waiting.values()}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER_S)
        silent = sorted(rank for each, rank in asked.items() if each not in answered or not _lives(each))
        who = ranks_named(silent or sorted(asked.values()))
        where = ", ".join(sorted({self._nodes[rank] for rank in silent or asked.values()}))
        if silent:
            return RunError(f"{who[0].upper()}{who[1:]} on node {where} died, or its node was lost; {self._again}.")
        return RunError(
            f"{who[0].upper()}{who[1:]} on node {where} did not come to a collective in which the others waited for "
            f"--stall-timeout seconds: a process hangs, or was stopped; {self._again}."
        )

    def _obituary(self, rank: int, error: RayError) -> Failure:
        """Return the failure of a rank whose actor died, or whose node was lost."""
        return Failure(rank, "", f"Rank {rank} on node {self._nodes[rank]} died ({_brief(error)}); {self._again}.", "")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupts.hear() is Heard.SECOND:
            raise RunError(KILLED)


def _lives(answer: Any) -> bool:
    with contextlib.suppress(RayError):
        ray.get(answer)
        return True
    return False


def _brief(error: BaseException) -> str:
    """Return the telling part of what Ray says of a death, which goes on for lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "The actor" in line or "cause" in line.lower()] or lines
    return (told[0] if told else type(error).__name__)[:200].rstrip(". ")
