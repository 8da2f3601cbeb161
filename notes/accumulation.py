"""Chapter 9: the gradient, the exchanges and the memory of accumulated micro-batches."""

# No postponed annotations here: DDP reads those of its hook.
import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks
from .one_model import digits

BATCH, PARTS = 64, 4
"""Samples of a step on one rank, and the micro-batches that they are split into."""


def network(norm: type[nn.Module] = nn.Identity) -> nn.Sequential:
    """Return a network whose weights are the same on every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 64), norm(64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).double()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def accumulated(model: nn.Module, samples: int, size: int, divisor: float | None) -> Tensor:
    """Return the gradient of micro-batches: mean losses over `divisor`, or sums over the samples of the step."""
    images, classes = digits()
    for x, y in zip(images[:samples].split(size), classes[:samples].split(size), strict=True):
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * len(x) / samples if divisor is None else loss / divisor).backward()
    return gradient(model)


def errors() -> dict[str, float]:
    """Return the relative error of the gradient, by way to accumulate."""
    size = BATCH // PARTS

    def error(samples: int, size: int, divisor: float | None, norm: type[nn.Module] = nn.Identity) -> float:
        reference = accumulated(network(norm), samples, samples, None)
        return float((accumulated(network(norm), samples, size, divisor) - reference).norm() / reference.norm())

    return {
        "divided by 4": error(BATCH, size, PARTS),
        "not divided": error(BATCH, size, 1),
        "last window of 2, divided by 4": error(2 * size, size, PARTS),
        "last window of 2, divided by 2": error(2 * size, size, 2),
        "last micro-batch of 4 samples, mean of means": error(3 * size + 4, size, PARTS),
        "last micro-batch of 4 samples, sums": error(3 * size + 4, size, None),
        "divided by 4, BatchNorm": error(BATCH, size, PARTS, nn.BatchNorm1d),
    }


def exchanges() -> dict[str, Any]:
    """Return the exchanges of one step, by what `no_sync` covers, and the error of the gradient (*collective*)."""
    images, classes = (part.chunk(2)[dist.get_rank()] for part in (values[: 2 * BATCH] for values in digits()))
    results: dict[str, Any] = {}
    for name in ("no no_sync", "no_sync over backward", "no_sync over forward and backward"):
        inner, sent = network(), [0]
        model = DistributedDataParallel(inner)

        def hook(count: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
            count[0] += 1
            work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return work.then(lambda future: future.value()[0] / dist.get_world_size())

        model.register_comm_hook(sent, hook)
        for number, (x, y) in enumerate(zip(images.chunk(PARTS), classes.chunk(PARTS), strict=True), start=1):
            is_silent = name != "no no_sync" and number < PARTS
            with model.no_sync() if is_silent and "forward" in name else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(x), y) / PARTS
                with model.no_sync() if is_silent else contextlib.nullcontext():
                    loss.backward()
        reference = accumulated(network(), 2 * BATCH, 2 * BATCH, None)
        error = (gradient(inner) - reference).norm() / reference.norm()
        results[name] = {"exchanges": sent[0], "error": float(error)}
    return results


def activation_bytes(parts: int) -> int:
    """Return the most bytes that autograd keeps for one backward pass, without the weights."""
    model = network()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    images, classes = digits()
    size = BATCH // parts
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nn.functional.cross_entropy(model(images[:size]), classes[:size])
    return sum(kept.values())


def measure() -> dict[str, Any]:
    """Return errors of the gradient, exchanges per step, and bytes of activations by number of micro-batches."""
    return {
        "errors": errors(),
        "exchanges": on_ranks(exchanges, 2)[0],
        "activation bytes": {str(parts): activation_bytes(parts) for parts in (1, 2, 4, 8, 16)},
        "gradient bytes": sum(parameter.numel() * parameter.element_size() for parameter in network().parameters()),
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the errors, and the memory of activations."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = {
        "not divided": "not divided",
        "last window of 2, divided by 4": "last window",
        "divided by 4, BatchNorm": "BatchNorm",
        "divided by 4": "divided by 4",
    }
    colors = ["#c0392b", "#c0392b", "#b7950b", "#1e8449"]
    values = [100 * numbers["errors"][name] for name in names]
    bars = left.bar([words(name) for name in names.values()], values, color=colors)
    left.bar_label(bars, fmt="%.0f %%")
    left.tick_params(axis="x", labelsize=8)
    left.set_ylabel(words("error of the gradient, %"))
    left.set_title(words("Four micro-batches"))
    sizes = numbers["activation bytes"]
    right.bar([*sizes], [size / 1024 for size in sizes.values()], color="#2471a3")
    right.set_xlabel(words("micro-batches"))
    right.set_ylabel(words("kept activations, KiB"))
    right.set_title(words("A batch of 64"))


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the factor for the last window: 50 micro-batches, in windows of 8."""
    return abs(float(answer) - 8 / (50 % 8)) < 1e-9


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "not divided": "没有除",
        "last window": "最后一个窗口",
        "BatchNorm": "BatchNorm",
        "divided by 4": "除以 4",
        "error of the gradient, %": "梯度误差（%）",
        "Four micro-batches": "4 个 micro-batch",
        "micro-batches": "micro-batch 数",
        "kept activations, KiB": "保留的激活值（KiB）",
        "A batch of 64": "64 个样本的 batch",
    },
)
