"""Weights exchanged every few steps: local SGD and DiLoCo are what one process computes for all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import checkpoint
from lockstep.batching import BatchPlan
from lockstep.errors import ProofError, RequestError, RunError, Stopped
from lockstep.world.world import World

from .. import loops
from ..command import command
from ..curves import apart, curve, same_bits
from ..pool import RankPool

COLLECTIVES = [pytest.param("shared-memory", marks=pytest.mark.slow), "gloo"]
SLOW_LOCAL_SGD = pytest.param("local-sgd", marks=pytest.mark.slow)
EXCHANGES = ["local-sgd", "diloco"]
BATCH, SAMPLES, EPOCHS, RANKS = 20, 61, 3, 3  # the last batch has one sample, so that two ranks have none
OPTIMIZERS: dict[str, dict[str, float]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 0.01},
}
VALUES: dict[str, Any] = {"model": "tests.models:Normed", "data": "fake", "image_size": 8, "batch": 50, "samples": 337}
VALUES |= {
    "clip": 0.2,
    "max_steps": 9,
    "ema": 0.9,
    "checkpoint_every": 2,
    "exchange_every": 3,
    "optimizer": "adamw",
    "lr": 1e-3,
}


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3), nn.Linear(3, 3)
    ).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES, 2, 3, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (SAMPLES,), generator=generator)


def optimize(model: nn.Module, name: str) -> Any:
    return getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])


def learn(world: World, name: str, stop_at: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return this rank's weights in the end, or where a request to stop has ended the run."""
    session = loops.session(world, **options)
    model = net()
    model[4].requires_grad_(False)  # in the optimizer, and thawed later
    optimizer = optimize(model, name)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(*data()), BATCH))
    try:
        with session:
            for epoch in session.epochs(EPOCHS):
                model[4].requires_grad_(epoch > 0)
                for x, y in loader:
                    session.loop.stop.asked = world.is_main and session.step >= stop_at
                    if name == "AdamW":  # a save finds gradients of the last step
                        optimizer.zero_grad()
                    session.backward(nn.functional.cross_entropy(model(x), y))
                    if session.is_last:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    if name != "AdamW":
                        optimizer.zero_grad()
    except Stopped:
        assert stop_at < 100
    return loops.weights(model)


