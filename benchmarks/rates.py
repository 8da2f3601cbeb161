"""Images a second on one NVIDIA GPU, by precision, batch and compilation: a part of `python -m benchmarks gpu`.

First the machine itself: the rate at which it multiplies bfloat16 matrices of random numbers and copies its memory.
Then images a second of whole training steps (data already on the GPU, crop and flip there), timed by the GPU's own
clock; what share of the matrix rate that is, with the operations counted by torch; and where one step's time goes.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lockstep import RequestError, World
from lockstep.jobs.job import Job, assemble
from lockstep.models import table as models

from .harness import Report, Series, table
from .loops import configured, fed, repeated, stepper
from .steps import name_of


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str
    precision: str
    batch: int
    compile: bool


@dataclass(frozen=True)
class Plan:
    """How much is measured; the rehearsal on a CPU does the same with less."""

    matrix: int
    copied_bytes: int
    cases: tuple[Case, ...]
    profiled: tuple[Case, ...]
    steps: int
    warm_up: int
    rounds: int


def _cases() -> tuple[Case, ...]:
    """Return the networks at their usual batches, then what precision, compiling and the batch change in each."""
    small, large, residual = "pyramidnet-110-48", "pyramidnet-110-270", "resnet18"
    found = [
        Case(model, precision, 128, compile=False)
        for model in (small, large, residual)
        for precision in ("fp32", "tf32", "fp16", "bf16")
    ]
    for model, batches in ((small, (128, 512, 2048)), (large, (128, 512)), (residual, (128, 512, 2048))):
        for batch in batches:
            found += [Case(model, "bf16", batch, compile=each) for each in (False, True)]
    return tuple(dict.fromkeys(found))


REAL = Plan(
    matrix=8192,
    copied_bytes=4 * 2**30,
    cases=_cases(),
    profiled=tuple(Case(model, "bf16", 128, compile=False) for model in ("pyramidnet-110-48", "resnet18")),
    steps=20,
    warm_up=10,
    rounds=3,
)
REHEARSAL = Plan(
    matrix=256,
    copied_bytes=2**22,
    cases=(
        Case("convnet-small", "fp32", 16, compile=False),
        Case("convnet-small", "tf32", 16, compile=False),  # refused by a CPU: the line must say so
        Case("convnet-small", "fp16", 16, compile=False),
        Case("resnet8", "bf16", 16, compile=True),
    ),
    profiled=(Case("resnet8", "bf16", 16, compile=False),),
    steps=2,
    warm_up=1,
    rounds=2,
)


class Clock:
    """Times work on one device: by CUDA events on a GPU, so that the host's own delays count only where they show."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds from the begin of `work` to the end of all that it queued."""
        if self.device.type != "cuda":
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def matrix_flops(clock: Clock, side: int, dtype: torch.dtype, rounds: int) -> Series:
    """Return operations a second of the product of two random matrices, side × side.

    Random, because a GPU draws less power and clocks higher on zeros.
    """
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    times = 20

    def multiply() -> None:
        for _ in range(times):
            a @ b

    clock.seconds(multiply)
    return Series(tuple(2 * side**3 * times / clock.seconds(multiply) for _ in range(rounds)))


