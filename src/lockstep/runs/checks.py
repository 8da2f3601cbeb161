"""Checks during training: equal replicas, and each sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ..checks.replicas import ReplicaCheck
from ..checks.samples import Indices, SampleCheck
from ..data.order import CHUNK
from ..errors import RequestError
from ..record.checks import by_name
from ..world.world import World
from .position import Position
from .prepared import Prepared, Source


class RunChecks:
    """Checks of one run: `replicas`, and `samples` under --ledger."""

    def __init__(self, prepared: Prepared, remedy: Callable[[], str], position: Position) -> None:
        """Set up the checks (*collective*), from `position` on; `ReplicaCheck` explains `remedy`."""
        config, world, source = prepared.config, prepared.world, prepared.source
        every, copies = config.proof.verify_every, prepared.copies
        self.replicas = ReplicaCheck(
            *(world, prepared.replicated, every),
            copies=copies,
            compared=prepared.exchange.compared,
            remedy=remedy,
            begun=position.step,
        )
        self.samples: SampleCheck | None = None
        if not config.proof.ledger or world.is_imagined:
            return
        if source is None or source.samples is None:
            raise RequestError("--ledger counts an epoch's samples, and these data have no known number; leave it out.")
        # Further passes over an epoch's data are not counted.
        resumed = source.samples if position.passes else position.within * source.plan.global_size
        resumed = min(resumed, source.samples)
        trained = _trained(source, world, position.epochs, resumed)
        self.samples = SampleCheck(world, source.index_bound, resumed_samples=resumed, trained=trained)

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return the checks' outcomes so far, as "proof" in summary.json."""
        checks = [self.replicas.proof(), *([] if self.samples is None else [self.samples.proof()])]
        return by_name(checks)


def _trained(source: Source, world: World, epoch: int, count: int) -> Iterator[Indices]:
    """Yield this rank's chunks of the first `count` samples of `epoch`; the ranks divide them."""
    order = source.epoch_order(epoch)
    for start in islice(range(0, count, CHUNK), world.rank, None, world.size):
        yield order(start, min(start + CHUNK, count))
