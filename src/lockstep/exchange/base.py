"""Exchange interface, and the exchange of a single process.

A backward pass over one micro-batch is a `Pass`. A `Part` collects its gradients: the n-th backward pass of each
micro-batch belongs to the n-th part of the global batch, since a loop may step an optimizer and drop gradients between
two passes. After the part's last micro-batch, `.grad` holds the sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import Hooks, UserHooks
from ..checkpoint.shards import full_tensor, local
from ..checkpoint.state import few
from ..errors import RunError
from ..world.world import World


class Call(StrEnum):
    """A call that all ranks make at the same time."""

    END_EPOCH = "ends an epoch"
    BEGIN_EVALUATION = "begins an evaluation"
    END_EVALUATION = "ends an evaluation"
    REDUCE = "calls session.sum, max, mean or gather"
    RECORD = "records its steps"
    BACKWARD = "calls session.backward outside of a loader's loop"
    LOAD_BEST = "calls session.load_best"
    STOP = "calls session.stop_if_asked"
    CLOSE = "closes its session or has ended its script"
    ORDER = "begins a pass in its sampler's order"
    SCORE = "calls session.score"

    @property
    def kind(self) -> int:
        """The `kind` of its headers."""
        return [*Call].index(self)


class Header(NamedTuple):
    """Description of an exchange. Ranks with different headers raise `RunError`."""

    kind: int
    """`Call.kind`, or, below 0, a pass over the data (see `pass_kind`)."""
    number: int
    """Global micro-batch of the pass, or optimizer step."""
    part: int = 0
    """Number of the backward pass of this micro-batch (see `MOST_PARTS`), or a checksum of a call's details."""


_MOST_PASSES = 1 << 16  # over an epoch's data
MOST_PARTS = 1 << 16
"""Backward passes per micro-batch; above it, a header's `part` has a checksum of the parameters that train."""


@dataclass
class Part:
    """This rank's gradients of one part of a global batch, over the micro-batches so far."""

    number: int = 0
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """Gradients hidden from the loop until the batch is complete: of a single process, or of gathered parameters."""
    flats: list[Tensor] = field(default_factory=list)
    """On several ranks with whole parameters: one tensor per bucket."""
    present: bytearray = field(default_factory=bytearray)
    """On several ranks: whether each parameter has a gradient here."""
    loss: Tensor | None = None
    """This rank's sum."""
    weight: float | Tensor = 0.0
    """This rank's sum: of its losses' weights, or of its samples."""
    is_weighed: bool | None = None
    """Whether its losses come with weights; None before the first."""
    sparse: dict[int, Tensor] = field(default_factory=dict)
    """Gradients outside of `flats`, by the parameter's index: sparse ones, and of parameters that cannot be divided."""
    hooks: list[tuple[Tensor, Hooks, Hooks]] = field(default_factory=list)
    """User hooks that the last backward pass has skipped: they run on the global batch's gradients."""


@dataclass(frozen=True)
class Pass:
    """One backward pass. `run` computes it; gradients of a pass with `zeroed` (bool or 0-dim) count as 0.

    Of a `weightless` pass (bool or 0-dim), those that are not finite do: its loss is a mean over nothing, but other
    ranks' losses depend on this rank's samples.
    """

    run: Callable[[], None]
    part: Part
    header: Header
    weight: float | Tensor
    is_last: bool
    zeroed: bool | Tensor = False
    weightless: bool | Tensor = False

    def clear_(self, gradient: Tensor) -> None:
        """Set what does not count of a gradient to 0, in place."""
        if isinstance(self.zeroed, Tensor):
            gradient.masked_fill_(self.zeroed, 0)
        if self.weightless is not False:
            gradient.masked_fill_(~gradient.isfinite() & self.weightless, 0)


