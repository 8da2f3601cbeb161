"""Exact evaluation: each sample of the test set once, shared out among the ranks, counts summed and then divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .result import Scores
from .world import World

if TYPE_CHECKING:
    from .data.source import Source


def evaluate(
    model: nn.Module,
    source: Source,
    world: World,
    *,
    batch: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Scores:
    """Return the scores of `model` over all of `source` (*collective*).

    Each rank takes a run of consecutive samples, `batch` at a time; nothing is padded, so ranks may evaluate
    different numbers of batches, and the model is called without a wrapper that would wait for the others.
    top5 counts a hit among the five most likely classes, or among all where there are fewer.
    """
    samples = len(source)
    first, end = (samples * part // world.size for part in (world.rank, world.rank + 1))
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)  # top1, top5, loss, samples
    # Each module's own: a part that its user has frozen in evaluation mode stays so.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            for x, y in source.stream(_batches(first, end, batch), epoch=0):
                with autocast():
                    logits = model(x)
                totals += _count(logits.float() if logits.dtype.itemsize < 4 else logits, y)
    finally:
        for module in training:
            module.training = True
    top1, top5, loss, evaluated = world.sum(totals).tolist()
    assert evaluated == samples, f"evaluated {evaluated:.0f} of {samples} samples"
    return Scores(top1=top1 / samples, top5=top5 / samples, loss=loss / samples, samples=samples)


def _batches(first: int, end: int, size: int) -> Iterator[np.ndarray]:
    for start in range(first, end, size):
        yield np.arange(start, min(start + size, end))


def _count(logits: Tensor, y: Tensor) -> Tensor:
    """Return (hits at 1, hits at 5, summed loss, samples) of a batch: logits (n, classes), y (n,)."""
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
    loss = nn.functional.cross_entropy(logits, y, reduction="sum")
    counts = (hits[:, 0].sum(), hits.sum(), loss, torch.tensor(len(y), device=y.device))
    return torch.stack([count.double() for count in counts])
