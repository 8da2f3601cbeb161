"""The parts of torch that lockstep uses and torch does not promise.

`tests/ranks/test_private.py` says what breaks without each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import multiprocessing.queues
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # the base of all of torch's, and of users' own
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode  # documented, in a module that is not
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:  # torch.distributed has them in public, unseen by type checkers
    from torch._C import _distributed_c10d as _stores
else:
    import torch.distributed as _stores

__all__ = ["BatchNorm", "TorchDispatchMode"]

FileStore = _stores.FileStore
HashStore = _stores.HashStore
PrefixStore = _stores.PrefixStore
Store = _stores.Store
TCPStore = _stores.TCPStore

foreach_copy_ = torch._foreach_copy_
"""One operation on a list of tensors, in a few kernels, as torch's optimizers use it; else there is one a tensor."""


def is_viewed(tensor: Tensor) -> bool:
    """Return whether another tensor shares the memory of `tensor`, whose base it is."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # `tensor` and `storage`


Hooks = Sequence[Callable[[Any], Any]]


class UserHooks:
    """A user's hooks on parameters."""

    def __init__(self) -> None:
        self._none_at = (-1, 0)  # hooks that torch had ever registered, and parameters, when no parameter had one

    @contextlib.contextmanager
    def removed(
        self, parameters: Sequence[Tensor], own: Mapping[Any, Any]
    ) -> Iterator[list[tuple[Tensor, Hooks, Hooks]]]:
        """Take the hooks off parameters until the block ends. `own` are handles of hooks that stay, by parameter.

        Yields each parameter with its hooks on the gradient, and those after its accumulation. Looks at the parameters
        (0.1 µs each) only where torch may have registered a hook since none had one.
        """
        taken: list[tuple[Any, dict[int, Any]]] = []
        hooks: list[tuple[Tensor, Hooks, Hooks]] = []
        staying = int(bool(own))  # all that train have one, or none has
        known = RemovableHandle.next_id, len(parameters)
        for parameter in parameters if known != self._none_at else ():
            before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if before or (after and len(after) > staying):
                stays = own[parameter].id if parameter in own else None
                pair = [{key: hook for key, hook in (held or {}).items() if key != stays} for held in (before, after)]
                hooks.append((parameter, [*pair[0].values()], [*pair[1].values()]))
                taken += [(held, items) for held, items in zip((before, after), pair, strict=True) if items]
        if not hooks:
            self._none_at = known
        for held, items in taken:
            for key in items:
                del held[key]
        try:
            yield hooks
        finally:
            for held, items in taken:
                held.update(items)


_COMPILER = "torch._dynamo"
COMPILERS = {f"{_COMPILER}.convert_frame", "torch._inductor.compile_fx"}
"""Modules with a frame on the stack while torch compiles, and none while it runs what it has compiled."""
_KEPT = "__dynamo_disable"  # where `torch._compile._disable_dynamo` keeps what it calls in place of a function


def spare_compiler() -> None:
    """Have optimizers not import torch's compiler.

    Its import takes nearly as long as torch's own. They import it to exclude some of their methods from compilation.
    As long as no other code has imported it, nothing is compiled, and the methods are called as they are; after that
    all is as torch has it. Where torch keeps this in another way, a start takes a second longer.
    """
    for owner in (Optimizer,):
        for method in vars(owner).values():
            for each in (method, getattr(method, "__wrapped__", None)):  # a context manager wraps such a method
                name = getattr(getattr(each, "__code__", None), "co_qualname", "")
                if each is not None and name == "_disable_dynamo.<locals>.inner":
                    setattr(each.__wrapped__, _KEPT, _plain(each.__wrapped__, each))


