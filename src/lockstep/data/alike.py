"""The same data for every rank: what differs is named before training starts, instead of a hang or a wrong model.

Ranks that see data sets of different lengths take different numbers of steps, and wait for each other until the
time-out; ranks that see different labels, or the same ones in another order (files as the disk lists them, a set of
names), train on samples twice and on others never.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .shared import Array

if TYPE_CHECKING:
    from ..world import World


def digest(*arrays: Array) -> str:
    """Return a hash of the arrays' contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def check_alike(world: World, asked: str, facts: dict[str, Any]) -> None:
    """Raise `RequestError`, on every rank, where one has other `facts` than rank 0 (*collective*).

    `facts` is {what it is: a number or text}, the same keys on each rank; `asked` is the data's name in the sentence.
    """
    if found := world.unlike(facts):
        rank, differ = found
        raise RequestError(
            f"{asked} is not the same on every rank: rank {rank} has {differ}; "
            "give every rank the same samples, in the same order."
        )