def simulated(exchange: str, name: str, every: int, accumulate: int) -> dict[str, Tensor]:
    """Return the weights after the steps of all ranks, made in this process."""
    models = [net() for _ in range(RANKS)]
    optimizers = [optimize(model, name) for model in models]
    anchor, (x, y) = copy.deepcopy(models[0]), data()
    outer = torch.optim.SGD(anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    plan = BatchPlan(global_size=BATCH, ranks=RANKS, accumulation=accumulate)

    def mean(tensors: list[Tensor]) -> None:
        total = torch.stack([tensor.detach() for tensor in tensors]).mean(0)
        for tensor in tensors if total.is_floating_point() else ():
            tensor.data.copy_(total)

    def meet() -> None:
        for own in zip(*(model.parameters() for model in models), strict=True):
            states = [optimizer.state[each] for optimizer, each in zip(optimizers, own, strict=True)]
            for key in states[0]:
                mean([state[key] for state in states])
        for tensors in zip(*(model.state_dict().values() for model in models), strict=True):
            if tensors[0].is_floating_point():
                mean([*tensors])
        if exchange == "diloco":
            for parameter, averaged in zip(anchor.parameters(), models[0].parameters(), strict=True):
                parameter.requires_grad_(averaged.requires_grad)
                parameter.grad = parameter.detach() - averaged.detach() if averaged.requires_grad else None
            outer.step()
            for model in models:
                for own_weight, weight in zip(model.parameters(), anchor.parameters(), strict=True):
                    own_weight.data.copy_(weight)

    for epoch in range(EPOCHS):
        for model in models:
            model[4].requires_grad_(epoch > 0)
        since = 0
        for step in range(plan.steps(SAMPLES)):
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                shares = [share for share in plan.shares(SAMPLES, rank) if share.step == step]
                size = sum(share.size for share in shares)
                optimizer.zero_grad()
                for share in shares:
                    rows = slice(share.start, share.stop)
                    loss = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum")
                    (loss * (share.size > 0) / max(1, size)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
            since += 1
            if since == every or step + 1 == plan.steps(SAMPLES):
                meet()
                since = 0
    return loops.weights(models[0])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_weights_are_those_of_all_ranks_steps_in_one_process(
    pool: RankPool, exchange: str, name: str, accumulate: int
) -> None:
    options = {"exchange": exchange, "exchange_every": 3, "accumulate": accumulate, "verify_every": 1}
    first, *others = pool.run(RANKS, learn, name, 1000, options)
    for key, tensor in simulated(exchange, name, 3, accumulate).items():
        assert all(torch.equal(first[key], other[key]) for other in others)
        torch.testing.assert_close(first[key], tensor, rtol=1e-9, atol=1e-12)


def step_later(world: World, exchange: str, every: int, output: str) -> str:
    """Evaluate between a backward pass and its step; return the error of a run that saves gradients, or ""."""
    folder = {"output": output} if output else {}
    session = loops.session(world, exchange=exchange, exchange_every=4, verify_every=1, **folder)
    model = net()
    optimizer = optimize(model, "SGD")
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(*data()), BATCH))
    evaluated, number = DataLoader(TensorDataset(*data()), BATCH), 0
    try:
        with session:
            for _ in session.epochs(2):
                for x, y in loader:
                    session.backward(nn.functional.cross_entropy(model(x), y))
                    for images, _ in session.evaluating(evaluated):
                        model(images)
                    number += 1
                    if number % every == 0:
                        optimizer.step()
                        optimizer.zero_grad()
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_between_backward_and_step_leaves_the_ranks_alike(pool: RankPool, exchange: str) -> None:
    assert pool.run(2, step_later, exchange, 1, "") == ["", ""]


def test_gradients_of_each_rank_are_not_saved_as_one(pool: RankPool, tmp_path: Path) -> None:
    for sentence in pool.run(2, step_later, "local-sgd", 3, str(tmp_path / "run")):
        assert sentence.startswith("--exchange local-sgd: gradients wait for a step at a save")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_stopped_run_waits_for_an_exchange_and_continues_with_the_same_bits(
    pool: RankPool, tmp_path: Path, exchange: str
) -> None:
    options = {"exchange": exchange, "exchange_every": 3, "log_every": 1, "output": tmp_path / "whole"}
    whole = pool.run(RANKS, learn, "AdamW", 1000, options)
    options |= {"output": tmp_path / "parts", "resume": "auto"}
    pool.run(RANKS, learn, "AdamW", 5, options)
    assert checkpoint.load(tmp_path / "parts").meta["step"] == 7  # an epoch has four steps, the next exchange is here
    for ours, theirs in zip(pool.run(RANKS, learn, "AdamW", 1000, options), whole, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("collectives", COLLECTIVES)
@pytest.mark.parametrize("exchange", ["diloco", SLOW_LOCAL_SGD])
def test_checkpoints_wait_for_an_exchange_and_continue_with_the_same_bits(
    pool: RankPool, tmp_path: Path, exchange: str, collectives: str
) -> None:
    values = VALUES | {"exchange": exchange, "collectives": collectives}
    whole = curve(pool, tmp_path / "whole", RANKS, **values)
    for steps in (3, 6, 9):
        part = curve(pool, tmp_path / "parts", RANKS, **values | {"max_steps": steps, "resume": "auto"})
    assert same_bits(part, whole)
    assert same_bits(whole, curve(pool, tmp_path / "again", RANKS, **values | {"checkpoint_every": 50}))


def misled(world: World, how: str) -> str:
    """Return the error of a loop whose ranks do not do the same."""
    session = loops.session(world, exchange="diloco", exchange_every=2, verify_every=1)
    model = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.zeros(40).long()), 5)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    try:
        with session:
            for _ in session.epochs(1):
                for x, y in loader:
                    model[1].requires_grad_(how != "frozen" or not world.rank)
                    layer = model[world.rank if how == "parameters" else 0]
                    session.backward(nn.functional.cross_entropy(layer(x), y))
                    if how == "setting":
                        optimizer.param_groups[0]["lr"] = 0.01 * (1 + world.rank)
                    optimizer.step()
                    optimizer.zero_grad()
    except (ProofError, RunError) as error:
        return str(error)
    return ""