def _plain(within: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if _COMPILER not in sys.modules:
            return within(*given, **named)
        vars(within).pop(_KEPT, None)
        return method(*given, **named)

    return call


@torch.no_grad()
def step(optimizer: Optimizer) -> None:
    """Step the optimizer without torch's wrappers.

    These are a profiler's mark, hooks, and marks for the compiler, which take time in each step, and import the
    compiler too. Of an optimizer that is wrapped in another way, as much is left out as `inspect.unwrap` takes off.
    """
    kind: Any = type(optimizer)
    _unwrapped_step(kind)(optimizer)


@functools.cache
def _unwrapped_step(kind: Any) -> Callable[[Optimizer], Any]:
    found: Callable[[Optimizer], Any] = inspect.unwrap(kind.step)
    return found


def step_with_hooks(optimizer: Optimizer) -> Any:
    """Step as `optimizer.step()`; as `step` for torch's own without hooks."""
    kind, module = type(optimizer), sys.modules[Optimizer.__module__]
    hooked = any(getattr(optimizer, f"_optimizer_step_{when}_hooks", True) for when in ("pre", "post"))
    hooked |= any(getattr(module, f"_global_optimizer_{when}_hooks", True) for when in ("pre", "post"))
    if hooked or optimizer.defaults.get("differentiable") or not kind.__module__.startswith("torch.optim."):
        return kind.step(optimizer)
    return step(optimizer)


@contextlib.contextmanager
def as_default_group(group: Any) -> Iterator[None]:
    """Make `group` the only process group that torch knows of.

    A step of the user's own may ask for the world's size, or exchange something, where one process computes alone.
    """
    whole = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(whole)


def arguments(operator: Any) -> Sequence[Any]:
    """Return an operator's arguments. Each has its name, and whether the operator writes to it (`alias_info`)."""
    found: Sequence[Any] = operator._schema.arguments
    return found


def inner(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` was given; another one itself."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called. A copy of such a module calls the original's code."""
    return module._compiled_call_impl is not None


def replicate(module: nn.Module) -> nn.Module:
    """Copy the module tree, with shared parameters and buffers of its own.

    torch's own `replicate` copies to GPUs alone.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for each in module.modules():
        copy = each.__new__(type(each))
        # What lockstep has put in the place of a method knows its object.
        copy.__dict__ = {
            name: moved_to(copy) if (moved_to := getattr(value, "moved_to", None)) else value
            for name, value in each.__dict__.items()
        }
        copy._parameters = each._parameters.copy()
        copy._buffers = {name: None if held is None else held.clone() for name, held in each._buffers.items()}
        copies[each] = copy
    for each, copy in copies.items():
        copy._modules = {name: None if child is None else copies[child] for name, child in each._modules.items()}
    return copies[module]


def end_workers(iterator: Any) -> None:
    """End a DataLoader's workers now, and wait for them.

    Otherwise they live as long as the iterator, which an exception's trace may hold.
    """
    if end := getattr(iterator, "_shutdown_workers", None):
        end()


def on_unsent(report: Callable[[BaseException], None]) -> None:
    """Have this process end, after `report`, where a queue cannot send an object, such as a batch with a lambda.

    Python's queues drop it and go on: whoever waits for it would wait for ever.
    """

    def end(error: BaseException, item: object) -> None:
        report(error)
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end)  # type: ignore[attr-defined]


def set_timeout(limit: timedelta) -> None:
    """Set the time limit of collectives: in public from torch 2.15 on."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(limit)


def plain_rendezvous(state: bytes) -> Any:
    """Unpickle the state of a dynamic rendezvous (round, participants, closed).

    torch itself unpickles any bytes in the agents' store: a stranger who reaches that port could have every agent run
    code. Here the bytes may name the few types that such a state is made of, and nothing else. Raises
    `pickle.UnpicklingError` for others, and so refuses to begin where torch keeps its state in another way.
    """
    return _Plain(io.BytesIO(state)).load()


class _Plain(pickle.Unpickler):
    _RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    _KNOWN = frozenset(
        {
            *((_RENDEZVOUS, "_RendezvousState"), (_RENDEZVOUS, "_NodeDesc")),
            *(("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta")),
            *(("builtins", "set"), ("builtins", "object"), ("copyreg", "_reconstructor")),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def mode_stack(mode: TorchDispatchMode | TorchFunctionMode) -> Sequence[Any]:
    """Return the active modes of this kind, the innermost last."""
    stack: Any = overrides._get_current_function_mode_stack
    if isinstance(mode, TorchDispatchMode):
        stack = _python_dispatch._get_current_dispatch_mode_stack
    modes: Sequence[Any] = stack()
    return modes
