"""What some steps of a job cost, in its ranks: the job's own loop, watched from outside, and ended early.

After a warm-up come steps that are timed, and then, where ranks exchange gradients, some that exchange none: what they
are faster by is the communication that no computation hides. Nothing is evaluated or saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..config.schema import RunConfig
from ..errors import RunError
from ..files import write_json
from . import energy, matrix
from .clock import Clock

if TYPE_CHECKING:
    from ..steps.loop import Loop
    from ..world.world import World

FILE = "measured.json"
"""In the run's folder."""
_UNSYNCHRONISED = 0.5
"""Steps that exchange nothing, as a share of those that are timed."""
_TIMED_S = 1.5
_FEWEST, _MOST = 4, 500
WARM_UP = 3
"""Steps before anything is timed: what happens once is over, and the operations of the last but one are counted."""
_WARM_S = 1.0
"""For which the job then runs at full speed before the timed steps: memory never touched before comes slowly."""


@dataclass(frozen=True)
class Measured:
    """An entry for the launchers: runs `entry` for some steps, and writes what they cost into the run's folder."""

    entry: Callable[[RunConfig, World], Any]
    steps: int = 0
    """Those that are timed; 0 for as many as fill `_TIMED_S`."""
    is_profiled: bool = False
    """Whether as many steps follow in which each exchange's place is noted, and none without exchange."""

    def __call__(self, config: RunConfig, world: World) -> None:
        """Measure (*collective*). Raises what the job does, and `RunError` where it ends before all steps are made."""
        probe = Probe(world, self.steps, is_profiled=self.is_profiled)
        if not watched(self.entry, config, world, probe):
            raise _too_short(probe.made)


@dataclass(frozen=True)
class Share:
    """An entry for the launchers: runs `entry` on one rank as the first of `ranks`, without the others.

    It computes that rank's share, by the code that runs on several; nothing is exchanged. What it costs, and where its
    steps meet what would be exchanged, is written into the run's folder.
    """

    entry: Callable[[RunConfig, World], Any]
    ranks: int

    def __call__(self, config: RunConfig, world: World) -> None:
        """Measure. Raises what the job does, and `RunError` where it ends before all steps are made."""
        alone = dataclasses.replace(
            world, topology=dataclasses.replace(world.topology, size=self.ranks), group=None, memory=None
        )
        Measured(self.entry, is_profiled=True)(config, alone)


@dataclass(frozen=True)
class Raced:
    """An entry for the launchers: runs steps of `entry` on command from a Unix socket at `address`."""

    entry: Callable[[RunConfig, World], Any]
    address: str

    def __call__(self, config: RunConfig, world: World) -> None:
        """Run until the socket is closed. Raises what the job raises, and `RunError` where it ends before that."""
        with Racer(world, self.address) as racer:
            if not watched(self.entry, config, world, racer):
                raise _too_short(racer.made)


class Watcher:
    """Hears of a job's course (a `pulse.Listener`), and has its clock."""

    exchanges = True
    is_endless = False

    def __init__(self, world: World) -> None:
        self.clock: Any = Clock(on_gpu=world.device.type == "cuda")

    def ended_phase(self, phase: str) -> None:
        """Take note that a phase is over."""
        self.clock.note(phase)

    def ended_step(self, loop: Loop) -> None:
        """Take note that a step is over (*collective*)."""

    def resumed(self) -> None:
        """Take note that steps begin again."""
        self.clock.go_on()


def watched(entry: Callable[[RunConfig, World], Any], config: RunConfig, world: World, watcher: Watcher) -> bool:
    """Run the entry until the watcher has seen enough; return whether it has."""
    world.pulse.listener = watcher
    try:
        with _schedules_without_end():
            entry(config, world)
    except _EnoughError as enough:
        if world.is_main and enough.folder is not None and enough.told:
            write_json(enough.folder / FILE, enough.told)
        return True
    finally:
        world.pulse.listener = None
    return False


def _too_short(steps: int) -> RunError:
    if not steps:
        return RunError("The job has ended without a step: a script has to train through lockstep.session().")
    return RunError(f"The job has ended after {steps} steps, before enough were measured: give it more epochs.")


