"""The driver's side of ranks under Ray: start the actors, show what rank 0 says, find the first cause, leave nobody."""

from __future__ import annotations

import contextlib
import io
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import IO, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import LockstepError, RequestError, RunError, ranks_named
from ..failures import Failure, first_cause
from ..interrupts import KILLED, OUTSIDE, Interrupts, heeded
from ..topology import Topology
from . import reports
from .ray import module_paths
from .ray_actor import Rank
from .reports import Report

_LOOK_S = 0.1
_ANSWER_S = 3.0  # for an actor to say that it lives, or that its rank has ended
_CONTROL = "control"  # what is asked of an actor while its rank runs


class Ranks:
    """The actors of a run: on leaving the `with` block none of them is left, nor anything they started."""

    def __init__(
        self,
        group: PlacementGroup,
        layout: Sequence[tuple[Topology, dict[str, int]]],
        again: str,
        *,
        stall_timeout_s: float,
        aborts_when_alone: bool = False,
    ) -> None:
        """`layout` is each rank's place, and the resources it takes of the bundle of its node.

        `again`, `stall_timeout_s` and `aborts_when_alone` are as `Supervisor` has them.
        """
        self._again, self._stall_timeout_s = again, stall_timeout_s
        self._laggards = reports.Laggards(stall_timeout_s)
        self._aborts_when_alone = aborts_when_alone
        self._places = [place for place, _ in layout]
        self._interrupts = Interrupts()
        self._heeding = contextlib.ExitStack()
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
        self._heeding.enter_context(heeded(self._on_signal))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._heeding:
            with contextlib.suppress(RayError):
                self._show()
            with contextlib.suppress(RayError):
                # With its actor alone the rank would end, but not what it has started.
                ended = [self._control(actor, "end") for actor in self._actors]
                ray.wait(ended, num_returns=len(ended), timeout=_ANSWER_S)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)

    def run(self, payload: bytes, folder: str, timeout_s: float) -> Any:
        """Run the pickled (entry, config) on all ranks and return rank 0's value; raise the first cause of a failure.

        `folder` is where relative paths begin, on nodes that have it.
        """
        address, port = self._meeting_place(timeout_s)
        paths, secret = module_paths(), secrets.token_bytes(32)
        # Of several ranks, those that were not stopped say it better, and first.
        patience_s = self._stall_timeout_s + reports.GRACE_S * (len(self._places) > 1)
        waiting: dict[Any, int] = {}
        for actor, place in zip(self._actors, self._places, strict=True):
            met = Topology(**vars(place) | {"address": address, "port": port})
            waiting[actor.run.remote(met, payload, secret, folder, paths, patience_s, self._again)] = place.rank
        while waiting and not reports.failures(self._reports):
            self._look(waiting)
            if waiting and self._laggards.are_late(some_are_done=bool(self._reports)):
                raise reports.left_behind(sorted(waiting.values()), self._again).error()
        if reports.failures(self._reports):
            reports.listen(self._reports, len(self._actors), lambda: self._look(waiting))
            raise self._error(sorted(waiting.values()))
        return reports.value_of(self._reports[0].value)

    def _meeting_place(self, timeout_s: float) -> tuple[str, int]:
        """Return where rank 0 listens: at its node's address, or at the loopback's where no rank is elsewhere."""
        try:
            found = self._answers([self._control(actor, "where") for actor in self._actors], timeout_s)
            self._nodes = {rank: f"{address} ({name})" for rank, (address, name) in enumerate(found)}
            host = "127.0.0.1" if self._places[0].nodes == 1 else found[0][0]
            ((address, port),) = self._answers([self._control(self._actors[0], "listen", host)], timeout_s)
        except (RayError, TimeoutError) as error:
            raise RequestError(
                f"--launcher ray: the ranks' actors did not start ({_brief(error)}); every node needs lockstep-torch "
                "and Ray in the same versions as here."
            ) from error
        return address, port

    def _answers(self, asked: list[Any], limit_s: float) -> list[Any]:
        """Return what actors answer; a second signal ends the wait for them."""
        deadline, waiting = time.monotonic() + limit_s, asked
        while waiting:
            self._check_insisted()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_S)
            if waiting and time.monotonic() >= deadline:
                raise TimeoutError(f"no answer within --timeout {limit_s:g} s")
        return list(ray.get(asked))

    def _control(self, actor: Any, method: str, *given: Any) -> Any:
        return getattr(actor, method).options(concurrency_group=_CONTROL).remote(*given)

    def _look(self, waiting: dict[Any, int]) -> None:
        """Take in reports and deaths, and pass signals on."""
        self._check_insisted()
        if self._interrupts.asked and not self._told:
            self._told = True
            for actor in self._actors:
                self._control(actor, "signal", int(signal.SIGTERM))
        ready, _ = ray.wait([*waiting], timeout=_LOOK_S)
        for each in ready:
            rank = waiting.pop(each)
            try:
                told: Report | int = ray.get(each)
            except RayError as error:
                sentence = f"Rank {rank}{self._where([rank])} died ({_brief(error)}); {self._again}."
                told = Report(rank, failure=Failure(rank, "", sentence, ""))
            self._reports[rank] = self._obituary(rank, told) if isinstance(told, int) else told
        with contextlib.suppress(RayError):
            self._show()

    def _show(self) -> None:
        """Write what rank 0 has said since."""
        with contextlib.suppress(TimeoutError):
            for number, data in ray.get(self._control(self._actors[0], "read"), timeout=_ANSWER_S):
                _write(sys.stdout if number == 1 else sys.stderr, data)

    def _error(self, silent: Sequence[int]) -> LockstepError:
        """Return the first cause; `silent` are the ranks that have told nothing."""
        if first_cause(reports.failures(self._reports)).is_echo and (lost := self._lost(silent)):
            who = ranks_named(lost)
            return RunError(f"{who[0].upper()}{who[1:]}{self._where(lost)} died, or its node was lost; {self._again}.")
        return reports.error(self._reports, silent, self._again, self._where(silent))

    def _lost(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks whose actors do not answer any more, which Ray tells late where a node is lost."""
        asked = {rank: self._control(self._actors[rank], "where") for rank in ranks}
        answered, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        return [rank for rank, each in asked.items() if each not in answered or not _lives(each)]

    def _obituary(self, rank: int, code: int) -> Report:
        """Return what is reported of a rank that died without a word."""
        failure = reports.obituary(
            rank,
            code,
            self._again,
            where=self._where([rank]),
            said="printed above" if rank == 0 else "printed, which is in Ray's logs there,",
            asked=OUTSIDE if self._interrupts.asked else "",
            aborts_when_alone=self._aborts_when_alone,
        )
        return Report(rank, failure=failure)

    def _where(self, ranks: Sequence[int]) -> str:
        return f" on node {', '.join(sorted({self._nodes[rank] for rank in ranks}))}"

    def _check_insisted(self) -> None:
        if self._interrupts.insisted:
            raise RunError(KILLED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts.hear()  # and the next look sees it: nothing is raised amid the end


def _write(stream: IO[str] | None, data: bytes) -> None:
    if stream is None:
        return
    stream.flush()
    if isinstance(stream, io.TextIOWrapper):
        stream.buffer.write(data)
    else:  # a notebook's
        stream.write(data.decode(errors="replace"))
    stream.flush()


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
