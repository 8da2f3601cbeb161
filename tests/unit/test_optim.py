"""The learning rate is a function of the optimizer step alone; optimizers, averages and losses are the formulas."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.state import load_model
from lockstep.config.options import override
from lockstep.config.schema import OptimConfig, RunConfig
from lockstep.errors import RequestError
from lockstep.training import losses, optim

PER_EPOCH, EPOCHS = 7, 6
TOTAL = PER_EPOCH * EPOCHS


def _config(**values: Any) -> OptimConfig:
    return override(RunConfig(), **values).optim


def _rates(**values: Any) -> list[float]:
    factor = optim.schedule(_config(**values), steps_per_epoch=PER_EPOCH, epochs=EPOCHS)
    return [factor(step) for step in range(TOTAL)]


def test_schedules_by_hand() -> None:
    def cosine(begin: float, end: float, steps: int) -> list[float]:
        return [end + (begin - end) * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]

    assert _rates(warmup=1) == pytest.approx([*(step / 7 for step in range(1, 8)), *[1.0] * 35])
    stepped = _rates(schedule="step", milestones=[2], gamma=0.2)
    assert stepped == pytest.approx([0.2 ** (step // 14) for step in range(TOTAL)])
    assert _rates(schedule="cosine") == pytest.approx(cosine(1, 0, TOTAL))
    warmed = _rates(schedule="cosine", warmup=2)
    assert warmed == pytest.approx([*(step / 14 for step in range(1, 15)), *cosine(1, 0, TOTAL - 14)])
    cut = _rates(schedule="multistep", milestones=[0.5, 3])  # half an epoch is 3.5 steps, rounded to 4
    assert cut == pytest.approx([1.0] * 4 + [0.1] * 17 + [0.01] * 21)
    for asked, up in ({}, round(0.3 * TOTAL) - 1), ({"warmup": 2}, 13):
        one = [*cosine(1 / 25, 1, up), *cosine(1, 1 / 250_000, TOTAL - 1 - up), 1 / 250_000]
        assert _rates(schedule="onecycle", **asked) == pytest.approx(one)  # as torch's
    for rule, batch, expected in (("none", 1024, 0.1), ("linear", 1024, 0.4), ("sqrt", 64, 0.05)):
        assert optim.peak_lr(_config(lr=0.1, lr_rule=rule, base_batch=256), batch) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "onecycle"])
def test_short_runs_have_a_rate_too(schedule: str) -> None:
    for warmup, epochs in ((0.0, 1), (1.0, 1), (1.0, 2), (5.0, 2)):
        factor = optim.schedule(_config(schedule=schedule, warmup=warmup), steps_per_epoch=1, epochs=epochs)
        assert all(0 <= factor(step) <= 1 for step in range(epochs))


def test_an_optimizer_holds_each_training_parameter_once_and_muon_the_matrices_alone() -> None:
    convolutions = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.ConvTranspose1d(4, 3, 2)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), *convolutions)
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))
    frozen = model.get_parameter("0.weight").requires_grad_(False)
    for name in ("lamb", "lars", "sgd", "adamw", "muon"):
        optimizers = optim.build(model, _config(optimizer=name, lr=0.5, weight_decay=0.25))
        groups = [group for each in optimizers for group in each.param_groups]
        held = [id(item) for group in groups for item in group["params"]]
        assert sorted(held) == sorted({id(item) for item in model.parameters()} - {id(frozen)})
        optim.set_lr(optimizers, 0.125)
        assert {(group["lr"], group["weight_decay"]) for group in groups} == {(0.125, 0.25)}
    # The filters of a dense convolution are a matrix; grouped or transposed ones are none, as complex numbers are.
    assert {id(item) for item in groups[0]["params"]} == {id(model.get_parameter(f"{each}.weight")) for each in (2, 3)}
    with pytest.raises(RequestError, match="needs matrices"):
        optim.build(nn.BatchNorm1d(3), _config(optimizer="muon"))
    with pytest.raises(RequestError, match="no parameter that trains"):
        optim.build(nn.ReLU(), OptimConfig())


def test_the_average_follows_the_weights_and_keeps_the_models_buffers() -> None:
    linear, norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(linear, norm)
    average = optim.Average(model, 0.9)
    expected = linear.weight.detach().clone()
    for step in range(1, 4):
        with torch.no_grad():
            linear.weight.add_(torch.randn(2, 3))
        model(torch.randn(4, 3))
        average.update(step)
        expected = 0.9 * expected + 0.1 * linear.weight.detach()
    torch.testing.assert_close(average.module.get_parameter("0.weight"), expected)
    assert torch.equal(average.module.get_buffer("1.running_mean"), norm.get_buffer("running_mean"))


class _Assigning(nn.Module):
    """Assigns one buffer anew, lengthens another, and registers a third, in forward."""

    mean: Tensor
    history: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("history", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.history = torch.cat([self.history, self.mean[None]])
        if "count" not in dict(self.named_buffers()):
            self.register_buffer("count", torch.zeros(()))
        self.count = self.count + 1
        y: Tensor = self.linear(x - self.mean)
        return y


def test_the_average_has_buffers_that_forward_assigns_and_a_checkpoint_their_shapes() -> None:
    model = nn.Sequential(_Assigning())
    average = optim.Average(model, 0.9)
    for step in range(1, 4):
        model(torch.randn(4, 3))
        average.update(step)
    ours, theirs = dict(average.module.named_buffers()), dict(model.named_buffers())
    assert {name: buffer.tolist() for name, buffer in ours.items()} == {
        name: buffer.tolist() for name, buffer in theirs.items()
    }
    assert ours["0.history"].shape == (3, 3)
    assert ours["0.count"] is not theirs["0.count"]
    fresh = nn.Sequential(_Assigning())
    load_model(fresh, {name: tensor for name, tensor in model.state_dict().items() if name != "0.count"})
    assert torch.equal(fresh.get_buffer("0.history"), theirs["0.history"])


weighted = functools.partial(torch.nn.functional.cross_entropy, weight=torch.ones(3))


def test_a_loss_of_ones_own_is_called_for_training_and_evaluation() -> None:
    own = _config(loss=f"{__name__}:weighted")
    assert losses.build(own) is weighted
    assert losses.evaluated(own, weighted) is weighted
    smoothed = _config(label_smoothing=0.1)
    scores, labels = torch.eye(3), torch.arange(3)
    found = losses.build(smoothed)
    plain = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    assert found(scores, labels, reduction="sum") > plain
    assert losses.evaluated(smoothed, found)(scores, labels, reduction="sum") == plain
