"""Weights divided among the ranks by fully_shard: one process's numbers, and checkpoints for every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.checkpoint.shards import full_tensor
from lockstep.errors import RequestError, RunError
from lockstep.exchange.blocks import check_found, find_blocks, inner_classes
from lockstep.world.world import World

from .. import loops
from ..curves import apart, curve, same_bits, spread
from ..pool import RankPool

VALUES: dict[str, Any] = {"model": "tests.models:Normed", "data": "fake", "image_size": 8, "batch": 50, "samples": 337}
VALUES |= {"clip": 0.2, "max_steps": 8, "ema": 0.9, "checkpoint_every": 3, "optimizer": "adamw", "lr": 1e-3}


class Block(nn.Module):
    """A block with dropout, a number that trains, and a branch that few rows take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.branch, self.idle = nn.Linear(width, width), nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        update = self.second(nn.functional.dropout(self.first(x).relu(), 0.1, self.training))
        rows = x[:, 0] > 0.8
        if bool(rows.any()):  # not on each rank
            update = update + rows[:, None] * self.branch(x)
        output: Tensor = x + self.scale * update
        return output


class Net(nn.Module):
    """Blocks, a tied layer, a frozen one, and synchronised BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.tied = nn.Linear(8, 12)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(12, 12).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.tied(x)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.last(self.norm(hidden + self.frozen(hidden)))
        return scores


def learn(world: World, strategy: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the whole weights of a loop with clipping, two losses, and a layer that thaws."""
    session = loops.session(world, strategy=strategy, draws="global", **options)
    net = Net()
    groups: list[dict[str, Any]] = [{"params": [*net.blocks.parameters()], "lr": 0.003}]
    rest = [parameter for name, parameter in net.named_parameters() if not name.startswith("blocks")]
    optimizer = torch.optim.AdamW([*groups, {"params": rest}], lr=0.01)
    del groups, rest
    x = torch.randn(63, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 21, shuffle=True)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    losses = []
    with session:
        for epoch in session.epochs(2):
            net.frozen.requires_grad_(epoch > 0)
            for x, y in loader:
                scores = net(x)
                kept = y.clone()
                kept[x[:, 1] > 0] = -100  # a rank may have no label at all
                has_label = (kept != -100).to(scores.dtype)
                losses_of_rows = -scores.log_softmax(1).gather(1, y[:, None])[:, 0]
                loss = (losses_of_rows * has_label).sum() / has_label.sum()  # 0/0 without a label
                session.backward(loss, weight=has_label.sum(), retain_graph=True)
                session.backward(0.1 * scores.square().mean())
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3)
                assert float(session.max(norm)) == pytest.approx(float(full_tensor(norm)))
                session.log(norm=norm)
                losses.append(float(session.mean(scores.detach().square().mean())))
                optimizer.step()
                optimizer.zero_grad()
    if strategy == "fsdp":
        with pytest.raises(RequestError, match="would have this rank's part alone"):
            net.blocks[0].state_dict()
    return losses, {
        name: full_tensor(tensor).clone() for name, tensor in (*net.named_parameters(), *net.named_buffers())
    }


ACCUMULATE = [1, 2, pytest.param(3, marks=pytest.mark.slow)]
LOOPS: dict[int, list[tuple[str, int, int | None]]] = {
    1: [("fsdp", 4, 2), ("fsdp", 3, None), ("ddp", 4, None)],
    2: [("fsdp", 3, None)],
    3: [("fsdp", 2, None), ("fsdp", 4, 2), ("ddp", 4, None)],
}
"""The strategy, the number of ranks and the size of a shard's group, by accumulation."""


@pytest.mark.parametrize("accumulate", ACCUMULATE)
def test_a_loop_has_the_weights_of_one_process(pool: RankPool, accumulate: int) -> None:
    """On 4 ranks some have no label in a batch, and yet their samples are in the statistics of BatchNorm."""
    options: dict[str, Any] = {"accumulate": accumulate}
    losses, weights = pool.run(1, learn, "auto", options)[0]
    for strategy, ranks, size in LOOPS[accumulate]:
        for here, tensors in pool.run(ranks, learn, strategy, options | {"shard_size": size}):
            assert here == pytest.approx(losses, rel=1e-9)
            for name, tensor in weights.items():
                torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-9)


