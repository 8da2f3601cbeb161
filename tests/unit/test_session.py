"""What a session refuses, in a sentence that says what to change, and what it leaves alone."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from email.message import Message
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import lockstep
from lockstep.checkpoint import write
from lockstep.errors import LockstepError, RequestError, Stopped
from lockstep.sessions import session as sessions
from lockstep.sessions.session import Session
from lockstep.world.world import World

from ..command import events, refusal
from ..loops import images, session

Loop = tuple[Session, Any, torch.optim.Optimizer, Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 4))


def loop(
    make: Callable[[], nn.Module] = net, data: TensorDataset | None = None, sampler: Any = None, **options: Any
) -> Loop:
    ours = session(World.alone(), **options)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(images() if data is None else data, batch_size=20, sampler=sampler)
    return ours, *ours.prepare(model, optimizer, loader)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_on_a_step_are_called_with_it(is_global: bool) -> None:
    ours, model, optimizer, loader = loop()
    module = torch.optim.Optimizer.__module__
    called: list[Any] = []
    register = sys.modules[module].register_optimizer_step_post_hook if is_global else optimizer.register_step_post_hook
    with contextlib.closing(types.SimpleNamespace(close=register(lambda *_: called.append(1)).remove)):
        run_epochs(ours, model, optimizer, loader, 1)
    assert len(called) == len(loader)


def run(body: Callable[..., None], ours: Session, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for _ in ours.epochs(1):
        for batch in loader:
            body(ours, model, optimizer, batch)


def step_without_session(ours: Session, model: nn.Module, optimizer: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.step()


def step_of_nan(ours: Session, model: nn.Module, optimizer: Any, batch: Any) -> None:
    ours.backward(loss_of(model, batch) * float("nan"))
    optimizer.step()


MISUSES: dict[str, Callable[..., Any]] = {
    r"without session\.backward\(loss\)": step_without_session,
    r"found \(20, 4\): take its mean": lambda ours, model, _, batch: ours.backward(model(batch[0])),
    "found float": lambda ours, *_: ours.backward(1.0),
    "depends on no trainable": lambda ours, model, _, batch: ours.backward(loss_of(model, batch).detach()),
    "sum to 0 over the": lambda ours, model, _, batch: ours.backward(loss_of(model, batch), weight=0),
    "found 'no'": lambda ours, model, _, batch: ours.backward(loss_of(model, batch), reduction="no"),
    "no optimizer has stepped": lambda ours, model, _, batch: ours.backward(loss_of(model, batch)),
    "after the loop had begun": lambda ours, *_: ours.prepare(nn.Linear(1, 1)),
    r"within session\.evaluating": lambda ours, *_: [
        ours.log(accuracy=1.0) for _ in ours.evaluating(DataLoader(images()))
    ],
    r"step 1 is not a finite number on rank 0\. Lower the learning rate": step_of_nan,
}


@pytest.mark.parametrize("words", MISUSES)
def test_misuse_is_refused(words: str) -> None:
    ours, model, optimizer, loader = loop()
    with pytest.raises(LockstepError, match=words):
        run(MISUSES[words], ours, model, optimizer, loader)


def test_a_loop_without_a_prepared_model_is_refused() -> None:
    ours, model = session(World.alone()), net().double()
    loader = ours.prepare(DataLoader(images(), batch_size=20))
    with pytest.raises(RequestError, match="was given no model"):
        run(lambda ours, model, _, batch: ours.backward(loss_of(model, batch)), ours, model, None, loader)


def test_a_loop_over_the_loader_that_was_given_and_not_the_one_returned_is_told() -> None:
    ours, model, optimizer, loader = loop()
    with pytest.raises(RequestError, match=r"its loop used no loader that session\.prepare returned"):
        run_epochs(ours, model, optimizer, [(x.double(), y) for x, y in loader.loader], 1)


def test_a_mean_between_batches_needs_its_weight() -> None:
    ours, *_ = loop()
    with pytest.raises(RequestError, match=r"outside of a batch, without weight: .* or give weight="):
        ours.mean(1.0)
    assert ours.mean(1.0, weight=3) == 1.0
    assert session(World.alone()).mean(2.0) == 2.0  # whose loop has no loader


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda: iter([1]), "found a list_iterator"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "in DataParallel, and would exchange"),
        (images, "a data set, a TensorDataset: give it the DataLoader"),
        (lambda: DataLoader(images(), batch_size=None), "batch_size"),
        (lambda: DataLoader(images(), batch_sampler=BatchSampler(SequentialSampler(images()), 4, False)), "batch"),
    ],
)
def test_what_cannot_be_prepared_is_refused(part: Callable[[], Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        session(World.alone()).prepare(part())


def test_an_optimizer_of_parameters_of_others_is_refused_and_one_that_was_not_prepared_missed() -> None:
    ours = session(World.alone())
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    ours.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(RequestError, match=r"2 parameters of no prepared model \(the first: shape \(3, 3\)\)"):
        next(iter(ours.epochs(1)))
    ours = session(World.alone())
    ours.prepare(model, *(torch.optim.Adam(each, lr=0.1) for each in (model.parameters(), [model.bias])))
    with pytest.raises(RequestError, match=r"Optimizers 1 and 2 .* both have the parameter bias, and"):
        next(iter(ours.epochs(1)))
    ours = session(World.alone())
    model, loader = ours.prepare(net(), DataLoader(images(), batch_size=20))
    batches = iter(loader)
    ours.backward(loss_of(model, next(batches)))
    with pytest.raises(RequestError, match="was given no optimizer"):
        next(batches)


def continued(
    output: str,
    width: int = 4,
    count: int = 61,
    groups: int = 1,
    schedules: int = 0,
    kind: Any = torch.optim.SGD,
    lr: float = 0.1,
) -> None:
    with session(World.alone(), output=output, resume="auto") as ours:
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, width))
        parts = [{"params": [each]} for each in model.parameters()] if groups > 1 else model.parameters()
        optimizer = kind(parts, lr=lr)
        constant = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(schedules)]
        ours.prepare(model, optimizer, DataLoader(images(count), batch_size=20), *constant)
        for _ in ours.epochs(3):
            pass


def test_a_run_of_another_model_or_other_data_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "run")
    continued(output)
    for changed, words in (
        ({"width": 5}, "another model"),
        ({"count": 60}, "61 samples .* this run has 60"),
        ({"groups": 2}, r"SGD \(parameter groups: 1\).* given SGD \(parameter groups: 2\)"),
        ({"kind": torch.optim.Adam}, "was trained with SGD .*, and session.prepare was given Adam"),
        ({"schedules": 1}, "and 0 schedules .* given .* and 1 schedules"),
    ):
        with pytest.raises(RequestError, match=words):
            continued(output, **changed)
    capsys.readouterr()
    for lr, is_told in ((0.1, False), (0.05, True), (0.1, False)):  # 0.1 is what it has
        continued(output, lr=lr)
        assert ("continues as it was saved: lr 0.1, not 0.05;" in capsys.readouterr().err) == is_told


class Listing(torch.optim.SGD):
    """An optimizer that keeps a list of tensors, as SOAP does."""

    def step(self, closure: Any = None) -> Any:
        for each in (each for group in self.param_groups for each in group["params"]):
            self.state[each]["moments"] = [held * 0.9 + each.grad.mean() for held in self._moments(each)]
            each.data -= self.param_groups[0]["lr"] * self._moments(each)[1]

    def _moments(self, each: Tensor) -> list[Tensor]:
        found: list[Tensor] = self.state[each].get("moments", [torch.zeros(()), torch.zeros(())])
        return found


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Listing])
def test_whatever_an_optimizer_keeps_is_continued(kind: Any, tmp_path: Path) -> None:
    def trained(epochs: int, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with session(World.alone(), **options) as ours:
            model = net()
            model, optimizer, loader = ours.prepare(
                model, kind(model.parameters(), lr=0.1), DataLoader(images(), batch_size=20)
            )
            run_epochs(ours, model, optimizer, loader, epochs)
        return [each.detach() for each in model.parameters()]

    kept = {"output": str(tmp_path / "run"), "resume": "auto"}
    trained(1, **kept)
    for whole, rest in zip(trained(2), trained(2, **kept), strict=True):
        assert torch.equal(whole, rest)


def run_epochs(ours: Session, model: nn.Module, optimizer: Any, loader: Any, epochs: int) -> None:
    for _ in ours.epochs(epochs):
        for batch in loader:
            ours.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def test_values_that_are_recorded_before_the_first_backward_are_its_steps(tmp_path: Path) -> None:
    ours, model, optimizer, loader = loop(output=str(tmp_path / "run"))
    with ours:
        for _ in loader:
            ours.log(number=100)  # before training: of no step
        for number, batch in enumerate(loader):
            ours.log(number=number)
            ours.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert [row["number"] for row in events(tmp_path / "run", "step")] == list(range(len(loader)))


def test_a_checkpoint_of_a_loop_that_is_damaged_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    continued(str(run))
    assert "was trained by your own loop or step" in refusal(capsys, "eval", str(run))
    weights = run / "checkpoints" / "last" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "model.safetensors does not match" in refusal(capsys, "diff", str(run), str(run))


def test_options_and_values_of_names_that_others_have_are_refused() -> None:
    with pytest.raises(
        RequestError, match=r"Unknown option .* 'lr': .* It takes output, remote, resume, checkpoint_every"
    ):
        lockstep.session(lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^accumulate 2 and micro_batch 3 both set micro-batches"):
        lockstep.session(accumulate=2, micro_batch=3)
    ours, *_ = loop()
    for name in sessions._RESERVED:
        with pytest.raises(RequestError, match=f"session.log was given '{name}', which records already have"):
            ours.log(**{"accuracy": 1.0, name: 1.0})


@pytest.mark.parametrize(("batch", "accumulate"), [(7, 1), (3, 4)])
def test_each_sample_is_evaluated_once_without_a_trace(batch: int, accumulate: int) -> None:
    ours, model, _, loader = loop(accumulate=accumulate)
    model.train()
    seen = []
    for x, _ in ours.evaluating(DataLoader(images(), batch_size=batch)):
        assert not model.training
        assert not model(x).requires_grad
        seen.append(ours.gather(x))
    assert model.training
    torch.testing.assert_close(torch.cat(seen).float(), images().tensors[0])
    assert (len(loader), loader.batch_size) == (4, 20)


def test_a_plain_loop_is_left_as_it_is() -> None:
    """Of one rank, a session's loop comes to the same bits as the loop without it, in the same order."""

    def train(ours: Session | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = net().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        loader: Any = DataLoader(images(), batch_size=20)
        if ours is not None:
            model, optimizer, schedule, loader = ours.prepare(model, optimizer, schedule, loader)
        for _ in range(2) if ours is None else ours.epochs(2):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x.double()), y)
                loss.backward() if ours is None else ours.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        return model.state_dict()

    plain = train(None)
    assert all(torch.equal(held, plain[name]) for name, held in train(session(World.alone())).items())


