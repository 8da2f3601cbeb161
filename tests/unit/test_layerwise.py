"""LARS and LAMB: their formulas in plain numbers, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training.layerwise import Lamb, Lars

RATES = [0.5, 0.5, 0.1, 0.3, 0.2]  # a schedule changes the rate
DECAY, MOMENTUM = 0.01, 0.9
Numbers = list[float]


def norm(values: Numbers) -> float:
    return math.sqrt(sum(value * value for value in values))


def lars(weight: Numbers, gradients: list[Numbers], *, adapts: bool) -> Numbers:
    """Return the weights after a step per gradient."""
    velocity, decay = [0.0] * len(weight), DECAY if adapts else 0.0
    for gradient, rate in zip(gradients, RATES, strict=True):
        divisor = norm(gradient) + decay * norm(weight)
        factor = 0.001 * norm(weight) / divisor if adapts and divisor and norm(weight) else 1.0
        for index, value in enumerate(gradient):
            velocity[index] = MOMENTUM * velocity[index] + rate * factor * (value + decay * weight[index])
        weight = [value - change for value, change in zip(weight, velocity, strict=True)]
    return weight


def lamb(weight: Numbers, gradients: list[Numbers], *, adapts: bool) -> Numbers:
    """Return the weights after a step per gradient."""
    mean, square = [0.0] * len(weight), [0.0] * len(weight)
    for number, (gradient, rate) in enumerate(zip(gradients, RATES, strict=True), start=1):
        step = []
        for index, value in enumerate(gradient):
            mean[index] = 0.9 * mean[index] + 0.1 * value
            square[index] = 0.999 * square[index] + 0.001 * value * value
            adam = mean[index] / (1 - 0.9**number) / (math.sqrt(square[index] / (1 - 0.999**number)) + 1e-6)
            step.append(adam + (DECAY * weight[index] if adapts else 0.0))
        factor = norm(weight) / norm(step) if adapts and norm(weight) and norm(step) else 1.0
        weight = [value - rate * factor * change for value, change in zip(weight, step, strict=True)]
    return weight


def trained(kind: str, weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    parameter = nn.Parameter(weight.clone())
    options: dict[str, Any] = {"momentum": MOMENTUM} if kind == "lars" else {}
    optimizer = {"lars": Lars, "lamb": Lamb}[kind]([parameter], lr=1.0, weight_decay=DECAY, **options)
    for gradient, rate in zip(gradients, RATES, strict=True):
        parameter.grad, optimizer.param_groups[0]["lr"] = gradient.clone(), rate
        optimizer.step()
    parameter.grad = None
    optimizer.step()  # without a gradient nothing moves
    return parameter.detach()


@pytest.mark.parametrize("kind", ["lars", "lamb"])
@pytest.mark.parametrize("case", ["matrix", "kernel", "vector", "zero weights", "zero gradients"])
def test_each_follows_its_formula(kind: str, case: str) -> None:
    shape = {"vector": (6,), "kernel": (2, 1, 3, 1)}.get(case, (2, 3))
    generator = torch.Generator().manual_seed(1)
    weight, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(6))
    weight = weight * (case != "zero weights")
    gradients = [gradient * (case != "zero gradients") for gradient in gradients]
    rule, flat = {"lars": lars, "lamb": lamb}[kind], [gradient.flatten().tolist() for gradient in gradients]
    expected = rule(weight.flatten().tolist(), flat, adapts=case != "vector")
    torch.testing.assert_close(trained(kind, weight, gradients).flatten().tolist(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_complex_weights_are_pairs_of_real_ones(kind: str) -> None:
    weight, *gradients = (torch.randn(2, 3, dtype=torch.complex128) for _ in range(6))
    pairs = trained(kind, torch.view_as_real(weight), [torch.view_as_real(gradient) for gradient in gradients])
    assert torch.equal(torch.view_as_real(trained(kind, weight, gradients)), pairs)
