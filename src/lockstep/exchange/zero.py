"""Optimizer state divided among the ranks, as in stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

Gradients are summed as by `AllReduce`, and every rank has all of them, so that clipping and scaling see what they would
see under ddp. Each parameter has one owner: in `optimizer.step()` a rank steps its own parameters, since the gradients
of all others are hidden, and then receives the others' new weights. State exists for a rank's own parameters only. An
optimizer that treats each parameter alone has the bits that it has under ddp.

Weights are equal on all ranks whatever their gradients and settings were. So the replica check compares these: the
optimizers' settings, and a running sum over one parameter's gradient in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _torch
from ..checkpoint.state import parameters_of
from ..errors import RequestError
from ..world.world import World
from .allreduce import AllReduce
from .base import Exchange
from .buckets import Bucket, lay_out
from .powersgd import PowerSGD

_SMALL_BYTES = 1 << 20
"""Smaller parameters travel in buckets of this size, larger ones in place."""


class Zero1(AllReduce):
    """Exchange among several ranks, each of which has a part of the optimizers' state."""

    compared = "weights, sums of gradients, optimizer settings, synchronised statistics, averaged weights"
    divides_state = True

    def __init__(self, world: World, *, wire: torch.dtype | PowerSGD | None = None) -> None:
        super().__init__(world, wire=wire)
        self._owners: dict[nn.Parameter, int] = {}
        self._loads = [0] * world.size
        """Bytes of each rank's own parameters."""
        self._hooks_of_step: dict[Optimizer, list[Any]] = {}
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients of other ranks' parameters, during a step."""
        self._layouts_of_step: dict[Optimizer, tuple[list[bool], list[tuple[int, Bucket]]]] = {}
        """Which parameters trained in an optimizer's last step, and (owner, bucket) of these."""
        self._steps, self._gradient_sum = 0, torch.zeros((), dtype=torch.float64, device=world.device)
        self._is_muted = False

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Exchange.take`."""
        for optimizer in optimizers:
            package = type(optimizer).__module__.split(".")
            is_known = package[:2] == ["torch", "optim"] or package[0] == __name__.partition(".")[0]
            if not is_known:
                raise RequestError(
                    f"--strategy zero1 cannot divide the state of {type(optimizer).__name__}: it takes torch.optim's "
                    "optimizers, which treat each parameter alone; take --strategy ddp."
                )
            self._assign(sorted(parameters_of(optimizer), key=lambda parameter: -parameter.numel()))
            for parameter in parameters_of(optimizer):
                if not self.owns(parameter):
                    optimizer.state.pop(parameter, None)
            self._hooks_of_step[optimizer] = _torch.hook_step(optimizer, self._hide_others, self._send_weights)
            optimizer.register_state_dict_pre_hook(  # stays: the state remains divided
                lambda _: self._refuse_part("optimizer.state_dict() under --strategy zero1")
            )

    def owns(self, parameter: nn.Parameter) -> bool:
        """See `Exchange.owns`."""
        return self._owners.get(parameter) == self.world.rank

    @contextmanager
    def whole_state(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """See `Exchange.whole_state`."""
        received: list[tuple[Optimizer, nn.Parameter]] = []
        for optimizer in optimizers:
            for index, entries in self._gather_facts(optimizer).items():
                parameter = parameters_of(optimizer)[index]
                state = optimizer.state.get(parameter, {})
                values = {name: self._to_main(state.get(name), fact, parameter) for name, fact in entries.items()}
                if self.world.is_main and not self.owns(parameter):
                    optimizer.state[parameter] = values
                    received.append((optimizer, parameter))
        try:
            with super().whole_state(optimizers):
                yield
        finally:
            for optimizer, parameter in received:
                del optimizer.state[parameter]

    def close(self) -> None:
        """See `Exchange.close`."""
        super().close()
        while self._hooks_of_step:
            for handle in self._hooks_of_step.popitem()[1]:
                handle.remove()

    def begin_step(self, optimizer: Optimizer) -> None:
        """See `Exchange.begin_step`."""
        if optimizer in self._hooks_of_step:
            _torch.move_innermost(self._hooks_of_step[optimizer])

    def silent(self) -> Exchange | None:
        """See `Exchange.silent`: each rank still steps its own parameters alone."""
        self._is_muted = True
        return super().silent()

    def evidence(self, digest: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Tensor]:
        """See `Exchange.evidence`."""
        return {"optimizer/gradients": self._gradient_sum}

    def _assign(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter without an owner to the rank with the fewest bytes."""
        for parameter in parameters:
            if parameter not in self._owners:
                if parameter not in set(self.parameters):
                    raise RequestError(
                        f"An optimizer has got a parameter of shape {tuple(parameter.shape)} that no model had at "
                        "session.prepare: prepare the model after the last change of its layers."
                    )
                rank = self._loads.index(min(self._loads))
                self._owners[parameter] = rank
                self._loads[rank] += parameter.nbytes

    def _hide_others(self, optimizer: Optimizer) -> None:
        """Hide the gradients of other ranks' parameters."""
        parameters = parameters_of(optimizer)
        self._assign(parameters)  # of a parameter group that the loop has added
        with_gradient = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if with_gradient:
            gradient = with_gradient[self._steps % len(with_gradient)][1]
            # Of a step that a loss scale has made overflow, only that it did.
            self._gradient_sum += gradient.detach().sum().abs().nan_to_num(nan=1.0, posinf=2.0)
        self._steps += 1
        for parameter, gradient in with_gradient:
            if not self.owns(parameter):
                self._hidden.append((parameter, gradient))
                parameter.grad = None

    @torch.no_grad()
    def _send_weights(self, optimizer: Optimizer) -> None:
        """Show the hidden gradients; send this rank's new weights, and receive the others'."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        if self._is_muted:
            return
        with self.world.progress.during("broadcast"):
            sent = [self._send(owner, bucket) for owner, bucket in self._lay_out_step(optimizer)]
            for bucket, flat, work in sent:
                work.wait()
                if flat is not None:
                    self._unpack(bucket, flat)

    def _lay_out_step(self, optimizer: Optimizer) -> list[tuple[int, Bucket]]:
        """Return (owner, bucket) of the parameters that train: alike on all ranks, whatever gradients a rank has."""
        parameters = parameters_of(optimizer)
        # A frozen one may still have a gradient.
        trains = [parameter.requires_grad or parameter.grad is not None for parameter in parameters]
        laid_out, layout = self._layouts_of_step.get(optimizer, ([], []))
        if trains != laid_out:
            trained, layout = list(compress(parameters, trains)), []
            for owner in range(self.world.size):
                numbered = [pair for pair in enumerate(trained) if self._owners[pair[1]] == owner]
                large = [pair for pair in numbered if pair[1].nbytes >= _SMALL_BYTES]
                small = [pair for pair in numbered if pair[1].nbytes < _SMALL_BYTES]
                layout += [(owner, bucket) for bucket in (*lay_out(large, 0), *lay_out(small, _SMALL_BYTES))]
            self._layouts_of_step[optimizer] = trains, layout
        return layout

    def _send(self, owner: int, bucket: Bucket) -> tuple[Bucket, Tensor | None, dist.Work]:
        """Begin to broadcast a bucket's weights; the flat tensor is None for weights that travel in place."""
        flat, data = None, bucket.in_place()
        if data is None:
            flat = data = bucket.allocate()
            if owner == self.world.rank:
                views = [bucket.view(flat, number) for number in range(len(bucket.parameters))]
                _torch.foreach_copy_(views, [parameter.detach() for parameter in bucket.parameters])
        work = dist.broadcast(data, group=self.world.group, group_src=owner, async_op=True)
        assert work is not None
        return bucket, flat, work

    def _unpack(self, bucket: Bucket, flat: Tensor) -> None:
        if not self.owns(bucket.parameters[0]):
            views = [bucket.view(flat, number) for number in range(len(bucket.parameters))]
            _torch.foreach_copy_([parameter.detach() for parameter in bucket.parameters], views)
        bucket.release(flat)

    def _gather_facts(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Return every parameter's state by its index: {name: {dtype, shape} or the number} (*collective*)."""
        facts = {
            index: {name: _describe(value) for name, value in optimizer.state[parameter].items()}
            for index, parameter in enumerate(parameters_of(optimizer))
            if self.owns(parameter) and parameter in optimizer.state
        }
        return {int(index): entries for of_rank in self.world.gather(facts) for index, entries in of_rank.items()}

    def _to_main(self, value: Any, fact: Any, parameter: nn.Parameter) -> Any:
        """Send an entry of a parameter's state from its owner to rank 0; return it there, on the host."""
        owner = self._owners[parameter]
        if not isinstance(fact, Mapping) or owner == 0:
            return value if owner == self.world.rank else fact
        with self.world.progress.during("gather"):  # one phase per tensor: a large state may take long
            if owner == self.world.rank:
                dist.send(value.detach().cpu().contiguous(), group=self.world.group, group_dst=0)
            elif self.world.is_main:
                value = torch.empty(fact["shape"], dtype=getattr(torch, fact["dtype"]))
                dist.recv(value, group=self.world.group, group_src=owner)
        return value


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape]}
    return value
