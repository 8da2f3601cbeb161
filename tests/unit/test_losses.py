"""A loss of the user's own: taken as it is, or refused in a sentence before anything trains."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from lockstep import losses
from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.options import override


def two_arguments(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.sum()


def by_samples(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return scores.sum(1)


def a_number(scores: Tensor, labels: Tensor, reduction: str) -> float:
    return 1.0


def detached(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return scores.detach().sum()


weighted = functools.partial(torch.nn.functional.cross_entropy, weight=torch.ones(3))


def test_a_loss_of_ones_own_is_called_for_training_and_evaluation() -> None:
    config = override(RunConfig(), loss="tests.judged:margin_loss").optim
    found = losses.build(config, classes=3)
    scores, labels = torch.eye(3) * 0.5, torch.arange(3)
    assert float(found(scores, labels, reduction="sum")) == pytest.approx(3 * 2 * 0.5 / 3)
    assert losses.evaluated(config, found) is found
    asked = override(RunConfig(), loss="tests.unit.test_losses:weighted").optim
    assert losses.evaluated(asked, losses.build(asked, classes=3)) is weighted
    smoothing = override(RunConfig(), label_smoothing=0.1).optim
    assert losses.evaluated(smoothing, losses.build(smoothing, classes=3)) is torch.nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("two_arguments", "raised TypeError"),
        ("by_samples", r"returned a tensor of shape \(2,\)"),
        ("a_number", "returned float"),
        ("detached", "returned a number without a gradient"),
        ("nowhere", "has no 'nowhere'"),
    ],
)
def test_what_is_no_loss_is_refused(name: str, found: str) -> None:
    config = override(RunConfig(), loss=f"tests.unit.test_losses:{name}").optim
    with pytest.raises(RequestError, match=found):
        losses.build(config, classes=3)


def test_an_unknown_loss_and_smoothing_that_nobody_would_do_are_refused() -> None:
    with pytest.raises(RequestError, match="Unknown loss 'cross_entropi': did you mean cross_entropy"):
        override(RunConfig(), loss="cross_entropi")
    with pytest.raises(RequestError, match=r"--label-smoothing 0\.1 belongs to cross_entropy"):
        override(RunConfig(), loss="mine:loss", label_smoothing=0.1)
