"""Exact scores of a classifier: ranks score each sample once, sum the counts, then divide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..batching import BatchPlan
from ..data.share import Micro
from ..errors import counted
from ..record.result import Scores
from ..training.losses import LossFunction
from ..world.world import World

if TYPE_CHECKING:
    from ..data.source import Indices, Source
    from ..sessions.session import Session

_BATCHES = 4  # between two exchanges of stop requests


class EvaluationShares:
    """This rank's shares of a data set, of about `size` samples, for `Session.evaluating`.

    `Micro.batch` is (x, y, indices): x (n, …), y (n,), and the samples' indices (n,), or (0,) for a stand-in.
    """

    def __init__(self, data: Source, world: World, size: int) -> None:
        self.samples = self.index_bound = len(data)
        self._data, self._rank = data, world.rank
        self._plan = BatchPlan(global_size=size * world.size, ranks=world.size, accumulation=1)

    def shares(self) -> Iterator[Micro]:
        """Yield the shares in the data set's order."""
        shares, ahead = (self._plan.evaluation(self.samples, self._rank) for _ in range(2))
        stream = self._data.stream((np.arange(share.start, share.stop) for share in ahead), epoch=0)
        for share, (x, y, read) in zip(shares, stream, strict=True):
            indices = read[: share.size]
            yield Micro((x, y, indices), share, indices)


def stoppable(session: Session, data: Any) -> Iterator[Any]:
    """Yield the batches of `session.evaluating(data)`; stop between them on request (*collective*)."""
    for number, batch in enumerate(session.evaluating(data)):
        if number % _BATCHES == 0:
            session.stop_if_asked()
        yield batch


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Indices]],
    world: World,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    loss_fn: LossFunction = nn.functional.cross_entropy,
    warn: Callable[[str], object] = lambda text: None,
    predictions: list[Tensor] | None = None,
) -> Scores:
    """Return the scores of `model` on all ranks' `batches`, of `EvaluationShares` (*collective*).

    `predictions` receives tensors (n, 4) of float64: index, label, most likely class, its probability. For models of
    fewer than five classes, top5 covers all of them. Of equal logits the first is the more likely, as for `argmax`. A
    sample with a NaN logit counts as wrong, with the prediction -1; `warn` receives a sentence with their number.
    """
    totals = torch.zeros(5, dtype=torch.float64, device=world.device)  # top1, top5, loss, samples, NaN samples
    for x, y, indices in batches:
        if not len(indices):  # a stand-in
            continue
        with autocast():
            logits = model(x)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        is_nan, loss = logits.isnan().any(1), loss_fn(logits, y, reduction="sum")
        likelier = _count_likelier_classes(logits, y).masked_fill_(is_nan, 5)
        counts = ((likelier == 0).sum(), (likelier < 5).sum(), loss, y.new_full((), len(y)), is_nan.sum())
        totals += torch.stack([count.double() for count in counts])
        if predictions is not None:
            top = logits.argmax(1)
            probability = logits.gather(1, top[:, None])[:, 0].sub(logits.logsumexp(dim=1)).exp()
            row = (torch.from_numpy(indices).to(y.device), y, top.masked_fill(is_nan, -1), probability)
            predictions.append(torch.stack([part.double() for part in row], dim=1))
    top1, top5, loss, evaluated, nans = world.sum(totals).tolist()
    samples = int(evaluated)
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