def test_checkpoints_continue_under_every_strategy(pool: RankPool, tmp_path: Path) -> None:
    whole_run = curve(pool, tmp_path / "single", 1, **VALUES)
    ranks = {"ddp": 2, "fsdp": 3, "zero1": 4, "single": 1}
    for ways in (["fsdp"], ["ddp", "fsdp", "zero1", "single"], ["fsdp", "fsdp"]):
        for number, strategy in enumerate(ways, start=1):
            steps = VALUES["max_steps"] * number // len(ways)
            options = VALUES | {"max_steps": steps, "resume": "auto"} | spread(strategy, ranks[strategy])[1]
            part = curve(pool, tmp_path / "-".join(ways), ranks[strategy], **options)
        if len(ways) == 1:
            divided = part
        assert apart((whole_run[0] | part[0], part[1]), whole_run) < 1e-9, ways
    assert same_bits(part, divided)


class Layer(nn.Linear):
    """A layer whose class one of two models has."""


def two_parts(world: World, strategy: str) -> dict[str, Tensor]:
    """Return the whole weights after two optimizers, one of which gets a further group after the first epoch.

    One has a state before it is prepared.
    """
    session = loops.session(world, strategy=strategy, **({"shard_modules": ("Layer",)} if strategy == "fsdp" else {}))
    first, second = nn.Sequential(Layer(8, 12), nn.Tanh()), nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 2))
    first, second, adagrad = session.prepare(first, second, torch.optim.Adagrad(first.parameters(), lr=0.1))
    optimizers = adagrad, torch.optim.SGD(second[0].parameters(), 0.1, 0.9)
    x = torch.randn(41, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 10, shuffle=True)
    _, loader = session.prepare(optimizers[1], loader)
    with session:
        for epoch in session.epochs(2):
            if epoch:
                optimizers[1].add_param_group({"params": [*second[1].parameters()], "lr": 0.05})
            for x, y in loader:
                session.backward(nn.functional.cross_entropy(second(first(x)), y))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    return {name: full_tensor(tensor).clone() for part in (first, second) for name, tensor in part.named_parameters()}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_several_optimizers_and_a_later_group_have_the_weights_of_one_process(pool: RankPool, strategy: str) -> None:
    (expected,) = pool.run(1, two_parts, "auto")
    for weights in pool.run(3, two_parts, strategy):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-9)


def refused(world: World, what: str) -> str:
    """Return the sentence for a loop that fully_shard cannot serve."""
    session = loops.session(world, strategy="fsdp", shard_modules=() if what == "blocks" else ("Linear",))
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if what == "shared":
        net[2].weight = net[0].weight
    parameters = list(net.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters)
    if what == "optimizer":
        optimizer = torch.optim.Adafactor(parameters)
    if what == "hook":
        parameters[0].register_hook(lambda gradient: gradient)
    if what != "list":
        del parameters
    loader = DataLoader(TensorDataset(torch.randn(20, 8)), 5)
    try:
        net, optimizer, loader = session.prepare(net, optimizer, loader)
        with session:
            for _ in session.epochs(1):
                for (x,) in loader:
                    session.backward(net(x).mean() * net[0].bias.sum())
                    optimizer.step()
    except RequestError as error:
        return str(error)
    return ""


