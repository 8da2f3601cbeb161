"""Ranks that another program has started and told who they are, through environment variables (see `dialects`)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ParallelConfig, RunConfig
from ..errors import RequestError
from ..failures import Failure
from ..kinds import kind
from . import dialects, rank, reasons, secret, stores
from .base import Entry
from .devices import gpu_ids
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
        with self.seat(config, env) as seat:
            return seat.run(entry, config)

    @contextlib.contextmanager
    def seat(self, config: RunConfig, env: Mapping[str, str]) -> Iterator[rank.Seat]:
        """Be the rank that the environment names while the block runs."""
        place = dialects.read(env)
        topology = place.topology

        def leave_word(failure: Failure) -> None:
            if failure.is_echo and place.error_file is not None:
                # torchrun takes the earliest report, in whole seconds, for the root cause, and then ends the others.
                time.sleep(_ECHO_WAITS_S)
            # Without its trace, which this process shows itself: torchrun would show it once more.
            reasons.leave(dataclasses.replace(failure, trace=""), place.error_file)

        with rank.teller() as say, rank.accounted(topology.rank, config, leave_word):

            def tell(failure: Failure) -> None:
                say(failure)
                leave_word(failure)

            _check_agrees(config.parallel, place)
            _check_node(config.parallel, place, env)
            with rank.met(
                config,
                env,
                lambda: _open(place, config.parallel.timeout, env),
                index=topology.rank,
                size=topology.size,
                known=topology if place.knows_node else None,
                tell=tell,
            ) as seat:
                yield seat


def _check_agrees(asked: ParallelConfig, place: Place) -> None:
    """Raise where flags say another world than the environment."""
    names, found = place.names, place.topology
    # One process that drives several devices is one rank; and what the environment does not say, the roll call finds.
    devices = asked.devices if place.knows_node and kind(asked.strategy).process_per_device else None
    nodes = asked.nodes if place.knows_node and asked.nodes > 1 else None
    pairs = (
        ("--world-size", asked.world_size, names.size, found.size),
        ("--rank", asked.rank, names.rank, found.rank),
        ("--devices", devices, names.local_size, found.local_size),
        ("--nodes", nodes, names.nodes, found.nodes),
    )
    for flag, wanted, variable, told in pairs:
        if wanted is not None and wanted != told:
            raise RequestError(
                f"{flag} {wanted} disagrees with the environment, where {variable} is {told}; "
                f"drop {flag}, or start the ranks with the same number."
            )


def _check_node(asked: ParallelConfig, place: Place, env: Mapping[str, str]) -> None:
    """Raise where this node has more ranks than the strategy wants there, or than there are GPUs."""
    here, name = place.topology.local_size, place.names.local_size
    if not place.knows_node or here == 1:
        return
    if kind(asked.strategy).drives_all:
        raise RequestError(
            f"--strategy {asked.strategy} drives all devices of a node in one process, but {name} is {here}; "
            "start one process on each node."
        )
    if asked.accelerator != "cuda":
        return
    shown = len(gpu_ids(asked, env))
    variable, granted = place.gpus or ("the number of GPUs that this process sees", shown)
    # One that sees a single GPU may have it for itself: the roll call finds out whether two would share it.
    gpus = min(granted, shown) if shown > 1 else granted
    if gpus < here and (place.gpus or shown > 1):
        raise RequestError(
            f"{name} is {here}, but {variable if gpus == granted else 'the number of GPUs that this process sees'} is "
            f"{gpus}: each rank needs a GPU of its own; start at most {gpus} on this node, or ask for more GPUs."
        )


def _open(place: Place, timeout_s: float, env: Mapping[str, str]) -> stores.Meeting:
    topology = place.topology
    if place.file:
        return stores.open_file(place.file)
    knows_hosts = place.knows_node and place.nodes_are_hosts
    apart = knows_hosts and (topology.nodes > 1 if topology.is_main else topology.node > 0)
    on_one_host = place.knows_node and topology.nodes == 1
    known = secret.of_job(env, on_one_host=on_one_host)
    if on_one_host and place.error_file is not None:
        # The folder of this agent's, of a random name: what another job has sealed is none of this one's notes.
        known += str(place.error_file.parents[2]).encode()
    if place.store_is_served:
        seat = (topology.rank, topology.size)
        return stores.connect(topology.address, topology.port, timeout_s, secret=known, job=place.job, place=seat)
    opens = stores.serve if topology.is_main else stores.connect
    return opens(topology.address, topology.port, timeout_s, secret=known, apart=apart)