def copy_rate(clock: Clock, size_bytes: int, rounds: int) -> Series:
    """Return bytes a second that a copy within the device's memory reads and writes together."""
    source = torch.randint(256, (size_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    times = 5

    def copy() -> None:
        for _ in range(times):
            target.copy_(source)

    clock.seconds(copy)
    return Series(tuple(2 * size_bytes * times / clock.seconds(copy) for _ in range(rounds)))


def image_flop(model: str, classes: int = 10, side: int = 32) -> float:
    """Return the operations of one image forward and backward, as torch counts convolutions and products."""
    images = 2
    net = models.build_for(model, classes=classes, shape=(3, side, side))
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(images, 3, side, side)).sum().backward()
    return float(counter.get_total_flops()) / images


@dataclass(frozen=True)
class Measured:
    """What a case came to; `trouble` says why there is nothing."""

    images_per_s: Series | None = None
    repeated_per_s: Series | None = None
    memory_bytes: int = 0
    first_s: float = 0.0
    """Seconds of the first step, compiling included."""
    trouble: str = ""


def measure_case(case: Case, data: dict[str, Any], plan: Plan, clock: Clock) -> Measured:
    """Return the rate of a case, fed and with one batch repeated, or what it failed of."""
    job = None
    try:
        job = _job(case, data, clock.device)
        return _measure(job, plan, clock)
    except (RequestError, torch.OutOfMemoryError) as error:
        return Measured(trouble=first_line(error))
    except Exception as error:  # a compiler's, most likely: the other cases can still be measured
        if not case.compile:
            raise
        return Measured(trouble=f"{type(error).__name__}: {first_line(error)}")
    finally:
        if job is not None:
            job.data.close()
        del job
        forget(clock.device)


def _measure(job: Job, plan: Plan, clock: Clock) -> Measured:
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(clock.device)
    once = clock.seconds(stepper(job, repeated(job), steps=1))
    runs = {name: stepper(job, feed(job), steps=plan.steps) for name, feed in (("fed", fed), ("same", repeated))}
    for _ in range(-(-plan.warm_up // plan.steps)):
        for run in runs.values():
            run()
    images = plan.steps * job.plan.global_size
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(plan.rounds):
        for name, run in runs.items():
            rates[name].append(images / clock.seconds(run))
    memory = torch.cuda.max_memory_allocated(clock.device) if clock.device.type == "cuda" else 0
    return Measured(Series(tuple(rates["fed"])), Series(tuple(rates["same"])), memory, once)


def _job(case: Case, data: dict[str, Any], device: torch.device) -> Job:
    options = {"model": case.model, "precision": case.precision, "batch": case.batch, "compile": case.compile}
    return assemble(configured(**options, **data, augment=["crop", "flip"], lr=0.01), World.alone(device))


def forget(device: torch.device) -> None:
    """Free what a measurement leaves: compiled code and cached memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """Return an error's first line, for a cell of a table."""
    text = str(error).strip()
    return text.splitlines()[0][:100].replace("|", "/") if text else type(error).__name__


def kernels(case: Case, data: dict[str, Any], plan: Plan, clock: Clock) -> str:
    """Return a Markdown section: where the time of one training step goes, by torch's profiler."""
    job = _job(case, data, clock.device)
    run = stepper(job, fed(job), steps=1)
    for _ in range(plan.warm_up):
        run()
    whole_s = min(clock.seconds(run) for _ in range(5))
    on_gpu = clock.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as seen:
        clock.seconds(run)
    job.data.close()
    events = [
        (event.key, event.count, _busy_us(event, on_gpu)) for event in seen.key_averages() if _counts(event, on_gpu)
    ]
    events.sort(key=lambda event: -event[2])
    busy_us = sum(event[2] for event in events)
    rows = [(f"`{_short(name)}`", str(count), f"{us:.0f}", f"{us / busy_us:.1%}") for name, count, us in events[:20]]
    what = "kernels" if on_gpu else "operators"
    return "\n".join(
        [
            f"## One step of {case.model}, {case.precision}, batch {case.batch}",
            "",
            f"{sum(event[1] for event in events)} {what}, busy for {busy_us / 1e3:.2f} ms; the step takes "
            f"{whole_s * 1e3:.2f} ms without the profiler.",
            "",
            *table((what[:-1], "calls", "µs", "share"), rows),
            "",
        ]
    )


def _counts(event: Any, on_gpu: bool) -> bool:
    """Whether the event is work itself rather than the operator that started it."""
    if not on_gpu:
        return bool(event.self_cpu_time_total > 0)
    if getattr(event, "is_user_annotation", False):
        return False
    return bool(event.device_type.name == "CUDA" and event.self_device_time_total > 0)


def _busy_us(event: Any, on_gpu: bool) -> float:
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)


def _short(name: str) -> str:
    """Return a kernel's name without the arguments of its templates."""
    name = name.replace("void ", "").replace("(anonymous namespace)::", "").replace("|", "/")
    bare = re.sub(r"<.*|\(.*", "", name)
    inner = re.search(r"(\w*(?:Functor|_kernel|Kernel)\w*)", name[len(bare) :])
    return (f"{bare} … {inner[1]}" if inner and inner[1] not in bare else bare)[:90]


def measure(device: torch.device, plan: Plan) -> Iterator[Report]:
    """Yield the report of one device after each case, and last the whole one."""
    clock, data = Clock(device), {"data": "fake", "image_size": 32, "samples": 50_000}
    rate, copied = (
        matrix_flops(clock, plan.matrix, torch.bfloat16, plan.rounds),
        copy_rate(clock, plan.copied_bytes, plan.rounds),
    )
    forget(device)
    flop = {model: image_flop(model) for model in dict.fromkeys(case.model for case in plan.cases)}
    done: list[tuple[Case, Measured]] = []

    def report(sections: Sequence[str] = ()) -> Report:
        left = len(plan.cases) - len(done)
        return Report(
            title=f"Images a second on one {name_of(device)}",
            finding=f"bf16 matrices of {plan.matrix}²: {rate.median / 1e12:.0f} TFLOP/s; copies: "
            f"{copied.median / 1e12:.2f} TB/s read and written. Best rates: {_best(done, flop, rate.median)}."
            + (f" **Cut short:** {left} cases were not measured." if left else ""),
            columns=_COLUMNS,
            rows=[_row(case, found, flop[case.model], rate.median) for case, found in done],
            method=f"Whole training steps of ours (images fetched, cropped and flipped on the device; forward, "
            f"backward, SGD) by CUDA events around {plan.steps} steps. Matrix rate: {rate.text('.3g')} FLOP/s, copy "
            f"rate: {copied.text('.3g')} B/s. GFLOP are those of convolutions and products, forward and backward, as "
            "torch.utils.flop_counter counts them. Memory is the allocator's peak. The data set is fake.",
            n=f"{plan.rounds} rounds of {plan.steps} steps, fed and repeated in turns",
            more="\n".join(sections),
        )

    for case in plan.cases:
        done.append((case, measure_case(case, data, plan, clock)))
        yield report()
    sections: list[str] = []
    for case in plan.profiled:
        sections.append(kernels(case, data, plan, clock))
        yield report(sections)


def _best(done: Sequence[tuple[Case, Measured]], flop: dict[str, float], matrix_rate: float) -> str:
    """Return each model's best rate, and what share of the matrix rate that is."""
    best: dict[str, float] = {}
    for case, found in done:
        if found.images_per_s is not None:
            best[case.model] = max(best.get(case.model, 0.0), found.images_per_s.median)
    return "; ".join(
        f"{model} {images_per_s:,.0f} images/s ({images_per_s * flop[model] / matrix_rate:.1%} of the matrix rate)"
        for model, images_per_s in best.items()
    )


_COLUMNS = (
    "model",
    "precision",
    "batch",
    "compiled",
    "images/s",
    "ms a step",
    "fed ÷ one batch repeated",
    "GFLOP an image",
    "TFLOP/s",
    "of the matrix rate",
    "memory, GiB",
    "first step, s",
)


def _row(case: Case, found: Measured, flop: float, matrix_rate: float) -> tuple[str, ...]:
    head = (case.model, case.precision, str(case.batch), "yes" if case.compile else "no")
    if found.images_per_s is None or found.repeated_per_s is None:
        return (*head, found.trouble, *[""] * (len(_COLUMNS) - len(head) - 1))
    rate = found.images_per_s.median
    return (
        *head,
        found.images_per_s.text(",.0f"),
        f"{case.batch / rate * 1e3:.2f}",
        f"{found.images_per_s.per(found.repeated_per_s).median:.3f}",
        f"{flop / 1e9:.2f}",
        f"{rate * flop / 1e12:.1f}",
        f"{rate * flop / matrix_rate:.1%}",
        f"{found.memory_bytes / 2**30:.2f}",
        f"{found.first_s:.1f}",
    )
