"""Optimizer state divided among the ranks: the bits of ddp, each state on one rank, and checkpoints for every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import ProofError, RequestError
from lockstep.world.world import World

from .. import loops
from ..curves import apart, curve, same_bits
from ..pool import RankPool

VALUES: dict[str, Any] = {"model": "tests.models:Normed", "data": "fake", "image_size": 8, "batch": 50, "samples": 337}
VALUES |= {"clip": 0.2, "max_steps": 8, "ema": 0.9, "checkpoint_every": 3}
_FURTHER = ("NAdam", "Rprop", "Adagrad")
COLLECTIVES = [pytest.param("shared-memory", marks=pytest.mark.slow), "gloo"]
OPTIMIZERS = ["SGD", "AdamW", "Adafactor", *(pytest.param(name, marks=pytest.mark.slow) for name in _FURTHER)]


def learn(world: World, strategy: str, name: str) -> tuple[list[Tensor], int, dict[int, int]]:
    """Return the weights, the number of parameters with state here, and what a user's hook has seen of gradients."""
    session = loops.session(world, strategy=strategy)
    net = nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 2))
    net.to(memory_format=torch.channels_last)
    x = torch.randn(63, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 20, shuffle=True)
    last, momentum = [{"params": net[4].parameters(), "lr": 0.003}], {"momentum": 0.9} if name == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([*_groups(net[:4]), *last], lr=0.01, **momentum)
    seen: dict[int, int] = {}

    def count_gradients(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen[len(seen)] = sum(parameter.grad is not None for parameter in net.parameters())

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)

    optimizer.register_step_pre_hook(count_gradients)
    sums: list[Tensor] = []
    optimizer.register_step_post_hook(
        lambda *_: sums.append(torch.stack([parameter.detach().sum() for parameter in net.parameters()]))
    )
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    with session:
        for epoch in session.epochs(2):
            if epoch:  # a hook that comes after the first step, and a layer that is frozen
                optimizer.register_step_pre_hook(clip)
                net[0].requires_grad_(False)
            for x, y in loader:
                session.backward(nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return [*sums, *(parameter.detach().clone() for parameter in net.parameters())], len(optimizer.state), seen


def _groups(*nets: nn.Module) -> list[dict[str, Any]]:
    return [{"params": net.parameters()} for net in nets]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rank_has_the_state_of_its_own_parameters_and_all_have_the_bits_of_ddp(pool: RankPool, name: str) -> None:
    expected = pool.run(3, learn, "ddp", name)
    divided = pool.run(3, learn, "zero1", name)
    for (weights, _, seen), (others, _, expected_seen) in zip(divided, expected, strict=True):
        assert all(map(torch.equal, weights, others))
        assert seen == expected_seen, "a hook of the user's sees every gradient"
    assert sum(count for _, count, _ in divided) == expected[0][1]
    assert all(count < expected[0][1] or not count for _, count, _ in divided)


@pytest.mark.parametrize("collectives", COLLECTIVES)
def test_checkpoints_are_those_of_ddp_and_continue_under_every_strategy(
    pool: RankPool, tmp_path: Path, collectives: str
) -> None:
    values = VALUES | {"optimizer": "adamw", "lr": 1e-3, "collectives": collectives}
    whole = curve(pool, tmp_path / "ddp", 3, **values, strategy="ddp")
    for strategy, steps in (("zero1", 3), ("ddp", 5), ("zero1", 8)):
        options = values | {"strategy": strategy, "max_steps": steps, "resume": "auto"}
        part = curve(pool, tmp_path / "parts", 3, **options)
    assert same_bits(part, whole)


@pytest.mark.parametrize(("name", "lr"), [("lamb", 0.01), ("lars", 5.0), ("muon", 0.01)])
@pytest.mark.slow
def test_optimizers_of_lockstep_are_divided_and_resumed(pool: RankPool, tmp_path: Path, name: str, lr: float) -> None:
    values = VALUES | {"optimizer": name, "lr": lr, "weight_decay": 0.01}
    whole = curve(pool, tmp_path / "ddp", 3, **values, strategy="ddp")
    assert apart(whole, curve(pool, tmp_path / "alone", 1, **values)) < 1e-9
    for steps in (4, 8):
        options = values | {"strategy": "zero1", "max_steps": steps, "resume": "auto"}
        part = curve(pool, tmp_path / "zero1", 3, **options)
    assert same_bits(part, whole)


def freeze(world: World, strategy: str) -> list[Tensor]:
    """Return the weights of a loop that freezes a layer and keeps its gradient, which AdamW goes on to decay."""
    session = loops.session(world, strategy=strategy, verify_every=1)
    net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    net, optimizer, loader = session.prepare(
        net, optimizer, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 10, shuffle=True)
    )
    with session:
        for epoch in session.epochs(2):
            net[0].requires_grad_(epoch == 0)
            for x, y in loader:
                optimizer.zero_grad(set_to_none=False)
                session.backward(nn.functional.cross_entropy(net(x), y))
                optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_a_frozen_layer_with_a_gradient_is_stepped_on_all_ranks(pool: RankPool) -> None:
    expected = pool.run(2, freeze, "ddp")[0]
    for weights in pool.run(2, freeze, "zero1"):
        assert all(map(torch.equal, weights, expected))


