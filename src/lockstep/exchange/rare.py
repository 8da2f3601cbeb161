"""Weights exchanged every few steps, in place of gradients in each: local SGD, and DiLoCo.

Every rank steps by its own gradients, those of the mean over its share of each global batch. After `every` steps
(`--exchange-every`), and wherever the weights of the run are read (at the end of a pass over the data, in an
evaluation, in a save), the ranks exchange: then their weights are the same bits. The mean of what they have moved since
the last exchange is an outer gradient, with which they make an outer step of SGD with Nesterov momentum. DiLoCo
(Douillard et al. 2023, arXiv 2311.08105) has learning rate 0.7 and momentum 0.9. Local SGD (Stich 2019, arXiv
1805.09767) takes the mean of the weights, which is learning rate 1 without momentum.

Of all else that differs between ranks then, such as the optimizers' state, averaged weights and BatchNorm's statistics,
all take the mean. (DiLoCo's authors leave each worker its optimizer's state; here a checkpoint has one.) In each step
the ranks exchange their headers alone, tens of bytes, so that all train the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..world.world import World
from .base import Pass
from .buckets import lay_out
from .ranks import Ranks

_BUCKET_BYTES = 25 << 20


class Rare(Ranks):
    """Steps by each rank's own gradients, and an outer step of all ranks every few of them."""

    def __init__(self, world: World, *, every: int, lr: float, momentum: float) -> None:
        """`lr` and `momentum` are the outer step's."""
        super().__init__(world)
        self.every, self.settings = every, {"exchange-every": every}
        self._lr, self._momentum = lr, momentum
        self._anchors: dict[Tensor, Tensor] = {}
        """The weights of the last exchange, of parameters that have trained since."""
        self._velocities: dict[Tensor, Tensor] = {}
        """The outer momentum, the same on all ranks."""

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """See `Exchange.backward`: `.grad` is this rank's own, scaled up from its share to the global batch."""
        if backward_pass.zeroed is True:  # a gradient of zero, so that optimizers step on all ranks alike
            zeroed = torch.ones((), dtype=torch.bool, device=self.world.device)
            backward_pass = dataclasses.replace(backward_pass, zeroed=zeroed)
        weights = super().backward(backward_pass)
        if weights is None:
            return None
        total, own_weight = weights.sum(), weights[self.world.rank]
        # Outside of a loader no weights are known: the ranks' shares then count alike.
        share = torch.where(total > 0, own_weight / total, 1 / self.world.size)
        self.divide(backward_pass.part, torch.where(share > 0, share, 1.0))
        return weights

    def begin_step(self, optimizer: Optimizer) -> None:
        """See `Exchange.begin_step`."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter not in self._anchors:
                self._anchors[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def synchronise(self, differing: Sequence[Tensor]) -> None:
        """See `Exchange.synchronise`. Whole numbers become rank 0's."""
        tensors = dict.fromkeys([*self._anchors, *differing])
        numbers = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        for bucket in lay_out(enumerate(numbers), _BUCKET_BYTES):  # type: ignore[arg-type]  # buffers as well
            flat = bucket.allocate()
            pairs = [(tensor, bucket.view(flat, number)) for number, tensor in enumerate(bucket.parameters)]
            for tensor, mean in pairs:
                # Not the weights, whose mean over three equal ones differs by rounding.
                mean.copy_(self._anchors[tensor] - tensor if tensor in self._anchors else tensor)
            self.world.sum_(flat).div_(self.world.size)
            for tensor, mean in pairs:
                tensor.copy_(self._step(tensor, mean) if tensor in self._anchors else mean)
        self.world.broadcast([tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())])
        self.drift = 0
        self._anchors.clear()  # a loop may change the weights of all ranks before the next step, as by load_best

    def _step(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return a parameter's weights after an outer step."""
        if self._momentum:
            if parameter not in self._velocities:
                self._velocities[parameter] = torch.zeros_like(parameter)
            velocity = self._velocities[parameter].mul_(self._momentum).add_(gradient)
            gradient = gradient + self._momentum * velocity
        return self._anchors[parameter] - self._lr * gradient

    def evidence(self, digest: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Tensor]:
        """See `Exchange.evidence`."""
        return {f"outer {name}": tensor for name, tensor in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """See `Exchange.state`. The anchors are the model's own weights, since a save exchanges them."""
        velocities = self._velocities
        return {f"momentum/{name}": velocities[key] for key, name in self.names().items() if key in velocities}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Exchange.load_state`."""
        names = {f"momentum/{name}": parameter for parameter, name in self.names().items()}
        self._velocities = {names[name]: tensor.to(names[name], copy=True) for name, tensor in tensors.items()}
