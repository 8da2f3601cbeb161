"""Muon: torch's numbers from batched products; filters as matrices; the same bits beside any other matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import _torch
from lockstep.training import muon
from lockstep.training.muon import Muon, orthogonalise

SHAPES = [(16, 24), (24, 16), (16, 24), (16, 16), (1, 9), (40, 12), (16, 24)]
RATES = [0.1, 0.3, 0.2]
OPTIONS: dict[str, Any] = {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.05}


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def trained(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the weights after a step per list of gradients; the last parameter has a gradient in every other step."""
    (group,) = optimizer.param_groups
    for number, (of_step, group["lr"]) in enumerate(zip(gradients, RATES, strict=True)):
        for parameter, gradient in zip(group["params"], of_step, strict=True):
            parameter.grad = gradient.clone()
        if number % 2:
            group["params"][-1].grad = None
        _torch.step(optimizer)  # without torch's compiler
    return [parameter.detach() for parameter in group["params"]]


def by_hand(weights: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return float64 weights after Muon's steps, a matrix at a time."""
    weights = [weight.flatten(1).clone() for weight in weights]
    averages = [torch.zeros_like(weight) for weight in weights]
    for number, (of_step, rate) in enumerate(zip(gradients, RATES, strict=True)):
        for index, (weight, average) in enumerate(zip(weights, averages, strict=True)):
            if number % 2 and index == len(weights) - 1:
                continue
            gradient = of_step[index].flatten(1)
            average.mul_(0.9).add_(gradient, alpha=0.1)
            x = 0.1 * gradient + 0.9 * average
            x /= x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
            weight -= rate * (0.05 * weight + 0.2 * max(weight.shape) ** 0.5 * x)
    return weights


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("stack_values", [1, 800, 1 << 19])  # one at a time; two; all
def test_a_float32_step_has_the_bits_of_torchs(
    nesterov: bool, stack_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "_CPU_STACK_VALUES", stack_values)
    weights, *gradients = (drawn(SHAPES, torch.float32, seed) for seed in range(4))
    ours, torchs = ([nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    expected = torch.optim.Muon(torchs, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", **OPTIONS)
    found = Muon(ours, nesterov=nesterov, **OPTIONS)
    assert all(map(torch.equal, trained(found, gradients), trained(expected, gradients)))
    states = [
        [optimizer.state[each]["momentum_buffer"] for each in of_one]
        for optimizer, of_one in ((found, ours), (expected, torchs))
    ]
    assert all(map(torch.equal, *states))


def test_float64_stays_float64_and_filters_are_matrices() -> None:
    shapes = [(16, 3, 2, 2), (4, 6), (16, 3, 2, 2), (5, 2, 3), (4, 6)]
    weights, *gradients = (drawn(shapes, torch.float64, seed) for seed in range(4))
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    parameters[2].data = parameters[2].data.to(memory_format=torch.channels_last)
    for found, expected in zip(
        trained(Muon(parameters, **OPTIONS), gradients), by_hand(weights, gradients), strict=True
    ):
        torch.testing.assert_close(found.flatten(1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (64, 216), (130, 130)])
def test_a_matrix_has_the_same_bits_beside_any_others(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    stack = torch.stack(drawn([shape] * 5, dtype, 0))
    whole = orthogonalise(stack)
    assert torch.equal(
        torch.cat([orthogonalise(stack[:1]), orthogonalise(stack[1:3]), orthogonalise(stack[3:])]), whole
    )
    singular = torch.linalg.svdvals(whole.double())
    assert singular.max() < 1.3
    assert singular.median() > 0.6


class Operations(_torch.TorchDispatchMode):
    """Counts operations that do work; views do none."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = operator._schema.returns
        self.count += not (returns and all(each.alias_info and not each.alias_info.is_write for each in returns))
        return operator(*args, **kwargs or {})


def test_more_matrices_of_a_shape_cost_no_more_operations() -> None:
    counts = []
    for number in (2, 12):
        parameters = [nn.Parameter(weight) for weight in drawn([(16, 24)] * number, torch.float32, 0)]
        optimizer = Muon(parameters, **OPTIONS)
        for _ in range(2):  # the first makes the state
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with Operations() as operations:
                optimizer.step()
        counts.append(operations.count)
    assert counts[0] == counts[1] < 40
