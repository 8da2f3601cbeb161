"""What a launcher is: the way in which the processes of a run come to be and meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..config import RunConfig

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

    from ..topology import Topology
    from ..world import World  # which imports torch; a launcher is chosen without it

Entry = Callable[[RunConfig, "World"], Any]
"""What every rank runs. Must be importable by name, since a launcher may start processes that look it up."""


@runtime_checkable
class FormsWorld(Protocol):
    """An entry that forms the world itself out of the ranks that have met, since it says why none can be formed."""

    def __call__(self, config: RunConfig, world: World) -> Any:
        """Not called: an entry like any other for whoever passes it on."""

    def before_world(self, config: RunConfig, topology: Topology, device: torch.device, store: Store) -> Any:
        """Be this rank, with a store that all ranks share, and return this rank's value (*collective*)."""


class Launcher(Protocol):
    """One way to start ranks. A new one is a file of its own and a line in `table.py`."""

    @property
    def name(self) -> str:
        """The name that --launcher takes."""

    def starts_here(self, config: RunConfig) -> bool:
        """Return whether this process starts all ranks or is the only one, so that rank 0 sees this host's files."""

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return whether the environment asks for this launcher: somebody else has started the ranks already."""

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Run `entry(config, world)` on every rank; return rank 0's value, None in processes of other ranks.

        `config` is resolved (see `devices.resolve`). Raises a `LockstepError` for whatever went wrong in any rank.
        """
