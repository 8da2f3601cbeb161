"""Random draws of a loop and its models: as on one device, or per rank with a warning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..training.draw_watch import DrawWatch
from ..training.draws import GlobalDraws
from ..world.world import World
from .shares import Handed

_CHECKED_STEPS = 3  # first steps after which the ranks' generators are compared
_CHECKED_EVERY = 50  # steps between later comparisons


class Draws:
    """Draws of the code between two shares. Every rank makes the same calls."""

    def __init__(self, world: World, seed: int, scope: str, is_certain: Callable[[], bool]) -> None:
        """Set up the draws. `scope` is the option `draws`: "rank" or "global". See `GlobalDraws` on `is_certain`."""
        self._global = GlobalDraws(world, seed, is_certain) if scope == "global" else None
        self._watch = DrawWatch(world) if world.size > 1 and scope == "rank" else None
        self._share: Handed | None = None  # whose draws began last

    def draw_by_rank(self) -> None:
        """Continue with unwatched draws per rank."""
        self.end()
        self._global = None

    @property
    def first(self) -> str:
        """Place of the first global draw, or ""."""
        return "" if self._global is None else self._global.first

    @property
    def have_mixed(self) -> bool:
        """Whether the current share may have mixed its samples with other ranks'."""
        return self._global is not None and self._global.has_mixed

    def begin(self, handed: Handed, *, watches: bool) -> None:
        """Begin the draws of a share. With `watches`, watch draws per rank, once in a run."""
        if self._global is not None:
            self._visit(self._global, handed)
        elif self._watch is not None and watches and not self._watch.is_watching:
            self._watch.begin()

    def come_to(self, handed: Handed | None) -> None:
        """Draw for this share, in a loop that reads batches ahead or keeps them."""
        if self._global is None or handed is None or (handed is self._share and self._global.is_active):
            return
        self._visit(self._global, handed)

    def _visit(self, draws: GlobalDraws, handed: Handed) -> None:
        """Seed by the share's number and by how often the loop has come to it: alike on any number of ranks."""
        share, self._share = handed.share, handed
        number = ((handed.epoch << 16 | handed.place) << 40) + (share.step << 8) + share.micro
        draws.begin(*handed.rows, number, handed.visits)
        handed.visits += 1

    def is_other(self, assumed: Handed | None, handed: Handed) -> bool:
        """Return whether draws for the share `assumed`, or for none, are other ones than those for `handed`."""
        return self._global is not None and (assumed is None or assumed.rows != handed.rows)

    def end(self) -> None:
        """End the draws of a share; draws of data and evaluations depend on (seed, epoch, sample)."""
        if self._global is not None:
            self._global.end()

    def close(self) -> None:
        """End the draws of a loop, also of one that has failed in its first step."""
        self.end()
        if self._watch is not None:
            self._watch.stop()

    def end_step(self, step: int) -> str:
        """Compare the ranks' generators; return the first step's warning, or "" (*collective*)."""
        if self._global is not None and (step <= _CHECKED_STEPS or step % _CHECKED_EVERY == 0):
            self._global.check()
        watch, self._watch = self._watch, None
        return watch.end() if watch is not None and watch.is_watching else ""

    def along(self, dimension: int | None) -> contextlib.AbstractContextManager[None]:
        """See `Session.along`."""
        return contextlib.nullcontext() if self._global is None else self._global.along(dimension)
