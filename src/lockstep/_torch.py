"""Private API of torch, and a name of Lightning: the parts that lockstep uses and they do not promise.

`tests/ranks/test_private.py` shows the consequences of a missing part.
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # the base class of torch's and users' layers
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode  # documented, in a private module
from torch.utils.data._utils.fetch import _IterableDatasetFetcher as IterableFetcher
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapFetcher
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:  # public in torch.distributed, but type checkers do not see them there
    from torch._C import _distributed_c10d as _stores
else:
    import torch.distributed as _stores

__all__ = ["BatchNorm", "IterableFetcher", "MapFetcher", "TorchDispatchMode"]

FileStore = _stores.FileStore
HashStore = _stores.HashStore
PrefixStore = _stores.PrefixStore
Store = _stores.Store
TCPStore = _stores.TCPStore
DebugLevel, get_debug_level = _stores.DebugLevel, _stores.get_debug_level

foreach_copy_ = torch._foreach_copy_
"""Copy of a list of tensors in a few kernels, as torch's optimizers do, instead of one kernel per tensor."""


def loader_copied_by_lightning() -> Any:
    """Return the loader that Lightning is replacing by a copy at this moment, as to give it a sampler; or None."""
    calls = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "_reinstantiate_wrapped_cls")
    call = next(calls, None)
    return call.f_locals.get("orig_object") if call is not None else None


def is_viewed(tensor: Tensor) -> bool:
    """Return whether another tensor is a view of `tensor`."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # `tensor` and `storage`


def has_hooks(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient, or after its accumulation."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


Hooks = Sequence[Callable[[Any], Any]]


class UserHooks:
    """A user's hooks on parameters."""

    def __init__(self) -> None:
        self._state_without_hooks = (-1, 0)  # torch's count of hooks and the number of parameters, with no hook on any

    @contextlib.contextmanager
    def removed(
        self, parameters: Sequence[Tensor], staying: Mapping[Any, Any]
    ) -> Iterator[list[tuple[Tensor, Hooks, Hooks]]]:
        """Remove the hooks from parameters until the block ends. `staying` are handles of other hooks, by parameter.

        Yields each parameter with its hooks on the gradient, and its hooks after accumulation. Reads the parameters
        (0.1 µs each) only if torch may have registered a hook since none had one.
        """
        removed: list[tuple[Any, dict[int, Any]]] = []
        hooks: list[tuple[Tensor, Hooks, Hooks]] = []
        staying_count = int(bool(staying))  # all trained parameters have one, or none has
        state = RemovableHandle.next_id, len(parameters)
        for parameter in parameters if state != self._state_without_hooks else ():
            gradient_hooks, accumulation_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if gradient_hooks or (accumulation_hooks and len(accumulation_hooks) > staying_count):
                staying_key = staying[parameter].id if parameter in staying else None
                tables = gradient_hooks, accumulation_hooks
                pair = [{key: hook for key, hook in (table or {}).items() if key != staying_key} for table in tables]
                hooks.append((parameter, [*pair[0].values()], [*pair[1].values()]))
                removed += [(table, items) for table, items in zip(tables, pair, strict=True) if items]
        if not hooks:
            self._state_without_hooks = state
        for table, items in removed:
            for key in items:
                del table[key]
        try:
            yield hooks
        finally:
            for table, items in removed:
                table.update(items)


_COMPILER = "torch._dynamo"
_MOST_NODES = 30  # of a graph, near the loss
COMPILERS = {f"{_COMPILER}.convert_frame", "torch._inductor.compile_fx"}
"""Modules with a frame on the stack while torch compiles, but not while compiled code runs."""
_REPLACEMENT = "__dynamo_disable"  # attribute in which `torch._compile._disable_dynamo` caches its replacement


