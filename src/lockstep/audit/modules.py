"""The modules and optimizers of an audited process, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..checkpoint.state import parameters_of


class Modules:
    """Outermost modules in the order of their first call while gradients are computed, and the optimizers."""

    def __init__(self) -> None:
        self.depth = 0
        self.roots: list[nn.Module] = []
        self.loose: list[nn.Parameter] = []
        """Parameters of optimizers that no module has."""
        self.optimizers: list[Optimizer] = []
        self.is_coarse = False

    def add_root(self, module: nn.Module) -> bool:
        """Add a module that has a new trained parameter; return whether it has one."""
        new = {*module.parameters()} - self._parameters_of_roots()
        is_trained = any(parameter.requires_grad for parameter in new)
        if is_trained:
            self.roots.append(module)
        return is_trained

    def add_optimizer(self, optimizer: Optimizer) -> int:
        """Add an optimizer and its parameters; return its number."""
        number = index_of(self.optimizers, optimizer)
        if number is None:
            number = len(self.optimizers)
            self.optimizers.append(optimizer)
            earlier = self._parameters_of_roots() | {*self.loose}
            self.loose += [parameter for parameter in parameters_of(optimizer) if parameter not in earlier]
        return number

    def tensors(self) -> list[list[Tensor]]:
        """Return parameters and buffers of each root, and last the parameters of no module."""
        return [*([*root.parameters(), *root.buffers()] for root in self.roots), [*self.loose]]

    def copies(self) -> list[list[Tensor]]:
        """Return copies of `tensors`."""
        return [[tensor.detach().clone() for tensor in root] for root in self.tensors()]

    def names(self) -> list[list[str]]:
        """Return the parameters' names, as `gradients` has them."""
        loose = [f"parameter {number} of no module" for number in range(len(self.loose))]
        return [*([name for name, _ in root.named_parameters()] for root in self.roots), loose]

    def gradients(self, optimizer: Optimizer, unclipped: Mapping[int, Tensor]) -> list[list[Tensor | None]]:
        """Return the gradients of the optimizer's parameters, or their `unclipped` values by id; None for others."""
        stepped = {id(parameter) for parameter in parameters_of(optimizer)}
        parameters = [*([*root.parameters()] for root in self.roots), self.loose]

        def gradient(parameter: nn.Parameter) -> Tensor | None:
            if id(parameter) not in stepped or parameter.grad is None:
                return None
            return unclipped.get(id(parameter), parameter.grad).detach().clone()

        return [[gradient(parameter) for parameter in root] for root in parameters]

    def _parameters_of_roots(self) -> set[nn.Parameter]:
        return {parameter for root in self.roots for parameter in root.parameters()}


def index_of(items: list[Any], item: object) -> int | None:
    """Return the index of this very object."""
    return next((number for number, other in enumerate(items) if other is item), None)