def recorded(ours: Session) -> list[tuple[float, int]]:
    """Return what will hold the (loss, samples) of each step."""
    found: list[tuple[float, int]] = []
    ours.loop.count_step = lambda loss, samples, *_: found.append((float(loss), samples))  # type: ignore[method-assign]
    return found


def test_each_loss_is_recorded_by_its_own_weights_and_a_steps_is_that_of_all_its_batches() -> None:
    ours, model, optimizer, loader = loop(accumulate=2)
    found = recorded(ours)
    for x, _ in loader:
        for value, weight in ((1.0, 3), (2.0, 5)):
            ours.backward(0 * model(x).sum() + value, weight=weight)
        optimizer.step()
    assert [loss for loss, _ in found] == [pytest.approx(3.0)] * 4
    ours, model, optimizer, loader = loop()
    found = recorded(ours)
    for number, (x, _) in enumerate(loader):
        ours.backward(0 * model(x).sum() + number, weight=5)
        if number % 2:
            optimizer.step()
    assert [loss for loss, _ in found] == pytest.approx([0 + 1, 2 + 3])
    assert [samples for _, samples in found] == [40, 21]


def test_values_of_ones_own_are_curves_and_lines(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ours, model, optimizer, loader = loop(output=str(run))
    with ours:
        for _ in ours.epochs(1):
            for batch in loader:
                ours.log(accuracy=ours.step / 4)
                ours.backward(loss_of(model, batch))
                optimizer.step()
            ours.log(bleu=31.5)
    assert [row["accuracy"] for row in events(run, "step")] == [0.0, 0.25, 0.5, 0.75]
    assert [(row["step"], row["bleu"]) for row in events(run, "values")] == [(4, 31.5)]
    curves = EventAccumulator(str(run)).Reload()
    for tag, last in (("train/accuracy", (4, 0.75)), ("values/bleu", (4, 31.5))):
        point = curves.Scalars(tag)[-1]
        assert (point.step, point.value) == last


def test_a_value_of_a_step_of_several_batches_is_the_mean_over_all_its_samples(tmp_path: Path) -> None:
    ours, model, optimizer, loader = loop(output=str(tmp_path / "run"))
    with ours:
        for number, batch in enumerate(loader):  # of 20, 20, 20 and 1
            ours.log(number=number)
            ours.backward(loss_of(model, batch) / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [row["number"] for row in events(tmp_path / "run", "step")] == pytest.approx([20 / 40, (2 * 20 + 3) / 21])


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (SystemExit(3), 3, "it called sys.exit(3)"),
        (HTTPError("http://data", 404, "not there", Message(), None), 1, "HTTPError: HTTP Error 404: not there"),
    ],
    ids=["sys.exit", "a library's code"],
)
def test_a_loop_that_exits_has_failed(tmp_path: Path, error: BaseException, code: int, told: str) -> None:
    run = tmp_path / "run"
    ours, model, optimizer, loader = loop(output=str(run))

    def trained() -> None:
        with ours:
            ours.backward(loss_of(model, next(iter(loader))))
            optimizer.step()
            raise error

    with pytest.raises(type(error)):
        trained()
    assert [row["exit"] for row in events(run, "failed")] == [code]
    assert json.loads((run / "summary.json").read_text())["exit"] == code
    assert told in (run / "failures" / "rank_0.txt").read_text()


