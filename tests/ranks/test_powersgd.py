"""Gradients as matrices of low rank: the numbers of torch's hook, and nothing that is owed is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import RequestError
from lockstep.exchange.allreduce import AllReduce
from lockstep.exchange.base import Call, Exchange, Header, Part, Pass
from lockstep.exchange.powersgd import PowerSGD, first_factor
from lockstep.world.world import World

from .. import loops
from ..command import command
from ..curves import Curve, apart, curve, same_bits
from ..pool import RankPool

STEPS = 6
VALUES: dict[str, Any] = {"model": "resnet8", "data": "fake", "image_size": 8, "batch": 50, "samples": 337, "clip": 0.2}
VALUES |= {"max_steps": 9, "checkpoint_every": 2, "exchange": "powersgd", "powersgd_rank": 2, "powersgd_start": 2}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 12, 3), nn.Flatten(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 9)
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def _loss(net: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    loss: Tensor = net(x).square().mean()
    return loss


def _exchange(world: World, net: nn.Module, *, rank: int, start: int = 0) -> tuple[PowerSGD, AllReduce]:
    codec = PowerSGD(world, rank=rank, start=start)
    exchange = AllReduce(world, wire=codec)
    exchange.attach(net)
    return codec, exchange


def _backward(exchange: Exchange, losses: list[Tensor], part: int = 0) -> None:
    """Exchange the gradients of a batch in micro-batches."""
    exchange.hide()
    ours = Part(part)
    for number, loss in enumerate(losses, start=1):
        exchange.backward(Pass(loss.backward, ours, Header(Call.BACKWARD.kind, number), 1.0, number == len(losses)))


def _with_torch(world: World, rank: int) -> float:
    """Return the greatest distance of a step's gradients from those of torch's hook."""
    start = 3  # DistributedDataParallel then has its final buckets
    net, theirs = (_net().to(memory_format=torch.contiguous_format) for _ in range(2))
    codec, exchange = _exchange(world, net, rank=rank, start=start)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    wrapped = DistributedDataParallel(theirs, bucket_cap_mb=100)
    ranks = {each.numel() // len(each): codec.rank_of(each) for each in net.parameters() if codec.rank_of(each)}

    def hook(state: Any, bucket: Any) -> Any:
        if state.iter >= start and not state.p_memory_dict:  # both begin with the same factors
            of_bucket = [each.shape[1:].numel() for each in bucket.gradients() if each.dim() > 1]
            columns = [m for m in of_bucket if m in ranks]
            factors = [first_factor(m, ranks[m]) for m in columns]
            state.q_memory_dict[0] = torch.cat([each.flatten() for each in factors])
            rows = [len(each) for m in columns for each in net.parameters() if each.numel() == len(each) * m]
            size = sum(n * ranks[m] for n, m in zip(rows, columns, strict=True))
            state.p_memory_dict[0] = torch.empty(size, dtype=torch.float64)
        return powerSGD_hook.powerSGD_hook(state, bucket)

    hook.__annotations__ = {}  # torch compares them as types
    wrapped.register_comm_hook(state, hook)
    gaps = []
    for step in range(start + STEPS):
        world.progress.step = step
        _backward(exchange, [_loss(net, world.rank, step) / world.size])
        wrapped.zero_grad()
        _loss(wrapped, world.rank, step).backward()
        assert bool(codec.errors) == (step >= start)
        for ours, other in zip(net.parameters(), theirs.parameters(), strict=True):
            assert ours.grad is not None
            assert other.grad is not None
            gaps.append(float((ours.grad - other.grad).norm() / other.grad.norm()))
    exchange.close()
    return max(gaps)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_torchs_hook(pool: RankPool, size: int, rank: int) -> None:
    assert max(pool.run(size, _with_torch, rank)) < 1e-9


def _owed(world: World) -> tuple[list[float], float]:
    """Return how far what is sent and what is owed are from the gradients' sums, and what was owed in the end.

    In micro-batches, with a layer that one rank or none uses, and one that is frozen and thawed.
    """
    net, plain = _net(), _net()
    codec, exchange = _exchange(world, net, rank=1)
    full = AllReduce(world)
    full.attach(plain)
    sent = {name: torch.zeros_like(each) for name, each in net.named_parameters()}
    due = {name: torch.zeros_like(each) for name, each in net.named_parameters()}

    def loss(model: nn.Sequential, step: int, micro: int) -> Tensor:
        total = _loss(
            model[:3] if step in (2, 3) and (step == 3 or world.rank) else model, world.rank, 2 * step + micro
        )
        return total * (0.0 if step == 4 and world.rank else 1.0)

    for step in range(STEPS):
        for model, of_model, sums in ((net, exchange, sent), (plain, full, due)):
            model[2].requires_grad_(step != 1)
            _backward(of_model, [loss(model, step, micro) for micro in range(2)])
            for name, each in model.named_parameters():
                assert (each.grad is None) == (name[0] == {1: "2", 3: "4"}.get(step))
                sums[name] += 0 if each.grad is None else each.grad
    gaps = []
    for name, parameter in net.named_parameters():
        owed = torch.zeros_like(parameter.flatten(1) if parameter.dim() > 1 else parameter)
        for key, error in codec.errors.items():
            owed = owed + world.sum(error) if key.parameter is parameter else owed
        gaps.append(float((sent[name] + owed.view(parameter.shape) - due[name]).norm() / due[name].norm()))
    largest = max(float(error.norm()) for error in codec.errors.values())
    exchange.close()
    full.close()
    return gaps, largest


def test_what_is_not_sent_is_owed(pool: RankPool) -> None:
    for gaps, largest in pool.run(2, _owed, collectives="gloo"):
        assert max(gaps) < 1e-12
        assert largest > 1e-3


def _two_losses(world: World) -> list[float]:
    """Return the distance of each loss's second gradient from what its own errors make of it."""
    gaps = []
    for mixed in (False, True):
        net = _net()
        _, exchange = _exchange(world, net, rank=1)
        for step in range(2):
            _backward(exchange, [_loss(net, world.rank, step)], 0)
            gaps.append(torch.cat([each.grad.flatten() for each in net.parameters() if each.grad is not None]))
            if mixed:  # as a generator's loss, whose gradients a loop drops
                _backward(exchange, [-_loss(net, world.rank, 7)], 1)
        exchange.close()
    return [float((gaps[at] - gaps[2 + at]).abs().max()) for at in range(2)]


