"""The learning rate is a function of the optimizer step alone, and the one that torch's schedulers would give."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep import losses, optim
from lockstep.config import OptimConfig, RunConfig
from lockstep.errors import RequestError
from lockstep.options import override

PER_EPOCH = 7
EPOCHS = 6
TOTAL = PER_EPOCH * EPOCHS


def _config(**values: Any) -> OptimConfig:
    return override(RunConfig(), **values).optim


def _rates(**values: Any) -> list[float]:
    factor = optim.schedule(_config(**values), steps_per_epoch=PER_EPOCH, epochs=EPOCHS)
    return [factor(step) for step in range(TOTAL)]


def _theirs(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> list[float]:
    """Return the factors that torch's scheduler gives when it steps once for each optimizer step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(TOTAL):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("values", "make"),
    [
        ({"schedule": "constant"}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        (
            {"schedule": "step", "milestones": [2], "gamma": 0.2},
            lambda o: lr_scheduler.StepLR(o, 2 * PER_EPOCH, gamma=0.2),
        ),
        (
            {"schedule": "multistep", "milestones": [1, 4.0], "gamma": 0.3},
            lambda o: lr_scheduler.MultiStepLR(o, [PER_EPOCH, 4 * PER_EPOCH], gamma=0.3),
        ),
        ({"schedule": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL)),
        (
            {"schedule": "cosine", "warmup": 2},
            lambda o: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, 1 / (2 * PER_EPOCH), total_iters=2 * PER_EPOCH - 1),
                    lr_scheduler.CosineAnnealingLR(o, TOTAL - 2 * PER_EPOCH),
                ],
                [2 * PER_EPOCH],
            ),
        ),
        ({"schedule": "onecycle", "warmup": 2}, lambda o: lr_scheduler.OneCycleLR(o, 1.0, TOTAL, pct_start=1 / 3)),
    ],
    ids=["constant", "step", "multistep", "cosine", "cosine after warm-up", "onecycle"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_schedules_are_torchs(
    values: dict[str, Any], make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    assert _rates(**values) == pytest.approx(_theirs(make), rel=1e-6, abs=1e-9)


def test_schedules_by_hand() -> None:
    warmed = _rates(warmup=1)
    assert warmed[:8] == [pytest.approx((step + 1) / 7) for step in range(7)] + [1.0]
    cosine = _rates(schedule="cosine", warmup=2)
    assert max(cosine) == 1.0
    assert cosine[14 + 14] == pytest.approx(0.5)
    assert 0 < cosine[-1] < 0.01
    cut = _rates(schedule="multistep", milestones=[0.5, 3])  # half an epoch is 3.5 steps, rounded to 4
    assert [cut.index(rate) for rate in sorted(set(cut), reverse=True)] == [0, 4, 21]
    assert sorted(set(cut), reverse=True) == pytest.approx([1.0, 0.1, 0.01])
    one = _rates(schedule="onecycle")
    assert one[0] == pytest.approx(1 / 25)
    assert max(one) == one[round(0.3 * TOTAL) - 1] == 1.0
    assert one[-1] == pytest.approx(1 / 250_000)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "onecycle"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_short_runs_have_a_rate_too(schedule: str, epochs: int) -> None:
    for warmup in (0.0, 1.0, 5.0):
        factor = optim.schedule(_config(schedule=schedule, warmup=warmup), steps_per_epoch=1, epochs=epochs)
        assert all(0 <= factor(step) <= 1 for step in range(epochs))


@pytest.mark.parametrize(
    ("rule", "batch", "expected"), [("none", 1024, 0.1), ("linear", 1024, 0.4), ("sqrt", 64, 0.05)]
)
def test_the_rate_follows_the_global_batch(rule: str, batch: int, expected: float) -> None:
    assert optim.peak_lr(_config(lr=0.1, lr_rule=rule, base_batch=256), batch) == pytest.approx(expected)
    assert optim.peak_lr(_config(lr=0.1), batch) == 0.1


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_an_optimizer_holds_each_training_parameter_once(name: str) -> None:
    model = _net()
    frozen = model.get_parameter("0.weight").requires_grad_(False)
    optimizers = optim.build(model, _config(optimizer=name, lr=0.5, weight_decay=0.25))
    held = [item for each in optimizers.each for group in each.param_groups for item in group["params"]]
    assert {id(item) for item in held} == {id(item) for item in model.parameters()} - {id(frozen)}
    assert len(held) == len({id(item) for item in held})
    groups = [group for each in optimizers.each for group in each.param_groups]
    assert {group["weight_decay"] for group in groups} == {0.25}
    optimizers.set_lr(0.125)
    assert {group["lr"] for group in groups} == {0.125}
    model(torch.ones(2, 4)).sum().backward()
    optimizers.zero_grad()
    assert all(item.grad is None for item in held)


def test_muon_takes_the_matrices_alone() -> None:
    muon, rest = optim.build(_net(), _config(optimizer="muon")).each
    assert {item.ndim for group in muon.param_groups for item in group["params"]} == {2}
    assert {item.ndim for group in rest.param_groups for item in group["params"]} == {1}
    with pytest.raises(RequestError, match="needs matrices"):
        optim.build(nn.BatchNorm1d(3), _config(optimizer="muon"))
    with pytest.raises(RequestError, match="no parameter that trains"):
        optim.build(nn.ReLU(), OptimConfig())


def test_sgd_is_the_formula() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    start = model.weight.item()
    config = _config(lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01)
    optimizers = optim.build(model, config)
    expected, buffer = start, 0.0
    for gradient in (1.0, -2.0, 0.5):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizers.each[0].step()
        decayed = gradient + 0.01 * expected
        buffer = 0.9 * buffer + decayed if buffer else decayed
        expected -= 0.5 * (decayed + 0.9 * buffer)
    assert math.isclose(model.weight.item(), expected, rel_tol=1e-12)


def test_the_average_follows_the_weights_and_keeps_the_models_buffers() -> None:
    linear, norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(linear, norm)
    average = optim.Average(model, 0.9)
    expected = linear.weight.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            linear.weight.add_(torch.randn(2, 3))
        model(torch.randn(4, 3))
        average.update()
        expected = 0.9 * expected + 0.1 * linear.weight.detach()
    torch.testing.assert_close(average.module.get_parameter("0.weight"), expected)
    assert torch.equal(average.module.get_buffer("1.running_mean"), norm.get_buffer("running_mean"))
    assert not any(parameter.requires_grad for parameter in average.module.parameters())


weighted = functools.partial(torch.nn.functional.cross_entropy, weight=torch.ones(3))


def test_a_loss_of_ones_own_is_called_for_training_and_evaluation() -> None:
    config = override(RunConfig(), loss="tests.judged:margin_loss").optim
    found = losses.build(config, classes=3)
    scores, labels = torch.eye(3) * 0.5, torch.arange(3)
    assert float(found(scores, labels, reduction="sum")) == pytest.approx(3 * 2 * 0.5 / 3)
    assert losses.evaluated(config, found) is found
    asked = override(RunConfig(), loss="tests.unit.test_optim:weighted").optim
    assert losses.evaluated(asked, losses.build(asked, classes=3)) is weighted
    smoothing = override(RunConfig(), label_smoothing=0.1).optim
    assert losses.evaluated(smoothing, losses.build(smoothing, classes=3)) is torch.nn.functional.cross_entropy
