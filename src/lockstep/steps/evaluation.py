"""Exact evaluation: each sample of a set once, shared out among the ranks, counts summed and then divided."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.modes import evaluating
from ..record.result import Scores
from ..training.losses import LossFunction
from ..world.world import World

_INTERVAL_S = 2.0
"""A person who asked to stop waits no longer than about this."""

if TYPE_CHECKING:
    from ..data.source import Indices, Source


class Predictions:
    """What a model says of each sample that this rank evaluates: 32 bytes a sample, until they are gathered."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def add(self, indices: Indices, y: Tensor, logits: Tensor, best: Tensor) -> None:
        """Keep a batch: its sample indices (n,), labels y (n,), logits (n, classes) and most likely classes (n,)."""
        probability = logits.gather(1, best[:, None])[:, 0].sub(logits.logsumexp(dim=1)).exp()
        told = (torch.from_numpy(indices).to(y.device), y, best, probability)
        self._rows.append(torch.stack([part.double() for part in told], dim=1))

    def gathered(self, world: World, samples: int) -> np.ndarray:
        """Return (samples, 4): index, label, predicted class, its probability, in index order (*collective*)."""
        own = torch.cat(self._rows or [torch.empty(0, 4, dtype=torch.float64, device=world.device)])
        counts = world.gather(len(own))
        padded = own.new_zeros(max(counts), 4)
        padded[: len(own)] = own
        told = world.stack(padded).cpu().numpy()
        rows = np.concatenate([part[:count] for part, count in zip(told, counts, strict=True)])
        assert np.array_equal(rows[:, 0], np.arange(samples)), "not each sample once, in index order"
        return rows


def evaluate(
    model: nn.Module,
    source: Source,
    world: World,
    *,
    batch: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    loss_fn: LossFunction = nn.functional.cross_entropy,
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[Indices], None] = lambda indices: None,
    predictions: Predictions | None = None,
) -> Scores | None:
    """Return the scores of `model` over all of `source`, or None once `stop()` holds on any rank (*collective*).

    Each rank takes a run of consecutive samples, `batch` at a time; nothing is padded, so ranks may evaluate
    different numbers of batches, and the model is called without a wrapper that would wait for the others.
    `note` hears of the sample indices of each batch, and `predictions` keep what the model says of them. top5 counts a
    hit among the five most likely classes, or among all where there are fewer.
    """
    samples = len(source)
    first, end = (samples * part // world.size for part in (world.rank, world.rank + 1))
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)  # top1, top5, loss, samples
    with world.pulse.during("eval"), evaluating(model), torch.inference_mode():
        stream = source.stream(_batches(first, end, batch), epoch=0)
        left = math.ceil(math.ceil(samples / world.size) / batch)  # of the rank that has the most
        interval = 1
        while left > 0:
            world.pulse.enter("eval")  # of one rank, no collective says that it moves
            begun_s = time.perf_counter()
            for x, y, indices in islice(stream, interval):
                with autocast():
                    logits = model(x)
                logits = logits.float() if logits.dtype.itemsize < 4 else logits
                best = logits.topk(min(5, logits.shape[1]), dim=1).indices
                totals += _count(best, y, loss_fn(logits, y, reduction="sum"))
                note(indices)
                if predictions is not None:
                    predictions.add(indices, y, logits, best[:, 0])
            left -= interval
            stopped, interval = _agree(world, stop(), interval, totals, begun_s)
            if stopped and left > 0:
                return None
    top1, top5, loss, evaluated = world.sum(totals).tolist()
    assert evaluated == samples, f"evaluated {evaluated:.0f} of {samples} samples"
    return Scores(top1=top1 / samples, top5=top5 / samples, loss=loss / samples, samples=samples)


def _agree(world: World, stop: bool, interval: int, totals: Tensor, begun_s: float) -> tuple[bool, int]:
    """Return whether any rank wants to stop, and for how many batches to go on before asking again (*collective*)."""
    totals.sum().item()  # the device has then done all that is timed
    proposal = max(1, round(_INTERVAL_S * interval / (time.perf_counter() - begun_s)))
    # Rank 0's clock decides, so that all come to the next collective after the same number of batches.
    told = world.sum(torch.tensor([float(stop), float(proposal if world.is_main else 0)]))
    return bool(told[0] > 0), int(told[1])


def _batches(first: int, end: int, size: int) -> Iterator[np.ndarray]:
    for start in range(first, end, size):
        yield np.arange(start, min(start + size, end))


def _count(best: Tensor, y: Tensor, loss: Tensor) -> Tensor:
    """Return (hits at 1, hits at 5, `loss`, samples) of a batch: `best` are its most likely classes (n, 5 at most)."""
    hits = best == y[:, None]
    counts = (hits[:, 0].sum(), hits.sum(), loss, y.new_full((), len(y)))
    return torch.stack([count.double() for count in counts])
