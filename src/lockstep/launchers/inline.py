"""No launcher at all: this process is the only rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import RunConfig
from ..errors import RequestError, counted
from . import rank
from .base import Entry
from .devices import processes
from .variables import having


class InlineLauncher:
    """Runs the entry in this process."""

    name = "inline"

    def starts_here(self, config: RunConfig) -> bool:
        """Return True: this process is rank 0."""
        return True

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return False: no environment asks for it; `auto` takes it where one process is enough."""
        return False

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Run the entry here, in a world of one rank, and return its value."""
        with self.seat(config, env) as seat:
            return seat.run(entry, config)

    @contextlib.contextmanager
    def seat(self, config: RunConfig, env: Mapping[str, str]) -> Iterator[rank.Seat]:
        """Be the only rank while the block runs."""
        wanted = processes(config, env)
        if wanted > 1 or config.parallel.nodes > 1:
            raise RequestError(
                f"--launcher inline is one process, but --strategy {config.parallel.strategy} needs {wanted} on each "
                f"of {counted(config.parallel.nodes, 'node')}; take --launcher auto, or --devices 1."
            )
        with rank.teller() as tell, rank.accounted(0, config), having(rank.variables(config)):
            yield rank.alone(config, env, tell=tell)
