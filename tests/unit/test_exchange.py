"""One rank's side of the exchange: what leaves when, what comes back, and which batch a loss is of."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.batching import Share
from lockstep.errors import RunError
from lockstep.exchange import allreduce, ranks
from lockstep.exchange.allreduce import AllReduce
from lockstep.exchange.base import Call, Exchange, Header, Part, Pass
from lockstep.exchange.batch import GlobalBatch
from lockstep.sessions.shares import Handed, Shares
from lockstep.world.topology import Topology
from lockstep.world.world import World

ALONE = World.alone()
FIRST = dataclasses.replace(ALONE, topology=Topology(rank=0, size=2, local_rank=0, local_size=2))
X = torch.arange(1.0, 7.0).view(3, 2)


class Wire:
    """In place of torch.distributed: the other rank's gradients are the same as this one's, or `other` of them."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.other: Callable[[Tensor], Tensor] = torch.clone

    def all_reduce(self, flat: Tensor, **_: Any) -> Work:
        self.sent.append(flat.clone())
        theirs = self.other(flat)
        return Work(lambda: flat.add_(theirs))

    def all_gather_into_tensor(self, rows: Tensor, own: Tensor, **_: Any) -> Work:
        rows.view(2, -1).copy_(own)
        return Work(lambda: rows)


class Work:
    """A collective under way."""

    def __init__(self, end: Callable[[], Tensor]) -> None:
        self.wait = end


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    for module in (allreduce, ranks):
        monkeypatch.setattr(module, "dist", wire)
    monkeypatch.setattr(ranks, "new_group", lambda: None)
    # A layer of 2 × 2 weights and 2 biases.
    monkeypatch.setattr(allreduce, "_BUCKET_BYTES", {"cpu": 24})
    return wire


def exchange_of(*layers: nn.Module) -> AllReduce:
    exchange = AllReduce(FIRST)
    exchange.attach(nn.ModuleList(layers))
    return exchange


def backward(exchange: AllReduce, *losses: Tensor) -> None:
    """Run the backward passes of a batch's micro-batches."""
    part = Part()
    exchange.hide()
    for number, loss in enumerate(losses, start=1):
        exchange.backward(Pass(loss.backward, part, Header(Call.BACKWARD.kind, number), 1.0, number == len(losses)))


def gradients(*layers: nn.Module) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for layer in layers for each in layer.parameters()]


