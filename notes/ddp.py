"""Chapter 6: when DistributedDataParallel's buckets leave, and what makes them leave."""

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks

WIDTH, LAYERS, BATCH = 1250, 12, 128
ROUNDS = 7
MIB = 1 << 20
Log = list[dict[str, Any]]


def network() -> nn.Sequential:
    """Return twelve square layers of 6 MiB each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def record(log: Log, bucket: GradBucket) -> Future[Tensor]:
    """Sum the bucket over the ranks as DDP does; log when it leaves and when its sum arrives."""
    entry = {"bucket": bucket.index(), "MiB": round(bucket.buffer().nbytes / MIB, 1), "leaves": time.perf_counter()}
    log.append(entry)

    def arrive(future: Future[Tensor]) -> Tensor:
        entry["arrives"] = time.perf_counter()
        return future.value()

    group = dist.group.WORLD
    assert group is not None
    future: Future[Tensor] = allreduce_hook(group, bucket).then(arrive)
    return future


def timeline() -> dict[str, Any]:
    """Return the buckets of the first step and of a later one, in ms from the start of backward (*collective*)."""
    log: Log = []
    model = DistributedDataParallel(network())
    model.register_comm_hook(log, record)
    x = torch.randn(BATCH, WIDTH)
    steps: Log = []
    for _ in range(ROUNDS):
        log.clear()
        loss = model(x).square().mean()
        dist.barrier()
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        steps.append(
            {
                "backward, ms": round(1e3 * (end - begin)),
                "buckets": [
                    entry | {key: round(1e3 * (entry[key] - begin)) for key in ("leaves", "arrives")} for entry in log
                ],
            }
        )
    return {"first step": steps[0], "later step": min(steps[1:], key=lambda step: int(step["backward, ms"]))}


def durations() -> dict[str, float]:
    """Return the ms of backward: alone, with the exchange inside, with the exchange after it (*collective*)."""
    model = DistributedDataParallel(network())
    x = torch.randn(BATCH, WIDTH)

    def backward(*, overlaps: bool, sums: bool) -> float:
        model.zero_grad()
        with contextlib.nullcontext() if overlaps else model.no_sync():
            loss = model(x).square().mean()
            dist.barrier()
            begin = time.perf_counter()
            loss.backward()
        if sums:
            for layer in reversed(model.module):
                for parameter in layer.parameters():
                    dist.all_reduce(parameter.grad)
        return 1e3 * (time.perf_counter() - begin)

    ways = {
        "without exchange": {"overlaps": False, "sums": False},
        "exchange during backward": {"overlaps": True, "sums": False},
        "exchange after backward": {"overlaps": False, "sums": True},
    }
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            rounds[name].append(backward(**way))
    return {name: round(min(series)) for name, series in rounds.items()}


def exchanges(place: str) -> int:
    """Return the buckets that leave for a micro-batch with `no_sync` at `place` (*collective*)."""
    log: Log = []
    model = DistributedDataParallel(network())
    model.register_comm_hook(log, record)
    x = torch.randn(8, WIDTH)
    model(x).square().mean().backward()  # DDP rebuilds its buckets after the first step
    model(x).square().mean().backward()
    log.clear()
    with model.no_sync() if place in ("forward and backward", "forward") else contextlib.nullcontext():
        loss = model(x).square().mean()
        if place == "forward and backward":
            loss.backward()
    if place != "forward and backward":
        with model.no_sync() if place == "backward" else contextlib.nullcontext():
            loss.backward()
    return len(log)


def buffer_after_forward() -> float:
    """Return this rank's running mean after a forward pass; it was set to the rank before (*collective*)."""
    model = DistributedDataParallel(nn.BatchNorm1d(1, momentum=0.0))
    assert isinstance(model.module.running_mean, Tensor)
    model.module.running_mean.fill_(10.0 + dist.get_rank())
    model(torch.zeros(2, 1))
    return float(model.module.running_mean)


def unused() -> str:
    """Return the first sentence of the error for a model with a layer that its loss does not use (*collective*)."""
    model = DistributedDataParallel(nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)}))
    model.module.forward = model.module["used"].forward
    try:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return ""


def observe() -> dict[str, Any]:
    """Return all of this rank's numbers (*collective*)."""
    torch.set_num_threads(1)
    return {
        **timeline(),
        "backward, ms": durations(),
        "buckets per micro-batch, no_sync around": {
            place: exchanges(place) for place in ("nothing", "backward", "forward", "forward and backward")
        },
        "running mean after forward": buffer_after_forward(),
        "unused parameters": unused(),
    }


def measure() -> dict[str, Any]:
    """Return rank 0's numbers, and the buffers of both ranks."""
    ranks: Log = on_ranks(observe, 2)
    buffers = "running mean after forward"
    return ranks[0] | {buffers: [numbers[buffers] for numbers in ranks]}


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw a line per bucket, from leaving to arriving, over the backward pass."""
    axes = figure.subplots()
    step = numbers["later step"]
    axes.axvspan(0, step["backward, ms"], color="#bdc3c7", alpha=0.35, label=words("backward pass"))
    for place, bucket in enumerate(step["buckets"]):
        axes.barh(
            place,
            bucket["arrives"] - bucket["leaves"],
            left=bucket["leaves"],
            color="#c0392b",
            height=0.5,
            label=words("all-reduce of a bucket") if place == 0 else None,
        )
    axes.set_yticks(
        range(len(step["buckets"])), [f"{bucket['bucket']}: {bucket['MiB']:g} MiB" for bucket in step["buckets"]]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.03 * step["backward, ms"])
    axes.set_ylabel(words("bucket"))
    axes.set_xlabel(words("ms since the start of backward"))
    axes.set_title(words("Buckets leave while backward runs"))
    axes.legend(frameon=True, loc="lower left")


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the all-reduces of a window of four micro-batches whose `no_sync` covers backward alone."""
    return int(answer) == 4 * int(numbers["buckets per micro-batch, no_sync around"]["backward"])


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "backward pass": "反向传播",
        "all-reduce of a bucket": "一个 bucket 的 all-reduce",
        "bucket": "bucket",
        "ms since the start of backward": "反向传播开始后的时间（ms）",
        "Buckets leave while backward runs": "bucket 在反向传播进行时就发出",
    },
)
