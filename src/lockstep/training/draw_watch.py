"""Notice of random draws that depend on the number of ranks, over a run's first step."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from .. import _torch
from ..world.world import World
from .random_operators import Draw


class DrawWatch:
    """Watches the draws of user code from `begin` to `end`; costs nothing afterwards."""

    def __init__(self, world: World) -> None:
        self.is_watching = False
        self._world = world
        self._mode = _Watcher()

    def begin(self) -> None:
        """Begin to watch."""
        self.is_watching = True
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> str:
        """Stop; return a sentence for the user, "" without draws (*collective*)."""
        stack, watcher = _torch.mode_stack(self._mode), self._mode
        if stack and stack[-1] is watcher:
            watcher.__exit__(None, None, None)
        watcher.is_active = False  # below a mode of the user's, it stays
        drawn, alike = zip(*self._world.gather([watcher.first, watcher.own]), strict=True)
        if len(alike) > 1 and alike[0] is not None and all(own == alike[0] for own in alike):
            return (
                f"{alike[0][0]} draws from a generator with the same state on every rank, so that different samples "
                'have the same noise; set draws="global", or seed the generator by rank.'
            )
        places = [place for place in drawn if place]
        if not places or len(drawn) == 1:
            return ""
        return (
            f"{places[0]} draws random numbers, other ones on each rank, so that the model depends on the number of "
            'ranks; draws="global" gives the model of one device.'
        )


class _Watcher(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the place of the first draw, and of the first from a generator of the user's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_active = True
        self.first = ""
        self.own: tuple[str, str] | None = None  # place, and the generator's state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_active and torch.Tag.nondeterministic_seeded in func.tags:
            draw = Draw(func, args, kwargs)
            generator = draw.arguments.get("generator")
            if not draw.is_random:
                pass
            elif generator is None:
                self.first = self.first or draw.place
            elif self.own is None and math.prod(draw.shape) > 1:
                state = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
                self.own = draw.place, state
        return func(*args, **kwargs)
