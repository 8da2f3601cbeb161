"""What only a GPU can tell of a session, in two minutes: prints a JSON line for each finding.

python -m benchmarks.jobs.on_gpu [--cpu]; `--cpu` rehearses with tiny sizes, whose numbers say nothing.

Two ranks share the one GPU where NCCL allows it, and else exchange CUDA tensors by gloo: the sums, the order and the
streams are those of two GPUs, the speed is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lockstep import RunConfig, World, override
from lockstep._torch import FileStore, HashStore
from lockstep.checks.replicas import facts
from lockstep.nn import sync_batchnorm
from lockstep.record.base import Nothing
from lockstep.runs.opened import OpenRun
from lockstep.sessions.session import Session
from lockstep.trainer import train
from lockstep.world.topology import Topology

ON_CPU = "--cpu" in sys.argv
DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
STEPS, WARM_UP = (2, 1) if ON_CPU else (12, 4)
LIMIT_S = 90


def say(what: str, **numbers: Any) -> None:
    """Print a finding."""
    print(json.dumps({"what": what} | numbers), flush=True)


def step_ms(step: Callable[[], None]) -> tuple[float, float]:
    """Return the milliseconds of a step, and those that the host takes to queue it."""
    for _ in range(WARM_UP):
        step()
    synchronize()
    host_s, begin_s = 0.0, time.perf_counter()
    for _ in range(STEPS):
        queued_s = time.perf_counter()
        step()
        host_s += time.perf_counter() - queued_s
    synchronize()
    return tuple(round(1e3 * seconds / STEPS, 2) for seconds in (time.perf_counter() - begin_s, host_s))  # type: ignore[return-value]


def synchronize() -> None:
    """Wait for the device."""
    if not ON_CPU:
        torch.cuda.synchronize()


def peak_gib() -> float | None:
    """Return the allocator's peak since the last call, in GiB; None on a CPU."""
    if ON_CPU:
        return None
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


class Transformer(nn.Module):
    """A GPT-2 of the given size; its embedding is its last layer, too."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return functional.linear(self.layers(self.embedding(tokens), mask, is_causal=True), self.embedding.weight)


def gpt() -> tuple[Transformer, int, int]:
    """Return a GPT-2 small, its batch, and its length of context."""
    return (Transformer(256, 64, 2, 2), 2, 32) if ON_CPU else (Transformer(50304, 768, 12, 12), 16, 1024)


def session_of(world: World, **options: Any) -> Session:
    """Return a session without a folder."""
    config = override(RunConfig(), precision="bf16", channels_last="off", **options)
    return Session(config, world, nullcontext(OpenRun(config, Nothing(), None)))


def transformer_steps(world: World) -> None:
    """Measure a plain step and a session's, with and without accumulation."""
    for accumulate in (1, 4):
        model, batch, length = gpt()
        model = model.to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(256, (batch, length), device=DEVICE)
        peak_gib()

        def plain(
            model: nn.Module = model,
            optimizer: Any = optimizer,
            tokens: Tensor = tokens,
            accumulate: int = accumulate,
        ) -> None:
            for _ in range(accumulate):
                with torch.autocast(DEVICE.type, torch.bfloat16):
                    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                (loss / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()

        if world.size == 1:
            say("GPT-2 small, plain", accumulate=accumulate, ms=step_ms(plain), peak_gib=peak_gib())
        with session_of(world, accumulate=accumulate) as session:
            count = batch * world.size * accumulate * (STEPS + WARM_UP)
            data = TensorDataset(torch.randint(256, (count, length)))
            loader = DataLoader(data, batch * world.size * accumulate)
            model, optimizer, loader = session.prepare(model, optimizer, loader)
            batches = iter(loader)

            def ours(
                model: nn.Module = model,
                optimizer: Any = optimizer,
                session: Session = session,
                batches: Any = batches,
                accumulate: int = accumulate,
            ) -> None:
                for _ in range(accumulate):
                    (tokens,) = next(batches)
                    session.backward(functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
                    optimizer.step()
                    optimizer.zero_grad()

            ms = step_ms(ours)
            if world.is_main:
                say("GPT-2 small, session", ranks=world.size, accumulate=accumulate, ms=ms, peak_gib=peak_gib())
        if accumulate == 1 and world.size == 1:
            tensors = dict(model.named_parameters())
            say("digest of the weights", ms=step_ms(partial(_digest, tensors)))


def _digest(tensors: dict[str, Tensor]) -> None:
    facts(tensors, DEVICE)


def residual_steps(world: World) -> None:
    """Measure ResNet-50 with BatchNorm of each rank and synchronised."""
    batch, size = (2, 64) if ON_CPU else (32, 224)
    for kind in ("local", "sync"):
        model = torchvision.models.resnet18() if ON_CPU else torchvision.models.resnet50()
        if kind == "sync":
            sync_batchnorm.convert(model, world)
        model = model.to(DEVICE, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=True)
        images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=DEVICE)

        def step(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = images, y: Tensor = labels) -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        ms = step_ms(step)
        if world.is_main:
            say("ResNet-50", ranks=world.size, batch=batch, batchnorm=kind, ms=ms)


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
    transformer_steps(world)
    residual_steps(world)
    world.close()


def two_ranks(backend: str) -> None:
    """Start both ranks; print what they say."""
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


def main() -> None:
    """Run all parts."""
    if "--rank" in sys.argv:
        at = sys.argv.index("--rank") + 1
        as_rank(int(sys.argv[at]), *sys.argv[at + 1 : at + 3])
        return
    say("device", name=str(DEVICE) if ON_CPU else torch.cuda.get_device_name(), torch=torch.__version__)
    for backend in ("gloo",) if ON_CPU else ("nccl", "gloo"):
        two_ranks(backend)
    world = World.join(Topology(), DEVICE, HashStore(), timeout_s=60)
    transformer_steps(world)
    residual_steps(world)
    world.close()


if __name__ == "__main__":
    main()