def test_ranks_with_other_settings_or_parameters_are_found(pool: RankPool) -> None:
    assert all("after step 2" in text and "optimizer/settings" in text for text in pool.run(2, misled, "setting"))
    assert all("with the trainable parameters" in text for text in pool.run(2, misled, "frozen"))
    for text in pool.run(2, misled, "parameters"):
        assert text.startswith("At step 2, not all ranks have optimizer/0.bias/exp_avg")
        assert text.endswith("with --exchange diloco, each rank has to train the same parameters.")


def adversaries(world: World) -> tuple[list[int], list[Tensor]]:
    """Return the steps after which two optimizers' weights are the same on all ranks, and this rank's in the end."""
    session = loops.session(world, exchange="local-sgd", exchange_every=2)
    nets = nn.Linear(8, 2), nn.Linear(8, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in nets]
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    *nets, first, second, loader = session.prepare(*nets, *optimizers, DataLoader(TensorDataset(x), 6))
    equal = []
    with session:
        for _ in session.epochs(1):
            for (batch,) in loader:
                ranks = world.stack(torch.cat([each.detach().flatten() for net in nets for each in net.parameters()]))
                if torch.equal(ranks[0], ranks[1]):
                    equal.append(session.step)
                session.backward(nets[0](batch.double()).square().mean())
                first.step()
                if session.step % 3 == 0:
                    session.backward(nets[1](batch.double()).square().mean())
                    second.step()
    return equal, [each.detach().clone() for net in nets for each in net.parameters()]


def test_optimizers_that_seldom_step_on_one_batch_are_exchanged_all_the_same(pool: RankPool) -> None:
    (equal, ours), (_, theirs) = pool.run(2, adversaries)
    assert equal == [0, 2, 4, 6, 8]
    assert all(map(torch.equal, ours, theirs))


def continued(world: World, options: dict[str, Any]) -> str:
    """Return the sentence of a run that refuses to continue, "" for one that has ended."""
    try:
        learn(world, "SGD", 1000, options)
    except RequestError as error:
        return str(error)
    return ""


def test_only_diloco_continues_diloco_and_local_sgd_is_anyones(pool: RankPool, tmp_path: Path) -> None:
    for exchange in EXCHANGES:
        options = {"exchange": exchange, "exchange_every": 3, "output": tmp_path / exchange, "batchnorm": "local"}
        pool.run(RANKS, learn, "SGD", 5, options)
        options |= {
            "exchange": "full",
            "exchange_every": None,
            "output": tmp_path / f"after {exchange}",
            "resume": str(tmp_path / exchange),
        }
        (said,) = {*pool.run(RANKS, continued, options)}
        if exchange == "diloco":
            assert "holds the state of --exchange diloco, which this run cannot continue; give --exchange dil" in said
        else:
            assert said == ""


def test_another_number_of_ranks_continues_diloco(pool: RankPool, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": "mlp", "data": "digits", "samples": 300, "batch": 60, "exchange_every": 2}
    values |= {"exchange": "diloco", "resume": "auto", "lr": 0.01}
    before = curve(pool, tmp_path, 3, **values, max_steps=5)
    after = curve(pool, tmp_path, 2, **values, max_steps=10)
    assert max(after[0]) == 10
    assert {name for name in after[1] if name.startswith("exchange/momentum")} == {
        name for name in before[1] if name.startswith("exchange/momentum")
    }


def test_one_rank_is_refused(tmp_path: Path) -> None:
    ended = command(tmp_path, "train", "digits", "--exchange", "diloco", "--devices", 1, "--accelerator", "cpu")
    assert ended.code == 2
    assert "--exchange diloco needs several ranks" in ended.err


def _drop_odd(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    kept = [row for row in rows if int(row[1]) % 2 == 0] or rows[:1]
    return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])


