"""One copy a host: arrays that a node's local rank 0 builds and its other ranks map.

Eight ranks that each read CIFAR-10 hold it eight times and read it eight times. Instead, local rank 0 writes the
arrays to a file in /dev/shm (memory; the temporary folder where that is too small), tells its path, and all of
the node's ranks map the file. It is unlinked as soon as they have: the memory lives as long as the mappings do,
and nothing is left behind, however the ranks end.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import LockstepError, RequestError

if TYPE_CHECKING:
    from ..world import World

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

_ALIGNMENT = 64


def shared(world: World, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `build` makes, held once a host (*collective*).

    `build` runs on each node's local rank 0 alone and must not communicate. What it raises is raised on every
    rank, as `RequestError` with the same sentence.
    """
    node, several = world.topology.node, world.topology.local_size > 1
    with ExitStack() as leaving:

        def make() -> tuple[Arrays, dict[str, Any]]:
            if world.topology.local_rank != 0:
                return {}, {}
            try:
                arrays = build()
                if not several:
                    return arrays, {}
                path, layout = _write(arrays)
            except (LockstepError, OSError, MemoryError) as error:
                raise RequestError(str(error) or type(error).__name__) from error
            leaving.callback(path.unlink, missing_ok=True)
            return {}, {"node": node, "path": str(path), "layout": layout}

        arrays, told = world.together(make)
        written = {each["node"]: each for each in world.gather(told) if each}
        # All of the node's ranks have mapped the file when this returns, and it can be unlinked.
        return world.together(lambda: _map(Path(written[node]["path"]), written[node]["layout"]) if several else arrays)


def _write(arrays: Arrays) -> tuple[Path, dict[str, Any]]:
    """Write `arrays` to a new file; return its path and where each lies in it."""
    layout = {}
    size = 0
    for name, array in arrays.items():
        layout[name] = (size, array.dtype.str, list(array.shape))
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    handle, name = tempfile.mkstemp(prefix="lockstep-", dir=_roomy_folder(size))
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            for (start, _, _), array in zip(layout.values(), arrays.values(), strict=True):
                file.seek(start)
                file.write(np.ascontiguousarray(array).data)
            file.truncate(max(size, 1))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path, layout


def _roomy_folder(size: int) -> str:
    """Return /dev/shm where it has room for `size` bytes, else the temporary folder."""
    memory = Path("/dev/shm")
    with suppress(OSError):
        if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size * 1.1 + 2**20:
            return str(memory)
    return tempfile.gettempdir()


def _map(path: Path, layout: dict[str, Any]) -> Arrays:
    """Return the file's arrays. Raises `RequestError` where it cannot be mapped."""
    try:
        with path.open("rb") as file:
            # Private (copy on write) rather than read-only: torch warns of arrays that it could not write to.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise RequestError(
            f"Ranks of one node must see the same {path.parent}, but one cannot open {path} ({error.strerror})."
        ) from error
    arrays = {}
    for name, (start, dtype, shape) in layout.items():
        flat = np.frombuffer(memory, np.dtype(dtype), count=int(np.prod(shape)), offset=start)
        arrays[name] = flat.reshape(shape)
    return arrays