def overflow(world: World, strategy: str) -> tuple[list[Tensor], float]:
    """Return the weights and the loss scale of a run whose first gradients overflow."""
    session = loops.session(world, strategy=strategy, verify_every=1, precision="fp16")
    net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    x = 30 * torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    net, optimizer, loader = session.prepare(
        net, optimizer, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 10, shuffle=True)
    )
    with session:
        for _ in session.epochs(3):
            for x, y in loader:
                session.backward(500 * nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
    scaler = session.precision.scaler
    assert scaler is not None
    return [parameter.detach().clone() for parameter in net.parameters()], scaler.get_scale()


def test_a_step_that_overflows_is_skipped_as_under_ddp(pool: RankPool) -> None:
    expected, scale = pool.run(2, overflow, "ddp")[0]
    assert scale < 2**16
    for weights, divided_scale in pool.run(2, overflow, "zero1"):
        assert all(map(torch.equal, weights, expected))
        assert divided_scale == scale


def disagree(world: World, how: str) -> str:
    """Return the error of a loop in which rank 1 steps by another setting or gradient, "" if there is none."""
    session = loops.session(world, strategy="zero1", verify_every=1)
    net = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.zeros(40).long()), 5)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    try:
        with session:
            for _ in session.epochs(1):
                for x, y in loader:
                    session.backward(nn.functional.cross_entropy(net(x), y))
                    if how == "setting":
                        optimizer.param_groups[0]["lr"] = 0.01 * (1 + world.rank)
                    if how == "gradient" and world.is_main:
                        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
                    optimizer.step()
                    optimizer.zero_grad()
    except ProofError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["setting", "gradient"])
def test_a_rank_with_another_setting_or_gradient_is_found(pool: RankPool, how: str) -> None:
    """Their weights are equal all the same: those of each parameter's rank."""
    for sentence in pool.run(2, disagree, how):
        assert f"optimizer/{how}s" in sentence


def own_state(world: World) -> str:
    """Return the sentence for the state_dict of an optimizer, of which this rank has a part."""
    session = loops.session(world, strategy="zero1")
    net = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(20, 8), torch.zeros(20).long()), 5)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    with session:
        for _ in session.epochs(1):
            for x, y in loader:
                session.backward(nn.functional.cross_entropy(net(x), y))
                optimizer.step()
    with pytest.raises(RequestError) as told:
        optimizer.state_dict()
    return str(told.value)


def test_a_part_of_the_state_is_not_given_for_the_whole(pool: RankPool) -> None:
    assert all("would have this rank's part alone" in sentence for sentence in pool.run(2, own_state))


@pytest.mark.slow
def test_gradients_in_16_bits_are_the_same_under_ddp_and_zero1(pool: RankPool, tmp_path: Path) -> None:
    ddp, zero1 = (
        curve(pool, tmp_path / name, 3, **VALUES, strategy=name, exchange="bf16") for name in ("ddp", "zero1")
    )
    assert same_bits(ddp, zero1)
    assert 1e-6 < apart(ddp, curve(pool, tmp_path / "full", 3, **VALUES, strategy="ddp")) < 0.5


class Own(torch.optim.SGD):
    """An optimizer of a user's own."""


def refused(world: World) -> str:
    """Return the sentence for an optimizer whose state cannot be divided."""
    session = loops.session(world, strategy="zero1")
    net = nn.Linear(8, 2)
    optimizer = Own(net.parameters())
    loader = DataLoader(TensorDataset(torch.randn(20, 8), torch.zeros(20).long()), 5)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    with pytest.raises(RequestError) as told, session:
        for _ in session.epochs(1):
            pass
    return str(told.value)


def test_an_optimizer_that_may_couple_parameters_is_refused(pool: RankPool) -> None:
    for sentence in pool.run(2, refused):
        assert sentence.startswith("--strategy zero1 cannot divide the state of Own: it takes torch.optim's")
