"""Measure some steps of a job in its ranks, then end it.

After a warm-up come timed steps, and then, where ranks exchange gradients, some without exchange: the time that these
save is the communication that no computation hides. Nothing is evaluated or saved.
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
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .. import hardware
from ..config.schema import RunConfig
from ..errors import RunError
from ..files import write_json
from ..nn.attach import gate_schedule
from ..sessions.hooks import Hooks
from .clock import Clock, MarkedProgress, mark_exchanges

if TYPE_CHECKING:
    import torch

    from ..exchange.base import Exchange
    from ..runs.loop import Loop
    from ..sessions.session import Session
    from ..world.world import World

FILE = "measured.json"  # in the run's folder
COMPARED = 5
"""First steps, whose losses are compared: rounding that grows from step to step is no other model. Their random draws
are those of one device, whatever the job asks for."""
WARM_UP, _WARM_S = 3, 1.0
"""Steps, in the second of which operations are counted, then seconds at full speed: new memory comes slowly."""
_TIMED_S, _FEWEST, _MOST = 1.5, 4, 500  # how long steps are timed by default, and at least and at most how many
_UNSYNCHRONISED = 0.5  # steps that exchange nothing, as a share of those that are timed
_MATRIX, _MATRIX_S = {"cpu": 1024, "cuda": 8192}, 0.2
Job = Callable[[RunConfig, "World", Hooks], Any]
Course = Callable[["Measurement"], Generator[None, Any, None]]


def measure(
    job: Job, steps: int, config: RunConfig, world: World, *, draws: str = "global", is_profiled: bool = False
) -> None:
    """Measure steps of a job; write the costs to its folder (*collective*).

    The first `COMPARED` draw as `draws` says ("" for the job's own option), and all others as the job. Times `steps`
    steps; 0: as many as fill `_TIMED_S`. If `is_profiled`, as many follow in which the place of each exchange is
    recorded, and none without exchange. Raises what the job does, and `RunError` where the job ends early.
    """
    _watch(job, config, Measurement(world, partial(_probed, steps=steps, is_profiled=is_profiled), draws=draws))


def measure_share(job: Job, ranks: int, config: RunConfig, world: World) -> None:
    """Measure one rank alone as the first of `ranks`. Raises as `measure` does.

    Computes that rank's share, by the code that runs on several; nothing is exchanged.
    """
    topology = dataclasses.replace(world.topology, size=ranks)
    alone = dataclasses.replace(world, topology=topology, group=None, memory=None)
    measure(job, 0, config, alone, draws="", is_profiled=True)


def race(job: Job, address: str, config: RunConfig, world: World) -> None:
    """Run turns of steps on command, from a Unix socket. Ends when that closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        try:
            _watch(job, config, Measurement(world, partial(_raced, connection=connection), marks_phases=False))
        finally:
            _signal_workers(signal.SIGCONT)


class Measurement(Hooks):
    """Follows a job by a course of steps. Each rank has one."""

    is_measurement = True  # a thread would write a checkpoint while another variant has its turn

    def __init__(self, world: World, course: Course, *, marks_phases: bool = True, draws: str = "") -> None:
        """Advance `course` of this measurement at the end of each step. The first ones draw as `draws` says."""
        self.clock = Clock(on_gpu=world.device.type == "cuda")
        self.progress = MarkedProgress(world.progress, self.clock if marks_phases else None)
        self.world = dataclasses.replace(world, progress=self.progress)
        """The world to give to the job."""
        self.made, self.draws = 0, draws
        self._course = course(self)
        next(self._course)

    def prepared(self, part: Any) -> None:
        """Have a OneCycleLR keep its last rate past its end. Other schedules do so."""
        from torch.optim.lr_scheduler import OneCycleLR

        if isinstance(part, OneCycleLR):
            gate_schedule(part, lambda: part.last_epoch < part.total_steps)

    def ended_step(self, session: Session) -> None:
        """Mark the end of a step (*collective*)."""
        self.made += 1
        self.clock.end_step(self.progress.phase)
        self._course.send(session)

    def resumed(self) -> None:
        """Mark that steps begin again."""
        self.clock.go_on()


class _EnoughError(BaseException):
    """Ends the job once measured, through any `except Exception` of a script."""


def _watch(job: Job, config: RunConfig, measurement: Measurement) -> None:
    """Run the job until the measurement ends it. Raises `RunError` where the job ends first."""
    with contextlib.suppress(_EnoughError):
        job(config, measurement.world, measurement)
        raise RunError(
            f"The job ended after {measurement.made} steps, before enough were measured: give it more epochs, and "
            "train through lockstep.session()."
        )


def _probed(measurement: Measurement, steps: int, *, is_profiled: bool) -> Generator[None, Session, None]:
    """Time steps after a warm-up; write their costs. Then steps without exchange, or with its places."""
    from torch.utils.flop_counter import FlopCounterMode

    world, clock = measurement.world, measurement.clock
    session = yield
    loop = session.loop
    found: dict[str, Any] = {"first_step_time": time.time()}
    yield from _pass(COMPARED - 1)
    loop.record_steps()  # whatever happens later
    found["first_draw"] = session.first_draw
    if measurement.draws and loop.config.batch.draws == "rank":
        session.draw_by_rank()
    yield
    warm_up = measurement.made
    exchanges, models, on_gpu = Clock(), [*loop.prepared.models.values()], world.device.type == "cuda"
    hooks = mark_exchanges(models, exchanges, on_gpu=on_gpu)
    with FlopCounterMode(display=False) as counter:
        yield
    exchanges.end_step()
    for hook in hooks:
        hook.remove()
    counts = {"bytes": _sent_bytes(exchanges.profile()["points"]), "flops": counter.get_total_flops()}
    yield
    while (more := _number_in(measurement, _WARM_S) - (measurement.made - warm_up)) > 0:
        yield from _pass(more)
    found["warm_up"], steps = measurement.made, steps or max(_FEWEST, _number_in(measurement, _TIMED_S))
    world.barrier()
    begun = _used(world, loop)
    clock.restart()
    yield from _pass(steps)
    found |= _timed(measurement, loop, begun, counts)
    if is_profiled:  # as one rank of several, without the others
        measurement.progress.clock = None
        mark_exchanges(models, clock, on_gpu=on_gpu)
        clock.restart()
        yield from _pass(steps)
        found["profile"] = clock.profile()
    else:
        loop.confirm()
        found["proof"] = loop.checks.outcomes()
        if world.size > 1:
            session.exchange_by(_without_exchange(session.prepared.exchange))
            world.barrier()
            clock.restart()
            yield from _pass(max(1, round(steps * _UNSYNCHRONISED)))
            found["unsynchronised_step_s"] = step_s = clock.step_s
            found["unsynchronised_phase_s"] = {name: each / len(step_s) for name, each in clock.phase_s.items()}
    if world.is_main and loop.folder is not None:
        write_json(loop.folder / FILE, found)
    raise _EnoughError


def _without_exchange(exchange: Exchange) -> Exchange:
    """Return the exchange of a lone process for the same parameters, whose replicas become different ones."""
    from ..exchange.base import Exchange

    none = Exchange(exchange.world)
    none.models, none.parameters, none.keeps_replicas = exchange.models, exchange.parameters, False
    return none


def _number_in(measurement: Measurement, seconds: float) -> int:
    """Return how many steps fill these seconds, on all ranks alike (*collective*)."""
    return int(measurement.world.gather(min(_MOST, round(seconds / measurement.clock.step_s[-1])))[0])


def _used(world: World, loop: Loop) -> tuple[float, float]:
    """Return processor seconds of this process and its workers, and joules."""
    cpu_s = time.process_time()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s += sum(child.cpu_times()[:2])
    return cpu_s, _joules(loop.meter.telemetry.handles, has_processors=world.topology.local_rank == 0)


def _timed(measurement: Measurement, loop: Loop, begun: tuple[float, float], counts: dict[str, int]) -> dict[str, Any]:
    """Return the timed steps' costs over all ranks (*collective*). `_used` was `begun` before them."""
    import torch

    world, telemetry, step_s = measurement.world, loop.meter.telemetry, measurement.clock.step_s
    used = [now - before for now, before in zip(_used(world, loop), begun, strict=True)]
    gpus_busy = len(telemetry.handles) * telemetry.sample().get("device_percent", 0) / 100
    peak = telemetry.peak_memory_bytes()
    # Replicas in threads are not counted: the counter belongs to this one.
    flops = counts["flops"] if len(loop.prepared.devices) == 1 else 0
    rate = _matrix_rate(world.device, loop.prepared.precision.name)  # by all ranks at the same time
    numbers = [*used, gpus_busy, peak["host"] or 0, peak["device"] or 0, flops, rate]
    own = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    cpu_s, joules, gpus_busy, host, device, flops, rate = world.sum(own).tolist()
    return {
        "ranks": world.size,
        "step_s": step_s,
        "phase_s": {phase: each / len(step_s) for phase, each in measurement.clock.phase_s.items()},
        "busy_processors": cpu_s / sum(step_s),
        "busy_gpus": gpus_busy or None,
        "joules_a_step": joules / len(step_s) if joules > 0 else None,  # a counter that overflowed has no meaning
        "peak_memory_bytes": {"host": host, "device": device or None},
        "flops_a_step": flops or None,
        "matrix_flops_per_s": rate if math.isfinite(rate) else None,
        "bytes_a_step": counts["bytes"] if world.size > 1 else None,
    }


def _raced(measurement: Measurement, connection: socket.socket) -> Generator[None, Session, None]:
    """Run turns of steps; all ranks wait at the same step.

    Data workers are stopped during the wait: else they would fill their queue, at the cost of others' turns.
    """
    lines = connection.makefile("rw", encoding="ascii", newline="\n")
    yield from _pass(WARM_UP)
    world, clock = measurement.world, measurement.clock
    told = f"{world.rank} {world.size}"
    while True:
        _signal_workers(signal.SIGSTOP)
        with world.progress.during(""):  # others' turns are no stall
            lines.write(f"{told}\n")
            lines.flush()
            steps = int(lines.readline() or 0)
        _signal_workers(signal.SIGCONT)
        if not steps:
            raise _EnoughError
        clock.restart()
        yield from _pass(1 + steps)
        told = f"{sum(clock.step_s[1:])}"  # the first one finds another variant's data in the caches


def _pass(steps: int) -> Generator[None, Any, None]:
    for _ in range(steps):
        yield


def _signal_workers(number: int) -> None:
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)


