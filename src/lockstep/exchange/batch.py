"""Global batch under way: its gradients and its loss, weighted, over micro-batches and ranks.

Gradients that exist already (of an earlier loss, or of earlier global batches that a loop has not stepped on yet) are
hidden from a global batch's first backward pass to its last micro-batch, and added then. Code of a plain loop between
backward and step (clipping, several optimizers) finds gradients of whole global batches, or none: it acts on each once.
So do hooks on parameters, which are left out of backward passes over shares and called after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import Hooks
from ..errors import RequestError
from .base import Exchange, Header, Part, Pass, on_device


class GlobalBatch:
    """Gradients and loss since the last optimizer step."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._is_alone = type(exchange) is Exchange
        self._parts: list[Part] = []
        self._losses: list[Tensor | None] = []  # of each part: this rank's share of it so far
        self._weights: list[Any] = []
        self._number = 0  # of the next backward pass of the micro-batch
        self._hidden: list[
            tuple[nn.Parameter, Tensor]
        ] = []  # gradients from before the batch, till its last micro-batch
        self._loss: Tensor | None = None  # of whole batches
        self._samples = 0

    @property
    def number(self) -> int:
        """The number of the next backward pass of this micro-batch."""
        return self._number

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss since the last optimizer step."""
        return self._loss is not None or bool(self._losses)

    def begin_micro_batch(self) -> None:
        """Number the backward passes of another micro-batch from 0."""
        self._number = 0

    def backward(
        self,
        loss: Tensor,
        factor: float | Tensor,
        weight: float | Tensor | None,
        share: tuple[float, float] | None,
        header: Header,
        run: Any,
        *,
        last: bool,
        unscale: Callable[[], None] | None = None,
    ) -> None:
        """Add the gradients of `factor` · `loss` (0-dim) to the batch's (*collective*). `run(factor)` computes them.

        With a `weight`, the last micro-batch divides the sum by all ranks' weights. `share` is (samples that this
        rank's loss is a mean over, samples that the factor takes for the whole batch) where the batch may turn out
        smaller, since a collate function has dropped samples.
        """
        exchange, number = self.exchange, self._number
        if number == len(self._parts):
            self._parts.append(Part(number))
            self._losses.append(None)
            self._weights.append(0.0)
        part = self._parts[number]
        self._number += 1
        is_whole = not isinstance(factor, Tensor) and factor == 1.0  # of a tensor the host would wait for the number
        if weight is not None:
            self._weights[number] = self._weights[number] + weight
        elif share is not None:
            self._weights[number] = self._weights[number] + share[0]
        divisor: Tensor | None = None
        if (
            self._is_alone
            and is_whole
            and last
            and weight is None
            and share is None
            and not (part.gradients or self._hidden or unscale)
        ):
            run(factor)  # adds to existing gradients by itself
        else:
            self._hidden += exchange.hide()
            zeroed = factor <= 0 if isinstance(factor, Tensor) else factor == 0
            one = Pass(lambda: run(factor), part, header._replace(part=number), self._weights[number], last, zeroed)
            weights = exchange.backward(one)
            if weights is not None and (weight is not None or share is not None):
                divisor = self._divisor(weights, None if share is None else share[1])
                if divisor is not None:
                    exchange.divide(part, divisor)
            if last:
                hooks, part.hooks = part.hooks, []
                _call_before(hooks)
                if unscale is not None:
                    unscale()
                self.show()
                _call_after(hooks)
        told = loss.detach() if is_whole else _times(loss.detach(), factor)
        total = self._losses[number]
        told = told if total is None else total + told
        self._losses[number] = told if divisor is None else told / divisor

    def end(self, samples: int, parts: int | None = None) -> None:
        """End a batch of `samples` over all ranks; with `parts`, only its first backward passes, as many as that.

        Raises `RequestError` where the last micro-batch has lacked a loss of an earlier one.
        """
        if parts is None and self._number < len(self._parts):
            raise RequestError(
                f"session.backward was called {self._number} times in a global batch's last micro-batch, and "
                f"{len(self._parts)} times in an earlier one, whose gradients would be lost: call it "
                "for each loss in each micro-batch, with weight=0 where nothing counts."
            )
        for loss in self._losses[:parts]:
            if loss is not None:
                self._loss = loss if self._loss is None else self._loss + loss
        self._samples += samples
        if parts is None:
            self.drop()
        else:
            del self._parts[:parts], self._losses[:parts], self._weights[:parts]
            self._number -= parts

    def show(self) -> None:
        """Add the gradients from before the batch to `.grad`."""
        for parameter, gradient in self._hidden:
            own = parameter.grad
            if own is None:
                parameter.grad = gradient
            else:
                parameter.grad = gradient + own if gradient.is_sparse or own.is_sparse else gradient.add_(own)
        self._hidden = []

    def drop(self) -> None:
        """Discard the batch, such as one left before its last micro-batch."""
        self.show()
        self._parts, self._losses, self._weights, self._number = [], [], [], 0

    def adds_to_existing(self) -> bool:
        """Return whether a backward pass would add to gradients that are there already."""
        return any(parameter.grad is not None for parameter in self.exchange.parameters)

    def waiting(self) -> tuple[float, int]:
        """Return this rank's loss and the samples of whole batches since the last optimizer step."""
        return 0.0 if self._loss is None else float(self._loss), self._samples

    def wait(self, loss: float, samples: int) -> None:
        """Go on from what `waiting` returned."""
        self._loss = torch.tensor(loss, dtype=torch.float64, device=self.exchange.world.device)
        self._samples = samples

    def taken(self) -> tuple[Tensor, int]:
        """Return and reset this rank's loss, and the samples. Both cover the batches since the last optimizer step."""
        device = self.exchange.world.device
        loss = torch.zeros((), device=device) if self._loss is None else self._loss
        samples, self._samples, self._loss = self._samples, 0, None
        return loss, samples

    def _divisor(self, weights: Tensor, expected: float | None) -> Tensor | None:
        """Return what the sums have still to be divided by. `weights` (ranks,) are in the order of the ranks."""
        total = weights.sum()
        if not total.is_cuda and not total > 0:
            raise RequestError(
                f"session.backward was given weights that sum to {total.item():g} over the global batch: a mean is "
                "over a number of things above 0; leave such a batch out of the data."
            )
        if expected is None:
            return total
        return None if not total.is_cuda and total.item() == expected else total / expected


@torch.no_grad()
def _call_before(hooks: Sequence[tuple[Tensor, Hooks, Hooks]]) -> None:
    """Call the user's hooks on gradients of the whole batch."""
    for parameter, before, _ in hooks:
        for hook in before:
            if parameter.grad is not None and (changed := hook(parameter.grad)) is not None:
                parameter.grad = changed


@torch.no_grad()
def _call_after(hooks: Sequence[tuple[Tensor, Hooks, Hooks]]) -> None:
    """Call the user's hooks on parameters whose gradients are accumulated."""
    for parameter, _, after in hooks:
        for hook in after:
            if parameter.grad is not None:
                hook(parameter)


def _times(loss: Tensor, factor: float | Tensor) -> Tensor:
    """Return the loss (0-dim) times its factor. Factor 0 gives zero: a mean over nothing is NaN."""
    if not isinstance(factor, Tensor):
        return loss * factor if factor else torch.zeros_like(loss)
    return torch.where(factor > 0, loss * factor, 0)


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


__all__ = ["GlobalBatch", "check_loss", "on_device"]
