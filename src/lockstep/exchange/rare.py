"""Weights exchanged every few steps, in place of gradients in each: local SGD, and DiLoCo.

Every rank steps by its own gradients, those of the mean over its share of each global batch. After `every` steps
(`--exchange-every`), and wherever weights are read that are to be those of the run (the end of a pass over the data, an
evaluation, a save), the ranks exchange: then their weights are the same bits again. Local SGD (Stich 2019, arXiv
1805.09767) takes the mean of the ranks' weights. DiLoCo (Douillard et al. 2023, arXiv 2311.08105) takes the mean of
what the ranks have moved since the last exchange for a gradient, and makes a step of Nesterov momentum with it.

Of all else that differs between ranks then, such as the optimizers' state, averaged weights and BatchNorm's statistics,
all take the mean. (DiLoCo's authors leave each worker its optimizer's state; here a checkpoint has one.) Before a step
the ranks exchange their headers alone, tens of bytes, so that all train the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..world.world import World
from .allreduce import AllReduce
from .base import Exchange, Part, Pass
from .buckets import lay_out

_BUCKET_BYTES = 25 << 20
_OUTER_LR, _OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo's, section 3.1


class LocalSGD(AllReduce):
    """Steps by each rank's own gradients; the mean of the ranks' weights every few of them."""

    is_rare = True

    def __init__(self, world: World, *, every: int) -> None:
        super().__init__(world)
        self._every, self._steps = every, 0
        self.settings = {"exchange-every": every}

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """See `Exchange.backward`: `.grad` is this rank's own, times as much as makes its share the global batch."""
        if self.is_plain:
            return super().backward(backward_pass)
        header = self._start_header(backward_pass.header, backward_pass.weight) if backward_pass.is_last else None
        if backward_pass.zeroed is True:  # a gradient of zero, so that optimizers step on all ranks alike
            zeroed = torch.ones((), dtype=torch.bool, device=self.world.device)
            backward_pass = dataclasses.replace(backward_pass, zeroed=zeroed)
        Exchange.backward(self, backward_pass)
        if header is None:
            return None
        rows, work = header
        with self.world.progress.during("all-gather"):
            if work is not None:
                work.wait()
        self._check(rows, is_read=False)
        weights = rows[:, 4]
        total, own = weights.sum(), weights[self.world.rank]
        # Outside of a loader no weights are known: the ranks' shares then count alike.
        share = torch.where(total > 0, own / total, 1 / self.world.size)
        Exchange.divide(self, backward_pass.part, torch.where(share > 0, share, 1.0))
        return weights

    def divide(self, part: Part, divisor: Tensor) -> None:
        """See `Exchange.divide`."""
        if self.is_plain:
            super().divide(part, divisor)
        else:
            Exchange.divide(self, part, divisor)

    def count_step(self, *, is_new: bool) -> None:
        """See `Exchange.count_step`."""
        self._steps += is_new
        self.has_drifted = True

    def is_due(self, *, is_complete: bool) -> bool:
        """See `Exchange.is_due`. An exchange is overdue in loops that are never known to have ended a step."""
        return self._steps > self._every or (self._steps == self._every and is_complete)

    @torch.no_grad()
    def synchronise(self, differing: Sequence[Tensor]) -> None:
        """See `Exchange.synchronise`. Whole numbers become rank 0's."""
        tensors = list(dict.fromkeys([*self._moving(), *differing]))
        numbers = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        for bucket in lay_out(enumerate(numbers), _BUCKET_BYTES):  # type: ignore[arg-type]  # buffers as well
            flat = bucket.allocate()
            views = [bucket.view(flat, number) for number in range(len(bucket.parameters))]
            for tensor, view in zip(bucket.parameters, views, strict=True):
                view.copy_(self._sent(tensor))
            self.world.sum_(flat).div_(self.world.size)
            for tensor, view in zip(bucket.parameters, views, strict=True):
                self._receive(tensor, view)
        self.world.broadcast([tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())])
        self._steps, self.has_drifted = 0, False

    def _moving(self) -> Sequence[Tensor]:
        """Return the parameters that are exchanged even if no rank's differs."""
        return ()

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor of which all ranks take the mean."""
        return tensor

    def _receive(self, tensor: Tensor, mean: Tensor) -> None:
        tensor.copy_(mean)


class DiLoCo(LocalSGD):
    """Steps by each rank's own gradients, and every few of them an outer step of all ranks."""

    def __init__(self, world: World, *, every: int) -> None:
        super().__init__(world, every=every)
        self.has_state = True
        self._anchors: dict[Tensor, Tensor] = {}
        """The weights of the last exchange, of parameters that have trained since."""
        self._momentum: dict[Tensor, Tensor] = {}

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """See `LocalSGD.backward`."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter not in self._anchors:
                self._anchors[parameter] = parameter.detach().clone()
        return super().backward(backward_pass)

    def synchronise(self, differing: Sequence[Tensor]) -> None:
        """See `LocalSGD.synchronise`."""
        super().synchronise(differing)
        self._anchors.clear()  # a loop may change the weights of all ranks before the next step, as by load_best

    def evidence(self) -> dict[str, Tensor]:
        """See `Exchange.evidence`."""
        return {f"outer {name}": tensor for name, tensor in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """See `Exchange.state`. The weights of the last exchange are the model's own, since a save exchanges."""
        names = self.names()
        return {f"momentum/{name}": self._momentum[key] for key, name in names.items() if key in self._momentum}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Exchange.load_state`."""
        names = self.names()
        self._anchors.clear()
        self._momentum = {
            parameter: tensors[f"momentum/{name}"].to(parameter, copy=True)
            for parameter, name in names.items()
            if f"momentum/{name}" in tensors
        }

    def _moving(self) -> Sequence[Tensor]:
        return [*self._anchors]

    def _sent(self, tensor: Tensor) -> Tensor:
        # Not the weights, whose mean over three equal ones differs by rounding.
        return self._anchors[tensor] - tensor if tensor in self._anchors else tensor

    def _receive(self, tensor: Tensor, mean: Tensor) -> None:
        if tensor in self._anchors:
            if tensor not in self._momentum:
                self._momentum[tensor] = torch.zeros_like(tensor)
            momentum = self._momentum[tensor].mul_(_OUTER_MOMENTUM).add_(mean)
            mean = self._anchors[tensor] - _OUTER_LR * (mean + _OUTER_MOMENTUM * momentum)
        tensor.copy_(mean)
