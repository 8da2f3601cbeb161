"""Loops as data: a program says what a loop does, and is interpreted on a session or on its plain twin.

The order of passes, the batches that are skipped, how far is read ahead, when is stepped and zeroed: all of it is the
same on every rank, so that any number of ranks has to come to the same numbers.
"""

from __future__ import annotations

import inspect
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from .catalogue import Numbers
from .common import FEATURES, checksum, mlp, regression, seeded

LIST = -1
"""The distance of reading ahead by a list of the whole pass."""


@dataclass(frozen=True)
class Pass:
    """One pass over a loader within an epoch."""

    kind: str = "train"
    """train; look: no gradients; peek: the first batch alone; evaluate: over the test set."""
    ahead: int = 0
    """The number of batches that are read ahead, or LIST."""
    change: str = ""
    """What is done to the input before the model: double, flatten, clone, or nothing."""
    is_named: bool = False
    """Whether `session.backward` is told the batch, where it can be."""
    skip: tuple[int, int] = (1, 1)
    """Skip batches whose number has this remainder (second) by this modulus (first)."""
    stop: int = 0
    """Leave the pass before this batch; 0: never."""
    every: int = 1
    """Step in each k-th batch."""
    divides: bool = True
    """Whether the loss is divided by `every`."""
    losses: int = 1
    """The number of backward passes a batch."""
    zero: str = "after"
    """Where gradients are zeroed: first, before-backward, after."""
    keeps_gradients: bool = False
    """Whether they are set to zero in place."""
    evaluates_at: int = -1
    """Evaluate before this batch; -1: never."""


@dataclass(frozen=True)
class Program:
    """A loop."""

    model: str = "mlp"
    """mlp, batchnorm, tied, frozen (its first layer until the second epoch), sometimes (a layer in odd steps)."""
    optimizer: str = "sgd"
    """sgd, momentum, adam, decay."""
    samples: int = 23
    batch: int = 6
    shuffle: bool = False
    workers: int = 0
    drops_last: bool = False
    epochs: int = 2
    uses_epochs: bool = True
    """Whether the epochs are the session's; else a plain range."""
    passes: tuple[Pass, ...] = (Pass(),)
    clip: str = ""
    """norm, value, or nothing."""
    schedule: str = ""
    """step, epoch, or nothing."""
    averages: bool = False
    """Whether the weights are averaged after each step."""
    accumulate: int = 1

    @property
    def counts_itself(self) -> bool:
        """Whether the loop would go on elsewhere after a resume within an epoch: it counts batches or passes itself."""
        counts = [one.skip[0] > 1 or one.stop > 0 or one.every > 1 or one.evaluates_at >= 0 for one in self.passes]
        return any(counts) or len(self.passes) > 1

    @property
    def has_plain(self) -> bool:
        """Whether a plain loop comes to the same numbers."""
        return not self.shuffle and (self.accumulate == 1 or self.model != "batchnorm")


def dumps(program: Program) -> str:
    """Return the program as JSON, without what is as usual."""
    values = _differing(program)
    if "passes" in values:
        values["passes"] = [_differing(one) for one in program.passes]
    return json.dumps(values, separators=(",", ":"))


