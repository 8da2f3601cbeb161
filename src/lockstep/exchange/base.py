"""Exchange interface, and the exchange of a lone process.

A backward pass over one micro-batch is a `Pass`. Its gradients are collected in a `Part`: the n-th backward pass of
each micro-batch belongs to the n-th part of the global batch, since a loop may step one optimizer and drop gradients
between two of them. After the part's last micro-batch, `.grad` holds the sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import Hooks, UserHooks
from ..checkpoint.state import few
from ..errors import RunError
from ..world.world import World


class Header(NamedTuple):
    """What this rank is about to exchange. Ranks that exchange something else are refused."""

    kind: int
    """The index of one of `KINDS`, or, below 0, a pass over the data as `pass_kind` gives it."""
    number: int
    """The global micro-batch of the pass, or the optimizer step."""
    part: int = 0
    """The number of the backward pass of this micro-batch, or a checksum of a call's details."""


KINDS = (
    "ends an epoch",
    "begins an evaluation",
    "ends an evaluation",
    "calls session.sum, max, mean or gather",
    "records its steps",
    "calls session.backward outside of a loader's loop",
    "saves",
    "closes its session or has ended its script",
)
(
    END_EPOCH,
    BEGIN_EVALUATION,
    END_EVALUATION,
    REDUCE,
    RECORD,
    BACKWARD,
    SAVE,
    CLOSE,
) = range(len(KINDS))


_PASSES = 1 << 16  # over an epoch's data, at most


@dataclass
class Part:
    """This rank's gradients of one part of a global batch, over the micro-batches so far."""

    number: int = 0
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """Of a lone process: gradients hidden from the loop until the batch is complete."""
    flats: list[Tensor] = field(default_factory=list)
    """Of several ranks: one tensor for each bucket."""
    present: bytearray = field(default_factory=bytearray)
    """Whether each parameter has a gradient in `flats`."""
    sparse: dict[int, Tensor] = field(default_factory=dict)
    hooks: list[tuple[Tensor, Hooks, Hooks]] = field(default_factory=list)
    """Hooks of the user's that the last backward pass has left out: they are for the whole batch's gradients."""


@dataclass(frozen=True)
class Pass:
    """One backward pass. `run` computes it; `zeroed` (0-dim) is true where its gradients count nothing."""

    run: Callable[[], None]
    part: Part
    header: Header
    weight: float | Tensor
    last: bool
    zeroed: bool | Tensor = False


class Exchange:
    """Exchange of a process that has no other: gradients are those of its own samples."""

    keeps_replicas = True
    """Whether replicas stay equal, and are compared."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parameters: list[nn.Parameter] = []
        self.models: list[nn.Module] = []
        self._user_hooks = UserHooks()

    def attach(self, model: nn.Module) -> None:
        """Add a model's parameters (*collective*)."""
        known = set(self.parameters)
        self.models.append(model)
        self.parameters += [parameter for parameter in model.parameters() if parameter not in known]

    def backward(self, one: Pass) -> Tensor | None:
        """Run a backward pass; return all ranks' weights (ranks,) after the part's last one (*collective*).

        Existing gradients must be hidden. After the last micro-batch `.grad` holds the part's sum, and is None for
        parameters without a gradient on any rank; before, it is None.
        """
        part = one.part
        adds_in_place = one.zeroed is False
        if adds_in_place:
            _show(part.gradients)
        with self._user_hooks.removed(self.parameters, {}) as part.hooks:
            one.run()
        if not adds_in_place:
            if isinstance(one.zeroed, Tensor):
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.masked_fill_(one.zeroed, 0)
            else:
                self.hide()
            for parameter, held in part.gradients:
                parameter.grad = held if parameter.grad is None else held.add_(parameter.grad)
        if not one.last:
            part.gradients = self.hide()
            return None
        part.gradients = []
        return on_device(one.weight, self.world.device)[None]

    def divide(self, part: Part, divisor: Tensor) -> None:
        """Divide the part's gradients (`.grad`) by `divisor` (0-dim)."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)

    def hide(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove and return the existing gradients."""
        found = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for parameter, _ in found:
            parameter.grad = None
        return found

    def meet(self, header: Header, details: Sequence[str] = ()) -> None:
        """Raise `RunError`, on every rank, where another rank comes to something else (*collective*).

        `details` say what the call is of, such as the names of values.
        """

    def close(self) -> None:
        """Remove all hooks from the models."""


def _show(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """Return the number as float64 (0-dim) on `device`. The host waits for nothing."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)  # filled there: a copy would be waited for


def check_match(rows: Sequence[Sequence[float]], step: int) -> None:
    """Raise `RunError` unless all ranks' headers are the same. `rows` are (kind, index, part)."""
    first = rows[0]
    for rank, row in enumerate(rows):
        if row != first:
            raise _unmatched(step, _described(first), rank, _described(row))


def check_details(kind: int, details: Sequence[Sequence[str]], step: int) -> None:
    """Raise `RunError` unless all ranks' details of a call are the same."""
    first = details[0]
    for rank, theirs in enumerate(details):
        if theirs != first:
            own, others = (
                " ".join([KINDS[kind], *([f"with {few(more)}"] if more else ["without"])])
                for more in (
                    [each for each in first if each not in theirs],
                    [each for each in theirs if each not in first],
                )
            )
            raise _unmatched(step, own, rank, others)


def _unmatched(step: int, first: str, rank: int, other: str) -> RunError:
    return RunError(
        f"At step {step}, rank 0 {first}, and rank {rank} {other}: every rank has to train the same batches and make "
        "the same calls. Skip a batch on all ranks or on none, as in `if session.max(float(bad)): continue`, and keep "
        "what communicates out of `if session.is_main`"
    )


def _described(row: Sequence[Any]) -> str:
    kind, index, part = map(int, row)
    if kind >= 0:
        return KINDS[kind]
    epoch, again = divmod(-1 - kind, _PASSES)
    of_pass = f", pass {again + 1} over the data" if again else ""
    loss = f", with loss {part + 1} of it" if part else ""
    return f"trains micro-batch {index} of epoch {epoch}{of_pass}{loss}"


def pass_kind(epoch: int, again: int) -> int:
    """Return the `kind` of a header for an epoch's data, over which a loop has gone `again` times before."""
    return -1 - (epoch * _PASSES + min(again, _PASSES - 1))
