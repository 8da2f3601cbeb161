"""Measure some steps of a job in its ranks, then end it.

After a warm-up, steps are timed. If ranks exchange gradients, further steps run without exchange: the time they save is
the communication that no computation hides. Nothing is evaluated or saved.
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
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .. import hardware
from ..config.options import override
from ..config.registry import EXCHANGE_EVERY, KINDS, POWERSGD_RANK, resolved
from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError, RunError
from ..files import write_json
from ..nn.attach import gate_schedule
from ..sessions.hooks import Hooks
from .clock import Clock, MarkedProgress, mark_exchanges

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..runs.loop import Loop
    from ..runs.prepared import Prepared
    from ..sessions.session import Session
    from ..world.world import World

FILE = "measured.json"  # in the run's folder
COMPARED = 5
"""Number of first steps to compare losses of: rounding grows from step to step. Their random draws are those of one
device, whatever the job's options."""
WARM_UP, _WARM_S = 3, 1.0
"""Steps (the second counts operations), then seconds at full speed, since first allocations are slow."""
_TIMED_S, _FEWEST, _MOST = 1.5, 4, 500  # default duration of timed steps; their least and greatest number
_UNSYNCHRONISED = 0.5  # steps without exchange, as a share of the timed steps
_METHOD_OPTIONS = ("exchange_every", "powersgd_rank", "powersgd_start", "shard_size")
_MATRIX, _MATRIX_S = {True: 8192, False: 1024}, 0.2
Job = Callable[[RunConfig, "World", Hooks], Any]
Course = Callable[["Measurement"], Generator[None, Any, None]]


def measure(job: Job, steps: int, config: RunConfig, world: World, *, draws: str = "global") -> None:
    """Measure steps of a job; write the costs to its folder (*collective*).

    The first `COMPARED` steps draw by `draws` ("" for the job's option), the others by the job's option. Times `steps`
    steps; 0: as many as fill `_TIMED_S`. Raises the job's errors, and `RunError` if the job ends early.
    """
    _watch(job, config, Measurement(world, partial(_probed, steps=steps), draws=draws))


def measure_share(job: Job, ranks: int, config: RunConfig, world: World) -> None:
    """Measure one rank alone as the first of `ranks`. Raises as `measure` does.

    Computes that rank's share with the code for several ranks, and whole weights; exchanges nothing. The method of
    `config` decides what else is recorded.
    """
    topology = dataclasses.replace(world.topology, size=ranks)
    alone = dataclasses.replace(world, topology=topology, group=None, memory=None)
    method = config.parallel
    plain = override(
        config, strategy="ddp", exchange="full", **dict.fromkeys(_METHOD_OPTIONS), shard_modules=(), shard_reshard=True
    )
    _watch(job, plain, Measurement(alone, partial(_probed, steps=0, method=method)))