def _sent_bytes(points: list[tuple[str, int, int]]) -> int:
    """Return the bytes that a rank gives to a step's exchanges; of several micro-batches, gradients once."""
    from .timeline import GRADIENT

    gradients = {number: size_bytes for kind, size_bytes, number in points if kind == GRADIENT}
    return sum(gradients.values()) + sum(size_bytes for kind, size_bytes, _ in points if kind != GRADIENT)


def _joules(gpus: list[Any], *, has_processors: bool) -> float:
    """Return the energy counted so far, of GPUs (NVML) and processors (RAPL).

    0 if no counter can be read. https://docs.kernel.org/power/powercap/powercap.html
    """
    total = sum((hardware.asked("nvmlDeviceGetTotalEnergyConsumption", gpu) or 0) / 1000 for gpu in gpus)
    packages = Path("/sys/class/powercap").glob("intel-rapl:[0-9]/energy_uj")  # intel-rapl:0:1 is a part of one
    for counter in packages if has_processors else ():
        with contextlib.suppress(OSError, ValueError):
            total += int(counter.read_text()) / 1e6
    return total


def _matrix_rate(device: torch.device, precision: str) -> float:
    """Return the floating-point operations a second of large matrix products.

    No net of matrix products and convolutions is faster. NaN where memory has no room for them.
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    size, at_once = _MATRIX.get(device.type, _MATRIX["cpu"]), 1 if device.type == "cpu" else 20
    with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
        # No random numbers: the job's generators go on as without a measurement.
        matrix = torch.arange(size * size, device=device).sin().view(size, size).to(dtype)
        clock = Clock(on_gpu=device.type == "cuda")
        while len(clock.step_s) < 2 or sum(clock.step_s[1:]) <= _MATRIX_S:  # the first one is not timed
            for _ in range(at_once):
                matrix @ matrix
            clock.end_step()
        return 2 * float(size) ** 3 * at_once * (len(clock.step_s) - 1) / sum(clock.step_s[1:])
    return math.nan
