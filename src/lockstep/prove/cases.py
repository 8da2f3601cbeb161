"""The global batches on which gradients are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import RunConfig
from ..errors import RequestError, counted


@dataclass(frozen=True)
class Case:
    """A global batch: positions [start, stop) of the first epoch's order, in `accumulation` global micro-batches."""

    name: str
    start: int
    stop: int
    accumulation: int = 1

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.stop - self.start


def cases(config: RunConfig, samples: int, replicas: int, *, own_step: bool) -> list[Case]:
    """Return the batches to compare, each once; a step of the user's own accumulates, if at all, by itself.

    Raises `RequestError` where the data set or the batch is smaller than the number of replicas.
    """
    size = min(config.batch.size, samples)
    if size < replicas:
        what = (
            f"--batch {config.batch.size}"
            if size == config.batch.size
            else f"a training set of {counted(samples, 'sample')}"
        )
        raise RequestError(
            f"{what[0].upper()}{what[1:]} does not split into {replicas} replicas, each of which needs a sample to be "
            f"compared; {f'give --devices {size} or fewer' if size > 1 else 'give more samples'}."
        )
    found = [Case("the first batch", 0, size)]
    if size % replicas == 0 and size > replicas:
        found.append(Case("an uneven batch", 0, size - 1))
    last = samples % size
    if last and not config.batch.drop_last and (last >= replicas or not own_step):
        found.append(Case("the epoch's last batch", samples - last, samples))
    parts = config.batch.accumulate or 2
    if not own_step and size // parts >= replicas and parts > 1:
        found.append(Case(f"{parts} micro-batches", 0, size, parts))
    return [case for at, case in enumerate(found) if dataclasses.replace(case, name="") not in _nameless(found[:at])]


def _nameless(found: Sequence[Case]) -> list[Case]:
    return [dataclasses.replace(case, name="") for case in found]