def race(job: Job, address: str, config: RunConfig, world: World) -> None:
    """Run turns of steps on request from a Unix socket, until it closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        try:
            _watch(job, config, Measurement(world, partial(_raced, connection=connection), marks_phases=False))
        finally:
            _signal_workers(signal.SIGCONT)


class Measurement(Hooks):
    """Follows a job through a course of steps. Each rank has one."""

    is_measurement = True  # a thread would write a checkpoint while another variant has its turn

    def __init__(self, world: World, course: Course, *, marks_phases: bool = True, draws: str = "") -> None:
        """Advance `course` at the end of each step. The first steps draw by `draws`."""
        self.clock = Clock(on_gpu=world.device.type != "cpu")
        self.progress = MarkedProgress(world.progress, self.clock if marks_phases else None)
        self.world = dataclasses.replace(world, progress=self.progress)
        """The world to give to the job."""
        self.steps, self.draws = 0, draws
        self._course = course(self)
        next(self._course)

    def prepared(self, part: Any) -> None:
        """Make a OneCycleLR keep its last rate past its end, as other schedules do."""
        from torch.optim.lr_scheduler import OneCycleLR

        if isinstance(part, OneCycleLR):
            gate_schedule(part, lambda: part.last_epoch < part.total_steps)

    def ended_step(self, session: Session) -> None:
        """Mark the end of a step (*collective*)."""
        self.steps += 1
        self.clock.end_step(self.progress.phase)
        self._course.send(session)

    def resumed(self) -> None:
        """Restart the clock when steps begin again."""
        self.clock.go_on()


class _EnoughError(BaseException):
    """Ends the job once measured, through any `except Exception` of a script."""


def _watch(job: Job, config: RunConfig, measurement: Measurement) -> None:
    """Run the job until the measurement ends it. Raises `RunError` if the job ends first."""
    with contextlib.suppress(_EnoughError):
        job(config, measurement.world, measurement)
        raise RunError(
            f"The job ended after {measurement.steps} steps, before enough were measured: give it more epochs, and "
            "train through lockstep.session()."
        )


def _probed(
    measurement: Measurement, steps: int, *, method: ParallelConfig | None = None
) -> Generator[None, Session, None]:
    """Time steps after a warm-up, then as many without exchange; write the costs.

    With a `method`, of a rank alone: the last steps record the place of each of that method's exchanges.
    """
    from torch.utils.flop_counter import FlopCounterMode

    world, clock = measurement.world, measurement.clock
    session = yield
    loop = session.loop
    costs: dict[str, Any] = {"first_step_time": time.time()}
    yield from _pass(COMPARED - 1)
    loop.record_steps()  # even if a later step fails
    costs["first_draw"] = session.first_draw
    if measurement.draws and loop.config.batch.draws == "rank":
        session.draw_by_rank()
    yield
    warm_up = measurement.steps
    exchanges, models, on_gpu = Clock(), [*loop.prepared.models.values()], world.device.type != "cpu"
    hooks = mark_exchanges(models, exchanges, on_gpu=on_gpu, is_last=lambda: session.is_last)
    with FlopCounterMode(display=False) as counter:
        yield
    exchanges.end_step()
    for hook in hooks:
        hook.remove()
    yield
    while (missing := _number_in(measurement, _WARM_S) - (measurement.steps - warm_up)) > 0:
        yield from _pass(missing)
    costs["warm_up"], steps = measurement.steps, steps or max(_FEWEST, _number_in(measurement, _TIMED_S))
    world.barrier()
    begun = _used(world, loop)
    clock.restart()
    yield from _pass(steps)
    costs |= _timed(measurement, loop, begun, counter.get_total_flops())
    costs["bytes_a_step"] = _sent_bytes(loop, exchanges)
    if method is not None:
        parallel = loop.config.parallel
        if parallel.exchange != "full" or KINDS[resolved(parallel.strategy, distributed=True)].divides_state:
            raise RequestError(
                "Forecasts take the method from the command, as in lockstep forecast --strategy zero1 …: leave "
                "strategy= and exchange= out of lockstep.session."
            )
        measurement.progress.clock = None
        blocks = blocks_of(models, method)
        mark_exchanges(models, clock, on_gpu=on_gpu, blocks=blocks, is_last=lambda: session.is_last)
        clock.restart()
        yield from _pass(steps)
        costs["profile"] = clock.profile() | facts_of(loop.prepared, method)
    else:
        loop.confirm()
        costs["proof"] = loop.checks.outcomes()
        if world.size > 1 and (silent := session.prepared.exchange.silent()) is not None:
            session.exchange_by(silent)
            world.barrier()
            clock.restart()
            yield from _pass(max(1, round(steps * _UNSYNCHRONISED)))
            costs["unsynchronised_step_s"] = step_s = clock.step_s
            costs["unsynchronised_phase_s"] = {name: seconds / len(step_s) for name, seconds in clock.phase_s.items()}
    if world.is_main and loop.folder is not None:
        write_json(loop.folder / FILE, costs)
    raise _EnoughError


def _number_in(measurement: Measurement, seconds: float) -> int:
    """Return the number of steps that fill these seconds, the same on all ranks (*collective*)."""
    return int(measurement.world.gather(min(_MOST, round(seconds / measurement.clock.step_s[-1])))[0])


def _used(world: World, loop: Loop) -> tuple[float, float]:
    """Return the processor seconds of this process and its workers, and joules."""
    cpu_s = time.process_time()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s += sum(child.cpu_times()[:2])
    return cpu_s, _joules(loop.meter.telemetry.handles, has_processors=world.topology.local_rank == 0)


def _timed(measurement: Measurement, loop: Loop, begun: tuple[float, float], flops: int) -> dict[str, Any]:
    """Return the timed steps' costs over all ranks (*collective*). `begun` is `_used` before them."""
    import torch

    world, telemetry, step_s = measurement.world, loop.meter.telemetry, measurement.clock.step_s
    used = [now - start for now, start in zip(_used(world, loop), begun, strict=True)]
    gpus_busy = len(telemetry.handles) * telemetry.sample().get("device_percent", 0) / 100
    peak = telemetry.peak_memory_bytes()
    # The counter sees this thread alone, not the replicas in other threads.
    flops = flops if len(loop.prepared.devices) == 1 else 0
    rate = _matrix_rate(world.device, loop.prepared.precision.name)  # by all ranks at the same time
    values = [*used, gpus_busy, peak["host"] or 0, peak["device"] or 0, flops, rate]
    sums = world.sum(torch.tensor(values, dtype=torch.float64, device=world.device))
    cpu_s, joules, gpus_busy, host, device, total_flops, rate = sums.tolist()
    return {
        "ranks": world.size,
        "step_s": step_s,
        "phase_s": {phase: seconds / len(step_s) for phase, seconds in measurement.clock.phase_s.items()},
        "busy_processors": cpu_s / sum(step_s),
        "busy_gpus": gpus_busy or None,
        "joules_a_step": joules / len(step_s) if joules > 0 else None,  # 0: no counter; negative: one overflowed
        "peak_memory_bytes": {"host": host, "device": device or None},
        "flops_a_step": total_flops or None,
        "matrix_flops_per_s": rate if math.isfinite(rate) else None,
    }