class _EnoughError(BaseException):
    """Ends the job once its steps are measured; no `except Exception` of a script's may hold it up."""

    def __init__(self, folder: Path | None, told: dict[str, Any]) -> None:
        super().__init__("measured")
        self.folder, self.told = folder, told


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    getattr(owner, name)  # what is no more there would change nothing, without a word
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:  # inherited, from a class that may be patched too
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _schedules_without_end() -> contextlib.AbstractContextManager[None]:
    """Have a OneCycleLR keep its last rate past its last step, which it alone of torch's schedules refuses."""
    from torch.optim.lr_scheduler import OneCycleLR

    get_lr: Any = OneCycleLR.get_lr

    def last_lr(schedule: OneCycleLR) -> Any:
        schedule.last_epoch = min(schedule.last_epoch, schedule.total_steps)
        return get_lr(schedule)

    return _patched(OneCycleLR, "get_lr", last_lr)


class Probe(Watcher):
    """Counts a job's steps as they end, and times those that are to be timed."""

    is_endless = True

    def __init__(self, world: World, steps: int, *, is_profiled: bool = False) -> None:
        super().__init__(world)
        self.made = 0
        self._world, self._steps, self._is_profiled = world, steps, is_profiled
        self._warm_to, self._timed_to, self._last = WARM_UP, 0, 0
        self._counting = contextlib.ExitStack()
        self._counter: Any = None
        self._bytes = 0
        self._cpu_s = self._joules = 0.0
        self._told: dict[str, Any] = {}

    def ended_step(self, loop: Loop) -> None:
        """Take note of a step that is over (*collective*)."""
        self.made += 1
        if self.made == 1:
            self._told["first_step_time"] = time.time()
            self._count()
        elif self.made == 2:
            self._counting.close()
            self._bytes += _of_gradients(loop, self._world)
        self.clock.end_step(self._world.pulse.phase)
        if self.made == self._warm_to:
            more = self._as_many_as_fill(_WARM_S) - (self.made - WARM_UP)
            if more > 0:
                self._warm_to += more
            else:
                self._plan()
                self._begin(loop)
        if self.made == self._timed_to:
            self._note(loop)
            if self._is_profiled:
                self._profile(loop)
            else:
                self.exchanges = False
                self._begin(loop)
        if self.made == self._last:
            if self._is_profiled:
                self._told["profile"] = self.clock.told()
            elif self._last > self._timed_to:
                self._told["unsynchronised_step_s"] = seconds = self.clock.step_s
                phases = self.clock.phase_s.items()
                self._told["unsynchronised_phase_s"] = {phase: each / len(seconds) for phase, each in phases}
            raise _EnoughError(loop.folder, self._told)

    def _plan(self) -> None:
        """Decide how many steps are timed, the same on every rank (*collective*)."""
        self._steps = self._steps or max(_FEWEST, self._as_many_as_fill(_TIMED_S))
        self._timed_to = self._warm_to + self._steps
        unsynchronised = max(1, round(self._steps * _UNSYNCHRONISED)) if self._world.size > 1 else 0
        more = self._steps if self._is_profiled else unsynchronised
        self._last = self._timed_to + more

    def _as_many_as_fill(self, seconds: float) -> int:
        """Return how many steps fill so many seconds, the same on every rank (*collective*)."""
        return int(self._world.gather(min(_MOST, round(seconds / self.clock.step_s[-1])))[0])

    def _count(self) -> None:
        """Count the operations of the next step, and the bytes that this rank gives to collectives in it."""
        from torch.utils.flop_counter import FlopCounterMode

        from ..world.world import World

        def counted(exchange: Any, size: Callable[[Any], int]) -> Any:
            def run(world: World, *given: Any) -> Any:
                before = self._bytes
                found = exchange(world, *given)
                self._bytes = before + sum(map(size, given))  # whatever it has called for that
                return found

            return run

        for name in ("sum_", "max", "stack"):
            own = counted(getattr(World, name), lambda each: getattr(each, "nbytes", 0))
            self._counting.enter_context(_patched(World, name, own))
        self._counting.enter_context(_patched(World, "numbers", counted(World.numbers, lambda each: 8 * len(each))))
        self._counter = self._counting.enter_context(FlopCounterMode(display=False))

    def _begin(self, loop: Loop) -> None:
        self._world.barrier()
        self._cpu_s, self._joules = _cpu_s(), self._joules_now(loop)
        self.clock.restart()

    def _joules_now(self, loop: Loop) -> float:
        return energy.joules(loop.meter.telemetry.handles, processors=self._world.topology.local_rank == 0)

    def _note(self, loop: Loop) -> None:
        import torch

        cpu_s, joules = _cpu_s() - self._cpu_s, self._joules_now(loop) - self._joules
        phase_s = {phase: each / self._steps for phase, each in self.clock.phase_s.items()}
        telemetry = loop.meter.telemetry
        gpus_busy = len(telemetry.handles) * telemetry.sample().get("device_percent", 0) / 100
        peak = telemetry.peak_memory_bytes()
        # Replicas in threads are not counted: the counter belongs to this one.
        flops = self._counter.get_total_flops() if len(loop.prepared.devices) == 1 else 0
        rate = matrix.flops_per_s(self._world.device, loop.precision.name)  # by all ranks at the same time
        numbers = [cpu_s, joules, gpus_busy, peak["host"] or 0, peak["device"] or 0, flops, rate]
        own = torch.tensor(numbers, dtype=torch.float64, device=self._world.device)
        cpu_s, joules, gpus_busy, host, device, flops, rate = self._world.sum(own).tolist()
        seconds = sum(self.clock.step_s)
        self._told |= {
            "ranks": self._world.size,
            "warm_up": self._warm_to,
            "step_s": self.clock.step_s,
            "phase_s": phase_s,
            "busy_processors": cpu_s / seconds,
            "busy_gpus": gpus_busy or None,
            "joules_a_step": joules / self._steps if joules > 0 else None,  # a counter that ran over tells nothing
            "peak_memory_bytes": {"host": host, "device": device or None},
            "flops_a_step": flops or None,
            "matrix_flops_per_s": rate if math.isfinite(rate) else None,
            "bytes_a_step": self._bytes if self._world.size > 1 else None,
        }
        if not self._is_profiled:  # then the other ranks are missing
            loop.confirm()
            self._told["proof"] = loop.checks()

    def _profile(self, loop: Loop) -> None:
        """Have the points of each step noted from now on."""
        from .profiler import Stamps

        # A loop of one's own exchanges its gradients after the backward pass.
        self._told["overlaps"] = loop.prepared.strategy is not None
        self.clock = Stamps(loop.prepared.models.values(), self._world.device)


