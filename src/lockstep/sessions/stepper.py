"""From a batch's losses to the counted optimizer step.

A global batch lasts from its first micro-batch's backward pass until the loop continues with another batch. In between
a loop may have several losses, several optimizers, a step every few batches, or two steps on one batch: a step counts
the samples and the loss of all batches since the previous step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import RequestError
from ..exchange import base
from ..exchange.base import Call, Exchange, Header
from ..exchange.batch import GlobalBatch
from ..nn import sync_batchnorm
from ..runs.loop import Loop
from .shares import Handed


class Stepper:
    """Gradients of the current global batch, and optimizer steps on them. Every rank makes the same calls."""

    def __init__(self, loop: Loop, *, stepping: Callable[[], None], stepped: Callable[[bool], None]) -> None:
        """Call `stepping()` before an optimizer steps, and `stepped(saves)` after each counted step (*collective*).

        See `Loop.end_step` on `saves`.
        """
        self.share: Handed | None = None
        """Share of the last backward pass, until its batch is settled."""
        self.is_left = False
        """Whether the loop has left its loader within a global batch."""
        self.outside = 0
        """Backward passes outside of a loader's loop."""
        self.norm: Tensor | None = None
        """Norm of the gradients before the step, if the loop reports it."""
        self._loop, self._prepared, self._precision = loop, loop.prepared, loop.prepared.precision
        self._batch = GlobalBatch(self._prepared.exchange)
        self._before_step, self._after_step = stepping, stepped
        self._stepped_by: set[Optimizer] = set()  # since the last counted step
        self._stepping: Optimizer | None = None  # may step the optimizer that it wraps; a scaler may step it
        self._lr = 0.0
        self._parts_at_step = 0  # backward passes before the last optimizer step
        self._has_warned_of_steps = False
        self._keeps_gradients: bool | None = None
        """Whether the loop adds to gradients after a step; None until a second epoch has begun."""
        self._has_warned = False
        has_scaler = self._precision.scaler is not None
        self._unscale = (lambda: self._precision.unscale(self._prepared.optimizers)) if has_scaler else None

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has made a step that is not yet counted."""
        return bool(self._stepped_by)

    @property
    def has_gradients(self) -> bool:
        """Whether a loss waits for an optimizer step."""
        return self._batch.has_loss

    @property
    def is_clean(self) -> bool:
        """Whether the loop is between two batches, with every step counted."""
        return self.share is None and not self.has_stepped

    @property
    def is_whole(self) -> bool:
        """Whether no global batch is incomplete, so that calls once per batch act."""
        return self.share is None or self.share.share.last or self.is_left

    def come_to(self, handed: Handed | None) -> None:
        """Begin the micro-batch of a loss, and settle the previous batch (*collective*)."""
        self.is_left = False
        previous = self.share
        if previous is handed and (handed is not None or not self.has_stepped):
            return
        if handed is not None and handed.share.micro and (previous is None or previous.index + 1 != handed.index):
            raise RequestError(
                f"session.backward was given the loss of micro-batch {handed.share.micro + 1} of a global batch, and "
                "not of the one before it: under accumulate=, train each global batch's micro-batches in the loader's "
                "order, or skip a whole batch."
            )
        if previous is None or handed is None or previous.batch != handed.batch:
            self.settle(saves=False)
            if self.share is not None:  # left before its last micro-batch
                if not self._has_warned:
                    self._has_warned = True
                    self._loop.warn("a global batch was left before its last micro-batch: its gradients are dropped")
                self._batch.drop()
                self.share = None
        self._batch.begin_micro_batch()

    def backward(
        self,
        loss: Tensor,
        handed: Handed | None,
        weight: float | Tensor | None,
        reduction: str,
        *,
        couples: bool,
        recorded: Tensor,
        retain_graph: bool,
    ) -> None:
        """Add the gradients of this rank's loss (0-dim) to the batch's (*collective*). See `Session.backward`.

        `couples` is whether other ranks' losses depend on this rank's samples, as by synchronised BatchNorm: a loss of
        weight 0 then has gradients. `recorded` is the loss to record, before any user's GradScaler.
        """
        factor, expected = self._factor(handed, weight, reduction)
        weight = _weighed(handed, weight)
        if weight is not None and reduction == "mean":
            factor = weight
        elif weight is not None:
            factor = float(handed is None or handed.share.size > 0)
        if handed is None:
            header = Header(Call.BACKWARD.kind, self.outside)
            self.outside += 1
        else:
            header = Header(base.pass_kind(handed.epoch, handed.place), handed.index)
        if not self.has_gradients:  # checkpoints hold gradients that may be added to
            if self._batch.adds_to_existing():
                self._keeps_gradients = True
            elif self._keeps_gradients is None and self._loop.position.epochs > 0:
                self._keeps_gradients = False
        self.share = handed
        weightless: bool | Tensor = False
        if couples and (handed is None or handed.share.size > 0):
            weightless = factor <= 0 if isinstance(factor, Tensor) else factor == 0

        def run(factor: float | Tensor) -> None:
            with sync_batchnorm.without_weight(weightless), self._prepared.memory.watched():
                self._precision.backward(loss, factor, retain_graph=retain_graph)

        self._batch.backward(
            *(recorded, factor, weight, expected, header, run),
            last=handed is None or handed.share.last,
            weightless=weightless,
            unscale=self._unscale,
        )

    def _factor(
        self, handed: Handed | None, weight: float | Tensor | None, reduction: str
    ) -> tuple[float | Tensor, tuple[float, float] | None]:
        """Return a loss's factor, and (remaining, expected) samples if some may have been dropped.

        Also if ranks step by their own gradients, whose means are over these samples.
        """
        ranks, is_own = self._prepared.world.size, self._prepared.exchange.every > 0
        if weight is not None:
            return 1.0, None
        if handed is None:
            return 1 / ranks if reduction == "mean" else 1.0, None
        share = handed.share
        if reduction == "sum":
            return float(share.size > 0), (float(share.size), float(share.total)) if is_own else None
        if share.size == share.total and ranks == 1:
            return 1.0, None
        if handed.samples is None:
            raise RequestError(
                f"The DataLoader's collate function made a batch of {share.size} samples none of whose parts has "
                f"{share.size}: its shares cannot be weighed. Say what the loss is a mean over, as in "
                "session.backward(loss, weight=…)."
            )
        expected = (float(handed.samples), float(share.total)) if handed.may_drop or is_own else None
        return handed.samples / share.total, expected

    def step(self, optimizer: Optimizer, step: Callable[[], Any], closure: Any) -> Any:
        """Step the optimizer at the end of a global batch. Replaces its `step` method."""
        if self._stepping is not None:
            return step()
        if closure is not None:
            raise RequestError("optimizer.step(closure) computes gradients that no rank could sum; give it none.")
        if not self.is_whole:
            return None
        if not self.has_gradients and not self._stepped_by:
            raise RequestError(
                "optimizer.step() without session.backward(loss) before it: gradients of loss.backward() are not "
                "weighed, nor summed over the ranks; call session.backward(loss) in its place."
            )
        source = self._prepared.source
        if self._stepped_by and source is not None and source.plan.accumulation > 1 and not self._has_warned_of_steps:
            self._has_warned_of_steps = True
            self._loop.warn(
                "a batch in micro-batches has several optimizer steps, and what its later losses add comes in part "
                "from the weights before the first of them: another model than without micro-batches (--accumulate 1)"
            )
        if optimizer in self._stepped_by:  # a loop may step twice on one batch
            self._end(self.share, parts=self._parts_at_step, saves=False)
        prepared, exchange, progress = self._prepared, self._prepared.exchange, self._prepared.world.progress
        progress.enter("step")
        self._before_step()
        exchange.begin_step(optimizer)
        self._stepping = optimizer
        try:
            result = self._precision.step_one(optimizer, step)
        finally:
            self._stepping = None
        if exchange.every:
            exchange.drift = max(1, exchange.drift + (not self._stepped_by))
        self._stepped_by.add(optimizer)
        self._synchronise(is_complete=self._stepped_by.issuperset(set(prepared.optimizers) - prepared.inner))
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._parts_at_step = self._batch.number
        progress.enter("")
        if prepared.source is None and optimizer is prepared.optimizers[-1]:
            self.settle()
        return result

    def _synchronise(self, *, is_complete: bool) -> None:
        """Exchange weights if that is due (*collective*). `is_complete`: no optimizer is still to make the step.

        An exchange is overdue in loops that are never known to have ended a step.
        """
        exchange = self._prepared.exchange
        if exchange.every and exchange.drift + is_complete > exchange.every:
            self._prepared.synchronise()

    def leave(self) -> None:
        """Note that the loop has left its loader, perhaps within a global batch; show hidden gradients."""
        self.is_left = True
        self._batch.show()

    def abandon(self) -> None:
        """Discard the batch under way, before its step."""
        exchange = self._prepared.exchange
        exchange.hide()
        self._batch, self.share = GlobalBatch(exchange), None

    def settle(self, *, saves: bool = True) -> None:
        """End the last trained global batch if it is complete, and count its step (*collective*).

        `saves` is False after the next batch's forward pass, which may have drawn numbers and changed buffers.
        """
        handed = self.share
        if not (self.has_stepped if handed is None else handed.share.last):
            return
        self.share = None
        self._end(handed, saves=saves)

    def _end(self, handed: Handed | None, parts: int | None = None, *, saves: bool = True) -> None:
        """End the batch, or its first `parts` backward passes; count the step on it, if any (*collective*)."""
        loop = self._loop
        if handed is not None and handed.counts and loop.is_running:
            loop.count_batch(handed.place, handed.share.step)
        self._batch.end(0 if handed is None else handed.share.total, parts)
        if self._stepped_by:  # a loop may step once per several batches: the step counts their sum
            self._stepped_by.clear()
            self._precision.update()
            if saves:
                self._synchronise(is_complete=True)
            norm, self.norm = self.norm, None
            loop.count_step(*self._batch.take_loss(), self._lr, norm)
            self._after_step(saves)
        elif self.has_gradients and not self._prepared.optimizers:
            raise RequestError("A batch is over, and session.prepare was given no optimizer to step; give it yours.")

    def exchange_by(self, exchange: Exchange) -> None:
        """Exchange gradients by `exchange` from the next global batch on (*collective*)."""
        self._prepared.exchange = self._batch.exchange = exchange

    def pending(self) -> dict[str, Any]:
        """Return the state between backward and optimizer step, for a checkpoint (*collective*)."""
        # Of ranks that step by their own gradients, none can be saved: those of a step that is over are left out.
        adds = self._keeps_gradients is True if self._prepared.exchange.every else self._keeps_gradients is not False
        is_held = self.has_gradients or (adds and self._batch.adds_to_existing())
        loss, samples = self._batch.pending_loss()
        losses = self._prepared.world.gather(loss) if is_held else []
        flags = {"steps": self.has_gradients, "adds": self._keeps_gradients, "is_held": is_held}
        return {"samples": samples, "losses": losses, **flags}

    def restore(self, pending: dict[str, Any] | None) -> None:
        """Restore the state that `pending` returned."""
        if pending is None:
            return
        world = self._prepared.world
        self._keeps_gradients = pending["adds"]
        if pending["steps"]:
            losses = pending["losses"]
            loss = losses[world.rank] if len(losses) == world.size else sum(losses) / world.size
            self._batch.restore_loss(loss, pending["samples"])


def _weighed(handed: Handed | None, weight: float | Tensor | None) -> float | Tensor | None:
    if weight is None:
        return None
    if handed is not None and not handed.share.size:
        return 0.0
    return weight.item() if isinstance(weight, Tensor) and weight.is_cpu else weight
