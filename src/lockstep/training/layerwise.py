"""Optimizers for large batches, whose step on a parameter is in proportion to the parameter's norm.

LARS: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks" (arXiv 1708.03888), algorithm 1.
LAMB: You et al. 2019, "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm 2, with φ(z) = z.

A parameter of fewer than two dimensions, such as a bias or BatchNorm's weight, has the factor 1 and no weight decay, as
in the authors' programs. The factor is 1 also where a norm is 0. Each parameter is treated alone. The host does not
wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_TRUST = 1e-3  # LARS's coefficient η
_BETAS, _EPSILON = (0.9, 0.999), 1e-6  # of LAMB


class _Layerwise(Optimizer):
    """Optimizer of parameters (…) one by one; sparse gradients are not supported."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient; `closure` must be None."""
        if closure is not None:
            raise TypeError(f"{type(self).__name__}.step takes no closure.")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight, gradient = map(_as_real, (parameter, parameter.grad))
                    decay = group["weight_decay"] if parameter.dim() > 1 else 0.0
                    self._step_one(weight, gradient, self.state[parameter], group, decay, adapts=parameter.dim() > 1)

    def _step_one(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], decay: float, adapts: bool
    ) -> None:
        raise NotImplementedError


class Lars(_Layerwise):
    """LARS: v ← m·v + γ·λ·(g + β·w), w ← w - v, with the factor λ = η·|w| / (|g| + β·|w|).

    γ is `lr`, m `momentum`, β `weight_decay`, and η = 0.001.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _step_one(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], decay: float, adapts: bool
    ) -> None:
        step = gradient.add(weight, alpha=decay)
        if adapts:
            norm = weight.norm()
            step *= _ratio(_TRUST * norm, gradient.norm() + decay * norm)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        weight -= state["momentum_buffer"].mul_(group["momentum"]).add_(step, alpha=group["lr"])


class Lamb(_Layerwise):
    """LAMB: Adam's step r with corrected bias, then w ← w - γ·|w|/|u|·u for u = r + λ·w.

    γ is `lr`, λ `weight_decay`; β₁ = 0.9, β₂ = 0.999, ε = 10⁻⁶.
    """

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _step_one(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], decay: float, adapts: bool
    ) -> None:
        if not state:  # the count on the host, as torch's optimizers have it
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight)}
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        number, (beta1, beta2) = state["step"].item(), _BETAS
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = (mean / (1 - beta1**number)).div_((square / (1 - beta2**number)).sqrt_().add_(_EPSILON))
        step.add_(weight, alpha=decay)
        if adapts:
            step *= _ratio(weight.norm(), step.norm())
        weight.sub_(step, alpha=group["lr"])


def _ratio(norm: Tensor, divisor: Tensor) -> Tensor:
    """Return the quotient (0-dim), 1 where either is 0."""
    return torch.where((norm > 0) & (divisor > 0), norm / divisor, 1.0)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