class Racer(Watcher):
    """Runs as many steps as it is told to, and waits at their end; all ranks do at the same one.

    Its data workers are stopped while it waits: they would fill their queue meanwhile, at the cost of others' turns.
    """

    is_endless = True

    def __init__(self, world: World, address: str) -> None:
        """Connect to the socket at `address`, and say which rank comes."""
        super().__init__(world)
        self.made = 0
        self._world, self._left = world, 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw", encoding="ascii", newline="\n")
        self._say(f"{world.rank} {world.size}")

    def __enter__(self) -> Racer:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal_workers(signal.SIGCONT)
        self._socket.close()

    def ended_phase(self, phase: str) -> None:
        """Take no note of phases."""

    def ended_step(self, loop: Loop) -> None:
        """Wait for the next turn once this one is over; raise where there is none any more."""
        self.made += 1
        if self.made < WARM_UP:
            return
        if self._left:
            self.clock.end_step("")
            self._left -= 1
            if self._left:
                return
        self._signal_workers(signal.SIGSTOP)
        before = self._world.pulse.phase
        self._world.pulse.enter("")  # others' turns are no stall
        self._say(f"{sum(self.clock.step_s[1:])}")  # the first one finds another variant's data in the caches
        told = self._lines.readline()
        self._signal_workers(signal.SIGCONT)
        if not told:
            raise _EnoughError(loop.folder, {})
        self._left = 1 + int(told)
        self._world.pulse.enter(before)
        self.clock.restart()

    @staticmethod
    def _signal_workers(number: int) -> None:
        for worker in multiprocessing.active_children():
            if worker.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    def _say(self, text: str) -> None:
        self._lines.write(f"{text}\n")
        self._lines.flush()


def _cpu_s() -> float:
    """Return the seconds that this process and its data workers have had of processors."""
    workers = 0.0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            workers += sum(child.cpu_times()[:2])
    return time.process_time() + workers


def _of_gradients(loop: Loop, world: World) -> int:
    """Return the bytes that DistributedDataParallel exchanges by itself, past the world's own collectives."""
    prepared = loop.prepared
    if prepared.strategy is None or world.size == 1 or (world.memory is not None and world.device.type == "cpu"):
        return 0
    models = prepared.models.values()
    return sum(each.nbytes for model in models for each in model.parameters() if each.requires_grad)
