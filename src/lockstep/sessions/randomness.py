"""Random draws of a loop and its models: those of one device, or each rank's own, of which the first step tells."""

from __future__ import annotations

import contextlib

from ..training.draw_watch import DrawWatch
from ..training.draws import GlobalDraws
from ..world.world import World
from .shares import Handed

_CHECKED = 3  # first steps after which the ranks' generators are compared
_CHECKED_EVERY = 50  # steps, from then on


class Draws:
    """The draws of the code between two shares. Every rank makes the same calls."""

    def __init__(self, world: World, seed: int, whose: str) -> None:
        """Draw as the option `draws`, "rank" or "global", says."""
        self._global = GlobalDraws(world, seed) if whose == "global" else None
        self._watch = DrawWatch(world) if world.size > 1 and whose == "rank" else None

    def draw_by_rank(self) -> None:
        """Go on with each rank's own draws, which are not watched."""
        self.end()
        self._global = None

    @property
    def first(self) -> str:
        """The place of the first draw since draws are those of one device; "" for none."""
        return "" if self._global is None else self._global.first

    def begin(self, handed: Handed, *, watches: bool) -> None:
        """Begin the draws of a share; those of each rank are watched if `watches`, once."""
        share = handed.share
        if self._global is not None:
            number = ((handed.epoch << 16 | handed.place) << 40) + (share.step << 8) + share.micro
            self._global.begin(share.row, share.size, share.rows, number)
        elif self._watch is not None and watches and not self._watch.is_watching:
            self._watch.begin()

    def come_to(self, handed: Handed | None) -> None:
        """Go on with the draws of this share."""
        if self._global is not None and self._global.is_active and handed is not None:
            self._global.resume_share(handed.share.row, handed.share.size, handed.share.rows)

    def end(self) -> None:
        """End the draws of a share: those of data and evaluations follow from (seed, epoch, sample)."""
        if self._global is not None:
            self._global.end()

    def end_step(self, step: int) -> str:
        """Compare the ranks' generators; return what the first step has to tell, or "" (*collective*)."""
        if self._global is not None and (step <= _CHECKED or step % _CHECKED_EVERY == 0):
            self._global.check()
        watch, self._watch = self._watch, None
        return watch.end() if watch is not None and watch.is_watching else ""

    def along(self, dimension: int | None) -> contextlib.AbstractContextManager[None]:
        """See `Session.along`."""
        return contextlib.nullcontext() if self._global is None else self._global.along(dimension)
