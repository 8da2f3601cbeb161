"""Gradients and losses of a user's own loop, weighted. They are summed over the ranks once a global batch.

DistributedDataParallel has to know before the forward pass which parameters will have gradients, and a method of the
model's own bypasses it silently. Here no model is wrapped; the price is that communication overlaps with no
computation. The parameters' order decides that of the sums: equal worlds come to equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch
from ..errors import RequestError
from ..world.world import World
from .precision import Precision

BUCKET_BYTES = 32 << 20
"""Size of gradients exchanged at a time, and of the additional memory."""
_Held = list[tuple[nn.Parameter, Tensor]]
_Bucket = list[nn.Parameter]


@dataclass
class _Part:
    """This rank's sums of the n-th backward over the batch's micro-batches."""

    loss: Tensor | None = None
    weight: Any = 0
    gradients: _Held = field(default_factory=list)


class GlobalBatch:
    """Current global batch: gradients, and loss since the last optimizer step.

    A micro-batch's gradients are put aside until the batch's last micro-batch; then they are summed over the ranks,
    divided by the total weight if there are weights, and added to existing gradients. Later code of a plain loop
    (clipping, several optimizers, a second loss) finds the gradients of the global batch, or none.
    """

    def __init__(self, world: World, precision: Precision) -> None:
        self.parameters: list[nn.Parameter] = []  # those of all models, in order
        self._world, self._precision = world, precision
        self._is_alone = world.group is None and precision.scaler is None
        self._models: list[list[nn.Parameter]] = []
        self._buckets: dict[tuple[Any, ...], list[_Bucket]] = {}  # of each, by which of its parameters train
        self._parts: list[_Part] = []  # by the number of the backward: a loop may drop gradients between two of them
        self.number = 0  # of the next backward of the micro-batch under way
        self._has_apart = False  # gradients of earlier micro-batches
        self._loss: Tensor | None = None
        self._samples = 0

    def add_model(self, model: nn.Module) -> None:
        """Add the parameters of `model` that no other model has."""
        known = set(self.parameters)
        self._models.append([each for each in model.parameters() if each not in known])
        self.parameters += self._models[-1]

    def note(self, loss: Tensor) -> None:
        """Add a part of the loss (0-dim). A strategy exchanges its gradients."""
        self._loss = loss if self._loss is None else self._loss + loss

    def backward(
        self, loss: Tensor, factor: float | Tensor, weight: float | Tensor | None, *, last: bool, exchanges: bool
    ) -> None:
        """Add the gradients of `factor` · `loss` (0-dim) to the batch's (*collective*).

        The `last` sums them and divides by all ranks' `weight`, if any. Uncounted shares join in BatchNorm's exchanges.
        """
        if self.number == len(self._parts):
            self._parts.append(_Part())
        part = self._parts[self.number]
        self.number += 1
        is_whole = not isinstance(factor, Tensor) and factor == 1.0  # of a tensor the host would wait for the number
        divisor = None
        if is_whole and self._is_alone and last and weight is None and not self._has_apart:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            others = self._set_aside()
            self._precision.backward(loss, factor)
            if weight is not None:
                self._void(factor)
            self._put_back(part.gradients)
            part.gradients = []
            if last:
                divisor = None if weight is None else self._total(part.weight + weight)
                self._sum(divisor, exchanges)
                self._precision.unscale(self.parameters)
            else:
                part.gradients, self._has_apart = self._set_aside(), True
            self._put_back(others)
        if weight is not None:
            part.weight = part.weight + weight
        told = loss.detach() if is_whole else _times(loss.detach(), factor)
        part.loss = told if part.loss is None else part.loss + told
        if divisor is not None:
            part.loss = part.loss / divisor

    def end(self, samples: int) -> None:
        """End a batch of `samples` over all ranks."""
        for part in self._parts:
            if part.loss is not None:
                self.note(part.loss)
        self._samples += samples
        self.drop()

    def drop(self) -> None:
        """Discard the batch, such as one left before its last micro-batch."""
        self._parts.clear()
        self.number, self._has_apart = 0, False

    def taken(self) -> tuple[Tensor, int]:
        """Return and reset this rank's loss, and the samples. Both cover the batches since the last optimizer step."""
        loss = torch.zeros((), device=self._world.device) if self._loss is None else self._loss
        samples, self._samples, self._loss = self._samples, 0, None
        return loss, samples

    def _set_aside(self) -> _Held:
        """Remove and return the existing gradients. The next backward pass then leaves its own alone."""
        held = [(each, each.grad) for each in self.parameters if each.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        return held

    def _put_back(self, held: _Held) -> None:
        for parameter, before in held:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _void(self, weight: float | Tensor) -> None:
        """Drop the gradients if `weight` (0-dim) is 0. Gradients of a mean over nothing are NaN."""
        if isinstance(weight, Tensor):
            for each in self.parameters:
                if each.grad is not None:
                    each.grad.masked_fill_(weight <= 0, 0)
        elif not weight:
            self._set_aside()

    def _total(self, own: float | Tensor) -> Tensor:
        total = self._world.sum(on_device(own, self._world.device))
        if not total.is_cuda and not total > 0:
            raise RequestError(
                f"session.backward was given weights that sum to {total.item():g} over the global batch: a mean is "
                "over a number of things above 0; leave such a batch out of the data."
            )
        return total

    def _sum(self, divisor: Tensor | None, exchanges: bool) -> None:
        """Sum the gradients over the ranks in place, and divide. A gradient that no rank has stays None."""
        if self._world.group is not None and exchanges:
            for buckets in self._taking_part():
                for bucket in buckets:
                    self._sum_bucket(bucket)
        if divisor is not None and (present := [each.grad for each in self.parameters if each.grad is not None]):
            _torch.foreach_div_(present, divisor)

    def _taking_part(self) -> Iterable[list[_Bucket]]:
        """Return the buckets of models with gradients on any rank. *Collective* for several models."""
        found = []
        for number, model in enumerate(self._models):  # a user may freeze a part, and let it train later
            key = number, *[each.requires_grad for each in model]
            if key not in self._buckets:
                self._buckets[key] = _buckets([each for each in model if each.requires_grad])
            found.append(self._buckets[key])
        if len(found) == 1:
            return found
        own = [any(each.grad is not None for each in model) for model in self._models]
        any_rank = self._world.max(torch.tensor(own, dtype=torch.int32)).tolist()  # the host waits for no GPU
        return [buckets for buckets, has_some in zip(found, any_rank, strict=True) if has_some]

    def _sum_bucket(self, bucket: _Bucket) -> None:
        first = bucket[0]
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        absent = [number for number, each in enumerate(bucket) if each.grad is None]
        has = torch.ones(len(bucket), dtype=first.dtype, device=first.device)
        for number in absent:
            has[number] = 0
        flat = self._world.sum_(torch.cat([*(part.reshape(-1) for part in parts), has]))
        *sums, has = torch.split(flat, [*(each.numel() for each in bucket), len(bucket)])
        _torch.foreach_copy_(parts, [one.view(each.shape) for one, each in zip(sums, bucket, strict=True)])
        if absent:  # only then does the host wait for the numbers
            for each, part, some in zip(bucket, parts, has.tolist(), strict=True):
                each.grad = part if some else None


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """Return the number as float64 (0-dim) on `device`. The host waits for nothing."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)  # filled there: a copy would be waited for


def _times(loss: Tensor, factor: float | Tensor) -> Tensor:
    """Return the loss (0-dim) times its factor. Factor 0 gives zero: a mean over nothing is NaN."""
    if not isinstance(factor, Tensor):
        return loss * factor if factor else torch.zeros_like(loss)
    return torch.where(factor > 0, loss * factor, 0)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Group the parameters by dtype and device. Each bucket has up to `BUCKET_BYTES`."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[_Bucket]] = {}
    for each in parameters:
        lists = by_kind.setdefault((each.dtype, each.device), [[]])
        if lists[-1] and sum(one.nbytes for one in lists[-1]) + each.nbytes > BUCKET_BYTES:
            lists.append([])
        lists[-1].append(each)
    return [bucket for lists in by_kind.values() for bucket in lists]


def check_loss(loss: Any) -> None:
    """Raise `RequestError` unless `loss` is one number that requires gradients."""
    if not isinstance(loss, Tensor) or loss.dim() or loss.is_complex():
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise RequestError(
            f"session.backward takes a loss of one number, a tensor without dimensions; found {found}: take its mean "
            "over this rank's samples first."
        )
    if not loss.requires_grad:
        raise RequestError(
            "session.backward was given a loss that hangs on no parameter which trains (requires_grad): it was "
            "computed under torch.no_grad(), from detached tensors, or the model is frozen."
        )
