"""Exact evaluation: ranks score each sample once, sum the counts, then divide."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import counted
from ..models.modes import evaluating
from ..record.result import Scores
from ..training.losses import LossFunction
from ..world.world import World

if TYPE_CHECKING:
    from ..data.source import Indices, Source

_BATCHES = 4  # between two exchanges of stop requests


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
    warn: Callable[[str], object] = lambda text: None,
    predictions: list[Tensor] | None = None,
) -> Scores | None:
    """Return the scores of `model` on `source`, or None once `stop()` holds on any rank (*collective*).

    Each rank takes consecutive samples, `batch` at a time, and calls the model without a wrapper that would wait for
    other ranks. `note` receives each batch's indices (n,). `predictions` receives tensors (n, 4) of float64: index,
    label, most likely class, its probability. For models of fewer than five classes, top5 covers all of them. Of equal
    logits the first is the more likely, as for `argmax`. A sample with a NaN logit counts as wrong, with the prediction
    -1; `warn` receives a sentence with their number.
    """
    samples = len(source)
    first, end = (samples * part // world.size for part in (world.rank, world.rank + 1))
    totals = torch.zeros(5, dtype=torch.float64, device=world.device)  # top1, top5, loss, samples, NaN samples
    with world.progress.during("eval"), evaluating(model), torch.inference_mode():
        shares = (np.arange(start, min(start + batch, end)) for start in range(first, end, batch))
        stream = source.stream(shares, epoch=0)
        remaining = math.ceil(math.ceil(samples / world.size) / batch)  # batches of the rank with the most
        while remaining > 0:
            world.progress.enter("eval")  # a single rank has no collective that shows progress
            for x, y, indices in islice(stream, _BATCHES):
                with autocast():
                    logits = model(x)
                logits = logits.float() if logits.dtype.itemsize < 4 else logits
                is_nan, loss = logits.isnan().any(1), loss_fn(logits, y, reduction="sum")
                likelier = _count_likelier_classes(logits, y).masked_fill_(is_nan, 5)
                counts = ((likelier == 0).sum(), (likelier < 5).sum(), loss, y.new_full((), len(y)), is_nan.sum())
                totals += torch.stack([count.double() for count in counts])
                note(indices)
                if predictions is not None:
                    top = logits.argmax(1)
                    probability = logits.gather(1, top[:, None])[:, 0].sub(logits.logsumexp(dim=1)).exp()
                    row = (torch.from_numpy(indices).to(y.device), y, top.masked_fill(is_nan, -1), probability)
                    predictions.append(torch.stack([part.double() for part in row], dim=1))
            remaining -= _BATCHES
            totals.sum().item()  # the device does not fall behind
            if world.sum(torch.tensor(float(stop()))) > 0 and remaining > 0:
                return None
    top1, top5, loss, evaluated, nans = world.sum(totals).tolist()
    assert evaluated == samples, f"evaluated {evaluated:.0f} of {samples} samples"
    if nans:
        warn(
            f"The model's output for {nans:,.0f} of {counted(samples, 'sample')} is not a number: they count as wrong."
        )
    return Scores(top1=top1 / samples, top5=top5 / samples, loss=loss / samples, samples=samples)


def _count_likelier_classes(logits: Tensor, y: Tensor) -> Tensor:
    """Return the number of classes that are more likely than the label (n,). Logits are (n, classes)."""
    of_label = logits.gather(1, y[:, None])
    is_before = torch.arange(logits.shape[1], device=y.device) < y[:, None]
    return ((logits > of_label) | ((logits == of_label) & is_before)).sum(1)
