"""What a launcher is: the way in which the processes of a run come to be and meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..config import RunConfig

if TYPE_CHECKING:
    from ..world import World  # which imports torch; a launcher is chosen without it

Entry = Callable[[RunConfig, "World"], Any]
"""What every rank runs. Must be importable by name, since a launcher may start processes that look it up."""


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
