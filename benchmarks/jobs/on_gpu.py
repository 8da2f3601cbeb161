"""Two ranks on one GPU, in a minute: prints a JSON line for each finding.

python -m benchmarks.jobs.on_gpu [--cpu]; `--cpu` rehearses with tiny sizes, whose numbers say nothing.

They share the GPU where NCCL allows it, and else exchange CUDA tensors by gloo: the sums, the order and the streams are
those of two GPUs, the speed is not. So DDP and a session are compared with each other alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import interleave
from benchmarks.steps import DDP, EAGER, IN_GROUP, NETWORKS, REHEARSED, Measured, Network, Way, session
from lockstep import RunConfig, World, override
from lockstep._torch import FileStore
from lockstep.record.base import Nothing
from lockstep.trainer import train
from lockstep.world.topology import Topology

ON_CPU = "--cpu" in sys.argv
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
STEPS, ROUNDS = (1, 2) if ON_CPU else (4, 4)
LIMIT_S = 100


def say(what: str, **numbers: Any) -> None:
    """Print a finding."""
    print(json.dumps({"what": what} | numbers), flush=True)


def exchanges(world: World, network: Network, backend: str) -> None:
    """Measure a step under DDP and under a session, in turns; and the session's with synchronised BatchNorm."""
    ways: dict[str, Way] = {DDP: EAGER[DDP], IN_GROUP: EAGER[IN_GROUP]}
    if network.is_image:
        ways["session, ddp, sync"] = partial(session, batchnorm="sync")
    with contextlib.ExitStack() as stack:
        subjects = {name: Measured(way, network, world, stack) for name, way in ways.items()}
        turns = {name: partial(subject.round, STEPS) for name, subject in subjects.items()}
        found = interleave(turns, rounds=ROUNDS)
    if world.is_main:
        by_way = {name: series.text() for name, series in found.items()}
        ratio = found[IN_GROUP].per(found[DDP]).text(".3f")
        say("session ÷ plain DDP", network=network.name, by=backend, ratio=ratio, ms=by_way)


class Losses(Nothing):
    """Keeps the losses of a run by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def record(self, event: str, **fields: Any) -> None:
        """Keep the losses of an interval."""
        if event == "steps":
            self.by_step |= {row["step"]: row["loss"] for row in fields["rows"]}


def losses(world: World, strategy: str, **options: Any) -> dict[int, float]:
    """Train a few steps in float64; return the losses."""
    recorder = Losses()
    options = {"model": "resnet8", "data": "digits", "augment": ["crop", "flip"], "batch": 33, "lr": 0.05} | options
    config = override(RunConfig(), precision="fp64", max_steps=8, epochs=9, strategy=strategy, **options)
    train(config, world, recorder)
    return recorder.by_step


def as_rank(number: int, folder: str, backend: str) -> None:
    """Join one other rank on this device, and compare what both compute with what one does."""
    torch.set_num_threads(1 if ON_CPU else torch.get_num_threads())  # ranks that share few processors
    if backend == "nccl":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    elif not ON_CPU:
        init = dist.init_process_group
        dist.init_process_group = lambda _, **how: init("cpu:gloo,cuda:gloo", **how | {"device_id": None})
    topology = Topology(rank=number, size=2, local_rank=number, local_size=2)
    world = World.join(topology, DEVICE, FileStore(f"{folder}/{backend}", 2), timeout_s=60)
    for accumulate in (1, 2):
        both = losses(world, "ddp", accumulate=accumulate)
        if world.is_main:
            one = losses(World.alone(DEVICE), "single", accumulate=accumulate)
            gap = max(abs(both[step] - one[step]) / abs(one[step]) for step in one)
            say("two ranks against one, float64", by=backend, accumulate=accumulate, steps=len(one), relative_gap=gap)
    for network in reversed(REHEARSED if ON_CPU else NETWORKS):  # small ones first: gloo takes seconds for large ones
        exchanges(world, network, backend)
    world.close()


def two_ranks(backend: str) -> bool:
    """Start both ranks; print what they say. Return whether both ended well."""
    has_ended = True
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.jobs.on_gpu", *["--cpu"] * ON_CPU, "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), folder, backend], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for rank in range(2)
        ]
        for number, process in enumerate(ranks):
            try:
                output = process.communicate(timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                output = process.communicate()[0]
            print("\n".join(line for line in output.splitlines() if line.startswith("{")), flush=True)
            if process.returncode:
                say("a rank failed", rank=number, by=backend, output=output[-600:])
                has_ended = False
    return has_ended


def main() -> None:
    """Run by NCCL, or where it refuses two ranks on a GPU, by gloo."""
    if "--rank" in sys.argv:
        at = sys.argv.index("--rank") + 1
        as_rank(int(sys.argv[at]), *sys.argv[at + 1 : at + 3])
        return
    say("device", name=str(DEVICE) if ON_CPU else torch.cuda.get_device_name(), torch=torch.__version__)
    if ON_CPU or not two_ranks("nccl"):
        two_ranks("gloo")


if __name__ == "__main__":
    main()
