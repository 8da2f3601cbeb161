"""Chapter 2: a batch size of each rank, and one of all ranks together."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from .chapter import Chapter, Words, on_ranks
from .one_model import digits

TRAINING = 1536
"""Samples to train on, which all batches below divide; the other 261 are for the evaluation."""
BATCH, EPOCHS, RATE = 16, 3, 0.2
RANKS = (1, 2, 3)
"""Numbers of ranks that really run; more are computed in one process, by the equality that is measured here."""
LARGER = (4, 8, 16, 32)


def train(ranks: int, batch: int, *, is_per_rank: bool, group: Any = None) -> dict[str, Any]:
    """Return all weights after training, steps, test accuracy (*collective* among the ranks of `group`)."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    model: nn.Module = inner if group is None else DistributedDataParallel(inner, process_group=group)
    rank = 0 if group is None else dist.get_rank(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    images, classes = digits()
    size = batch * ranks if is_per_rank else batch
    steps = 0
    data = TensorDataset(images[:TRAINING])
    for epoch in range(EPOCHS):
        order: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)  # all samples, shuffled
        order.set_epoch(epoch)
        for samples in torch.tensor(list(order)).split(size):
            own = samples.tensor_split(ranks)[rank]
            loss = nn.functional.cross_entropy(model(images[own]), classes[own])
            optimizer.zero_grad()
            (loss * len(own) * ranks / len(samples)).backward()  # chapter 7; the factor is 1 for even shares
            optimizer.step()
            steps += 1
    with torch.no_grad():
        scores = inner(images[TRAINING:])
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in inner.parameters()]).tolist(),
        "steps per epoch": steps // EPOCHS,
        "accuracy": float((scores.argmax(1) == classes[TRAINING:]).double().mean()),
    }


def trainings() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what `train` returns, by meaning of the batch size and number of ranks (*collective*)."""
    results: dict[str, dict[str, dict[str, Any]]] = {"per rank": {}, "global": {}}
    for ranks in RANKS:
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            for name, by_ranks in results.items():
                by_ranks[str(ranks)] = train(ranks, BATCH, is_per_rank=name == "per rank", group=group)
    return results


def measure() -> dict[str, Any]:
    """Return steps, accuracies and differences of the weights, by meaning of the batch size and number of ranks."""

    def difference(first: list[float], second: list[float]) -> float:
        a, b = (torch.tensor(weights, dtype=torch.float64) for weights in (first, second))
        return float((a - b).norm() / b.norm())

    results = on_ranks(trainings, max(RANKS))[0]
    alone = {ranks: train(1, BATCH * ranks, is_per_rank=False) for ranks in (*RANKS, *LARGER)}
    return {
        "per rank": {
            str(ranks): {name: alone[ranks][name] for name in ("steps per epoch", "accuracy")} for ranks in alone
        },
        "global": {
            ranks: {name: result[name] for name in ("steps per epoch", "accuracy")}
            for ranks, result in results["global"].items()
        },
        "difference: N ranks × 16 against one process with 16 N": {
            ranks: difference(result["weights"], alone[int(ranks)]["weights"])
            for ranks, result in results["per rank"].items()
        },
        "difference: N ranks × 16 against one process with 16": {
            ranks: difference(result["weights"], alone[1]["weights"]) for ranks, result in results["per rank"].items()
        },
        "difference: N ranks × 16 / N against one process with 16": {
            ranks: difference(result["weights"], alone[1]["weights"]) for ranks, result in results["global"].items()
        },
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the accuracy by number of ranks, for both meanings."""
    axes = figure.subplots()
    for name, label, style in (
        ("per rank", "16 samples per rank", {"color": "#c0392b", "marker": "o"}),
        ("global", "16 samples over all ranks", {"color": "#1e8449", "marker": "s"}),
    ):
        ranks = [int(ranks) for ranks in numbers[name]]
        accuracies = [100 * result["accuracy"] for result in numbers[name].values()]
        axes.semilogx(ranks, accuracies, base=2, label=words(label), **style)
    axes.set_xticks([*map(int, numbers["per rank"])], [*numbers["per rank"]])
    axes.set_xlabel(words("ranks"))
    axes.set_ylabel(words("test accuracy, %"))
    axes.set_title(words("Three epochs, the same learning rate"))
    axes.legend()


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the whole epochs before step 30,000: 50,000 samples, 4 ranks of 64 samples."""
    samples_per_rank = -(-50_000 // 4)
    return int(answer) == 30_000 // -(-samples_per_rank // 64)


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "16 samples per rank": "每个 rank 16 个样本",
        "16 samples over all ranks": "所有 rank 合计 16 个样本",
        "ranks": "rank 数",
        "test accuracy, %": "测试准确率（%）",
        "Three epochs, the same learning rate": "3 个 epoch，学习率相同",
    },
)
