"""What one NVIDIA GPU does with a training step: `python -m benchmarks gpu [--parts steps,costs] [--cpu]`.

The parts, each of which writes a file of its own, after each network again:

    steps     plain torch, DDP, sessions, `lockstep train` and CUDA graphs, with GPT-2 small, ResNet-50, ResNet-18 and
              PyramidNet-110: time of device and host, memory, operations
    costs     digests, snapshots for checkpoints, and Muon's step
    speedrun  seconds to 94 % on CIFAR-10, by the recipe cifar10-speedrun; digits where CIFAR-10 is not at hand
    train     the loop of `lockstep train`, with its records
    compiled  the ways of `steps`, compiled, which takes minutes
    rates     images a second by precision, batch and compilation, and the kernels of a step

`--cpu` runs all of it on a processor with tiny sizes: a rehearsal, whose numbers say nothing and are not kept.
Two ranks on one GPU are `python -m benchmarks.jobs.on_gpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep import RequestError, World, override, train
from lockstep._torch import HashStore
from lockstep.config.options import recipe
from lockstep.record.base import Recorder
from lockstep.world.topology import Topology

from . import images, rates
from .costs import measure_costs
from .harness import RESULTS, Neighbours, Report, Skipped, interleave, write
from .loops import configured, engine_step_s
from .rates import first_line, forget
from .steps import (
    COMPILED,
    DDP,
    EAGER,
    GRAPHS,
    IN_GROUP,
    NETWORKS,
    PLAIN,
    REHEARSED,
    SESSION,
    Cost,
    Measured,
    Network,
    Way,
    name_of,
)

TARGET = 0.94
_COLUMNS = (
    *("network", "way", "ms a step", "÷ plain", "host, ms", "memory, GiB", "operations", "launches", "first step, s"),
)
_METHOD = (
    "bfloat16 by autocast, fused SGD with momentum or AdamW, one batch that stays on the device. Sessions take theirs "
    "from a loader. `session` is alone; `plain DDP` and `session, ddp` exchange gradients in a process group of one "
    "rank; `train` is the step of `lockstep train`. `graphs` are CUDA graphs of the passes. All ways of a network take "
    "turns. `host` is the time to queue a step on an idle device, memory the allocator's peak less what the other ways "
    "hold. Operations are kernels, copies and fills by torch's profiler (a CPU's: operators); launches are the host's "
    "calls."
)


def steps(device: torch.device, *, only: str, is_rehearsal: bool) -> Iterator[Report]:
    """Yield the report of the ways that compile nothing, after each network."""
    yield from _of_ways("steps", EAGER, device, only, is_rehearsal)


def compiled(device: torch.device, *, only: str, is_rehearsal: bool) -> Iterator[Report]:
    """Yield the report of the compiled ways, after each network."""
    yield from _of_ways("compiled steps", {PLAIN: EAGER[PLAIN]} | dict(COMPILED), device, only, is_rehearsal)


def _of_ways(
    title: str, ways: Mapping[str, Way], device: torch.device, only: str, is_rehearsal: bool
) -> Iterator[Report]:
    rounds, repeats = (2, 1) if is_rehearsal else (5, 6)
    rows: list[tuple[str, ...]] = []
    findings: list[str] = []
    world = World.join(Topology(), device, HashStore(), timeout_s=60)
    try:
        for network in REHEARSED if is_rehearsal else NETWORKS:
            if only not in network.name:
                continue
            costs, troubles = measure_ways(ways, network, world, rounds, repeats)
            rows += [_row(network, way, costs, troubles.get(way, "")) for way in ways]
            findings += _ratios(network, costs)
            yield Report(
                title=f"Training {title} on one {name_of(device)}",
                finding="; ".join(findings) + ".",
                columns=_COLUMNS,
                rows=rows,
                method=_METHOD,
                n=f"{rounds} rounds of {repeats} steps in turns",
            )
            forget(device)
    finally:
        world.close()


def measure_ways(
    ways: Mapping[str, Way], network: Network, world: World, rounds: int, repeats: int
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return the costs of the ways of one network, and why others cannot be measured."""
    troubles: dict[str, str] = {}
    subjects: dict[str, Measured] = {}
    with contextlib.ExitStack() as stack:
        for name, way in ways.items():
            try:
                subjects[name] = Measured(way, network, world, stack)
            except (RequestError, torch.OutOfMemoryError) as error:
                troubles[name] = first_line(error)
            except Exception as error:  # a compiler's or a graph's: the other ways can still be measured
                troubles[name] = f"{type(error).__name__}: {first_line(error)}"
        turns = {name: lambda subject=subject: subject.round(repeats) for name, subject in subjects.items()}
        found = interleave(turns, rounds=rounds)
        costs = {name: subject.cost(found[name], repeats) for name, subject in subjects.items()}
        subjects.clear()
    return costs, troubles