def test_a_loss_of_the_loader_prepared_second_is_refused() -> None:
    ours, model, *_ = loop()
    second = ours.prepare(DataLoader(images(), batch_size=20))
    batches = iter(second)
    batch = next(batches)
    with pytest.raises(RequestError, match=r"that session\.prepare was not given first"):
        ours.backward(loss_of(model, batch))


def test_a_pass_over_the_data_before_training_is_no_epoch() -> None:
    ours, _, _, loader = loop()
    assert sum(len(x) for x, _ in loader) == 61
    next(iter(loader))
    assert list(ours.epochs(3)) == [0, 1, 2]
    with pytest.raises(RequestError, match="called again after its last epoch"):
        next(iter(ours.epochs(3)))


def test_gradients_of_a_batch_that_is_left_are_none_of_the_next_one() -> None:
    found = []
    for leaves in (False, True):
        torch.manual_seed(0)
        ours, model, optimizer, loader = loop(accumulate=2)
        if leaves:
            for batch in loader:
                ours.backward(loss_of(model, batch))
                break
        optimizer.zero_grad()
        for _, batch in zip(range(2), loader, strict=False):
            ours.backward(loss_of(model, batch))
        found.append(model[1].weight.grad.clone())
    assert torch.equal(*found)


def test_what_weighs_nothing_leaves_no_trace_and_losses_may_be_weighed_or_not() -> None:
    ours, model, optimizer, loader = loop(accumulate=2)
    for number, (x, y) in enumerate(loader):
        ignored = torch.full_like(y, -100) if number % 2 else y  # a mean over nothing is no number
        ours.backward(model(x).mean())
        ours.backward(nn.functional.cross_entropy(model(x), ignored), weight=int((ignored >= 0).sum()))
        assert not ours.is_last or model[1].weight.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
    assert ours.step == 4


