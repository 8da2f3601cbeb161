"""Variants of one job that must train the same model, as commands.

The reference uses one device. The variants use the strategies of the registry, an additional rank, micro-batches, other
launchers, and runs that stop halfway and resume. (Strategies of several nodes need ranks started by hand:
`verify gradients` measures them.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..config.options import flatten
from ..config.registry import KINDS, resolved
from ..config.schema import RunConfig
from ..errors import RunError, Stopped, counted
from ..files import check_own
from .commands import Command, python, run


class _Way(NamedTuple):
    strategy: str
    devices: int = 1

    @property
    def name(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}-{self.devices}"

    @property
    def has_ranks(self) -> bool:
        """Whether each device has a separate process."""
        return KINDS[self.strategy].has_ranks


_ALONE = _Way(resolved("auto", distributed=False))
ALONE = _ALONE.name
"""The name of the reference."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train, and the variant to compare it with."""

    name: str  # its row, and its folder below the output folder
    stages: tuple[tuple[Command, ...], ...]
    """Its commands: those of an inner tuple run concurrently and end before the next tuple begins."""
    partner: str = ""
    """The name of the variant to compare it with; empty if it only serves as a partner."""
    same_bits: bool = False  # whether the two must be equal bit for bit: one world, strategy and accumulation
    why_not: str = ""  # why it cannot be trained; empty if it can

    @property
    def commands(self) -> list[Command]:
        """All its commands."""
        return [command for stage in self.stages for command in stage]