def _row(network: Network, way: str, costs: Mapping[str, Cost], trouble: str) -> tuple[str, ...]:
    if way not in costs:
        return (network.name, way, trouble, *[""] * (len(_COLUMNS) - 3))
    cost = costs[way]
    return (
        *(network.name, way, cost.step_ms.text()),
        f"{cost.step_ms.per(costs[PLAIN].step_ms).median:.3f}" if PLAIN in costs else "",
        *(f"{cost.host_ms:.2f}", f"{cost.memory_bytes / 2**30:.2f}", str(cost.operations), str(cost.launches)),
        f"{cost.first_s:.1f}",
    )


def _ratios(network: Network, costs: Mapping[str, Cost]) -> list[str]:
    pairs = ((SESSION, PLAIN), (IN_GROUP, DDP), (GRAPHS, PLAIN), *((way, PLAIN) for way in COMPILED))
    return [
        f"{network.name}: {way} ÷ {other} {costs[way].step_ms.per(costs[other].step_ms).median:.3f}"
        for way, other in pairs
        if way in costs and other in costs
    ]


def loop_of_train(device: torch.device, *, only: str, is_rehearsal: bool) -> Iterator[Report]:
    """Yield the report of `lockstep train`, eager and as graphs, after each network."""
    rows: list[tuple[str, ...]] = []
    for network in REHEARSED if is_rehearsal else NETWORKS:
        if not network.recipe or only not in network.name:
            continue
        for name, options in (("lockstep train", {}), ("lockstep train, graphs", {"cuda_graphs": "on"})):
            rows.append((network.name, name, *_trained(network, device, options, 8 if is_rehearsal else 80)))
        yield Report(
            title=f"The loop of lockstep train on one {name_of(device)}",
            finding=f"{len(rows)} runs.",
            columns=("network", "way", "ms a step", "memory, GiB"),
            rows=rows,
            method="Whole runs on made-up images, cropped and flipped, with everything that happens between steps: "
            "records, loss and gradient norm; bf16. The first two of the log's intervals are left out.",
            n="one run each",
        )
        forget(device)


