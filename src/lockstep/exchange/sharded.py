"""Weights, gradients and optimizer state divided among the ranks, by torch's `fully_shard` (FSDP2).

Blocks of the model gather their weights just before they compute, and free them after. A block's gradients are summed
over the ranks, each receiving its shard, while the backward pass still runs; under accumulation in the last micro-batch
alone. The session weighs the sums, as in ddp. With a shard size, so many neighbouring ranks divide the weights, and
these groups are replicas of each other (hybrid sharding).

Only hybrid sharding has replicas of a shard. The replica check compares the optimizers' settings, statistics, and the
shards of different groups.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Adafactor, Adam, Muon, Optimizer, SparseAdam

from .. import _torch, hardware
from ..checkpoint.shards import is_shard, local, shard_as
from ..errors import RequestError, RunError
from ..world.world import World, new_group
from .base import Header, Part, Pass, check_match
from .blocks import check_divisible, check_found, find_blocks, inner_classes, with_forward
from .compress import reduce_scatter
from .ranks import Ranks

_NOT_BY_ELEMENT = (Adafactor, Muon, SparseAdam)
"""Optimizers that take rows or whole matrices; of shards, Muon's bfloat16 products also round otherwise."""


class FullyShard(Ranks):
    """Exchange among several ranks, each of which has a shard of every parameter."""

    compared = "optimizer settings, synchronised statistics, shards of different groups"
    divides_state = True
    checks_first = True

    def __init__(
        self,
        world: World,
        *,
        blocks: Sequence[str] = (),
        shard_size: int | None = None,
        reshards: bool = True,
        wire: torch.dtype | None = None,
    ) -> None:
        """`blocks` are patterns of class names (see `find_blocks`); `shard_size` is the ranks that divide the weights.

        Unless it `reshards`, weights stay gathered from a forward pass to its backward pass. `wire` is the type in
        which gradients travel; None for their own.

        Raises `RequestError` unless `shard_size` divides the ranks into equal groups of two or more.
        """
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RequestError(
                f"--strategy fsdp needs a newer torch than {torch.__version__}: it cannot sum unused layers."
            )
        super().__init__(world)
        hardware.return_freed_memory()  # kept memory is in pieces: a rank took 2.7 GiB where ddp's took 1.8
        self._patterns, self._shard_size, self._reshards = blocks, shard_size or world.size, reshards
        self._reduce_scatter: Any = partial(reduce_scatter, wire=wire) if wire else dist.reduce_scatter_tensor
        if world.size % self._shard_size or self._shard_size == 1:
            raise RequestError(
                f"--shard-size {shard_size} does not divide {world.size} ranks into equal groups of 2 or more."
            )
        self._mesh: DeviceMesh | None = None
        self._pass: Pass | None = None  # under way
        self._blocks = 0  # of all models
        self._classes: dict[str, bool] = {}  # of the modules within all models (see `inner_classes`)
        self._numbers = itertools.count()  # of the divided modules of all models
        self._order = 0  # a checksum of the blocks whose collectives ran, in order, since the ranks compared it
        self._roots: list[FSDPModule] = []
        self._gathered: list[FSDPModule] = []  # whose weights may stay gathered after a forward pass
        self._unsharded: list[nn.Parameter] = []
        """What backward passes see in place of the sharded parameters."""
        self._undivided: dict[int, nn.Parameter] = {}  # by index: scalars, and those outside of any forward pass
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}  # parameters before and after, until optimizers are known

    def attach(self, model: nn.Module) -> None:
        """Divide a model's parameters, and add them (*collective*). Raises as `shard` does."""
        self.shard(model)
        super().attach(model)
        indices = {parameter: index for index, parameter in enumerate(self.parameters)}
        for parameter, index in indices.items():
            if parameter not in self._hooks:
                note = partial(_refuse, parameter) if is_shard(parameter) else partial(self._note, index)
                self._hooks[parameter] = _hook(parameter, note)
                if not is_shard(parameter):
                    self._undivided[index] = parameter
        names = dict(model.named_parameters())
        for module in model.modules():  # the root first, as torch demands
            if isinstance(module, FSDPModule):
                module.unshard()
                for name, parameter in model.named_parameters():
                    if parameter is not names[name]:
                        self._unsharded.append(parameter)
                        _hook(parameter, partial(self._note, indices[names[name]]))
                module.reshard()
                if not self._reshards:
                    self._gathered.append(module)
                    # Weights without a backward pass to follow would be stale in a later forward pass.
                    module.register_forward_pre_hook(
                        lambda module, _: module.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
                    )

    def shard(self, model: nn.Module) -> None:
        """See `Exchange.shard`.

        A model without blocks is one itself. Raises `RequestError` for one that torch cannot divide.
        """
        blocks = find_blocks(model, self._patterns)
        self._classes |= inner_classes(model)
        self._blocks += len(blocks)
        parameters = dict(model.named_parameters())
        check_divisible(model, blocks, parameters)
        scalars = {parameter for parameter in parameters.values() if not parameter.dim()}
        for parameter in parameters.values():
            parameter.data = parameter.data.contiguous()  # torch divides no other memory order
        mesh = self._mesh = self._mesh or self._make_mesh()
        roots = list(with_forward(model))
        for module in dict.fromkeys((*blocks, *roots)):
            # The root too: it would keep its weights after an evaluation, and the next one would use those.
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                note = partial(self._note_block, next(self._numbers))
                comms: Any = _Noted(note, dist.all_gather_into_tensor), _Noted(note, self._reduce_scatter)
                module.set_custom_all_gather(comms[0])
                module.set_custom_reduce_scatter(comms[1])
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_reduce_scatter_unused_params(True, recurse=False)  # ranks may use different parameters
                register_hook: Any = module.register_state_dict_pre_hook
                register_hook(lambda *_: self._refuse_part("model.state_dict() under --strategy fsdp"))  # stays
                if module in roots:
                    self._roots.append(module)
        self._replaced |= {parameters[name]: parameter for name, parameter in model.named_parameters()}

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Exchange.take`. Raises as `check_found`, and for an optimizer that needs whole tensors."""
        check_found(self._blocks, self._classes, self._patterns)
        for optimizer in optimizers:
            if isinstance(optimizer, _NOT_BY_ELEMENT):
                raise RequestError(
                    f"--strategy fsdp divides tensors, and {type(optimizer).__name__} steps on whole ones; take "
                    "--strategy ddp, or an optimizer such as AdamW."
                )
            self._replace_in(optimizer)
        references = [weakref.ref(old) for old, new in self._replaced.items() if old is not new]
        self._replaced.clear()
        if any(reference() is not None for reference in references):
            gc.collect()
        if shapes := [tuple(old.shape) for reference in references if (old := reference()) is not None]:
            raise RequestError(
                "--strategy fsdp replaces the model's parameters by shards in session.prepare, and this script still "
                f"has {len(shapes)} of before (the first: shape {shapes[0]}), in a list or an optimizer: prepare the "
                "model first, then make what takes its parameters."
            )

    def _replace_in(self, optimizer: Optimizer) -> None:
        """Have an optimizer train the shards. No local variable of the caller may refer to what they replace."""
        for group in optimizer.param_groups:
            if group.get("fused") and not isinstance(optimizer, Adam):
                self.settings["fused"] = "off, as torch has fused steps of shards for Adam alone"
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]
        state: Any = optimizer.state
        for parameter in [parameter for parameter in state if parameter in self._replaced]:
            entries, shard = state.pop(parameter), self._replaced[parameter]
            state[shard] = {name: shard_as(shard, value) for name, value in entries.items()}

    def begin_step(self, optimizer: Optimizer) -> None:
        """See `Exchange.begin_step`: torch's fused steps of shards are Adam's alone."""
        self._reshard()
        if not isinstance(optimizer, Adam):
            _torch.separate_step(optimizer)

    def _reshard(self) -> None:
        """Free weights that a forward pass without a backward pass has left gathered: they would be stale."""
        for module in self._gathered:
            module.reshard()

    @contextmanager
    def whole_state(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """See `Exchange.whole_state`: shards, which their reader gathers one at a time, and may change."""
        self._reshard()
        with super().whole_state(optimizers):
            yield

    def silent(self) -> None:
        """See `Exchange.silent`: each step exchanges weights."""

    @property
    def leaves(self) -> list[nn.Parameter]:
        """See `Exchange.leaves`."""
        return [*self.parameters, *self._unsharded]

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """See `Exchange.backward`."""
        part = backward_pass.part
        part.present = part.present or bytearray(len(self.parameters))
        for root in self._roots:
            root.set_requires_gradient_sync(backward_pass.is_last)
        self._pass = backward_pass
        try:  # `_note` sets to 0 what does not count
            weights = super().backward(dataclasses.replace(backward_pass, zeroed=False, weightless=False))
        finally:
            self._pass = None
        if weights is not None:
            with self.world.progress.during("all-reduce"):
                self._finish(part, self._header(backward_pass))
        return weights

    def evidence(self, digest: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Tensor]:
        """See `Exchange.evidence`: digests of a group's shards, and each rank's norm, which shows NaNs."""
        shards = [local(parameter) for parameter in self.parameters]
        norm = nn.utils.get_total_norm([shard for shard in shards if shard.numel()]).to(self.world.device).double()
        digests, norms = self.world.stack(torch.stack([digest(shards), norm.view(torch.int64)])).unbind(1)
        group = digests.view(-1, self._shard_size)[self.world.rank // self._shard_size]
        return {"model/shards": group, "model/norms": norms.contiguous().view(torch.float64)}

    def _make_mesh(self) -> DeviceMesh:
        device, size = self.world.device.type, self._shard_size
        if size == self.world.size:
            return DeviceMesh.from_group(new_group(), device)
        return init_device_mesh(device, (self.world.size // size, size), mesh_dim_names=("replicas", "shards"))

    def _note_block(self, number: int) -> None:
        self._order = zlib.crc32(number.to_bytes(4), self._order)

    def _note(self, index: int, gradient: Tensor) -> Tensor | None:
        """Note a gradient before torch adds it; return zeros for a rank without samples."""
        backward_pass = self._pass
        if backward_pass is None:
            return None
        if backward_pass.zeroed is True:
            return torch.zeros_like(gradient)
        backward_pass.part.present[index] = True
        if backward_pass.zeroed is False and backward_pass.weightless is False:
            return None
        gradient = gradient.clone()
        backward_pass.clear_(gradient)
        return gradient

    def _finish(self, part: Part, header: Header) -> None:
        """Sum the gradients of undivided parameters; drop those that no rank has (*collective*)."""
        if any(parameter.grad is not None for parameter in self._unsharded):
            raise RequestError(
                "--strategy fsdp sums gradients in a global batch's last micro-batch, whose loss here does not depend "
                "on all weights that an earlier one's does; take --strategy zero1, or no accumulation."
            )
        # Through the host: on a GPU, it need not wait for the backward pass.
        rows = self.world.stack(torch.tensor([*part.present, *header, self._order]))
        check_match(rows[:, -4:-1].tolist(), self.world.progress.step)
        self._order = 0
        if len(set(rows[:, -1].tolist())) > 1:
            raise RunError(
                f"At step {self.world.progress.step}, ranks have run different blocks of the model, or in another "
                "order, and got each other's weights: have all of them run each block, name a class that contains the "
                "layers that some of them skip by --shard-modules, or take --strategy zero1"
            )
        used = rows.amax(0).tolist()
        undivided = [parameter for index, parameter in self._undivided.items() if used[index]]
        if undivided:  # all in one message
            gradients = [torch.zeros_like(item) if item.grad is None else item.grad for item in undivided]
            flat = torch.cat([gradient.double().view(-1) for gradient in gradients])
            totals = torch.split(self.world.stack(flat).sum(0), [parameter.numel() for parameter in undivided])
            for parameter, total in zip(undivided, totals, strict=True):
                parameter.grad = total.view_as(parameter).to(parameter.dtype)
        for parameter, is_used in zip(self.parameters, used[:-4], strict=True):
            if not is_used:
                parameter.grad = None


class _Noted:
    """A block's collective, as torch's own, that notes its place in their order.

    Ranks that run different blocks of one size would exchange the weights of one for those of another.
    """

    def __init__(self, note: Callable[[], None], send: Callable[..., dist.Work | None]) -> None:
        self._note, self._send = note, send

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> dist.Work | None:
        self._note()
        return self._send(output_tensor, input_tensor, **options)


def _hook(parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook on a parameter's gradient, also for a frozen one, which may thaw later."""
    is_trained, register = parameter.requires_grad, cast(Any, parameter.register_hook)
    parameter.requires_grad_(True)
    handle = register(hook)
    parameter.requires_grad_(is_trained)
    return handle


def _refuse(shard: Tensor, gradient: Tensor) -> None:
    raise RequestError(
        f"--strategy fsdp: the loss depends on a weight of shape {tuple(shard.shape)} outside of the model's forward, "
        "where each rank has its shard alone, so that ranks would train it apart: use it in forward, or take zero1."
    )
