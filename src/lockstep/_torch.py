"""What lockstep uses of torch that torch does not promise: each with its reason, and what happens where it is gone."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_COMPILER = "torch._dynamo"
_KEPT = "__dynamo_disable"
"""Where `torch._compile._disable_dynamo` keeps what it calls in place of a function."""


def spare_compiler() -> None:
    """Have optimizers not import torch's compiler, which takes nearly as long as importing torch itself.

    They do so to tell it that some of their methods are none of its business. As long as nobody else has imported it,
    nothing is compiled, and the methods are called as they are; from then on all is as torch has it. Where torch keeps
    this in another way, a start takes a second longer. (DDP asks the compiler for its options, and has to have it.)
    """
    for method in vars(Optimizer).values():
        is_kept_out = getattr(getattr(method, "__code__", None), "co_qualname", "") == "_disable_dynamo.<locals>.inner"
        if is_kept_out:
            setattr(method.__wrapped__, _KEPT, _plain(method.__wrapped__, method))


@torch.no_grad()
def step(optimizer: Optimizer) -> None:
    """Make the optimizer's step without what torch wraps it in: a profiler's mark, hooks, and marks for the compiler.

    They take time in each step, and import the compiler too. Of an optimizer that is wrapped in another way, as much is
    left out as `inspect.unwrap` takes off.
    """
    kind: Any = type(optimizer)
    _own_step(kind)(optimizer)


@functools.cache
def _own_step(kind: Any) -> Callable[[Optimizer], Any]:
    found: Callable[[Optimizer], Any] = inspect.unwrap(kind.step)
    return found


def _plain(within: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if _COMPILER not in sys.modules:
            return within(*given, **named)
        vars(within).pop(_KEPT, None)
        return method(*given, **named)

    return call