def _trained(network: Network, device: torch.device, options: dict[str, Any], count: int) -> tuple[str, str]:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    data = {"data": "fake", "image_size": network.shape[1], "samples": 8 * network.batch, "augment": ["crop", "flip"]}
    try:
        config = configured(
            **{"model": network.recipe, "classes": network.classes, "batch": network.batch, "lr": 0.01} | data,
            **{"precision": "bf16", "max_steps": count, "log_every": max(1, count // 8), "eval_every": 1000} | options,
        )
        with tempfile.TemporaryDirectory() as folder:
            step_ms = 1e3 * engine_step_s(config, Path(folder) / "steps.jsonl", World.alone(device))
    except RequestError as error:
        return first_line(error), ""
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return f"{step_ms:.2f}", f"{peak / 2**30:.2f}"


class Scores(Recorder):
    """Keeps the score of each evaluation, and the seconds since training began."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float]] = []
        self._begin_s = 0.0

    def record(self, event: str, **fields: Any) -> None:
        """Keep an evaluation."""
        if event == "start":
            self._begin_s = time.perf_counter()
        elif event == "eval":
            self.rows.append((fields["epoch"] + 1, time.perf_counter() - self._begin_s, float(fields["top1"])))

    def sentence(self) -> str:
        """Return when the target was reached, and the last score."""
        reached = next(
            (f"after {spent_s:.1f} s (epoch {epoch})" for epoch, spent_s, top1 in self.rows if top1 >= TARGET), ""
        )
        epoch, spent_s, top1 = self.rows[-1]
        return f"{TARGET:.0%} {reached or 'not reached'}, {top1:.2%} after {epoch} epochs and {spent_s:.1f} s"


def speedrun(device: torch.device, *, only: str, is_rehearsal: bool) -> Iterator[Report]:
    """Yield the report of a training to the target, and last of one with CUDA graphs too."""
    name, options = "cifar10-speedrun", dict[str, Any](download=False)
    try:
        options |= {"data_dir": images.cifar10()}
        note = ""
    except Skipped as reason:
        name, options, note = "digits", {}, f" Digits, since CIFAR-10 is not at hand: {reason}."
    limits = {"max_steps": 3, "batch": 64} if is_rehearsal else {}
    findings: list[str] = []
    rows: list[tuple[str, ...]] = []
    for graphs in ("off", "on"):
        try:
            scores = Scores()
            config = override(recipe(name), **options, **limits, strategy="single", cuda_graphs=graphs)
            train(config, World.alone(device), scores)
            findings.append(f"CUDA graphs {graphs}: {scores.sentence()}")
            rows += [(graphs, str(epoch), f"{spent_s:.2f}", f"{top1:.4f}") for epoch, spent_s, top1 in scores.rows]
        except RequestError as error:
            findings.append(f"CUDA graphs {graphs}: {first_line(error)}")
        yield Report(
            title=f"{name} on one {name_of(device)}",
            finding=f"{'; '.join(findings)}.{note}",
            columns=("CUDA graphs", "epoch", "seconds", "test accuracy"),
            rows=rows,
            method="Seconds of the wall clock from the run's start, once data and model are on the device, evaluations "
            "and the choice of algorithms included; graphs are recorded before.",
            n="one run each",
        )


def image_rates(device: torch.device, *, only: str, is_rehearsal: bool) -> Iterator[Report]:
    """Yield the report of the rates, after each case."""
    yield from rates.measure(device, rates.REHEARSAL if is_rehearsal else rates.REAL)


Part = Callable[..., Iterator[Report]]
PARTS: Mapping[str, Part] = {
    "steps": steps,
    "costs": measure_costs,
    "speedrun": speedrun,
    "train": loop_of_train,
    "compiled": compiled,
    "rates": image_rates,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write a report for each part, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--only", default="", help="only networks whose names contain this")
    parser.add_argument("--cpu", action="store_true", help="rehearse on a CPU with tiny sizes")
    asked = parser.parse_args(arguments)
    names = asked.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts {', '.join(unknown)}: there are {', '.join(PARTS)}")
    if not (asked.cpu or torch.cuda.is_available()):
        print("gpu: skipped: torch sees no NVIDIA GPU; --cpu rehearses.", flush=True)
        return 0
    device = torch.device("cpu") if asked.cpu else torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.benchmark = True  # for the plain ways, as `lockstep train` has it
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-")) if asked.cpu else RESULTS
    command = " ".join(["python -m benchmarks gpu", *(sys.argv[1:] if arguments is None else arguments)])
    for name in names:
        neighbours = Neighbours()
        slug = re.sub(r"[^a-z0-9]+", "-", f"gpu {name_of(device)} {name} {asked.only}".lower()).strip("-")
        for report in PARTS[name](device, only=asked.only, is_rehearsal=asked.cpu):
            path = write(slug, report, command=command, disturbed=neighbours.share(), folder=folder)
            print(f"{name}: {report.finding} ({path})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
