"""One copy a host: arrays that a node's local rank 0 builds and its other ranks map.

Local rank 0 writes the arrays to files in /dev/shm (memory; the temporary folder where that is too small), tells their
folder, and all of the node's ranks map them. They are unlinked as soon as they have: the memory lives as long as the
mappings do, and nothing is left behind, however the ranks end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import LockstepError, RequestError

if TYPE_CHECKING:
    from ..world.world import World

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def shared(world: World, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `build` makes, held once a host (*collective*).

    `build` runs on each node's local rank 0 alone and must not communicate. What it raises is raised on every
    rank, as `RequestError` with the same sentence.
    """
    node, several = world.topology.node, world.topology.local_size > 1
    with ExitStack() as leaving:

        def make() -> tuple[Arrays, str]:
            if world.topology.local_rank != 0:
                return {}, ""
            try:
                arrays = build()
                return (arrays, "") if not several else ({}, _write(arrays, leaving))
            except (LockstepError, OSError, MemoryError) as error:
                raise RequestError(str(error) or type(error).__name__) from error

        arrays, folder = world.together(make)
        written = {node: folder for node, folder in world.gather([node, folder]) if folder}
        # All of the node's ranks have mapped the files when this returns, and they can be unlinked.
        return world.together(lambda: _map(Path(written[node])) if several else arrays)


def _write(arrays: Arrays, leaving: ExitStack) -> str:
    """Write `arrays` to a new folder, which goes with `leaving`, and return it."""
    size, memory = sum(array.nbytes + 4096 for array in arrays.values()), "/dev/shm"
    is_roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size * 1.1 + 2**20
    folder = tempfile.mkdtemp(prefix="lockstep-", dir=memory if is_roomy else None)
    leaving.callback(shutil.rmtree, folder, ignore_errors=True)
    for name, array in arrays.items():
        np.save(Path(folder, name), array, allow_pickle=False)
    return folder


def _map(folder: Path) -> Arrays:
    """Return the arrays in `folder`. Raises `RequestError` where they cannot be mapped."""
    try:
        # Private (copy on write) rather than read-only: torch warns of arrays that it could not write to.
        return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in sorted(folder.iterdir())}
    except OSError as error:
        raise RequestError(
            f"Ranks of one node must see the same {folder.parent}, but one cannot open {folder} ({error.strerror})."
        ) from error
