"""Ranks that another program has started and told who they are, through environment variables (see `dialects`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..config import ParallelConfig, RunConfig
from ..errors import RequestError
from ..failures import Failure
from ..kinds import kind
from ..topology import Topology
from . import dialects, rank, reasons, stores
from .base import Entry
from .dialects import Place

_ECHO_WAITS_S = 1.5


class EnvironmentLauncher:
    """Takes the rank from the environment and joins the others."""

    name = "environment"

    def starts_here(self, config: RunConfig) -> bool:
        """Return False: another program has started the ranks, here and elsewhere."""
        return False

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return whether another program has told this process who it is."""
        return dialects.is_spoken(env)

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Run the entry as the rank that the environment names; return its value on rank 0, else None."""
        place = dialects.read(env)
        topology = place.topology

        def leave_word(failure: Failure) -> None:
            if failure.is_echo and place.error_file is not None:
                # torchrun takes the earliest report, in whole seconds, for the root cause, and then ends the others.
                time.sleep(_ECHO_WAITS_S)
            reasons.leave(failure, place.error_file)

        def tell(failure: Failure) -> None:
            rank.say(failure)
            leave_word(failure)

        with rank.accounted(topology.rank, config, leave_word):
            _check_agrees(config.parallel, topology, knows_node=place.knows_node)
            return rank.run_met(
                entry,
                config,
                env,
                lambda: _open(place, config.parallel.timeout),
                index=topology.rank,
                size=topology.size,
                known=topology if place.knows_node else None,
                tell=tell,
            )


def _check_agrees(asked: ParallelConfig, found: Topology, *, knows_node: bool) -> None:
    """Raise where flags say another world than the environment."""
    # One process that drives several devices is one rank; and what the environment does not say, the roll call finds.
    devices = asked.devices if knows_node and kind(asked.strategy).process_per_device else None
    pairs = (
        ("--world-size", asked.world_size, "WORLD_SIZE", found.size),
        ("--rank", asked.rank, "RANK", found.rank),
        ("--devices", devices, "LOCAL_WORLD_SIZE", found.local_size),
        ("--nodes", asked.nodes if asked.nodes > 1 else None, "the number of nodes", found.nodes),
    )
    for flag, wanted, variable, told in pairs:
        if wanted is not None and wanted != told:
            raise RequestError(
                f"{flag} {wanted} disagrees with the environment, where {variable} is {told}; "
                f"drop {flag}, or start the ranks with the same number."
            )


def _open(place: Place, timeout_s: float) -> stores.Meeting:
    topology = place.topology
    apart = place.knows_node and (topology.nodes > 1 if topology.is_main else topology.node > 0)
    if place.store_is_served:
        return stores.connect(topology.address, topology.port, timeout_s, job=place.job, start=place.start)
    opens = stores.serve if topology.is_main else stores.connect
    return opens(topology.address, topology.port, timeout_s, apart=apart)