class ReferenceFacts(NamedTuple):
    """Facts from the reference's run that decide which variants are possible."""

    steps: int
    accumulation: int
    batch: int  # samples of a step; 0 where the loop has no DataLoader
    has_statistics: bool  # whether the model has batch statistics
    has_epochs: bool  # whether the loop uses session.epochs, which makes it resumable
    optimizers: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all variants share."""

    config: RunConfig
    folder: Path
    devices: int  # of the variants that have several
    is_cpu: bool
    arguments: Command  # the verb, train or run, and the flags that all variants share
    script: Command = ()  # the user's script and its arguments, or -m, a module and its arguments
    name: str = "curve"  # of the check: curve, or gradients, which needs the first step only


def reference(setup: Setup) -> Variant:
    """Return the run on one device."""
    return Variant(name=ALONE, stages=(_at_once(setup, ALONE, _ALONE),))


def derive(setup: Setup, facts: ReferenceFacts) -> list[Variant]:
    """Return all variants but the reference, each after its partner."""
    variants: list[Variant] = []

    def add(
        way: _Way,
        name: str,
        partner: str,
        *,
        parts: int = facts.accumulation,
        first_way: _Way | None = None,
        starter: str = "",
        same_bits: bool = False,
    ) -> None:
        """Add a variant of `parts` micro-batches. `first_way` trains its first half, if not None."""
        words = ("--accumulate", str(parts), "--micro-batch", "None")
        stages = [_at_once(setup, name, way, *words, *(("--resume", "auto") if first_way else ()), starter=starter)]
        if first_way is not None:
            stages.insert(0, _at_once(setup, name, first_way, *words, "--max-steps", str(facts.steps // 2)))
        why_not = _obstacle(setup, facts, way, parts, first_way)
        variants.append(Variant(name=name, stages=tuple(stages), partner=partner, same_bits=same_bits, why_not=why_not))

    # One world gives the same bits each time; on a GPU only with --deterministic.
    exact = setup.is_cpu or setup.config.precision.deterministic
    requested, is_own = setup.config.parallel.strategy, bool(setup.script or setup.config.optim.step)
    strategies = [name for name, kind in KINDS.items() if kind.process_per_device and not kind.divides_state]
    if not is_own:  # each process of such a loop has one device
        strategies += [name for name, kind in KINDS.items() if kind.drives_all and not kind.has_ranks]
    ways = [_Way(name, setup.devices) for name in (strategies if requested == "auto" else [requested])]
    ranked = [way for way in ways if way.has_ranks]
    for way in ways:
        add(way, way.name, ALONE)
        if way in ranked and setup.is_cpu:
            larger = _Way(way.strategy, way.devices + 1)
            add(larger, larger.name, ALONE)
    # With batch statistics or several optimizers, accumulation changes the model: code after the first optimizer's step
    # sees updated weights only if the batch is whole.
    parts, is_cut_apart = 2 * facts.accumulation, facts.has_statistics or facts.optimizers > 1
    for way in (_ALONE, *ranked) if ranked else ():
        partner = f"{ALONE}-accum-{parts}" if way != _ALONE else "" if is_cut_apart else ALONE
        add(way, f"{way.name}-accum-{parts}", partner, parts=parts)
    for way in ranked if setup.name == "curve" else ():  # launchers and continuations do not change gradients
        for starter in ("torchrun", "hand") if way == ranked[0] else ():
            add(way, f"{way.name}-by-{starter}", way.name, starter=starter, same_bits=exact)
        add(way, f"{way.name}-resumed", way.name, first_way=way, same_bits=exact)
        add(way, f"{ALONE}-then-{way.name}", ALONE, first_way=_ALONE)
    return variants


def _obstacle(setup: Setup, facts: ReferenceFacts, way: _Way, parts: int, first_way: _Way | None) -> str:
    """Return why a variant cannot be trained; "" if it can."""
    parallel, replicas = setup.config.parallel, 1 if way.has_ranks else way.devices  # in one process
    if facts.has_statistics and replicas > 1 and parallel.strategy == parallel.batchnorm == "auto":
        return f"each of {replicas} replicas takes its own batch statistics: by design not one device's model"
    if setup.config.precision.checkpoint_activations and replicas > 1:
        return "--checkpoint-activations takes one device per process"
    if not facts.batch and parts > facts.accumulation:
        return "the loop has no DataLoader whose batches could be cut"
    if 0 < facts.batch < parts * way.devices:
        return f"--batch {facts.batch} does not split into {counted(parts, 'micro-batch')} on {way.devices} devices"
    if first_way and facts.steps < 2:
        return "one step has no middle"
    if first_way and not facts.has_epochs:
        return "a loop that does not go over session.epochs(…) cannot be continued"
    if first_way not in (None, way) and facts.has_statistics and parallel.batchnorm == "local":
        return "with --batchnorm local another number of replicas is another model"
    return ""


def _at_once(setup: Setup, name: str, way: _Way, *extra: str, starter: str = "") -> tuple[Command, ...]:
    """Return the commands to start together: one per rank if started by hand, else one."""
    options, gpus = flatten(setup.config), setup.config.parallel.gpu_indices[: way.devices]
    words: Command = (
        *("lockstep", *setup.arguments, "--output", str(setup.folder / name), "--max-steps", str(options["max-steps"])),
        *("--strategy", way.strategy, "--devices", str(way.devices)),
        *(("--gpus", ",".join(map(str, gpus))) if gpus else ()),
        *extra,
    )
    if starter == "torchrun":
        # Without --, torchrun would take some of the script's flags as its own.
        per_node = ("--standalone", "--nproc-per-node", str(way.devices), "--no-python", "--")
        return (python("torch.distributed.run", *per_node, *python(*words, *setup.script)),)
    if starter == "hand":
        place = (setup.folder / f"{name}.meeting").resolve().as_uri()
        words = (*words, "--launcher", "manual", "--init-method", place, "--world-size", str(way.devices))
        return tuple(python(*words, "--rank", str(rank), *setup.script) for rank in range(way.devices))
    return (python(*words, *setup.script),)


def train(setup: Setup, variant: Variant) -> None:
    """Train a variant by its commands, with logs next to the run's folder.

    Raises the error of the first command that fails, by its exit code, and `Stopped` after Ctrl-C.
    """
    names = [f"{variant.name}.{number}" for number, _ in enumerate(variant.commands, start=1)]
    logs = [setup.folder / f"{name}.log" for name in (names if names[1:] else [variant.name])]
    try:
        check_own(setup.folder / variant.name)
        for stage in variant.stages:
            run(variant.name, stage, logs[: len(stage)])
            del logs[: len(stage)]
    except KeyboardInterrupt:
        raise Stopped(f"Stopped on request while {variant.name} was trained: nothing is proved; start again.") from None
    except OSError as error:
        raise RunError(f"The variant {variant.name} cannot be started: {error.filename}: {error.strerror}.") from error
