"""Method of data parallelism: the devices of a process, and the exchange among processes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ..config import registry
from ..config.schema import ParallelConfig
from ..errors import RequestError
from ..world.world import World
from .base import Exchange
from .compress import WIRES
from .powersgd import PowerSGD
from .rare import Rare


@dataclass(frozen=True)
class Method:
    """One rank's part of a method."""

    name: str
    devices: tuple[torch.device, ...]
    """Devices that this process computes on. Each has one random generator."""
    exchange: Exchange

    @property
    def can_sync_batchnorm(self) -> bool:
        """Whether batch statistics can be those of the global micro-batch."""
        return not (registry.KINDS[self.name].drives_all or self.exchange.every)


def build(config: ParallelConfig, world: World) -> Method:
    """Return this rank's method. Raises `RequestError` for a one-process strategy among several processes."""
    # A launcher resolves `auto` before there is a world; a library's caller need not.
    name = registry.resolved(config.strategy, distributed=world.size > 1)
    kind = registry.KINDS[name]
    if world.size > 1 and not kind.has_ranks:
        raise RequestError(
            f"--strategy {name} is one process, and here are {world.size}, which would train separate models; use "
            f"--strategy {registry.with_ranks()}."
        )
    devices: tuple[torch.device, ...] = (world.device,)
    if kind.drives_all:
        devices *= config.devices or 1  # a CPU's threads
        if world.device.type != "cpu":
            indices = config.gpu_indices or range(config.devices or torch.accelerator.device_count() or 1)
            devices = tuple(torch.device(world.device.type, index) for index in indices)
    return Method(name, devices, exchange_of(world, config))


def exchange_of(world: World, config: ParallelConfig) -> Exchange:
    """Return the strategy's exchange; the base class for a single rank, and for imagined ranks.

    Raises `RequestError` for a strategy or an exchange that a single rank cannot have.
    """
    strategy, name = registry.resolved(config.strategy, distributed=True), config.exchange
    kind = registry.KINDS[strategy]
    if world.size == 1 and kind.divides_weights:
        raise RequestError(
            f"--strategy {strategy} divides the weights among ranks, and here is one; take more, or single."
        )
    if world.group is None:
        if name in registry.RARE and not world.is_imagined:
            raise RequestError(f"--exchange {name} needs several ranks, and this is the only one; leave it out.")
        return Exchange(world)
    if name in registry.RARE:
        lr, momentum = registry.RARE[name]
        return Rare(world, every=config.exchange_every or registry.EXCHANGE_EVERY, lr=lr, momentum=momentum)
    options: dict[str, Any] = {"wire": WIRES[name]} if name in WIRES else {}
    if name == "powersgd":
        rank, start = config.powersgd_rank or registry.POWERSGD_RANK, config.powersgd_start or 0
        options = {"wire": PowerSGD(world, rank=rank, start=start)}
    if kind.divides_weights:
        options |= {"blocks": config.shard_modules, "shard_size": config.shard_size, "reshards": config.shard_reshard}
    module, _, exchange = kind.exchange.partition(":")
    built: Exchange = getattr(import_module(module, __package__), exchange)(world, **options)
    return built