def _raced(measurement: Measurement, connection: socket.socket) -> Generator[None, Session, None]:
    """Run turns of steps; all ranks wait at the same step.

    Data workers are paused during the wait: filling their queue would slow the other variants' turns.
    """
    lines = connection.makefile("rw", encoding="ascii", newline="\n")
    yield from _pass(WARM_UP)
    world, clock = measurement.world, measurement.clock
    message = f"{world.rank} {world.size}"
    while True:
        _signal_workers(signal.SIGSTOP)
        with world.progress.during(""):  # waiting for other variants' turns is no stall
            lines.write(f"{message}\n")
            lines.flush()
            steps = int(lines.readline() or 0)
        _signal_workers(signal.SIGCONT)
        if not steps:
            raise _EnoughError
        clock.restart()
        yield from _pass(1 + steps)
        message = f"{sum(clock.step_s[1:])}"  # the first step finds another variant's data in the caches


def _pass(steps: int) -> Generator[None, Any, None]:
    for _ in range(steps):
        yield


def _signal_workers(number: int) -> None:
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)


def blocks_of(models: Sequence[nn.Module], method: ParallelConfig) -> list[nn.Module]:
    """Return the modules that fsdp would gather one at a time; inner ones last. None under other strategies."""
    from ..exchange.blocks import check_found, find_blocks, inner_classes, with_forward

    if not KINDS[resolved(method.strategy, distributed=True)].divides_weights:
        return []
    patterns, names = method.shard_modules, dict[str, bool]()
    roots = [module for model in models for module in with_forward(model)]
    blocks = [module for model in models for module in find_blocks(model, patterns)]
    for model in models:
        names |= inner_classes(model)
    check_found(len(blocks), names, patterns)
    return [*dict.fromkeys((*roots, *blocks))]