def test_steps_that_are_made_once_in_several_batches_are_continued_where_they_stood(tmp_path: Path) -> None:
    """Gradients that somebody accumulates by hand: a batch is read once, whether or not a step follows it."""

    def train(output: str, stop_at: int = 99, **options: Any) -> list[Tensor]:
        ours, model, optimizer, loader = loop(output=output, checkpoint_every=1, **options)
        read: list[Tensor] = []
        with ours:
            for _ in ours.epochs(2):
                for number, batch in enumerate(loader):
                    if len(read) == stop_at:
                        raise KeyboardInterrupt
                    read.append(batch[1])
                    ours.backward(loss_of(model, batch) / 2)
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
        return [*read, model[1].weight.detach()]

    *whole, weights = train(str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train(str(tmp_path / "part"), stop_at=3)  # after the first step, which two batches made
    *rest, again = train(str(tmp_path / "part"), resume="auto")
    assert [each.tolist() for each in rest] == [each.tolist() for each in whole[2:]]
    assert torch.equal(again, weights)


def _ahead(pairs: Iterator[Any]) -> Iterator[Any]:
    """Read one pair ahead."""
    kept = deque(islice(pairs, 1))
    for pair in pairs:
        kept.append(pair)
        yield kept.popleft()
    yield from kept


def _drawn(one: Any, other: Any) -> Iterator[Any]:
    """Draw from the second loader in the loop's body."""
    drawn = iter(other)
    return ((x, next(drawn)) for x in one)


PAIRS: dict[str, Callable[[Any, Any], Iterator[Any]]] = {
    "zip": lambda one, other: zip(one, other, strict=False),
    "the other first": lambda one, other: ((x, y) for y, x in zip(other, one, strict=False)),
    "ahead": lambda one, other: _ahead(zip(one, other, strict=False)),
    "drawn": _drawn,
}


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("ending", [{"max_steps": 3}, {"checkpoint_every": 3}])
def test_loaders_that_are_read_together_are_continued_together(
    tmp_path: Path, ending: dict[str, int], pairs: str
) -> None:
    def train(output: str, **options: Any) -> list[tuple[float, float]]:
        ours = session(World.alone(), output=str(tmp_path / output), seed=0, **options)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        data = [torch.arange(float(start), start + count)[:, None] for start, count in ((0, 20), (100, 28))]
        one, other = (DataLoader(TensorDataset(each), 4) for each in data)
        model, optimizer, one, other = ours.prepare(model, optimizer, one, other)
        trained = []
        with contextlib.suppress(KeyboardInterrupt), ours:
            for _ in ours.epochs(2):
                for (x,), (y,) in PAIRS[pairs](one, other):
                    if ours.step == 4 and "checkpoint_every" in options:
                        raise KeyboardInterrupt
                    ours.backward(model(x).mean() + model(y).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    trained.append((x[0].item(), y[0].item()))
        return trained

    whole = train("whole")
    assert len(whole) == 10
    saved = train("cut", **ending)[: ending.get("checkpoint_every")]
    assert saved + train("cut", resume="auto") == whole


def test_gradients_that_wait_for_a_step_at_an_epochs_end_are_continued(tmp_path: Path) -> None:
    def train(output: str, stop_at: int = 9, **options: Any) -> Tensor:
        ours, model, optimizer, loader = loop(output=output, **options)
        with ours:
            for epoch in ours.epochs(2):  # of four batches
                if epoch == stop_at:
                    raise KeyboardInterrupt
                for number, batch in enumerate(loader, start=4 * epoch):
                    ours.backward(loss_of(model, batch) / 3)
                    if number % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()
        weights: Tensor = model[1].weight.detach()
        return weights

    torch.manual_seed(0)
    whole = train(str(tmp_path / "whole"))
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        train(str(tmp_path / "part"), stop_at=1)
    assert torch.equal(train(str(tmp_path / "part"), resume="auto"), whole)


@pytest.mark.parametrize("weights", [[None] * 3, [1, 2, 3]])
def test_several_optimizers_step_for_one_loss_without_a_loader(weights: list[Any]) -> None:
    ours = session(World.alone())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, *optimizers = ours.prepare(model, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in model))
    for weight in weights:
        ours.backward(model(torch.ones(4, 2, dtype=torch.float64)).mean(), weight=weight)
        for each in optimizers:
            each.step()
    assert ours.step == 3


def test_a_copy_of_a_model_in_half_precision_is_its_own() -> None:
    ours = session(World.alone(), precision="bf16")
    model = ours.prepare(nn.Linear(2, 2))
    other = copy.deepcopy(model)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    assert not other(torch.ones(1, 2)).any()
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert isinstance(model, nn.Linear)


class _Remembers(nn.Module):
    """A net whose forward changes a state that its `state_dict` does not hold."""

    calls: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(108, 4)
        self.rnn = nn.RNN(4, 4)  # keeps a list of its parameters, which is no state beside them
        self.seen: Any = {"deque": deque(maxlen=9), "tensor": torch.zeros(()), "dict": {"calls": 0}, "number": 0}.get(
            kind
        )
        if kind in ("buffer", "saved"):
            self.register_buffer("calls", torch.zeros(()), persistent=kind == "saved")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor
        self.last_output = found = self.rnn(self.layer(x.flatten(1)))[0]  # kept to be looked at
        if self.kind == "deque":
            self.seen.append(float(found.detach().mean()))
        elif self.kind == "dict":
            self.seen["calls"] += 1
        elif self.kind in ("buffer", "saved"):
            self.calls = self.calls + 1
        elif self.kind != "none":
            self.seen = self.seen + 1
        return found


@pytest.mark.parametrize("kind", ["deque", "tensor", "dict", "number", "buffer", "saved", "none"])
def test_a_state_that_no_checkpoint_holds_is_reported_at_the_first_step(tmp_path: Path, kind: str) -> None:
    ours, model, optimizer, loader = loop(lambda: _Remembers(kind), output=tmp_path / "run")
    with ours:
        run_epochs(ours, model, optimizer, loader, 1)
    reported = [row["text"] for row in events(tmp_path / "run", "warning")]
    name = {"saved": "", "none": "", "buffer": "calls"}.get(kind, "seen")
    assert [f"changes {name} in forward" in text for text in reported] == [True] * bool(name)


def test_a_loss_that_a_scaler_has_scaled_is_recorded_as_it_was(tmp_path: Path) -> None:
    recorded = []
    for scale in (1.0, 65536.0):
        run = tmp_path / str(scale)
        ours, model, optimizer, loader = loop(output=str(run))
        scaler = ours.prepare(torch.amp.GradScaler("cpu", init_scale=scale))
        for batch in loader:
            ours.backward(scaler.scale(loss_of(model, batch)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ours.close()
        recorded.append([row["loss"] for row in events(run, "step")])
    assert recorded[0] == pytest.approx(recorded[1])


def test_a_scaler_beside_fp16_is_refused() -> None:
    with pytest.raises(RequestError, match="precision='fp16' scales losses already"):
        session(World.alone(), precision="fp16").prepare(torch.amp.GradScaler("cpu"))


def test_a_compiled_model_computes_in_half_precision_and_saves_plain_names() -> None:
    ours = session(World.alone(), precision="bf16")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    names, dtypes = list(model.state_dict()), list[torch.dtype]()
    model[0].register_forward_hook(lambda *found: dtypes.append(found[-1].dtype))
    prepared = ours.prepare(torch.compile(model, backend="eager"))
    assert prepared(torch.zeros(5, 3)).dtype == torch.float32
    assert dtypes[-1] == torch.bfloat16
    assert list(ours.prepared.models["model"].state_dict()) == names


def test_autocast_ends_with_the_outer_of_two_prepared_models() -> None:
    ours = session(World.alone(), precision="bf16")
    inner = nn.Linear(3, 3)
    _, outer = ours.prepare(inner, nn.Sequential(inner, nn.Linear(3, 2)))
    assert outer(torch.zeros(5, 3)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_only_what_was_made_before_the_session_is_told() -> None:
    early = nn.Linear(3, 2)
    ours = session(World.alone())
    ours.prepare(nn.Linear(3, 2))
    assert not ours.prepared.cautions
    ours.prepare(early)
    assert ["made before lockstep.session()" in each for each in ours.prepared.cautions] == [True]
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
    ours.prepare(AveragedModel(model))
    assert len(ours.prepared.cautions) == 1, "a deep copy of a model of the session"


class Counting(TensorDataset):
    """Counts how often it was read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.reads += 1
        sample: tuple[Tensor, ...] = super().__getitem__(index)
        return sample


def test_a_data_set_that_counts_is_told_after_the_first_step(tmp_path: Path) -> None:
    data = Counting(*images().tensors)
    data.reads = 0
    ours, model, optimizer, loader = loop(data=data, output=str(tmp_path / "run"))
    run_epochs(ours, model, optimizer, loader, 1)
    ours.close()
    told = [row["text"] for row in events(tmp_path / "run", "warning")]
    assert len(told) == 1
    assert "The data set changes its attribute reads as it is read" in told[0]


def test_a_closed_session_leaves_the_users_objects_as_they_were() -> None:
    ours = session(World.alone(), accumulate=2)
    layer = nn.Linear(108, 4)
    model = nn.Sequential(nn.Flatten(), layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    objects = (model, optimizer, schedule, scaler)
    before = [{*vars(item)} for item in objects]
    *_, loader = ours.prepare(*objects, DataLoader(images(), batch_size=20))
    with ours:
        for _ in ours.epochs(1):
            for batch in loader:
                ours.backward(loss_of(model, batch))
                optimizer.step()
                schedule.step()
    added = {name for item, names in zip(objects, before, strict=True) for name in {*vars(item)} - names}
    assert added <= {"_opt_called"}  # by torch's schedule
    weights = layer.weight.detach().clone()
    x, y = next(iter(DataLoader(images(), batch_size=20)))
    nn.functional.cross_entropy(model(x.double()), y).backward()
    optimizer.step()
    assert not torch.equal(weights, layer.weight)


def test_evaluations_that_are_under_way_together_end_in_any_order() -> None:
    ours, model, *_ = loop()
    model.train()
    for (x, _), (other, _) in zip(
        *[ours.evaluating(DataLoader(images(), batch_size=20)) for _ in range(2)], strict=False
    ):
        assert (torch.is_grad_enabled(), model.training) == (False, False)
        torch.testing.assert_close(x, other)
    assert (torch.is_grad_enabled(), model.training) == (True, True)
    ours.log(accuracy=1.0)


class _Count:
    """Counts. Its state has `steps`, not `seen`."""

    def __init__(self) -> None:
        self.steps = self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class _KeepsWeight(nn.Linear):
    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state | {"weight": self.weight.detach()}, *arguments, **options)


class _Raises(nn.Linear):
    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        raise KeyError("old-name")


@pytest.mark.parametrize(
    ("head", "counts", "told"),
    [
        (nn.Linear, "", []),
        (_KeepsWeight, "", ["A copy of the model that loads this checkpoint differs in weight,"]),
        (_Raises, "", ["No resumed run could load the checkpoint of the model: ", "KeyError: 'old-name'"]),
        (nn.Linear, "seen", ["A copy of _Count that loads this checkpoint differs in seen,"]),
        (nn.Linear, "scaler", ["The loop has a GradScaler that session.prepare was not given:"]),
    ],
)
def test_what_no_resume_would_restore_is_told_at_the_first_save(
    head: type[nn.Linear], counts: str, told: list[str], tmp_path: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=counts == "scaler")
    with session(World.alone(), output=str(tmp_path / "run")) as ours:
        model = head(108, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader, count = ours.prepare(model, optimizer, DataLoader(images(), batch_size=20), _Count())
        for _ in ours.epochs(2):
            for x, y in loader:
                ours.backward(scaler.scale(nn.functional.cross_entropy(model(x.flatten(1)), y)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                count.steps += 1
                count.seen += counts == "seen"
    warnings = [row["text"] for row in events(tmp_path / "run", "warning")]
    assert len(warnings) == bool(told), warnings
    assert all(text in warnings[0] for text in told), warnings


def test_a_sampler_keeps_the_epoch_that_the_loop_sets() -> None:
    class Sampler(SequentialSampler):
        epoch = 0

        def __iter__(self) -> Any:
            yield from torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist()

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    for first in (0, 100):
        sampler = Sampler(images())
        ours, model, optimizer, loader = loop(sampler=sampler)
        for epoch in ours.epochs(2):
            labels = []
            if first:
                sampler.set_epoch(first + epoch)
            for batch in loader:
                labels.append(batch[1])
                ours.backward(loss_of(model, batch))
                optimizer.step()
            plain = Sampler(images())
            plain.set_epoch(first + epoch)
            assert torch.equal(torch.cat(labels), images().tensors[1][list(plain)])


def test_a_stop_at_an_epochs_end_repeats_that_end_alone(tmp_path: Path) -> None:
    def train(output: str, *, asked_at: int = 0, **options: Any) -> Tensor:
        """Ask for a stop within step `asked_at`, or, if negative, at the end of that epoch."""
        ours, model, optimizer, loader = loop(output=output, **options)
        ours.on("end", lambda _: {"tested": ours.load_best(), "steps": 0})
        with ours:
            for epoch in ours.epochs(2):
                for batch in loader:
                    ours.backward(loss_of(model, batch))
                    optimizer.step()
                    if ours.step == asked_at:
                        signal.raise_signal(signal.SIGTERM)
                    ours.stop_if_asked()  # not here: the step is not counted
                    optimizer.zero_grad()
                if epoch + 1 == -asked_at:
                    signal.raise_signal(signal.SIGTERM)
                ours.stop_if_asked()
                ours.score([0.5, 0.25][epoch], on="held out", loss=torch.tensor(0.25))
                assert ours.is_best == (epoch == 0)
        weights: Tensor = model[1].weight.detach()
        return weights

    whole = train(str(tmp_path / "whole"))
    for asked_at in (2, 4, -1, -2):
        output = str(tmp_path / f"asked{asked_at}")
        with pytest.raises(Stopped, match=r"at step [48] of 8 and saved" if asked_at < 0 else "saved"):
            train(output, asked_at=asked_at)
        assert torch.equal(train(output, resume="auto"), whole), asked_at
        found = json.loads((Path(output) / "summary.json").read_text())
        assert (found["tested"], found["steps"], found["exit"]) == (4, 8, 0)
        rows = events(Path(output), "eval")
        assert [(row["score"], row["on"], row["loss"]) for row in rows] == [
            (0.5, "held out", 0.25),
            (0.25, "held out", 0.25),
        ]


def test_a_stop_waits_where_the_epochs_end_has_changed_a_schedule(tmp_path: Path) -> None:
    """Else the resumed run would step it twice; where max_steps has cut the epoch, that is told."""

    def train(output: str, *, asked: bool = False, **options: Any) -> list[float]:
        ours, model, optimizer, loader = loop(output=output, **options)
        schedule = ours.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        with ours:
            for epoch in ours.epochs(2):
                for batch in loader:
                    ours.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
                if asked and epoch == 0:
                    signal.raise_signal(signal.SIGTERM)
                ours.stop_if_asked()
                ours.score(-epoch)
        return [*model[1].weight.flatten().tolist(), optimizer.param_groups[0]["lr"]]

    whole = train(str(tmp_path / "whole"))
    with pytest.raises(Stopped):
        train(str(tmp_path / "asked"), asked=True)
    assert train(str(tmp_path / "asked"), resume="auto") == whole
    train(str(tmp_path / "cut"), max_steps=6)
    assert "_steps has ended the run within an epoch of 4 steps" in events(tmp_path / "cut", "warning")[-1]["text"]
    train(str(tmp_path / "cut"), resume="auto")
    assert any("cut short is repeated" in line for line in events(tmp_path / "cut", "start")[-1]["lines"])


def test_the_best_weights_are_loaded_at_once_and_the_last_ones_stay_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any, **options: Any) -> None:
        time.sleep(0.1)
        save_file(*given, **options)

    monkeypatch.setattr(write, "save_file", slow)
    ours, model, optimizer, loader = loop(output=tmp_path)
    with ours:
        found = []
        for epoch in ours.epochs(4):
            found.append(ours.load_best() if epoch else None)  # while it is being saved
            for batch in loader:
                ours.backward(loss_of(model, batch))
                optimizer.step()
            ours.score(-epoch)
            if epoch == 3:
                break
        last = model[1].weight.detach().clone()
        assert [*found, ours.load_best()] == [None, 4, 4, 4, 4]
        assert not torch.equal(model[1].weight, last)
    assert torch.equal(lockstep.checkpoint.load(tmp_path).tensors["model/1.weight"], last)
    ours, *_ = loop()
    with pytest.raises(RequestError, match="needs a run's folder"):
        ours.load_best()
    with pytest.raises(RequestError, match="called before the loop"):
        ours.score(1.0)


def test_functions_are_called_at_a_runs_events(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    ours, model, optimizer, loader = loop(output=tmp_path)
    for event in ("save", "end", "evaluate", "epoch", "step"):
        ours.on(event, lambda fields, event=event: seen.append((event, fields)))  # type: ignore[misc]
    ours.on("epoch", lambda fields: optimizer.param_groups[0].update(lr=1 / 2 ** (fields["epoch"] + 1)))
    ours.on("end", lambda _: {"tested": torch.tensor(0.25)})
    with ours:
        for _ in ours.epochs(2):
            for batch in loader:
                ours.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            ours.score(0.5, on="held out", loss=2.0)
    assert [event for event, _ in seen if event != "save"] == [*["step"] * 4, "evaluate", "epoch"] * 2 + ["end"]
    assert seen[0] == ("step", {"step": 1, "epoch": 0})
    assert seen[4] == ("evaluate", {"step": 4, "epoch": 0, "on": "held out", "score": 0.5, "loss": 2.0})
    saved = [fields for event, fields in seen if event == "save"]
    assert [fields["step"] for fields in saved] == [4, 8]
    assert all(Path(fields["path"]).parent == tmp_path / "checkpoints" for fields in saved)
    assert json.loads((tmp_path / "summary.json").read_text())["tested"] == 0.25
    resumed, _, optimizer, _ = loop(output=tmp_path, resume="auto")
    with resumed:
        assert [*resumed.epochs(2)] == []
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(RequestError, match="takes a function of one argument"):
        loop()[0].on("step", lambda: None)  # type: ignore[arg-type, misc]
    with pytest.raises(RequestError, match=r"'saved'.*did you mean save"):
        loop()[0].on("saved", print)  # type: ignore[arg-type]


def test_a_function_for_the_end_adds_no_epoch(tmp_path: Path) -> None:
    for _ in range(2):
        ours, model, optimizer, loader = loop(output=tmp_path, resume="auto")
        ours.on("end", lambda _: None)
        with ours:
            run_epochs(ours, model, optimizer, loader, 1)
        assert ours.step == 4
        with pytest.raises(RequestError, match="called after the last epoch"):
            ours.on("end", lambda _: None)
        with pytest.raises(RequestError, match="given 'step', which its record has"):
            ours.score(1.0, step=3)