def own_gradients(world: World, how: str) -> list[tuple[float, float]]:
    """Return this rank's gradient after each batch, and that of the mean over its share."""
    session = loops.session(world, exchange="local-sgd", exchange_every=1)
    weight = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    x, y = torch.arange(1.0, 14.0).double()[:, None], torch.arange(13)
    collate: Any = _drop_odd if how == "dropped" else None
    weight, optimizer, loader = session.prepare(
        weight, optimizer, DataLoader(TensorDataset(x, y), 5, collate_fn=collate)
    )
    pairs = []
    with session:
        for _ in session.epochs(1):
            for x, y in loader:
                out, size = weight(x).flatten(), session.samples
                expected = x.mean() if size else torch.zeros(())
                if how == "weight":
                    tokens = (y + 1) * (size > 0)
                    session.backward((out * tokens).sum() / max(1, int(tokens.sum())), weight=int(tokens.sum()))
                    expected = (x[:, 0] * tokens).sum() / max(1, int(tokens.sum()))
                elif how == "sum":
                    session.backward(out.sum(), reduction="sum")
                    expected = expected * session.sum(size)
                else:
                    session.backward(out.mean())
                pairs.append((weight.weight.grad.item(), float(expected)))
                optimizer.step()
                optimizer.zero_grad()
    return pairs


@pytest.mark.parametrize("how", ["mean", "weight", "sum", "dropped"])
def test_a_gradient_is_of_the_mean_over_a_ranks_own_share(pool: RankPool, how: str) -> None:
    for pairs in pool.run(4, own_gradients, how):
        assert len(pairs) == 3
        assert pairs == [(pytest.approx(expected, rel=1e-12), expected) for _, expected in pairs]


def scored(world: World, folder: Path) -> tuple[list[float], int]:
    """Return how far the ranks are apart before and after evaluations, and the step of the best weights."""
    session = loops.session(world, exchange="diloco", exchange_every=50, output=folder)
    model = net()
    optimizer = optimize(model, "SGD")
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(*data()), BATCH))
    apart = []
    with session:
        for _ in session.epochs(2):
            for x, y in loader:
                session.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if session.step == 2:
                    apart.append(_spread(world, model))
                    for _ in session.evaluating(DataLoader(TensorDataset(*data()), BATCH)):
                        pass
                    apart.append(_spread(world, model))
                    session.score(1.0)
            apart.append(_spread(world, model))
    return apart, checkpoint.load(folder / "checkpoints" / "best").meta["step"]


def _spread(world: World, model: nn.Module) -> float:
    ranks = world.stack(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return float((ranks - ranks[0]).abs().max())


def test_evaluations_and_scores_are_of_one_model(pool: RankPool, tmp_path: Path) -> None:
    for (before, within, *ends), best_at in pool.run(2, scored, tmp_path / "run"):
        assert before > 1e-3
        assert [within, *ends] == [0.0] * 3
        assert best_at == 2


def test_an_end_between_two_exchanges_is_told(pool: RankPool, tmp_path: Path) -> None:
    for steps, is_told in ((6, True), (7, False)):
        options = {"exchange": "local-sgd", "exchange_every": 3, "max_steps": steps, "output": tmp_path / f"{steps}"}
        pool.run(2, learn, "SGD", 1000, options)
        text = (tmp_path / f"{steps}" / "steps.jsonl").read_text()
        assert ("Max_steps has ended the run between two exchanges" in text) == is_told


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_ranks_devices_make_one_gradient(pool: RankPool, tmp_path: Path, exchange: str) -> None:
    values: dict[str, Any] = {"model": "mlp", "data": "digits", "samples": 300, "batch": 48, "max_steps": 8}
    values |= {"exchange": exchange, "exchange_every": 3}
    ddp = curve(pool, tmp_path / "ddp", 2, **values)
    assert apart(ddp, curve(pool, tmp_path / "hybrid", 2, **values, strategy="hybrid", devices=2)) < 1e-9