def facts_of(prepared: Prepared, method: ParallelConfig) -> dict[str, Any]:
    """Return the fields of a `traffic.Profile` that do not depend on time, for JSON."""
    import torch
    from torch import nn

    from ..exchange.powersgd import PowerSGD
    from .traffic import Parameter

    blocks = blocks_of([*prepared.models.values()], method)

    sizes = {
        parameter: sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
        for optimizer in prepared.optimizers
        for parameter, state in optimizer.state.items()
    }
    block_of = {parameter: number for number, block in enumerate(blocks) for parameter in block.parameters()}
    codec = PowerSGD(prepared.world, rank=method.powersgd_rank or POWERSGD_RANK, start=0)
    parameters = [
        Parameter(
            shape=[*parameter.shape],
            bytes=parameter.nbytes,
            is_trained=parameter.requires_grad,
            state_bytes=sizes.get(parameter, 0),
            block=block_of.get(parameter, -1) if parameter.dim() else -1,  # torch does not divide scalars
            low_rank=codec.rank_of(parameter),
        )._asdict()
        for parameter in nn.ModuleList(prepared.models.values()).parameters()
    ]
    steps, every = prepared.source.steps() if prepared.source else None, method.exchange_every or EXCHANGE_EVERY
    buffers = [buffer for model in prepared.groups.values() for buffer in model.buffers() if buffer.is_floating_point()]
    averages = [parameter for average in prepared.averages for parameter in average.module.parameters()]
    return {
        "strategy": resolved(method.strategy, distributed=True),
        "exchange": method.exchange,
        "every": steps / math.ceil(steps / every) if steps else every,  # ranks exchange at the end of an epoch, too
        "shard_size": method.shard_size,
        "reshards": method.shard_reshard,
        "on_gpu": prepared.world.device.type != "cpu",
        "parameters": parameters,
        "buffer_bytes": sum(tensor.nbytes for tensor in (*buffers, *averages)),
    }


def _sent_bytes(loop: Loop, exchanges: Clock) -> float | None:
    """Return the bytes that a rank has sent in the last step; None for one rank, and for weights that are divided."""
    from .traffic import Profile, bytes_a_step

    prepared, method = loop.prepared, loop.config.parallel
    if method.exchange == "powersgd" and prepared.world.progress.step <= (method.powersgd_start or 0):
        method = dataclasses.replace(method, exchange="full")
    if prepared.world.size == 1 or KINDS[resolved(method.strategy, distributed=True)].divides_weights:
        return None
    return bytes_a_step(Profile.of(0, exchanges.profile() | facts_of(prepared, method)), prepared.world.size)


def _joules(gpus: list[Any], *, has_processors: bool) -> float:
    """Return the joules counted so far, of GPUs (NVML) and processors (RAPL).

    0 if no counter can be read. https://docs.kernel.org/power/powercap/powercap.html
    """
    total = sum((hardware.query_nvml("nvmlDeviceGetTotalEnergyConsumption", gpu) or 0) / 1000 for gpu in gpus)
    packages = Path("/sys/class/powercap").glob("intel-rapl:[0-9]/energy_uj")  # intel-rapl:0:1 is part of a package
    for counter in packages if has_processors else ():
        with contextlib.suppress(OSError, ValueError):
            total += int(counter.read_text()) / 1e6
    return total


def _matrix_rate(device: torch.device, precision: str) -> float:
    """Return the floating-point operations per second of large matrix products.

    No net of matrix products and convolutions is faster. NaN if memory is too small for them.
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    size, at_once = _MATRIX[device.type != "cpu"], 1 if device.type == "cpu" else 20
    with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
        # No random numbers, which would change the state of the job's generators.
        matrix = torch.arange(size * size, device=device).sin().view(size, size).to(dtype)
        clock = Clock(on_gpu=device.type != "cpu")
        while len(clock.step_s) < 2 or sum(clock.step_s[1:]) <= _MATRIX_S:  # the first round is not timed
            for _ in range(at_once):
                matrix @ matrix
            clock.end_step()
        return 2 * float(size) ** 3 * at_once * (len(clock.step_s) - 1) / sum(clock.step_s[1:])
    return math.nan
