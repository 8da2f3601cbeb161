"""The strategies and the launchers: one line each with the facts that a launch plan needs. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A strategy: the class of its exchange, a description, and its processes and devices."""

    exchange: str
    """module:class, the module from `lockstep.exchange` on where it begins with a dot"""
    phrase: str
    has_ranks: bool  # several processes share the work
    drives_all: bool  # a process drives all devices that are used on its node, not one
    divides_state: bool = False  # each process has a part of the optimizers' state; not compared unless it is named
    divides_weights: bool = False  # each process has a part of the weights as well

    @property
    def process_per_device(self) -> bool:
        """Whether a node has as many processes as devices."""
        return self.has_ranks and not self.drives_all

    @property
    def has_two_levels(self) -> bool:
        """Whether several processes share the work, and each drives several devices."""
        return self.has_ranks and self.drives_all


_DP = "one process drives several devices (threads on a CPU)"
_DDP = "one process a device, gradients all-reduced while backward runs"
_ZERO1 = "as ddp, and each process has a part of the optimizer's state"
_FSDP = "as zero1, and each process has a part of the weights and gradients (torch's fully_shard)"
_HYBRID = "one process a node drives several devices (threads on a CPU), gradients all-reduced between processes"
KINDS = {
    "single": Kind(".base:Exchange", "one device", False, False),
    "dp": Kind(".base:Exchange", _DP, False, True),
    "ddp": Kind(".allreduce:AllReduce", _DDP, True, False),
    "zero1": Kind(".zero:Zero1", _ZERO1, True, False, True),
    "fsdp": Kind(".sharded:FullyShard", _FSDP, True, False, True, True),
    "hybrid": Kind(".allreduce:AllReduce", _HYBRID, True, True),
}
RARE = {"local-sgd": (1.0, 0.0), "diloco": (0.7, 0.9)}
"""Exchanges of weights every few steps: the outer step's learning rate and momentum; diloco's of its section 3.1."""
POWERSGD_RANK, EXCHANGE_EVERY = 4, 100
"""Defaults: of powersgd, as in the paper's larger experiments; of `RARE`."""
UNSCALED = ("powersgd", *RARE)
"""Exchanges that need each step's gradients in one scale on all ranks, so none of fp16's loss scaling."""
EXCHANGES = ("full", "bf16", "fp16", *UNSCALED)


class Launcher(NamedTuple):
    """A launcher's module and flags. The module's `launch(entry, launch_plan, env)` returns rank 0's value or None."""

    module: str
    joins: bool
    """Whether this process, which runs already, is a rank; else ranks are started."""
    takes: tuple[str, ...] = ()
    """The flags on how ranks meet that the launcher takes."""
    on_several: str = ""
    """The module that replaces `module` with several nodes; only then are the flags taken."""


LAUNCHERS = {
    "inline": Launcher(".join", joins=True),  # this process is the only rank
    "spawn": Launcher(".supervisor", joins=False),  # this process starts its host's ranks
    # As spawn, with restarts of lost ranks; on several nodes, agents agree on them.
    "elastic": Launcher(".supervisor", False, ("--init-method", "--interface"), ".nodes"),
    "environment": Launcher(".join", True, ("--rank", "--world-size", "--interface")),  # torchrun, srun or mpirun has
    "manual": Launcher(".join", True, ("--init-method", "--rank", "--world-size", "--interface")),  # a person has
}


TRACKERS = {
    **{name: f"'lockstep-torch[{name}]'" for name in ("wandb", "mlflow", "swanlab")},
    "trackio": "trackio",  # no extra: it needs an older Pillow than lockstep
    "csv": "",
}
"""Experiment trackers, by the modules of their libraries; and what pip installs for each."""


def with_ranks() -> str:
    """Name the strategies with several processes, joined by "or"."""
    return " or ".join(name for name, kind in KINDS.items() if kind.has_ranks)


def per_device() -> str:
    """Name the strategies with a process for each device, joined by "or"."""
    return " or ".join(name for name, kind in KINDS.items() if kind.process_per_device)


def with_several() -> str:
    """Name the strategies that use several devices, joined by "or"."""
    return " or ".join(name for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all)


def resolved(strategy: str, *, distributed: bool) -> str:
    """Return the strategy; for "auto", the default of several devices or ranks (`distributed`) or of one."""
    return strategy if strategy != "auto" else "ddp" if distributed else "single"
