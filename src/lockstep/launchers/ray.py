"""Ranks on the nodes of a Ray cluster: a placement group with a bundle for each node, and an actor for each rank.

The cluster is the one that RAY_ADDRESS names, else the one that runs on this host, else one that is started here for
this run alone, as `ray.init()` has it. --nodes and --devices say what is taken of it: as many nodes, with so many GPUs
(or processors) on each. This process is the driver: it needs no GPU and imports no torch, shows what rank 0 says,
passes Ctrl-C on, and raises the first cause when a rank fails. Ray tells it of actors and nodes that die.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import failures
from ..config import ParallelConfig, RunConfig
from ..errors import RequestError, counted
from ..kinds import auto, kind, with_ranks
from ..printable import told
from ..topology import Topology
from .base import Entry
from .variables import having, unset

_SEVERAL_HOSTS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_PROBE_S = 5.0


class RayLauncher:
    """Starts one actor for each rank on a Ray cluster."""

    name = "ray"

    def starts_here(self, config: RunConfig) -> bool:
        """Return False: rank 0 is on whichever node Ray gives it."""
        return False

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return False: it is asked for by name, inside a Ray job too."""
        return False

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Start the ranks on the cluster, wait for all of them, and return rank 0's value.

        `config` is not resolved yet: what `auto` comes to depends on the cluster's nodes. Raises `RequestError` for
        what the cluster has not got within --timeout, and the error of the rank that failed first.
        """
        _check(config.parallel)
        with _cluster(env):
            parallel = _resolved(config.parallel)
            config = dataclasses.replace(config, parallel=parallel)
            from .ray_driver import Ranks  # late: it imports ray

            on_gpus, again = parallel.accelerator == "cuda", failures.again(config)
            stall_timeout_s = parallel.stall_timeout
            with (
                _bundles(parallel) as group,
                Ranks(
                    group, _layout(parallel), again, stall_timeout_s=stall_timeout_s, aborts_when_alone=on_gpus
                ) as ranks,
            ):
                return ranks.run(_packed(entry, config), str(Path.cwd()), parallel.timeout)


def _check(parallel: ParallelConfig) -> None:
    """Raise for what does not go with Ray, before it is asked."""
    if parallel.gpus:
        raise RequestError(
            f"--gpus {parallel.gpus}: under --launcher ray, Ray chooses each rank's GPUs; give their number, --devices."
        )
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"--launcher ray needs Ray, which cannot be imported here ({error}); "
            "install it on every node: pip install 'lockstep-torch[ray]'."
        ) from error


@contextlib.contextmanager
def _cluster(env: Mapping[str, str]) -> Iterator[None]:
    """Be a driver of the cluster within the block; one that the caller's own script has joined already is kept."""
    import ray

    if ray.is_initialized():
        yield
        return
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = env.get("RAY_ADDRESS", "")
    _check_address(address)
    with contextlib.ExitStack() as left:
        # Ray would tell its makers of a cluster that is started here.
        left.enter_context(having(unset({"RAY_USAGE_STATS_ENABLED": "0"})))
        try:
            try:
                ray.init(address="auto", **how)
            except ConnectionError:
                if address not in ("", "local"):
                    raise
                sys.stderr.write(told("no Ray cluster runs here: one is started on this host for this run"))
                sys.stderr.flush()
                left.enter_context(_on_loopback())
                ray.init(address="local", include_dashboard=False, **how)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"--launcher ray: Ray cannot be joined from here ({failures.one_line(error)}); is its cluster up?"
            ) from error
        left.callback(ray.shutdown)
        yield


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a cluster that is started in the block listen on loopback alone: who reaches its ports can have it run code.

    Ray takes a host's outward address even where it is given 127.0.0.1, unless clusters of several hosts are off, which
    is a setting of its own for systems that know none.
    """
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with having({_SEVERAL_HOSTS: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_address(address: str) -> None:
    """Raise where nothing listens at RAY_ADDRESS: Ray itself would try for minutes."""
    if address in ("", "auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        raise RequestError(
            f"RAY_ADDRESS is {address}; --launcher ray is started on a node of the cluster, as lockstep itself or by "
            "ray job submit, and takes HOST:PORT or auto there."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except OSError as error:
        raise RequestError(
            f"RAY_ADDRESS is {address}, and no Ray cluster answers there ({error.strerror or error}); "
            "start one with ray start --head, or unset RAY_ADDRESS."
        ) from error


def _nodes() -> list[dict[str, float]]:
    """Return the resources of each node that is alive, those with most GPUs first."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda has: (has.get("GPU", 0), has.get("CPU", 0)), reverse=True)