def of(loss: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return twice the gradients: those of two ranks."""
    return [2 * each for each in torch.autograd.grad(loss, [each for layer in layers for each in layer.parameters()])]


def two() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(2, 2), nn.Linear(2, 2)


def same(found: list[Tensor | None], expected: list[Tensor]) -> bool:
    return all(a is not None and torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_a_bucket_leaves_with_its_last_gradient_and_while_others_are_computed(wire: Wire) -> None:
    low, high = two()
    exchange, left = exchange_of(low, high), list[int]()
    for _ in range(3):
        wire.sent.clear()
        hidden = low(X)
        hidden.register_hook(lambda _: left.append(len(wire.sent)))
        backward(exchange, high(hidden).sum())
    assert left == [0, 1, 1]  # the first pass learns
    assert same(gradients(low, high), of(high(low(X)).sum(), low, high))


@pytest.mark.parametrize("is_reversed", [False, True])
def test_buckets_leave_in_one_order_whichever_is_complete_first(wire: Wire, is_reversed: bool) -> None:
    low, high = two()
    exchange = exchange_of(low, high)
    for _ in range(2):
        wire.sent.clear()
        backward(exchange, (low(high(X)) if is_reversed else high(low(X))).sum())
    # A layer's bias comes before its weight: it is later by definition.
    expected = [torch.cat([each.bias.grad, each.weight.grad.flatten()]) for each in (high, low)]  # type: ignore[list-item, union-attr]
    for sent, summed in zip(wire.sent, expected, strict=True):
        assert torch.equal(2 * sent[:-2], summed)


def test_a_batchs_gradients_are_the_sum_over_its_micro_batches(wire: Wire) -> None:
    low, high = two()
    exchange = exchange_of(low, high)
    for _ in range(2):
        wire.sent.clear()
        backward(exchange, *(high(low(row)).sum() for row in X))
        assert len(wire.sent) == 2  # not one for each micro-batch
        assert same(gradients(low, high), of(high(low(X)).sum(), low, high))


@pytest.mark.parametrize("couples", [False, True])
def test_a_weight_on_the_device_costs_operations_by_buckets_and_not_by_parameters(wire: Wire, couples: bool) -> None:
    layers = [nn.Linear(2, 2) for _ in range(8)]
    exchange = exchange_of(*layers)
    exchange._bucket_bytes = 1 << 20  # one bucket
    counted, is_zero = Counter[str](), torch.tensor(True)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[func.name()] += 1
            return func(*args, **kwargs or {})

    for _ in range(2):
        counted.clear()
        loss = nn.Sequential(*layers)(X).sum() * (float("nan") if couples else 1.0)
        zeroed = {"weightless": is_zero} if couples else {"zeroed": is_zero}
        with Count():
            exchange.hide()
            exchange.backward(Pass(loss.backward, Part(), Header(Call.BACKWARD.kind, 0), 1.0, True, **zeroed))
        assert counted["aten::masked_fill_.Scalar"] == 1
        assert same(gradients(*layers), [torch.zeros_like(each) for layer in layers for each in layer.parameters()])


def test_a_parameter_has_a_gradient_where_any_rank_has_one(wire: Wire) -> None:
    low, high = two()
    exchange = exchange_of(low, high)
    for _ in range(2):
        backward(exchange, high(low(X)).sum())
    backward(exchange, low(X).sum())
    assert gradients(high) == [None, None]
    wire.other = torch.ones_like
    backward(exchange, low(X).sum())
    assert same(gradients(high), [torch.ones(2, 2), torch.ones(2)])


def test_layers_that_had_no_part_wake(wire: Wire) -> None:
    low, high = two()
    exchange = exchange_of(low, high)
    for _ in range(3):
        wire.sent.clear()
        backward(exchange, low(X).sum())
    assert len(wire.sent) == 1
    assert gradients(high) == [None, None]
    for _ in range(3):
        backward(exchange, high(low(X)).sum())
        assert same(gradients(low, high), of(high(low(X)).sum(), low, high))


def test_a_gradient_that_a_loop_keeps_is_not_written_over(wire: Wire) -> None:
    low, high = two()
    exchange = exchange_of(low, high)
    kept = []
    for scale in (1.0, 2.0, 3.0):
        backward(exchange, scale * high(low(X)).sum())
        kept.append((low.weight.grad, gradients(low)[0]))
    assert all(torch.equal(one, other) for one, other in kept)  # type: ignore[arg-type]


def test_a_backward_pass_of_the_users_own_is_none_of_the_exchanges(wire: Wire) -> None:
    low, high = two()
    exchange = exchange_of(low, high)
    backward(exchange, high(low(X)).sum())
    exchange.hide()
    wire.sent.clear()
    high(low(X)).sum().backward()
    assert wire.sent == []
    assert same([2 * each for each in gradients(low, high) if each is not None], of(high(low(X)).sum(), low, high))


def test_ranks_that_come_to_something_else_are_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(rows: Tensor, own: Tensor, **_: Any) -> Work:
        rows.view(2, -1).copy_(torch.stack([own, own + 1]))
        return Work(lambda: rows)

    low, high = two()
    exchange = exchange_of(low, high)
    monkeypatch.setattr(wire, "all_gather_into_tensor", other)
    with pytest.raises(RunError, match="every rank has to"):
        backward(exchange, high(low(X)).sum())


def test_a_weighed_mean_is_over_the_whole_batch() -> None:
    layer = nn.Linear(2, 1, bias=False)
    exchange = Exchange(ALONE)
    exchange.attach(layer)
    batch = GlobalBatch(exchange)
    for number, weight in enumerate((1, 3)):
        batch.begin_micro_batch()
        loss = (number + 1) * layer(X).sum()
        run = lambda factor, loss=loss: (factor * loss).backward()  # noqa: E731
        batch.backward(loss, weight, weight, None, Header(Call.BACKWARD.kind, number), run, last=number == 1)
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad[0], (1 * 1 + 3 * 2) / 4 * X.sum(0))
    batch.end(3)
    assert batch.take_loss()[0].item() == pytest.approx((1 * 1 + 3 * 2) / 4 * layer(X).sum().item())


def test_a_loss_leads_to_the_share_of_its_batch_wherever_the_loop_has_come_to() -> None:
    shares, weight = Shares(), torch.ones(1, requires_grad=True)
    batches, handed, losses = [], [], []
    for number in range(3):
        share = Share(0, number + 1, number + 1, 3, True, number, 0, 0, 3)
        batches.append(torch.ones(number + 1, 1))
        handed.append(Handed(share, 0, number, True, number + 1))
        shares.hand_out(handed[-1], batches[-1])
        shares.see(batches[-1])
        output = batches[-1] * weight
        shares.mark(output)
        losses.append(output.square().mean() + 1)
    assert [shares.take(losses[number]) for number in (1, 2, 0)] == [handed[number] for number in (1, 2, 0)]
