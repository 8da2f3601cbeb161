"""Warning of random draws that depend on the number of ranks, in a run's first step."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

import numpy as np
import torch

from .. import _torch
from ..world.world import World
from .random_operators import Draw


class DrawWatch:
    """Watcher of the draws of user code from `begin` to `end`. Costs no time afterwards."""

    def __init__(self, world: World) -> None:
        self.is_watching = False
        self._others: tuple[Any, ...] = ()  # states of Python's and NumPy's generators at the beginning
        self._world = world
        self._mode = _Watcher()

    def begin(self) -> None:
        """Start watching."""
        self.is_watching, self._others = True, other_states()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop watching, as when the loop has failed."""
        _torch.leave(self._mode)
        self._mode.is_active = False

    def end(self) -> str:
        """Stop watching; return a warning, or "" (*collective*)."""
        self.stop()
        watcher = self._mode
        if not watcher.first and other_states() != self._others:
            watcher.first = "the loop, by Python's or NumPy's generator,"
        places, seeded = zip(*self._world.gather([watcher.first, watcher.user_draw]), strict=True)
        if len(seeded) > 1 and seeded[0] is not None and all(draw == seeded[0] for draw in seeded):
            return (
                f"{seeded[0][0]} draws from a generator with the same state on every rank, so that different samples "
                'have the same noise; set draws="global", or seed the generator by rank.'
            )
        draw_places = [place for place in places if place]
        if not draw_places or len(places) == 1:
            return ""
        return (
            f"{draw_places[0]} draws different random numbers on each rank, so that the model depends on the number of "
            'ranks; draws="global" gives the model of one device.'
        )


def other_states() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators."""
    _, key, *fields = np.random.get_state()
    return random.getstate(), np.asarray(key).tobytes(), fields


class _Watcher(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of the first draw, and of the first draw from a user's generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_active = True
        self.first = ""
        self.user_draw: tuple[str, str] | None = None  # place, and a digest of the generator's state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_active and torch.Tag.nondeterministic_seeded in func.tags:
            draw = Draw(func, args, kwargs)
            generator = draw.arguments.get("generator")
            if not draw.is_random:
                pass
            elif generator is None:
                self.first = self.first or draw.place
            elif self.user_draw is None and math.prod(draw.shape) > 1:
                state = hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
                self.user_draw = draw.place, state
        return func(*args, **kwargs)
