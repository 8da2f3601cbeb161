"""Chapter 8: how often each sample is trained and evaluated, and accuracies that count otherwise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DistributedSampler, Sampler, TensorDataset

from .chapter import Chapter, Words, on_ranks
from .one_model import digits

SAMPLES, RANKS, EPOCHS = 10, 4, 100
DATA = TensorDataset(torch.arange(SAMPLES))


def counts(*, is_epoch_set: bool, is_last_dropped: bool) -> list[int]:
    """Return how often each sample is trained in all epochs, over all ranks."""
    counter: Counter[int] = Counter()
    for rank in range(RANKS):
        sampler: DistributedSampler[int] = DistributedSampler(
            DATA, RANKS, rank, shuffle=True, drop_last=is_last_dropped
        )
        for epoch in range(EPOCHS):
            if is_epoch_set:
                sampler.set_epoch(epoch)
            counter.update(sampler)
    return [counter[sample] for sample in range(SAMPLES)]


def correct() -> Tensor:
    """Return for ten digits whether a model that was trained for 3 steps classifies them correctly: 1 or 0."""
    torch.manual_seed(0)
    images, classes = digits()
    model = nn.Linear(64, 10, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(images[:1000]), classes[:1000])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test = slice(1000, 1000 + SAMPLES)
    hits: Tensor = model(images[test]).argmax(1) == classes[test]
    return hits.double()


def accuracies() -> dict[str, float]:
    """Return the accuracy of ten samples by ways to count, on rank 0 (*collective*)."""
    is_correct, rank = correct(), dist.get_rank()

    def own(sampler: Sampler[int] | range) -> Tensor:
        return is_correct[list(sampler)]

    def total(value: Tensor | float) -> float:
        value = torch.as_tensor(value, dtype=torch.float64).clone()
        dist.all_reduce(value)
        return float(value)

    padded = own(DistributedSampler(DATA, shuffle=False))
    exact = own(range(rank, SAMPLES, RANKS))
    return {
        "one process": float(is_correct.mean()),
        "each sample once, sums": total(exact.sum()) / total(len(exact)),
        "padded": total(padded.sum()) / total(len(padded)),
        "mean of the ranks' accuracies": total(exact.mean()) / RANKS,
        "one rank's hits / all samples": float(exact.sum()) / SAMPLES,
        "samples counted with padding": total(len(padded)),
    }


def measure() -> dict[str, Any]:
    """Return the samples of each rank, how often each is trained, and accuracies."""
    return {
        "samples by rank": [[*DistributedSampler(DATA, RANKS, rank, shuffle=False)] for rank in range(RANKS)],
        "times trained": {
            "set_epoch": counts(is_epoch_set=True, is_last_dropped=False),
            "no set_epoch": counts(is_epoch_set=False, is_last_dropped=False),
            "no set_epoch, drop_last": counts(is_epoch_set=False, is_last_dropped=True),
            "set_epoch, drop_last": counts(is_epoch_set=True, is_last_dropped=True),
        },
        "accuracies": on_ranks(accuracies, RANKS)[0],
        "classified correctly": correct().int().tolist(),
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw how often each sample is trained."""
    axes = figure.subplots()
    styles = {"set_epoch": "#1e8449", "no set_epoch": "#2471a3", "no set_epoch, drop_last": "#c0392b"}
    for place, (name, color) in enumerate(styles.items()):
        positions = [sample + 0.27 * (place - 1) for sample in range(SAMPLES)]
        axes.bar(positions, numbers["times trained"][name], width=0.25, label=words(name), color=color)
    axes.set_xticks(range(SAMPLES))
    axes.set_ylim(0, 260)
    axes.set_xlabel(words("sample"))
    axes.set_ylabel(words("times trained"))
    axes.set_title(words("100 epochs of 10 samples on 4 ranks"))
    axes.legend(ncols=3, fontsize=9, loc="upper center")


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check how many of 1,797 samples DistributedSampler repeats on 16 ranks."""
    return int(answer) == -1797 % 16


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "set_epoch": "set_epoch",
        "no set_epoch": "无 set_epoch",
        "no set_epoch, drop_last": "无 set_epoch，drop_last",
        "sample": "样本",
        "times trained": "训练次数",
        "100 epochs of 10 samples on 4 ranks": "10 个样本、4 个 rank、100 个 epoch",
    },
)