def test_each_loss_of_a_batch_has_its_own_errors(pool: RankPool) -> None:
    assert pool.run(2, _two_losses) == [[0.0, 0.0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_resumed_run_has_the_same_bits(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    values = VALUES | {"strategy": strategy, "accumulate": 2}
    whole = curve(pool, tmp_path / "whole", 3, **values)
    for steps in (4, 9):
        part = curve(pool, tmp_path / "parts", 3, **values | {"max_steps": steps, "resume": "auto"})
    assert same_bits(part, whole)
    assert any(name.startswith("exchange/errors") for name in whole[1])
    full = values | {"exchange": "full", "powersgd_rank": None, "powersgd_start": None}
    assert 1e-6 < apart(*map(_model, (whole, curve(pool, tmp_path / "full", 3, **full)))) < 0.5


def _model(of: Curve) -> Curve:
    return of[0], {name: each for name, each in of[1].items() if name.startswith("model/")}


def _reloaded(world: World, saved: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the exchange's state after a step, or after it has loaded one; and this rank's errors."""
    net = _net()
    codec, exchange = _exchange(world, net, rank=1)
    if saved is None:
        _backward(exchange, [_loss(net, world.rank, 0)])
    else:
        exchange.load_state(saved)
    state = exchange.state()
    exchange.close()
    return state, {exchange.names()[key.parameter]: error for key, error in codec.errors.items()}


def test_another_number_of_ranks_owes_the_same(pool: RankPool) -> None:
    saved = pool.run(3, _reloaded, None)[0][0]
    for size in (2, 3):
        by_rank = [errors for _, errors in pool.run(size, _reloaded, saved)]
        for name in by_rank[0]:
            owed = sum(errors[name] for errors in by_rank)
            assert torch.allclose(owed, saved[f"errors/0/{name}"].sum(0), rtol=1e-12)
            assert size == 2 or all(
                torch.equal(errors[name], error)
                for errors, error in zip(by_rank, saved[f"errors/0/{name}"], strict=True)
            )


def _loop(world: World, how: str) -> str:
    """Return the sentence that refuses a loop, "" for none."""
    session = loops.session(world, exchange="powersgd", precision="fp32")
    net = nn.Sequential(nn.Linear(8, 200), nn.LayerNorm(200), nn.Linear(200, 2))
    if how == "frozen":
        net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(20, 8), torch.zeros(20).long()), 5)
    try:
        if how == "scaler":
            session.prepare(torch.amp.GradScaler("cpu"))
        net, optimizer, loader = session.prepare(net, optimizer, loader)
        with session:
            for _ in session.epochs(1):
                for x, y in loader:
                    session.backward(nn.functional.cross_entropy(net(x), y))
                    optimizer.step()
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [("frozen", "--exchange powersgd has nothing to compress: "), ("scaler", "--exchange powersgd cannot work with")],
)
def test_nothing_to_compress_and_a_loss_scale_are_refused(pool: RankPool, how: str, words: str) -> None:
    for sentence in pool.run(2, _loop, how):
        assert words in sentence


def test_the_command_refuses_vectors(tmp_path: Path) -> None:
    words = (
        "train",
        "digits",
        "--freeze",
        "*.weight",
        "--exchange",
        "powersgd",
        "--devices",
        2,
        "--accelerator",
        "cpu",
    )
    ended = command(tmp_path, *words)
    assert ended.code == 2
    assert "--exchange powersgd has nothing to compress" in ended.err


def _without_own_draws(world: World, draws: str) -> tuple[list[str], list[Tensor]]:
    """Return the warnings and weights of a loop whose first layer is as wide as its batch, and draws nothing."""
    session = loops.session(world, exchange="powersgd", powersgd_rank=2, draws=draws)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1))), 32)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    warnings: list[str] = []
    session.loop.warn = warnings.append  # type: ignore[assignment]
    with session:
        for _ in session.epochs(2):
            for (x,) in loader:
                session.backward((model(x) - x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return warnings, [parameter.detach() for parameter in model.parameters()]


def test_its_own_random_numbers_are_not_the_loops(pool: RankPool) -> None:
    (warned, by_rank), (_, by_device) = (pool.run(2, _without_own_draws, draws)[0] for draws in ("rank", "global"))
    assert not warned
    assert all(map(torch.equal, by_rank, by_device))