class Exchange:
    """Exchange of a single process: gradients are those of its samples."""

    compared = "weights, optimizer state, synchronised statistics, averaged weights"
    """The state that the replica check compares."""
    divides_state = False
    """Whether each rank has only a part of the optimizers' state, and perhaps of the weights."""
    every = 0
    """Steps by each rank's own gradients between two exchanges of weights; 0 for an exchange of gradients in each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.parameters: list[nn.Parameter] = []
        self.models: list[nn.Module] = []
        self.asks: Callable[[], bool] = lambda: False
        """Whether this rank asks all ranks to end the interval of their metrics, as for a stop."""
        self.is_asked = False
        """Whether a rank has asked, alike on all ranks. On a GPU this is seen only where the host waits anyway."""
        self.settings: dict[str, int | str] = {}
        """The method's own options by their flags, and its choices, for the startup report."""
        self.drift = 0
        """Steps by each rank's own gradients since the last exchange of weights; unless 0, replicas differ."""
        self.overwrites_gradients = False
        """Whether a backward pass writes to the tensors in which the last one left its gradients, as CUDA graphs do."""
        self._user_hooks = UserHooks()
        self._hooks: dict[nn.Parameter, Any] = {}  # the exchange's own, which stay in backward passes
        self._is_whole = False  # within `whole_state`

    def attach(self, model: nn.Module) -> None:
        """Add a model's parameters (*collective*)."""
        attached = set(self.parameters)
        self.models.append(model)
        self.parameters += [parameter for parameter in model.parameters() if parameter not in attached]

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """Run a backward pass; return all ranks' weights (ranks,) after the part's last pass (*collective*).

        Existing gradients must be hidden. After the last micro-batch `.grad` is the part's sum, and None for parameters
        without a gradient on any rank; until then it is None. Raises `RunError` for ranks with different headers.
        """
        part = backward_pass.part
        adds_in_place = backward_pass.zeroed is False and backward_pass.weightless is False
        for parameter, gradient in part.gradients if adds_in_place else ():
            parameter.grad = gradient
        with self._user_hooks.removed(self.parameters, self._hooks) as part.hooks:
            backward_pass.run()
        if not adds_in_place:
            if backward_pass.zeroed is True:
                self.hide()
            for parameter in self.parameters:
                if parameter.grad is not None:
                    backward_pass.clear_(parameter.grad)
            for parameter, gradient in part.gradients:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        if not backward_pass.is_last:
            part.gradients = self.hide()
            if self.overwrites_gradients:
                part.gradients = [(parameter, gradient.clone()) for parameter, gradient in part.gradients]
            return None
        part.gradients = []
        return on_device(backward_pass.weight, self.world.device)[None]

    def divide(self, part: Part, divisor: Tensor) -> None:
        """Divide the part's gradients (`.grad`) by `divisor` (0-dim)."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                local(parameter.grad).div_(divisor)

    def hide(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove and return the existing gradients."""
        gradients = [(parameter, parameter.grad) for parameter in self.leaves if parameter.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        return gradients

    def meet(self, call: Call, number: int, details: Sequence[str] = ()) -> None:
        """Raise `RunError` on every rank unless all make the same call (*collective*).

        `number` counts such calls, or steps; `details` describe the call, such as the names of values.
        """

    def shard(self, model: nn.Module) -> None:
        """Divide a model's weights among the ranks in place, if the method does (*collective*).

        The model need not be attached, such as an average.
        """

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters, in every form in which a loss may depend on them."""
        return self.parameters

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Have the optimizers step what this rank has: divided parameters, or a part of the state.

        Called once, before the first step. Raises `RequestError` for an optimizer that cannot.
        """

    def begin_step(self, optimizer: Optimizer) -> None:
        """Prepare for a step of an optimizer: called on every rank right before it."""

    def silent(self) -> Exchange | None:
        """Return an exchange that sends nothing, to measure steps without one; None if there can be none."""
        silent = Exchange(self.world)
        silent.models, silent.parameters, silent.drift = self.models, self.parameters, 1
        return silent

    def evidence(self, digest: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Tensor]:
        """Return further tensors by name that are equal on all ranks after a step (*collective*).

        `digest` returns a 0-dim int64 that any bit of the tensors changes.
        """
        return {}

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank has the optimizer state of a parameter."""
        return True

    @contextmanager
    def whole_state(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Have the whole state in rank 0's optimizers, or shards on every rank, within the block (*collective*)."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False

    def synchronise(self, differing: Sequence[Tensor]) -> None:
        """Exchange weights (*collective*). `differing` are all tensors of the model and optimizers that differ."""

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, by name; complete on rank 0 (*collective*)."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`, perhaps of another number of ranks; {} begins anew."""

    def names(self) -> dict[nn.Parameter, str]:
        """Return the parameters' names in checkpoints: the number of the model and the name in it."""
        models = enumerate(self.models)
        return {
            parameter: f"{number}/{name}" for number, model in models for name, parameter in model.named_parameters()
        }

    def close(self) -> None:
        """Remove all hooks from the models."""
        while self._hooks:
            self._hooks.popitem()[1].remove()


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """Return the number as float64 (0-dim) on `device`. The host does not wait for the device."""
    if isinstance(value, Tensor):
        return full_tensor(value).to(device, torch.float64)
    return torch.full(
        (), float(value), dtype=torch.float64, device=device
    )  # filled there: the host would wait for a copy


def check_match(rows: Sequence[Sequence[float]], step: int) -> None:
    """Raise `RunError` unless all ranks' headers are equal. `rows` are (kind, number, part)."""
    first = rows[0]
    for rank, row in enumerate(rows):
        if row != first:
            names_set = row[0] == first[0] and row[2] // MOST_PARTS != first[2] // MOST_PARTS
            raise _mismatch_error(step, _describe(first, names_set), rank, _describe(row, names_set))


def check_details(call: Call, details: Sequence[Sequence[str]], step: int) -> None:
    """Raise `RunError` unless all ranks' details of a call are equal."""
    main_names = details[0]
    for rank, names in enumerate(details):
        if names != main_names:
            main_text, text = (
                " ".join([call, *([f"with {few(extra)}"] if extra else ["without"])])
                for extra in (
                    [name for name in main_names if name not in names],
                    [name for name in names if name not in main_names],
                )
            )
            raise _mismatch_error(step, main_text, rank, text)


def _mismatch_error(step: int, first: str, rank: int, other: str) -> RunError:
    return RunError(
        f"At step {step}, rank 0 {first}, and rank {rank} {other}: every rank has to train the same batches and make "
        "the same calls. Skip a batch on all ranks or on none, as in `if session.max(float(bad)): continue`, and keep "
        "collective calls out of `if session.is_main`"
    )


def _describe(row: Sequence[Any], names_set: bool) -> str:
    kind, index, part = map(int, row)
    if kind >= 0:
        return str([*Call][kind])
    epoch, again = divmod(-1 - kind, _MOST_PASSES)
    of_pass = f", pass {again + 1} over the data" if again else ""
    trained, number = divmod(part, MOST_PARTS)
    loss = f", with loss {number + 1} of it" if number else ""
    parameters = f", with the trainable parameters {trained:x}" if names_set else ""
    return f"trains micro-batch {index} of epoch {epoch}{of_pass}{loss}{parameters}"


def pass_kind(epoch: int, again: int) -> int:
    """Return the header's `kind` for a pass over an epoch's data; `again` counts earlier passes."""
    return -1 - (epoch * _MOST_PASSES + min(again, _MOST_PASSES - 1))
