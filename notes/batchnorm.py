"""Chapter 10: gradients under local and synchronised BatchNorm, and the drift of running statistics."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .accumulation import gradient, network
from .chapter import Chapter, Words, on_ranks
from .one_model import digits

SHARES = {
    "3 + 5": (3, 5),
    "4 + 4": (4, 4),
    "8 + 8": (8, 8),
    "16 + 16": (16, 16),
    "32 + 32": (32, 32),
    "128 + 128": (128, 128),
}
STEPS = 30


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Synchronised(nn.BatchNorm1d):
    """BatchNorm over the samples of all ranks, from sums and counts. Keeps no running statistics."""

    is_weighted = True

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (samples, features) by the statistics of all ranks (*collective*)."""
        weight = len(input) if self.is_weighted else 1
        own = torch.cat([input.new_ones(1), input.mean(0), (input**2).mean(0)])
        sums: Tensor = SumOverRanks.apply(own * weight)
        mean, square = (sums[1:] / sums[0]).chunk(2)
        return (input - mean) / (square - mean**2 + self.eps).sqrt() * self.weight + self.bias


class Unweighted(Synchronised):
    """The same, with the mean of the ranks' means."""

    is_weighted = False


def gradients() -> dict[str, dict[str, list[float]]]:
    """Return the gradient of the mean loss over all samples, by norm and shares (*collective*)."""
    results: dict[str, dict[str, list[float]]] = {}
    for name, norm in (("local", nn.BatchNorm1d), ("synchronised", Synchronised), ("means of means", Unweighted)):
        results[name] = {}
        for label, shares in SHARES.items():
            images, classes = (values[: sum(shares)].split(shares)[dist.get_rank()] for values in digits())
            inner = network(norm)
            model = DistributedDataParallel(inner)  # must outlive the backward pass
            loss = nn.functional.cross_entropy(model(images), classes)
            (loss * len(images) * len(shares) / sum(shares)).backward()
            results[name][label] = gradient(inner).tolist()
    return results


def drift() -> dict[str, Any]:
    """Return how far the ranks' running means differ, by `broadcast_buffers` and step (*collective*)."""
    images, classes = digits()
    results: dict[str, Any] = {}
    for is_broadcast in (True, False):
        inner = network(nn.BatchNorm1d)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 calls it forward_sync_buffers
            model = DistributedDataParallel(inner, broadcast_buffers=is_broadcast)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)

        def difference(name: str, inner: nn.Module = inner) -> float:
            own = inner.state_dict()[name]
            other = own.clone()
            dist.broadcast(other, src=0)
            largest = (own - other).norm() / other.norm()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            return float(largest)

        means = []
        for _ in range(STEPS):
            own = torch.randint(len(images), (16,), generator=generator).chunk(2)[dist.get_rank()]
            loss = nn.functional.cross_entropy(model(images[own]), classes[own])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            means.append(difference("1.running_mean"))
        name = "broadcast_buffers=True" if is_broadcast else "broadcast_buffers=False"
        results[name] = {"1.running_mean": means, "0.weight": difference("0.weight")}
    return results


def measured() -> dict[str, Any]:
    """Return what `gradients` and `drift` return (*collective*)."""
    return {"gradients": gradients(), "drift": drift()}


def measure() -> dict[str, Any]:
    """Return the relative error of the gradient by norm and shares, and the drift."""
    images, classes = digits()
    results = on_ranks(measured, 2)[0]

    def error(label: str, values: list[float]) -> float:
        size = sum(SHARES[label])
        model = network(nn.BatchNorm1d)
        nn.functional.cross_entropy(model(images[:size]), classes[:size]).backward()
        reference = gradient(model)
        return float((torch.tensor(values, dtype=reference.dtype) - reference).norm() / reference.norm())

    return {
        "errors": {
            name: {label: error(label, values) for label, values in by_shares.items()}
            for name, by_shares in results["gradients"].items()
        },
        "drift": results["drift"],
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the errors by shares, and the drift by step."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    errors = {label: value for label, value in numbers["errors"]["local"].items() if label != "3 + 5"}
    bars = left.bar([label.partition(" ")[0] for label in errors], [100 * error for error in errors.values()])
    left.bar_label(bars, fmt="%.0f")
    left.set_xlabel(words("samples per rank"))
    left.set_ylabel(words("error of the gradient, %"))
    left.set_title(words("Local BatchNorm, two ranks"))
    for name, color in (("broadcast_buffers=False", "#c0392b"), ("broadcast_buffers=True", "#1e8449")):
        values = numbers["drift"][name]["1.running_mean"]
        right.plot(range(1, STEPS + 1), [100 * value for value in values], label=name, color=color)
    right.set_xlabel(words("optimizer step"))
    right.set_ylabel(words("difference, %"))
    right.set_title(words("running_mean, two ranks"), fontsize=11)
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the variance over 3 + 5 samples, with means 2 and 6 and variances 1."""
    mean = (3 * 2 + 5 * 6) / 8
    return abs(float(answer) - ((3 * (1 + 2**2) + 5 * (1 + 6**2)) / 8 - mean**2)) < 1e-9


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "samples per rank": "每个 rank 的样本数",
        "error of the gradient, %": "梯度误差（%）",
        "Local BatchNorm, two ranks": "本地 BatchNorm，两个 rank",
        "optimizer step": "优化器步数",
        "difference, %": "差异（%）",
        "running_mean, two ranks": "running_mean 之差",
    },
)
