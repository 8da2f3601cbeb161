"""What a data set costs a host: two ranks that train on CIFAR-10 against one process.

The measure is the proportional set size (PSS) of anonymous and shared memory: each page counts once, shared out
among those who map it.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import torch

from lockstep import RunConfig, World, launch
from lockstep.data import sets
from lockstep.jobs.job import assemble

from .harness import Report, verdict
from .images import cifar10
from .loops import configured

GOAL = 1.5  # halfway between one copy and two


def measure() -> Report:
    """Return the memory of one and of two ranks before and after they hold CIFAR-10."""
    options = {"model": "mlp", "data": "cifar10", "data_dir": cifar10(), "augment": ["crop", "flip"], "batch": 64}
    rows, grown = [], {}
    for ranks in (1, 2):
        # Spawned for one rank too: a process in which nothing else has left freed memory to fill.
        config = configured(**options, strategy="ddp", devices=ranks, launcher="spawn")
        found = launch(on_rank, config)
        assert found is not None
        before, after = found
        grown[ranks] = after - before
        rows.append((str(ranks), *(f"{value / 2**20:.0f}" for value in (before, after, after - before))))
    share = grown[2] / grown[1]
    return Report(
        title="What a data set costs a host",
        finding=f"CIFAR-10 takes {grown[1] / 2**20:.0f} MiB in one process and {grown[2] / 2**20:.0f} MiB in two "
        f"ranks together: {share:.2f} times (goal: one copy a host, so below {GOAL} times, {verdict(share < GOAL)}).",
        columns=("ranks", "before, MiB", "with CIFAR-10, MiB", "growth, MiB"),
        rows=rows,
        method="Sum over the ranks of PSS (anonymous and shared pages) from /proc/PID/smaps_rollup, before the "
        "data set is built and after every "
        "image has been read once. The images are 60,000 × 3,072 bytes, 176 MiB.",
        n="one run each",
    )


def on_rank(config: RunConfig, world: World) -> tuple[int, int]:
    """Return the bytes of all ranks before and after they hold the data set (*collective*)."""
    assemble(configured(model="mlp", batch=64), World.alone()).data.close()  # whatever is loaded once
    before = _bytes(world)
    data = sets.build(config.data, seed=0, world=world, dtype=torch.float32, channels_last=True)
    for split in (data.train, data.test):
        for _ in split.stream(np.array_split(np.arange(len(split)), 1000), epoch=0):
            pass
    after = _bytes(world)
    data.close()
    return before, after


def _bytes(world: World) -> int:
    """Return the sum of the ranks' PSS (*collective*)."""
    gc.collect()
    world.barrier()
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    # Without the pages of files: the system drops those of torch's libraries, and reads them again, as it likes.
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    own = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))
    return sum(world.gather(own))