REFUSED = {
    "blocks": "No model has blocks that repeat: name the classes of the large parts, such as --shard-modules",
    "shared": "--strategy fsdp cannot divide a model with parameters that two blocks share (0.weight)",
    "optimizer": "--strategy fsdp divides tensors, and Adafactor steps on whole ones",
    "hook": "--strategy fsdp cannot divide a model with hooks on parameters from before session.prepare (0.weight)",
    "outside": "--strategy fsdp: the loss depends on a weight of shape (8,) outside of the model's forward",
    "list": "--strategy fsdp replaces the model's parameters by shards in session.prepare, and this script still has 4",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_loop_that_would_lose_something_is_refused(pool: RankPool, what: str) -> None:
    for sentence in pool.run(2, refused, what):
        assert sentence.startswith(REFUSED[what])


def overflow(world: World) -> list[bool]:
    """Return whether each step has changed the weights: the first gradient overflows in the last rank's shard alone."""
    session = loops.session(world, strategy="fsdp", shard_modules=("Linear",), precision="fp16")
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    loader = DataLoader(TensorDataset(torch.ones(8, 8)), 4)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    changed = []
    with session:
        for _ in session.epochs(1):
            for number, (x,) in enumerate(loader):
                before = [full_tensor(parameter).clone() for parameter in net.parameters()]
                output = net(x)
                session.backward((output[:, 7] * (1e5 if number == 0 else 1.0)).mean() + 0 * output.sum())
                optimizer.step()
                optimizer.zero_grad()
                after = [full_tensor(parameter) for parameter in net.parameters()]
                changed.append(not all(map(torch.equal, before, after)))
        assert str(session.prepared.exchange.settings["fused"]).startswith("off")
    return changed


def test_an_overflow_in_one_shard_skips_the_step_of_all(pool: RankPool) -> None:
    assert pool.run(2, overflow) == [[False, True]] * 2


def gather(world: World, strategy: str, options: dict[str, Any]) -> tuple[list[float], int]:
    """Return losses and scores, and the number of gathers, of a loop whose weights change while some are gathered."""
    send, count = dist.all_gather_into_tensor, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return send(*args, **kwargs)

    dist.all_gather_into_tensor = counted
    try:
        session = loops.session(world, strategy=strategy, **options)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x), 10, shuffle=True)
        held_out = DataLoader(TensorDataset(x), 10)
        net, optimizer, loader = session.prepare(net, optimizer, loader)
        results = []
        with session:
            for _ in session.epochs(3):
                for (x,) in loader:
                    loss = (net(x) - x[:, :3]).square().mean()
                    session.backward(loss)
                    net(x)  # no backward pass frees these weights before the step
                    optimizer.step()
                    optimizer.zero_grad()
                    results.append(float(session.sum(loss.detach() * len(x))))
                    results.append(float(session.sum(net(x).detach().square().sum())))
                results += [float(session.sum(net(x).square().sum())) for (x,) in session.evaluating(held_out)]
                with torch.no_grad():  # as where averaged weights are swapped in
                    for parameter in net.parameters():
                        parameter.mul_(0.9)
                results += [float(session.sum(net(x).square().sum())) for (x,) in session.evaluating(held_out)]
    finally:
        dist.all_gather_into_tensor = send
    return results, count


def test_weights_that_stay_gathered_are_never_stale(pool: RankPool) -> None:
    results, _ = pool.run(1, gather, "auto", {})[0]
    options = {"shard_modules": ("Linear",)}
    by_rank = [pool.run(2, gather, "fsdp", options | {"shard_reshard": reshards}) for reshards in (False, True)]
    assert all(here == pytest.approx(results, rel=1e-9) for ranks in by_rank for here, _ in ranks)
    fewer, more = (ranks[0][1] for ranks in by_rank)
    assert fewer < more


@pytest.mark.parametrize("exchange", ["bf16", "fp16"])
def test_gradients_in_16_bits_are_close_to_full_ones(pool: RankPool, exchange: str) -> None:
    full, rounded = (
        pool.run(2, gather, "fsdp", {"shard_modules": ("Linear",), "exchange": name})[0][0]
        for name in ("full", exchange)
    )
    assert full == pytest.approx(rounded, rel=0.02)
    assert full != pytest.approx(rounded, rel=1e-6)


class Routed(nn.Module):
    """Two blocks, of which a batch runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        scores: Tensor = self.experts[chosen](x)
        return scores


def route_by_rank(world: World, models: int) -> str:
    """Return the sentence for ranks that run different blocks, of one model or of two."""
    session = loops.session(world, strategy="fsdp", shard_modules=("Sequential",))
    nets = [Routed() for _ in range(models)]
    optimizer = torch.optim.SGD([parameter for net in nets for parameter in net.parameters()], lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(20, 8)), 5)
    *nets, optimizer, loader = session.prepare(*nets, optimizer, loader)
    try:
        with session:
            for _ in session.epochs(1):
                for (x,) in loader:
                    scores = nets[0](x, world.rank) if models == 1 else nets[world.rank](x, 0)
                    session.backward(scores.square().mean())
                    optimizer.step()
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("models", [1, 2])
def test_ranks_that_run_different_blocks_are_told(pool: RankPool, models: int) -> None:
    """Their collectives are of one size: each would compute with the other's weights."""
    for sentence in pool.run(2, route_by_rank, models):
        assert sentence.startswith("At step 0, ranks have run different blocks of the model")


def test_one_rank_divides_nothing() -> None:
    with pytest.raises(RequestError, match="--strategy fsdp divides the weights among ranks, and here is one"):
        loops.session(World.alone(), strategy="fsdp")


def test_blocks_are_the_layers_that_repeat() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    assert find_blocks(nn.Sequential(nn.Linear(8, 8), encoder), ()) == [*encoder.layers]
    assert find_blocks(encoder, ("Multi*",)) == [layer.self_attn for layer in encoder.layers]
    assert not find_blocks(encoder, ("Linera",))
    with pytest.raises(RequestError, match="Unknown --shard-modules pattern 'Linera': did you mean Linear"):
        check_found(0, inner_classes(encoder), ("Linera",))
