"""Forecasts beside the speed-ups that the multi-GPU examples which people copy have published.

Their machines are not here. What a step of one GPU lasts is their own number; where in it gradients are ready is
measured on the same net here, on a CPU; links are the presets of their hardware. Computation is taken to shrink with
the batch, since nothing is known of smaller ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from lockstep.compare import forecast, networks, timeline
from lockstep.compare.clock import Clock, mark_exchanges
from lockstep.compare.forecast import Cluster
from lockstep.models import table as models

from .harness import Report

NEAR = 0.10
"""Of the efficiency, that a forecast may be off."""
_STEPS, _IMAGES = 4, 2
_CLOCK = "their clock does not wait for the GPU, and one run was timed"


@dataclass(frozen=True)
class Row:
    """A published row: `batch` images in `batch_s` on so many GPUs, where one takes `one_s` for `one_batch`."""

    whose: str
    way: str
    devices: int
    per_node: int
    one_batch: int
    one_s: float
    batch: int
    batch_s: float
    why: str = ""
    """Where a forecast is further off."""

    @property
    def efficiency(self) -> float:
        """Of images a second, over one GPU."""
        return self.batch / self.batch_s / (self.one_batch / self.one_s) / self.devices


_THREADS = "DataParallel's threads start about 1,200 kernels each in turn, which nobody has timed there"
ROWS = (
    Row("pytorch-multigpu, K80", "dp", 4, 4, 240, 6.0, 768, 5.0),
    Row("pytorch-disttrain, P100", "dp", 2, 2, 256, 1.04, 256, 0.70, _THREADS),
    Row("pytorch-disttrain, P100", "ddp", 2, 2, 256, 1.04, 256, 0.60, _CLOCK),
    Row("pytorch-disttrain, P100", "ddp", 2, 1, 256, 1.04, 256, 0.58, _CLOCK),
    Row("distributed-training-dl, P100", "dp", 2, 2, 64, 0.255, 64, 0.170, _THREADS),
    Row("distributed-training-dl, P100", "ddp", 2, 2, 64, 0.255, 128, 0.274, _CLOCK),
    Row("distributed-training-dl, P100", "ddp", 4, 2, 64, 0.255, 256, 0.301, _CLOCK),
)


def measure() -> Report:
    """Return the forecasts beside what was published."""
    told = _shape()
    table, near, held = [], 0, 0
    for row in ROWS:
        low, middle, high = _efficiencies(row, told)
        off = middle - row.efficiency
        near += abs(off) <= NEAR
        held += low <= row.efficiency <= high
        table.append(
            (
                row.whose,
                f"{row.way} × {row.devices}"
                + (f", {row.devices // row.per_node} nodes" if row.per_node < row.devices else ""),
                f"{row.efficiency:.0%}",
                f"{middle:.0%} ({low:.0%}–{high:.0%})",
                f"{100 * off:+.0f}",
                "" if abs(off) <= NEAR else row.why,
            )
        )
    return Report(
        title="Forecasts beside published speed-ups",
        finding=f"{near} of {len(ROWS)} forecasts of efficiency are within {100 * NEAR:.0f} points of what was "
        f"published; the error bars, which hold the links' range alone, hold {held}.",
        columns=("project", "way", "published", "forecast", "points off", "why"),
        rows=table,
        method="PyramidNet-110 α270 in fp32; one GPU's time of a step is the project's own. Links: PCIe3 within a "
        "node, 10GbE between nodes (no project says what it had). Not among them: projects that publish no time of one "
        "GPU (4 × 2080Ti: DDP is 1.25 times as fast as DataParallel) or another batch size for each row (MLPerf).",
        n=f"{_STEPS} steps for the shape of a step; the rest is arithmetic",
        is_timed=False,
    )


def _shape() -> dict[str, object]:
    """Return where in a step of the projects' net its gradients are ready."""
    model = models.build_for("pyramidnet-110-270", classes=10, shape=(3, 32, 32))
    images, labels = torch.randn(_IMAGES, 3, 32, 32), torch.arange(_IMAGES)
    clock = Clock()
    mark_exchanges([model], clock, on_gpu=False)
    clock.restart()
    for _ in range(_STEPS):
        model.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        clock.end_step()
    told = clock.profile()
    seconds = np.array(told["seconds"])
    return {
        "step_s": seconds.sum(1).tolist(),
        "overlaps": True,
        "peak_memory_bytes": {"host": 0, "device": None},
        "profile": {"points": told["points"], "seconds": [seconds.mean(0).tolist()]},
    }


def _efficiencies(row: Row, told: dict[str, object]) -> tuple[float, float, float]:
    share = math.ceil(row.batch / row.devices)
    shape = forecast.share(1, row.one_batch, [told])
    one = shape.profile.scaled(row.one_s / shape.profile.step_s, row.one_batch)
    mine = one.scaled(share / row.one_batch, share)
    cluster = Cluster(
        between=networks.links("--network", "10GbE"), within=networks.links("--within", "PCIe3"), per_node=row.per_node
    )
    step = timeline.data_parallel_s if row.way == "dp" else timeline.step_s
    times = [step(mine, row.devices, cluster.network(quality, has_trees=True)) for quality in range(3)]
    low, middle, high = (row.batch / each_s / (row.one_batch / row.one_s) / row.devices for each_s in times)
    return low, middle, high