def spare_compiler() -> None:
    """Keep optimizers from importing torch's compiler.

    Its import takes nearly as long as torch's. Optimizers import it to exclude some of their methods from compilation.
    Until other code imports the compiler, nothing is compiled, and the methods are called directly; after that torch's
    behaviour is restored. If a version of torch caches this in another way, a start takes a second longer.
    """
    for owner in (Optimizer,):
        for method in vars(owner).values():
            for function in (method, getattr(method, "__wrapped__", None)):  # a context manager wraps such a method
                name = getattr(getattr(function, "__code__", None), "co_qualname", "")
                if function is not None and name == "_disable_dynamo.<locals>.inner":
                    setattr(function.__wrapped__, _REPLACEMENT, _call_directly(function.__wrapped__, function))


def _call_directly(wrapped: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return wrapped(*args, **kwargs)
        vars(wrapped).pop(_REPLACEMENT, None)
        return method(*args, **kwargs)

    return call


@torch.no_grad()
def step(optimizer: Optimizer) -> None:
    """Step the optimizer without torch's wrappers.

    The wrappers are a profiler's mark, hooks and marks for the compiler, which take time in each step and import the
    compiler. `inspect.unwrap` decides how much of any other wrapping is removed.
    """
    kind: Any = type(optimizer)
    _unwrapped_step(kind)(optimizer)


@functools.cache
def _unwrapped_step(kind: Any) -> Callable[[Optimizer], Any]:
    unwrapped: Callable[[Optimizer], Any] = inspect.unwrap(kind.step)
    return unwrapped


def step_with_hooks(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
    """Call `optimizer.step(…)`; for torch's optimizers without hooks, call `step` instead."""
    kind, module = type(optimizer), sys.modules[Optimizer.__module__]
    has_hooks = any(getattr(optimizer, f"_optimizer_step_{when}_hooks", True) for when in ("pre", "post"))
    has_hooks |= any(getattr(module, f"_global_optimizer_{when}_hooks", True) for when in ("pre", "post"))
    is_torch = kind.__module__.startswith("torch.optim.")
    if args or options or has_hooks or optimizer.defaults.get("differentiable") or not is_torch:
        return kind.step(optimizer, *args, **options)
    return step(optimizer)


def hook_step(
    optimizer: Optimizer, pre_hook: Callable[[Optimizer], None], post_hook: Callable[[Optimizer], None]
) -> list[RemovableHandle]:
    """Call the hooks before and after the optimizer's arithmetic; see `move_innermost`."""
    first = optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: pre_hook(optimizer))
    last = optimizer.register_step_post_hook(lambda optimizer, args, kwargs: post_hook(optimizer))
    return [first, last]


def separate_step(optimizer: Optimizer) -> None:
    """Have an optimizer of torch's step without a fused kernel, which may unscale gradients as well."""
    if any(group.get("fused") for group in optimizer.param_groups):
        vars(optimizer).pop("_step_supports_amp_scaling", None)
        for group in optimizer.param_groups:
            group["fused"] = False


def move_innermost(handles: Sequence[RemovableHandle]) -> None:
    """Move the hooks of `hook_step` next to the arithmetic: the last before it, the first after it."""
    for handle, is_last in zip(handles, (True, False), strict=True):
        hooks: Any = handle.hooks_dict_ref()
        hooks.move_to_end(handle.id, last=is_last)


@contextlib.contextmanager
def as_default_group(group: Any) -> Iterator[None]:
    """Make `group` torch's default process group within the block.

    A user's step may read the world's size or call a collective while one process computes alone.
    """
    default = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(default)


def arguments(operator: Any) -> Sequence[Any]:
    """Return an operator's arguments: `name`, and `alias_info` if the operator writes to it."""
    schema_arguments: Sequence[Any] = operator._schema.arguments
    return schema_arguments


def inner(module: nn.Module) -> nn.Module:
    """Return the original of a `torch.compile(module)`, or `module` itself."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called. A copy of such a module calls the original's code."""
    return module._compiled_call_impl is not None


def replicate(module: nn.Module) -> nn.Module:
    """Copy the module tree, with the same parameters and copied buffers.

    torch's `replicate` copies to GPUs only.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for original in module.modules():
        copy = original.__new__(type(original))
        # A method that lockstep has replaced refers to its object (see nn/attach.py).
        copy.__dict__ = {
            name: moved_to(copy) if (moved_to := getattr(value, "moved_to", None)) else value
            for name, value in original.__dict__.items()
        }
        copy._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in original._buffers.items()}
        copies[original] = copy
    for original, copy in copies.items():
        copy._modules = {name: None if child is None else copies[child] for name, child in original._modules.items()}
    return copies[module]


def end_workers(iterator: Any) -> None:
    """End a DataLoader's workers now, and wait for them.

    Otherwise they live as long as the iterator, which an exception's traceback may keep alive. Its finaliser ends them.
    """
    if end := getattr(iterator, "__del__", None):
        end()


def on_unsent(report: Callable[[BaseException], None]) -> None:
    """End this process, after `report`, if a queue cannot send an object, such as a batch with a lambda.

    Python's queues drop the object silently: its receiver would wait for ever.
    """

    def end(error: BaseException, item: object) -> None:
        report(error)
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end)  # type: ignore[attr-defined]


def nll_divisors(loss: Tensor) -> list[tuple[Tensor, int]]:
    """Return (divisor (0-dim), number of labels) of the means of negative log likelihoods in a loss's graph."""
    nodes: list[Any] = [loss.grad_fn]
    divisors = []
    for _ in range(_MOST_NODES):
        if not nodes:
            break
        if (node := nodes.pop(0)) is None:
            continue
        if node.name().startswith("NllLoss") and node._saved_reduction == 1:
            divisors.append((node._saved_total_weight.detach(), node._saved_target.numel()))
        else:
            nodes.extend(following for following, _ in node.next_functions)
    return divisors


def set_timeout(limit: timedelta) -> None:
    """Set the time limit of collectives. Public from torch 2.15 on."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(limit)


def plain_rendezvous(state: bytes) -> Any:
    """Unpickle the state of a dynamic rendezvous (round, participants, closed).

    torch unpickles any bytes in the agents' store: a stranger who reaches that port could make every agent run code.
    Here the bytes may only name the few types of such a state. Raises `pickle.UnpicklingError` for others, and so
    refuses to start if a version of torch has a different state.
    """
    return _Plain(io.BytesIO(state)).load()


class _Plain(pickle.Unpickler):
    _RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    _TYPES = frozenset(
        {
            *((_RENDEZVOUS, "_RendezvousState"), (_RENDEZVOUS, "_NodeDesc")),
            *(("datetime", "datetime"), ("datetime", "timezone"), ("datetime", "timedelta")),
            *(("builtins", "set"), ("builtins", "object"), ("copyreg", "_reconstructor")),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._TYPES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def mode_stack(mode: TorchDispatchMode | TorchFunctionMode) -> Sequence[Any]:
    """Return the active modes of this mode's kind, innermost last."""
    stack: Any = overrides._get_current_function_mode_stack
    if isinstance(mode, TorchDispatchMode):
        stack = _python_dispatch._get_current_dispatch_mode_stack
    modes: Sequence[Any] = stack()
    return modes


def is_of_compiler(error: BaseException) -> bool:
    """Return whether torch's compiler has raised an error: of its own, or for want of a C++ compiler."""
    return type(error).__module__.startswith((_COMPILER, "torch._inductor"))


def is_watched() -> bool:
    """Return whether a mode sees this thread's operations."""
    return bool(_python_dispatch._get_current_dispatch_mode_stack())


def leave(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Leave a mode if it is the innermost; below a user's mode it stays on the stack."""
    stack = mode_stack(mode)
    if stack and stack[-1] is mode:
        mode.__exit__(None, None, None)
