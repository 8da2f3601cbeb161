"""Whether `lockstep forecast` is right: its times of a step against measured ones, on nodes with throttled links.

The nodes are the tests' network namespaces, with a processor each (more than there are processors share them). A rank's
share is measured on all nodes at once, so that it has what the real rank has of the machine.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.compare import forecast, networks
from lockstep.compare.forecast import Cluster, Job
from lockstep.compare.networks import Links
from lockstep.compare.numbers import Interval
from lockstep.compare.timeline import Link
from tests.command import Running
from tests.real.hosts import Host, hosts, missing

from .harness import Report, Skipped, verdict

EXAMINED, DESCRIBED = "examined", "described"
WORLDS = (2, 3, 4)
STEPS, RUNS = 30, 3
"""Timed in a run, and runs of each case: from start to start, too, the same job differs."""
GOAL_MEDIAN, GOAL_WORST, GOAL_HELD = 0.08, 0.20, 0.9
_LIMIT_S = 400
_PORTS = count(29600)
_LINKS = {
    "100 Mbit/s": ("tbf rate 100mbit burst 16kb latency 1s", 100e6 / 8, 0.0),
    "1 Gbit/s": ("tbf rate 1gbit burst 64kb latency 1s", 1e9 / 8, 0.0),
    "1 Gbit/s, 2 ms": ("netem rate 1gbit delay 2ms limit 10000", 1e9 / 8, 2e-3),
}
"""{name: (tc's words, bytes/s, seconds until a message arrives)}."""
_ON_THE_WIRE = 1448 / 1514
"""The part of an Ethernet frame, as tc counts it, that TCP carries with time stamps."""


class Wide(nn.Sequential):
    """13 MB of gradients in two buckets, and no BatchNorm."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        wide = 1024
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(in_channels * image_size**2, wide), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(wide, wide), nn.ReLU()]
        super().__init__(*layers, nn.Linear(wide, classes))


JOBS: Mapping[str, Sequence[str]] = {
    "resnet8, 0.3 MB, 18 exchanges of BatchNorm": ("--batch", "64"),
    "4 × 1,024, 13 MB in two buckets": ("--batch", "256", "--model", "benchmarks.forecast:Wide", "--lr", "0.01"),
}


@dataclass(frozen=True)
class Case:
    """One job on so many nodes over a link: what was said of it, and what it was."""

    job: str
    world: int
    link: str
    known: str
    """How the link is known."""
    forecast_s: Interval
    measured_s: float

    @property
    def error(self) -> float:
        """The forecast's, relative to what was measured."""
        return self.forecast_s.middle / self.measured_s - 1

    @property
    def is_held(self) -> bool:
        """Whether the error bar holds what was measured."""
        return self.forecast_s.holds(self.measured_s)


def measure() -> Report:
    """Return the forecasts beside what was measured."""
    if why := missing():
        raise Skipped(why)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in JOBS.items():
            for world in WORLDS:
                with hosts(world) as nodes:
                    cases += _of(nodes, name, words, Path(folder) / f"{len(cases)}")
    told = []
    for known in (EXAMINED, DESCRIBED):
        some = [each for each in cases if each.known == known]
        errors = sorted(abs(each.error) for each in some)
        median, worst, held = statistics.median(errors), errors[-1], sum(each.is_held for each in some)
        told.append(
            f"Links {known}: the median error of {len(some)} forecasts is {median:.0%} (goal {GOAL_MEDIAN:.0%}, "
            f"{verdict(median <= GOAL_MEDIAN)}), the worst {worst:.0%} (goal {GOAL_WORST:.0%}, "
            f"{verdict(worst <= GOAL_WORST)}); the error bar holds what was measured in {held} (goal "
            f"{GOAL_HELD:.0%}, {verdict(held >= GOAL_HELD * len(some))})."
        )
    return Report(
        title="Forecasts against measurements",
        finding=" ".join(told),
        columns=("job", "nodes", "link", "known by", "forecast, ms", "90 %", "measured, ms", "error", "held"),
        rows=[
            (
                each.job,
                f"{each.world}",
                each.link,
                each.known,
                f"{1000 * each.forecast_s.middle:.1f}",
                f"{1000 * each.forecast_s.low:.1f}–{1000 * each.forecast_s.high:.1f}",
                f"{1000 * each.measured_s:.1f}",
                f"{each.error:+.0%}",
                "yes" if each.is_held else "no",
            )
            for each in cases
        ],
        method="`lockstep train digits` under ddp on network namespaces with one processor each, whose links `tc tbf` "
        "slows down, and `tc netem` delays where the kernel has it. A rank's share is measured on all nodes at the "
        "same time, without exchange, and taken from the slowest, for which the others wait. A link is examined by "
        "`lockstep doctor` on these nodes; or described by its rate, to which gloo's own time for a message is "
        "added, as doctor finds it without a limit. Nothing is fitted to a measured step of several ranks. Measured: "
        f"{STEPS} steps after the warm-up, mean, the median of {RUNS} runs. Shares, links and steps take turns.",
        n=f"{RUNS} runs of each case, share and link",
    )


def _of(nodes: Sequence[Host], name: str, words: Sequence[str], folder: Path) -> Iterator[Case]:
    """Yield the cases of one job on these nodes.

    What is forecast from and what is measured take turns: from minute to minute the same machine is half as fast again.
    """
    world = len(nodes)
    told, own = [], []
    examined: dict[str, list[Link]] = {link: [] for link in _LINKS}
    real_s: dict[str, list[float]] = {link: [] for link in _LINKS}
    for number in range(RUNS):
        shares = _shares(nodes, words, folder / f"share-{number}")
        # All wait for the slowest node: of three on two processors, one has a processor of its own, and tells nothing.
        told.append(max(shares, key=lambda node: statistics.fmean(node["step_s"])))
        own.append(_examined(nodes, folder))
        for link, (limit, *_) in _LINKS.items():
            with contextlib.ExitStack() as kept:
                try:
                    kept.enter_context(_throttled(nodes, limit))
                except AssertionError:  # a kernel without netem
                    continue
                examined[link].append(_examined(nodes, folder))
                run = folder / f"{limit.replace(' ', '-')}-{number}"
                measured = _together(nodes, run, ("compare", "measured", f"{STEPS}"), words)
                real_s[link].append(statistics.fmean(measured["step_s"]))
    share = forecast.share(world, 1, told)
    both = [share._replace(ranks=1, process_s=()), share]  # nothing is asked of one node
    for link, (_, bytes_per_s, latency_s) in _LINKS.items():
        if not real_s[link]:
            continue
        wire = Link.of(bytes_per_s * _ON_THE_WIRE, latency_s)
        described = Links(*(wire.behind(each) for each in networks.measured(own)))
        for known, between in ((EXAMINED, networks.measured(examined[link])), (DESCRIBED, described)):
            cluster = Cluster(between=between, within=between, per_node=1)
            job = Job(batch=int(words[1]), steps_per_epoch=None, epochs=1, on_gpu=False)
            (row,) = forecast.forecast(both, job, cluster, [world])
            yield Case(name, world, link, known, row.step_s, statistics.median(real_s[link]))


def _shares(nodes: Sequence[Host], words: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return what each node tells of the first rank's share, all at the same time."""
    how = ("--strategy", "ddp", "--devices", "1", "--eval-every", 10**9, "--epochs", 1000)
    started = [
        each.lockstep(
            folder, "compare", "share", len(nodes), "train", "digits", *words, *how, "--output", folder / each.name
        )
        for each in _made(folder, nodes)
    ]
    _ended(started)
    return [json.loads((folder / each.name / "measured.json").read_text()) for each in nodes]


def _together(nodes: Sequence[Host], folder: Path, watched: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """Return what rank 0 tells of the job on all nodes."""
    meets = f"tcp://{nodes[0].address}:{next(_PORTS)}"
    how = ("--strategy", "ddp", "--init-method", meets, "--world-size", len(nodes), "--eval-every", 10**9)
    started = [
        each.lockstep(
            folder,
            *watched,
            "train",
            "digits",
            *words,
            *how,
            "--rank",
            rank,
            "--epochs",
            1000,
            "--output",
            folder / "run",
        )
        for rank, each in enumerate(_made(folder, nodes))
    ]
    _ended(started)
    found: dict[str, Any] = json.loads((folder / "run" / "measured.json").read_text())
    return found


def _examined(nodes: Sequence[Host], folder: Path) -> Link:
    """Return what `lockstep doctor` finds between the nodes."""
    meets = f"tcp://{nodes[0].address}:{next(_PORTS)}"
    how = ("doctor", "--json", "--accelerator", "cpu", "--init-method", meets, "--world-size", len(nodes))
    started = [each.lockstep(folder, *how, "--rank", rank) for rank, each in enumerate(_made(folder, nodes))]
    return networks.exchanges(json.loads(_ended(started)[0]))


def _made(folder: Path, nodes: Sequence[Host]) -> Sequence[Host]:
    folder.mkdir(parents=True, exist_ok=True)
    return nodes


def _ended(started: Sequence[Running]) -> list[str]:
    """Return what the commands have printed; raise `RuntimeError` where one failed."""
    said = [each.communicate(timeout=_LIMIT_S) for each in started]
    for each, (_, trouble) in zip(started, said, strict=True):
        if each.returncode:
            raise RuntimeError(trouble)
    return [text for text, _ in said]


@contextlib.contextmanager
def _throttled(nodes: Sequence[Host], limit: str) -> Iterator[None]:
    """Slow down what each node sends within the block. Raises AssertionError where the kernel cannot."""
    for each in nodes:
        each.do(f"tc qdisc add dev eth0 root {limit}")
    try:
        yield
    finally:
        for each in nodes:
            each.do("tc qdisc del dev eth0 root")