def _differing(value: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {field.name: field.default for field in fields(value)}
    return {name: getattr(value, name) for name in usual if getattr(value, name) != usual[name]}


def loads(text: str) -> Program:
    """Return the program of its JSON."""
    values = json.loads(text)
    passes = [
        Pass(**({**one, "skip": tuple(one["skip"])} if "skip" in one else one)) for one in values.get("passes", [{}])
    ]
    return Program(**{**values, "passes": tuple(passes)})


def draw(seed: int, number: int) -> Program:
    """Return the `number`-th program of a seed."""
    source = random.Random(f"{seed}:{number}")

    def maybe(value: Any, usual: Any, chance: float = 0.3) -> Any:
        return value if source.random() < chance else usual

    accumulate = source.choice((1, 1, 1, 2))
    batch = source.choice((4, 5, 6, 8))
    batches = source.choice((2, 3, 4, 5))
    samples = batch * batches - maybe(source.randrange(1, batch), 0, 0.5)
    model = source.choice(("mlp", "mlp", "batchnorm", "tied", "frozen", "sometimes"))
    if model == "batchnorm" and 0 < samples % batch < 2 * accumulate:  # it needs two samples at least
        samples += batch - samples % batch
    program = Program(
        model=model,
        optimizer=source.choice(("sgd", "momentum", "adam", "decay")),
        samples=samples,
        batch=batch,
        shuffle=maybe(True, False),
        workers=maybe(1, 0, 0.04),
        drops_last=maybe(True, False, 0.2),
        epochs=source.choice((1, 2, 3)),
        uses_epochs=maybe(False, True, 0.15),
        passes=tuple(_draw_pass(source, batches, accumulate) for _ in range(source.choice((1, 1, 2, 3)))),
        # torch's clip_grad_value_ takes no model without gradients, as before a batch's last micro-batch.
        clip=maybe(source.choice(("norm", "value") if accumulate == 1 else ("norm", "norm")), ""),
        schedule=maybe(source.choice(("step", "epoch")), ""),
        averages=maybe(True, False, 0.2),
        accumulate=accumulate,
    )
    if all(one.kind != "train" for one in program.passes):
        program = replace(program, passes=(*program.passes, Pass()))
    return program


def _draw_pass(source: random.Random, batches: int, accumulate: int) -> Pass:
    def maybe(value: Any, usual: Any, chance: float = 0.3) -> Any:
        return value if source.random() < chance else usual

    kind = source.choice(("train", "train", "train", "train", "look", "peek", "evaluate"))
    drawn = Pass(
        kind=kind,
        ahead=maybe(source.choice((1, 1, 2, 3, LIST)), 0, 0.35),
        change=maybe(source.choice(("double", "flatten", "clone")), ""),
        is_named=maybe(True, False, 0.4),
        evaluates_at=maybe(source.randrange(batches), -1, 0.15),
        losses=maybe(2, 1, 0.2),
        zero=source.choice(("first", "before-backward", "after", "after")),
        keeps_gradients=maybe(True, False, 0.2),
    )
    if kind != "train":
        return Pass(kind=kind, ahead=drawn.ahead, change=drawn.change)
    if accumulate > 1:  # the loop's own numbers would be those of micro-batches
        return replace(drawn, evaluates_at=min(drawn.evaluates_at, 0))
    modulus = source.choice((2, 3))
    return replace(
        drawn,
        skip=maybe((modulus, source.randrange(modulus)), (1, 1), 0.2),
        stop=maybe(source.randrange(1, batches + 1), 0, 0.2),
        every=maybe(source.choice((2, 3)), 1, 0.2),
        divides=maybe(False, True, 0.2),
    )


class _Sometimes(nn.Module):
    """A net with a layer that is used in odd steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.uses_middle = (
            *(nn.Linear(FEATURES, 4), nn.Linear(4, 4)),
            nn.Linear(4, 1),
            False,
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        output: Tensor = self.last(torch.tanh(self.middle(hidden)) if self.uses_middle else hidden)
        return output


def _tied() -> nn.Module:
    layer = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(FEATURES, 1))


def _normalised() -> nn.Module:
    # A bias before the BatchNorm has a gradient of rounding alone, which Adam makes as large as any.
    return nn.Sequential(nn.Linear(FEATURES, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


_MODELS: dict[str, Any] = {"batchnorm": _normalised, "tied": _tied, "sometimes": _Sometimes}


def _optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    momentum, decay = {"sgd": (0.0, 0.0), "momentum": (0.9, 0.0), "decay": (0.5, 0.1)}[kind]
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)


def _ahead(batches: Iterable[Any], distance: int) -> Iterator[Any]:
    if distance == LIST:
        yield from list(batches)
        return
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > distance:
            yield waiting.popleft()
    yield from waiting


def _changed(x: Tensor, change: str) -> Tensor:
    return {"double": lambda: x * 2, "flatten": lambda: x.flatten(1), "clone": x.clone}.get(change, lambda: x)()


class _Interpreter:
    """A program under way."""

    def __init__(self, program: Program, session: Any) -> None:
        self.program, self.session = program, session
        self.model = seeded(_MODELS.get(program.model, mlp))
        self.optimizer = _optimizer(program.optimizer, self.model)
        loader = DataLoader(
            regression(program.samples),
            batch_size=program.batch,
            shuffle=program.shuffle,
            num_workers=program.workers,
            drop_last=program.drops_last,
        )
        self.schedule: Any = CosineAnnealingLR(self.optimizer, T_max=20) if program.schedule else None
        self.average: Any = AveragedModel(self.model) if program.averages else None
        self.model, self.optimizer, self.loader = session.prepare(self.model, self.optimizer, loader)
        for part in (self.schedule, self.average):
            if part is not None:
                session.prepare(part)
        self.test = DataLoader(regression(9), batch_size=4)
        self.takes_batch = "batch" in inspect.signature(session.backward).parameters
        self.numbers = [0.0, 0.0]

    def run(self) -> Numbers:
        """Run all epochs; return the numbers."""
        program, session = self.program, self.session
        for epoch in session.epochs(program.epochs) if program.uses_epochs else range(program.epochs):
            if program.model == "frozen":
                self.model[0].requires_grad_(epoch > 0)
            for one in program.passes:
                getattr(self, f"_{one.kind}")(one)
            if program.schedule == "epoch":
                self.schedule.step()
        models = [self.model] if self.average is None else [self.model, self.average]
        return [checksum(*models), *self.numbers]

    def _evaluate(self, one: Pass) -> None:
        for x, y in self.session.evaluating(self.test):
            loss = functional.mse_loss(self.model(x), y, reduction="sum")
            self.numbers[0] += self.session.sum(loss.item())

    def _look(self, one: Pass) -> None:
        with torch.no_grad():
            for x, _ in _ahead(self.loader, one.ahead):
                if self.program.model == "batchnorm":  # a forward pass would change the statistics
                    self.numbers[1] += self.session.sum(x.sum().item()) if one.ahead == 0 else 0.0
                else:
                    self.model(_changed(x, one.change))

    def _peek(self, one: Pass) -> None:
        x, _ = next(iter(self.loader))
        _changed(x, one.change)

    def _train(self, one: Pass) -> None:
        for number, (x, y) in enumerate(_ahead(self.loader, one.ahead)):
            if one.stop and number == one.stop:
                break
            if number == one.evaluates_at:
                self._evaluate(one)
            if one.skip[0] > 1 and number % one.skip[0] == one.skip[1]:
                continue
            self._step(one, number, x, y)

    def _step(self, one: Pass, number: int, x: Tensor, y: Tensor) -> None:
        program, session, model, optimizer = self.program, self.session, self.model, self.optimizer
        if one.zero == "first" and number % one.every == 0:
            optimizer.zero_grad(set_to_none=not one.keeps_gradients)
        if program.model == "sometimes":
            model.uses_middle = session.step % 2 == 1
        options = {"batch": x} if one.is_named and self.takes_batch else {}
        losses = []
        for at in range(one.losses):
            output = model(_changed(x, one.change))
            loss = functional.mse_loss(output, y) if at == 0 else functional.l1_loss(output, y)
            losses.append(loss / one.every if one.divides else loss)
        if one.zero == "before-backward" and number % one.every == 0:
            optimizer.zero_grad(set_to_none=not one.keeps_gradients)
        for loss in losses:
            session.backward(loss, **options)
        if (number + 1) % one.every:
            return
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        if program.clip == "norm":
            nn.utils.clip_grad_norm_(weights, 0.3)
        elif program.clip == "value":
            nn.utils.clip_grad_value_(weights, 0.1)
        optimizer.step()
        if program.schedule == "step":
            self.schedule.step()
        if one.zero == "after":
            optimizer.zero_grad(set_to_none=not one.keeps_gradients)
        if self.average is not None:
            self.average.update_parameters(model)


def interpret(program: Program, session: Any) -> Numbers:
    """Run the program on a session or on its plain twin."""
    return _Interpreter(program, session).run()
