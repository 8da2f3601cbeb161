"""Current global batch: weighted gradients and loss over micro-batches and ranks.

Existing gradients (of an earlier loss, or of earlier global batches without a step) are hidden from a global batch's
first backward pass to its last micro-batch, and added then. Code between backward and step (clipping, several
optimizers) thus sees gradients of complete global batches, or none, and acts on each once. Hooks on parameters do the
same: backward passes over shares skip them, and they run after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import Hooks
from ..errors import RequestError
from .base import Exchange, Header, Part, Pass


class GlobalBatch:
    """Gradients and loss since the last optimizer step."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._is_alone = type(exchange) is Exchange
        self._parts: list[Part] = []
        self._number = 0  # of the next backward pass of the micro-batch
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []  # existing gradients, until the batch's last micro-batch
        self._loss: Tensor | None = None  # of complete batches
        self._samples = 0

    @property
    def number(self) -> int:
        """Number of the next backward pass of this micro-batch."""
        return self._number

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss since the last optimizer step."""
        return self._loss is not None or bool(self._parts)

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
        weightless: bool | Tensor = False,
        unscale: Callable[[], None] | None = None,
    ) -> None:
        """Add the gradients of `factor` · `loss` (0-dim) to the batch's (*collective*). `run(factor)` computes them.

        With factor 0 they are zero, even if the loss is a mean over nothing; see `Pass` on `weightless`.

        With a `weight`, the last micro-batch divides the sum by all ranks' weights. `share` is needed if a collate
        function may drop samples: (samples in this rank's mean, samples in the global batch that `factor` assumes).
        Raises `RequestError` for weights whose sum is not positive.
        """
        exchange, number = self.exchange, self._number
        if number == len(self._parts):
            self._parts.append(Part(number))
        part = self._parts[number]
        self._number += 1
        is_unscaled = not isinstance(factor, Tensor) and factor == 1.0  # reading a tensor would make the host wait
        if part.is_weighed not in (None, weight is not None):
            raise RequestError(
                "session.backward was given weight= in one micro-batch of a global batch and not in another: give it "
                "in all of them, 0 where nothing counts."
            )
        part.is_weighed = weight is not None
        if weight is not None:
            part.weight = part.weight + weight
        elif share is not None:
            part.weight = part.weight + share[0]
        divisor: Tensor | None = None
        if (
            self._is_alone
            and is_unscaled
            and last
            and weight is None
            and share is None
            and not (part.gradients or self._hidden or unscale)
        ):
            run(factor)  # autograd adds to existing gradients
        else:
            self._hidden += exchange.hide()
            zeroed = weightless is False and (factor <= 0 if isinstance(factor, Tensor) else factor == 0)
            header = header._replace(part=number)
            backward_pass = Pass(lambda: run(factor), part, header, part.weight, last, zeroed, weightless)
            weights = exchange.backward(backward_pass)
            if weights is not None and (weight is not None or share is not None):
                divisor = self._divisor(weights, None if share is None else share[1])
                if divisor is not None:
                    exchange.divide(part, divisor)
            if last:
                hooks, part.hooks = part.hooks, []
                _call_gradient_hooks(hooks)
                if unscale is not None:
                    unscale()
                self.show()
                _call_accumulation_hooks(hooks)
        scaled = loss.detach() if is_unscaled else _times(loss.detach(), factor)
        total = scaled if part.loss is None else part.loss + scaled
        part.loss = total if divisor is None else total / divisor

    def end(self, samples: int, parts: int | None = None) -> None:
        """End a batch of `samples` over all ranks, or only its first `parts` backward passes.

        Raises `RequestError` if the last micro-batch lacks a loss of an earlier one.
        """
        if parts is None and self._number < len(self._parts):
            raise RequestError(
                f"session.backward was called {self._number} times in a global batch's last micro-batch, and "
                f"{len(self._parts)} times in an earlier one, whose gradients would be lost: call it "
                "for each loss in each micro-batch, with weight=0 where nothing counts."
            )
        for part in self._parts[:parts]:
            if part.loss is not None:
                self._loss = part.loss if self._loss is None else self._loss + part.loss
        self._samples += samples
        if parts is None:
            self.drop()
        else:
            del self._parts[:parts]
            self._number -= parts

    def show(self) -> None:
        """Add the hidden gradients to `.grad`."""
        for parameter, hidden in self._hidden:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = hidden
            else:
                is_sparse = hidden.is_sparse or gradient.is_sparse
                parameter.grad = hidden + gradient if is_sparse else hidden.add_(gradient)
        self._hidden = []

    def drop(self) -> None:
        """Discard the batch, as when a loop breaks before its last micro-batch."""
        self.show()
        self._parts, self._number = [], 0

    def adds_to_existing(self) -> bool:
        """Return whether a backward pass would add to existing gradients."""
        return any(parameter.grad is not None for parameter in self.exchange.parameters)

    def pending_loss(self) -> tuple[float, int]:
        """Return this rank's loss, and the samples, of complete batches since the last optimizer step."""
        return 0.0 if self._loss is None else float(self._loss), self._samples

    def restore_loss(self, loss: float, samples: int) -> None:
        """Restore the values that `pending_loss` returned."""
        self._loss = torch.tensor(loss, dtype=torch.float64, device=self.exchange.world.device)
        self._samples = samples

    def take_loss(self) -> tuple[Tensor, int]:
        """Return and reset this rank's loss (0-dim), and the samples, since the last optimizer step."""
        device = self.exchange.world.device
        loss = torch.zeros((), device=device) if self._loss is None else self._loss
        samples, self._samples, self._loss = self._samples, 0, None
        return loss, samples

    def _divisor(self, weights: Tensor, expected: float | None) -> Tensor | None:
        """Return the remaining divisor of the sums (0-dim), or None for 1. `weights` (ranks,) are in rank order."""
        total = weights.sum()
        if total.is_cpu and not total > 0:
            raise RequestError(
                f"session.backward was given weights that sum to {total.item():g} over the global batch: a mean needs "
                "a positive sum of weights; leave such a batch out of the data."
            )
        if expected is None:
            return total
        return None if total.is_cpu and total.item() == expected else total / expected


@torch.no_grad()
def _call_gradient_hooks(hooks: Sequence[tuple[Tensor, Hooks, Hooks]]) -> None:
    """Call the user's hooks on the gradients of the global batch."""
    for parameter, gradient_hooks, _ in hooks:
        for hook in gradient_hooks:
            if parameter.grad is not None and (changed := hook(parameter.grad)) is not None:
                parameter.grad = changed


@torch.no_grad()
def _call_accumulation_hooks(hooks: Sequence[tuple[Tensor, Hooks, Hooks]]) -> None:
    """Call the user's hooks on parameters with accumulated gradients."""
    for parameter, _, accumulation_hooks in hooks:
        for hook in accumulation_hooks:
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
        kind = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise RequestError(
            f"session.backward takes a loss of one number, a tensor without dimensions; found {kind}: take its mean "
            "over this rank's samples first."
        )
    if not loss.requires_grad:
        raise RequestError(
            "session.backward was given a loss that depends on no trainable parameter (requires_grad): it was "
            "computed under torch.no_grad(), from detached tensors, or the model is frozen."
        )