def _resolved(asked: ParallelConfig) -> ParallelConfig:
    """Return `asked` with strategy, accelerator and devices as the cluster has them."""
    nodes = _nodes()
    on_gpus = asked.accelerator == "cuda" or (asked.accelerator == "auto" and nodes[0].get("GPU", 0) >= 1)
    least = nodes[min(asked.nodes, len(nodes)) - 1]  # of the nodes that would be taken
    count = asked.devices or (max(1, int(least.get("GPU", 0))) if on_gpus else 1)
    strategy = auto(several=count * asked.nodes > 1) if asked.strategy == "auto" else asked.strategy
    if not kind(strategy).has_ranks and count * asked.nodes > 1:
        raise RequestError(
            f"--launcher ray starts ranks, and --strategy {strategy} is one process; take --strategy {with_ranks()}."
        )
    return dataclasses.replace(
        asked, strategy=strategy, accelerator="cuda" if on_gpus else "cpu", devices=count, launcher=RayLauncher.name
    )


def _unit(parallel: ParallelConfig) -> str:
    return "GPU" if parallel.accelerator == "cuda" else "CPU"


def _layout(parallel: ParallelConfig) -> list[tuple[Topology, dict[str, int]]]:
    """Return of each rank its place, and the resources that it takes there."""
    several = not kind(parallel.strategy).process_per_device
    here, each = (1, parallel.devices or 1) if several else (parallel.devices or 1, 1)
    takes = {"num_cpus": each, "num_gpus": each if parallel.accelerator == "cuda" else 0}
    return [
        (
            Topology(
                rank=node * here + local_rank,
                size=parallel.nodes * here,
                local_rank=local_rank,
                local_size=here,
                node=node,
                nodes=parallel.nodes,
            ),
            takes,
        )
        for node in range(parallel.nodes)
        for local_rank in range(here)
    ]


@contextlib.contextmanager
def _bundles(parallel: ParallelConfig) -> Iterator[Any]:
    """Hold the nodes' resources within the block: a bundle for each node, so that a node's ranks are together.

    Raises `RequestError` where Ray cannot give them within --timeout.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    count = parallel.devices or 1
    bundle = {"CPU": count} | ({"GPU": count} if parallel.accelerator == "cuda" else {})
    group = placement_group([bundle] * parallel.nodes, strategy="STRICT_SPREAD" if parallel.nodes > 1 else "PACK")
    try:
        ready, _ = ray.wait([group.ready()], timeout=parallel.timeout)
        if not ready:
            raise RequestError(_lacking(parallel, count))
        yield group
    finally:
        remove_placement_group(group)


def _lacking(parallel: ParallelConfig, count: int) -> str:
    import ray

    unit, nodes = _unit(parallel), _nodes()
    having = ", ".join(f"{has.get(unit, 0):g}" for has in nodes)
    free = ray.available_resources().get(unit, 0)
    asked = f"{counted(count, unit)} on {'each of ' * (parallel.nodes > 1)}{counted(parallel.nodes, 'node')}"
    return (
        f"--nodes {parallel.nodes} --devices {count}: Ray did not give {asked} within --timeout {parallel.timeout:g} "
        f"s; its cluster has {counted(len(nodes), 'node')} ({unit}s: {having}), and {free:g} {unit}s are free; ask for "
        "less, wait until others are done, or add nodes."
    )


def _packed(entry: Entry, config: RunConfig) -> bytes:
    """Return (entry, config) for other processes; paths are from this one's folder, wherever a rank is."""
    from ray import cloudpickle

    data = dataclasses.replace(config.data, dir=config.data.dir.absolute())
    record = config.record
    if record.output is not None:
        record = dataclasses.replace(record, output=record.output.absolute())
    config = dataclasses.replace(config, data=data, record=record)
    try:
        return bytes(cloudpickle.dumps((entry, config)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{getattr(entry, '__qualname__', entry)!s} cannot be run in other processes ({error}); "
            "define it at the top level of a module."
        ) from error


def module_paths() -> list[str]:
    """Return where this process finds modules, for ranks that share its disk."""
    return [os.path.abspath(path) for path in sys.path]  # noqa: PTH100  # "" is the current folder
