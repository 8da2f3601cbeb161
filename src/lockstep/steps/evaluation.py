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

if TYPE_CHECKING:
    from ..data.source import Indices, Source

_INTERVAL_S = 2.0
"""A person who asked to stop waits no longer than about this."""


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
    predictions: list[Tensor] | None = None,
) -> Scores | None:
    """Return the scores of `model` over all of `source`, or None once `stop()` holds on any rank (*collective*).

    Each rank takes a run of consecutive samples, `batch` at a time, and calls the model without a wrapper that would
    wait for the others. `note` hears of each batch's indices, and `predictions` get a row for each sample: index,
    label, most likely class, its probability. top5 is of five classes, or of all where there are fewer.
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
                hits, loss = best == y[:, None], loss_fn(logits, y, reduction="sum")
                counts = (hits[:, 0].sum(), hits.sum(), loss, y.new_full((), len(y)))
                totals += torch.stack([count.double() for count in counts])
                note(indices)
                if predictions is not None:
                    top = best[:, 0]
                    probability = logits.gather(1, top[:, None])[:, 0].sub(logits.logsumexp(dim=1)).exp()
                    row = (torch.from_numpy(indices).to(y.device), y, top, probability)
                    predictions.append(torch.stack([part.double() for part in row], dim=1))
            left -= interval
            totals.sum().item()  # the device has then done all that is timed
            proposal = max(1, round(_INTERVAL_S * interval / (time.perf_counter() - begun_s)))
            # Rank 0's clock decides, so that all come to the next collective after the same number of batches.
            told = world.sum(torch.tensor([float(stop()), float(proposal if world.is_main else 0)]))
            interval = int(told[1])
            if told[0] > 0 and left > 0:
                return None
    top1, top5, loss, evaluated = world.sum(totals).tolist()
    assert evaluated == samples, f"evaluated {evaluated:.0f} of {samples} samples"
    return Scores(top1=top1 / samples, top5=top5 / samples, loss=loss / samples, samples=samples)


def concatenated(world: World, rows: Tensor) -> Tensor:
    """Return all ranks' rows, (n, …) of each, one after the other in their order (*collective*); n may differ."""
    sizes: list[int] = world.gather(len(rows))
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    return torch.cat([part[:size] for part, size in zip(world.stack(padded), sizes, strict=True)])


def _batches(first: int, end: int, size: int) -> Iterator[np.ndarray]:
    for start in range(first, end, size):
        yield np.arange(start, min(start + size, end))
