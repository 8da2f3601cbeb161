"""One rank under examination, and what ranks send one another about themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..topology import Topology
from . import host, network, nvml
from .finding import Finding

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Self:
    """This rank, and what it has found out about itself."""

    config: RunConfig
    topology: Topology
    device: torch.device
    driver: nvml.Driver
    wire: network.Wire
    limit_s: float
    """For one thing that may hang."""

    @property
    def sharers(self) -> host.Sharers:
        """With whom it shares its host."""
        return host.Sharers(self.topology.local_size, self.topology.size, on_cpu=self.device.type == "cpu")


def present(told: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (rank, what it told) of those that are not absent."""
    return ((at, each) for at, each in enumerate(told) if each is not None)


def sent(found: Sequence[Finding], own: int | None) -> list[dict[str, Any]]:
    """Return findings for the board; those that name no rank are about `own`, if that is one."""
    about = () if own is None else (own,)
    return [replace(each, ranks=each.ranks or about).to_json() for each in found]


def received(told: Sequence[Any]) -> list[Finding]:
    return [Finding.from_json(values) for _, each in present(told) for values in each["findings"]]
