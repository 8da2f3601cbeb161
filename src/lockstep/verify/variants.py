"""Variants of one job that must train one model, as commands.

The reference is one device. Beside it stand the strategies of the registry, one rank more, micro-batches, ranks started
in other ways, and runs that were stopped in the middle. (Strategies of several nodes need ranks started by hand:
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
        """Whether each device has a process of its own."""
        return KINDS[self.strategy].has_ranks


_ALONE = _Way(resolved("auto", several=False))
ALONE = _ALONE.name
"""The name of the reference."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train, and the variant to compare it with."""

    name: str  # its row, and its folder below the output folder
    stages: tuple[tuple[Command, ...], ...]
    """Its commands: each inner tuple is started at once, and ends before the next begins."""
    partner: str = ""
    """The name of the variant that it is compared with; empty where others are compared with this one alone."""
    same_bits: bool = False  # whether the two have to be the same bits: one world, strategy and accumulation
    why_not: str = ""  # why it cannot be trained; empty where it can

    @property
    def commands(self) -> list[Command]:
        """All its commands."""
        return [command for stage in self.stages for command in stage]


class Known(NamedTuple):
    """Facts from the reference's run."""

    steps: int
    accumulation: int
    batch: int  # samples of a step; 0 where the loop has no DataLoader
    has_statistics: bool  # whether the model has batch statistics
    has_epochs: bool  # whether the loop goes over session.epochs, and so can be continued
    optimizers: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that all variants share."""

    config: RunConfig
    folder: Path
    devices: int  # of the variants that have several
    is_cpu: bool
    given: Command  # the verb, train or run, and its flags, but for those in which variants differ
    script: Command = ()  # the user's script and its own arguments, or -m and a module's
    name: str = "curve"  # of the check: curve, or gradients, for which the first step is enough


def reference(setup: Setup) -> Variant:
    """Return the run on one device."""
    return Variant(name=ALONE, stages=(_at_once(setup, ALONE, _ALONE),))


def others(setup: Setup, known: Known) -> list[Variant]:
    """Return the variants beside the reference, each after its partner."""
    found: list[Variant] = []

    def add(
        way: _Way,
        name: str,
        partner: str,
        *,
        parts: int = known.accumulation,
        begun: _Way | None = None,
        starter: str = "",
        same_bits: bool = False,
    ) -> None:
        """Add a variant of `parts` micro-batches. Its first half is trained as `begun`, if given."""
        words = ("--accumulate", str(parts), "--micro-batch", "None")
        stages = [_at_once(setup, name, way, *words, *(("--resume", "auto") if begun else ()), starter=starter)]
        if begun is not None:
            stages.insert(0, _at_once(setup, name, begun, *words, "--max-steps", str(known.steps // 2)))
        why_not = _obstacle(setup, known, way, parts, begun)
        found.append(Variant(name=name, stages=tuple(stages), partner=partner, same_bits=same_bits, why_not=why_not))

    # One world gives the same bits each time; on a GPU, --deterministic alone sees to that.
    exact = setup.is_cpu or setup.config.precision.deterministic
    asked, is_own = setup.config.parallel.strategy, bool(setup.script or setup.config.optim.step)
    several = [name for name, kind in KINDS.items() if kind.process_per_device]
    if not is_own:  # each process of such a loop has one device
        several += [name for name, kind in KINDS.items() if kind.drives_all and not kind.has_ranks]
    ways = [_Way(name, setup.devices) for name in (several if asked == "auto" else [asked])]
    ranked = [way for way in ways if way.has_ranks]
    for way in ways:
        add(way, way.name, ALONE)
        if way in ranked and setup.is_cpu:
            more = _Way(way.strategy, way.devices + 1)
            add(more, more.name, ALONE)
    # Accumulation is a part of models with batch statistics, and of loops with several optimizers: what comes after
    # the first one's step sees the step where the batch is whole, and not before.
    parts, is_cut_apart = 2 * known.accumulation, known.has_statistics or known.optimizers > 1
    for way in (_ALONE, *ranked) if ranked else ():
        partner = f"{ALONE}-accum-{parts}" if way != _ALONE else "" if is_cut_apart else ALONE
        add(way, f"{way.name}-accum-{parts}", partner, parts=parts)
    for way in ranked if setup.name == "curve" else ():  # launchers and continuations share out no other gradients
        for starter in ("torchrun", "hand") if way == ranked[0] else ():
            add(way, f"{way.name}-by-{starter}", way.name, starter=starter, same_bits=exact)
        add(way, f"{way.name}-resumed", way.name, begun=way, same_bits=exact)
        add(way, f"{ALONE}-then-{way.name}", ALONE, begun=_ALONE)
    return found


def _obstacle(setup: Setup, known: Known, way: _Way, parts: int, begun: _Way | None) -> str:
    """Return why a variant cannot be trained; "" where it can."""
    asked, replicas = setup.config.parallel, 1 if way.has_ranks else way.devices  # in one process
    if known.has_statistics and replicas > 1 and asked.strategy == asked.batchnorm == "auto":
        return f"each of {replicas} replicas takes batch statistics of its own: by design not one device's model"
    if not known.batch and parts > known.accumulation:
        return "the loop has no DataLoader whose batches could be cut"
    if 0 < known.batch < parts * way.devices:
        return f"--batch {known.batch} does not split into {counted(parts, 'micro-batch')} on {way.devices} devices"
    if begun and known.steps < 2:
        return "one step has no middle"
    if begun and not known.has_epochs:
        return "a loop that does not go over session.epochs(…) cannot be continued"
    if begun not in (None, way) and known.has_statistics and asked.batchnorm == "local":
        return "with --batchnorm local another number of replicas is another model"
    return ""


def _at_once(setup: Setup, name: str, way: _Way, *more: str, starter: str = "") -> tuple[Command, ...]:
    """Return the commands to start together. One per rank if started by hand, else one."""
    options, gpus = flatten(setup.config), setup.config.parallel.gpu_indices[: way.devices]
    words: Command = (
        *("lockstep", *setup.given, "--output", str(setup.folder / name), "--max-steps", str(options["max-steps"])),
        *("--strategy", way.strategy, "--devices", str(way.devices)),
        *(("--gpus", ",".join(map(str, gpus))) if gpus else ()),
        *more,
    )
    if starter == "torchrun":
        # --: of a script's own flags, it would take some for its own.
        per_node = ("--standalone", "--nproc-per-node", str(way.devices), "--no-python", "--")
        return (python("torch.distributed.run", *per_node, *python(*words, *setup.script)),)
    if starter == "hand":
        place = (setup.folder / f"{name}.meeting").resolve().as_uri()
        words = (*words, "--launcher", "manual", "--init-method", place, "--world-size", str(way.devices))
        return tuple(python(*words, "--rank", str(rank), *setup.script) for rank in range(way.devices))
    return (python(*words, *setup.script),)


def train(setup: Setup, variant: Variant) -> None:
    """Train a variant by its commands; logs lie beside the run's folder.

    Raises the error of the first command that failed, by its exit code, and `Stopped` after Ctrl-C.
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
