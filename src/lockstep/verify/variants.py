"""The variants of one config: ways to train that have to come to one model, each as the commands that a person gives.

The reference is one device. Beside it stand every strategy of the table, more ranks, accumulation, the launchers, and
runs that were stopped in the middle. Which there are follows from `kinds.KINDS`; a new line there is a new variant.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..batching import BatchPlan, most_ranks
from ..config.options import code, to_toml
from ..config.registry import KINDS, auto
from ..config.schema import ParallelConfig, RecordConfig, RunConfig
from ..errors import RunError, Stopped, counted
from ..files import check_own, write_whole
from .commands import Command, run

CONFIG = "curve.toml"
_NODES = 2
"""Ranks that stand for nodes of several devices each."""


class _Way(NamedTuple):
    """A strategy, and the number of devices that it has in all."""

    strategy: str
    devices: int

    @property
    def name(self) -> str:
        if self.has_two_levels:
            return f"{self.strategy}-{self.ranks}x{self.each}"
        return self.strategy if self.devices == 1 else f"{self.strategy}-{self.devices}"

    @property
    def ranks(self) -> int:
        """Processes that share out the batch."""
        if self.has_two_levels:
            return _NODES
        return self.devices if KINDS[self.strategy].process_per_device else 1

    @property
    def each(self) -> int:
        """Devices that a process drives."""
        return self.devices // self.ranks

    @property
    def has_two_levels(self) -> bool:
        """Whether each of several processes drives several devices; they are started by hand, as on several nodes."""
        return KINDS[self.strategy].has_two_levels


_ALONE = _Way(auto(several=False), 1)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train, and the variant that it has to agree with."""

    name: str
    """Its row, and its folder below the output folder."""
    stages: tuple[tuple[Command, ...], ...]
    """Its commands: each inner tuple is started at once, and ends before the next begins."""
    partner: str = ""
    """The name of the variant that it is compared with; empty where others are compared with this one alone."""
    same_bits: bool = False
    """Whether the two have to be the same bits: one world, strategy and accumulation."""
    note: str = ""
    """Why its partner is another one than might be expected."""
    why_not: str = ""
    """Why it cannot be trained; empty where it can."""

    @property
    def commands(self) -> list[Command]:
        """All its commands."""
        return [command for stage in self.stages for command in stage]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the reference's run has told."""

    steps: int
    has_statistics: bool
    """Whether the model has batch statistics."""
    optimizers: int = 1
    has_batches: bool = True
    """Whether the loop has a DataLoader; of the user's own, it may have none."""
    has_epochs: bool = True
    """Whether the loop goes over session.epochs, and so can be continued."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all variants share: the config, the folder, and the number of devices of those that have several."""

    config: RunConfig
    folder: Path
    devices: int
    is_cpu: bool
    script: Command = ()
    """A script of the user's and its arguments, or -m and a module's; empty where `lockstep train` trains."""
    flags: Command = ()
    """Flags of `lockstep run` that all variants of a script have; it decides on whatever they do not name."""
    first_step: bool = False
    """Whether the gradients of the first step are compared, and not the whole of short runs."""

    @property
    def name(self) -> str:
        """What is proved: the name of its check."""
        return "gradients" if self.first_step else "curve"

    @property
    def accumulation(self) -> int:
        """Global micro-batches of a step, a part of the model: as many as keep one device to --micro-batch."""
        batch = self.config.batch
        if self.script:  # the batch is its own, and the reference tells how it was cut
            return batch.accumulate or 1
        plan = BatchPlan.solve(batch.size, 1, micro_size=batch.micro_batch, accumulation=batch.accumulate)
        return plan.accumulation

    @property
    def reference(self) -> Variant:
        """The run on one device."""
        return _variant(self, None, _ALONE)

    def check(self) -> None:
        """Raise `RequestError` where the batch cannot be shared out among the devices, as far as that is known."""
        for way in _ways(self) if not self.script else ():
            BatchPlan.solve(self.config.batch.size, way.ranks, accumulation=self.accumulation, devices=way.each)


def _ways(setup: Setup) -> list[_Way]:
    """Return how the strategies use the devices: the one that was asked for, or all.

    Several nodes have as many devices each on a CPU; GPUs are shared out. In a loop of the user's own each process has
    one device.
    """
    asked, is_own = setup.config.parallel.strategy, bool(setup.script or setup.config.optim.step)
    kinds = {name: kind for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all}
    if asked != "auto":
        kinds = {asked: KINDS[asked]}
    elif is_own:
        kinds = {name: kind for name, kind in kinds.items() if kind.process_per_device}
    nodes = _NODES * (setup.devices if setup.is_cpu else setup.devices // _NODES)
    return [_Way(name, nodes if kind.has_two_levels else setup.devices) for name, kind in kinds.items()]


def others(setup: Setup, known: Known) -> list[Variant]:
    """Return the variants beside the reference, each after its partner.

    Accumulation is a part of models with batch statistics, and of loops with several optimizers: what comes after the
    first one's step sees the step where the batch is whole, and not before.
    """
    make, asked = functools.partial(_variant, setup, known), setup.config.parallel
    # One world gives the same bits each time; on a GPU, --deterministic alone sees to that.
    exact = setup.is_cpu or setup.config.precision.deterministic
    found: dict[str, Variant] = {}

    def add(*made: Variant) -> None:
        for each in made:
            found.setdefault(each.name, each)

    ways = _ways(setup)
    ranked = [way for way in ways if KINDS[way.strategy].process_per_device]
    for way in ways:
        is_apart = asked.strategy == asked.batchnorm == "auto" and KINDS[way.strategy].drives_all
        if known.has_statistics and is_apart:
            note = (
                f"each of {way.devices} replicas takes batch statistics of its own: by design not one device's model, "
                "but that of as many ranks which do so too"
            )
            ranks = _Way(auto(several=True), way.devices)
            add(make(ranks, "local", local=True), make(way, partner=f"{ranks.name}-local", note=note))
        else:
            add(make(way, partner=_ALONE.name))
        if way in ranked and setup.is_cpu:
            add(make(_Way(way.strategy, way.devices + 1), partner=_ALONE.name))
    if ranked:
        parts = 2 * setup.accumulation
        is_cut_apart = known.has_statistics or known.optimizers > 1
        add(make(_ALONE, f"accum-{parts}", accumulation=parts, partner="" if is_cut_apart else _ALONE.name))
        add(
            *(make(way, f"accum-{parts}", accumulation=parts, partner=f"{_ALONE.name}-accum-{parts}") for way in ranked)
        )
    if setup.first_step:  # launchers and continuations share out no other gradients
        return list(found.values())
    for way in [way for way in ranked if way.strategy == auto(several=True)] or ranked[:1]:
        for starter in ("torchrun", "hand"):
            add(make(way, f"by-{starter}", starter=starter, partner=way.name, same_bits=exact))
    for way in (*ranked, *(way for way in ways if way.has_two_levels)):
        add(make(way, "resumed", begun_as=way, partner=way.name, same_bits=exact))
        if not (way.has_two_levels and known.has_statistics):
            name = f"{_ALONE.name}-then-{way.name}"
            add(make(way, name=name, begun_as=_ALONE, partner=_ALONE.name))
    return list(found.values())


def _variant(
    setup: Setup,
    known: Known | None,
    way: _Way,
    how: str = "",
    *,
    name: str = "",
    accumulation: int | None = None,
    starter: str = "",
    begun_as: _Way | None = None,
    local: bool = False,
    **more: Any,
) -> Variant:
    """Return a variant, named by its way and `how` it is trained, unless it has a name of its own.

    `starter` starts the ranks: torchrun, hand, or empty for the command itself. With `begun_as` the first half of the
    steps is trained so, and continued. With `local`, each rank takes batch statistics of its own.
    """
    name = name or (f"{way.name}-{how}" if how else way.name)
    cut = accumulation or setup.accumulation
    words = functools.partial(_words, setup, name, cut, ("--batchnorm", "local") if local else ())
    place = setup.folder / f"{name}.meeting"
    stages = [_at_once(words, way, place, starter, *(("--resume", "auto") if begun_as else ()))]
    if begun_as is not None and known is not None:
        stages.insert(0, _at_once(words, begun_as, place, starter, "--max-steps", str(known.steps // 2)))
    why_not = "" if known is None else _obstacle(setup, known, way, cut, begun_as)
    return Variant(name=name, stages=tuple(stages), why_not=why_not, **more)


def _obstacle(setup: Setup, known: Known, way: _Way, accumulation: int, begun_as: _Way | None) -> str:
    """Return why a variant cannot be trained, in words; empty where it can."""
    batch = setup.config.batch.size
    if not known.has_batches and accumulation > setup.accumulation:
        return "the loop has no DataLoader whose batches could be cut"
    if known.has_batches and way.ranks > most_ranks(batch // accumulation, way.each):
        return f"--batch {batch} does not split into {counted(accumulation, 'micro-batch')} on {way.ranks} ranks"
    if begun_as and known.steps < 2:
        return "one step has no middle"
    if begun_as and not known.has_epochs:
        return "a loop that does not go over session.epochs(…) cannot be continued"
    if begun_as not in (None, way) and known.has_statistics and setup.config.parallel.batchnorm == "local":
        return "with --batchnorm local another number of replicas is another model"
    return ""


def _at_once(words: Any, way: _Way, place: Path, starter: str, *more: str) -> tuple[Command, ...]:
    """Return the commands that are started at once: one for each rank that is started by hand, else one for all."""
    if starter == "torchrun":
        # --: of a script's own flags, it would take some for its own.
        per_node = ("--standalone", "--nproc-per-node", str(way.ranks), "--no-python", "--")
        return (_python("torch.distributed.run", *per_node, *_python("lockstep", *words(way, 0, *more))),)
    if starter == "hand" or way.has_two_levels:
        meet = ("--launcher", "manual", "--init-method", place.resolve().as_uri(), "--world-size", str(way.ranks))
        ranks = range(way.ranks)
        return tuple(_python("lockstep", *words(way, rank, *more, *meet, "--rank", str(rank))) for rank in ranks)
    return (_python("lockstep", *words(way, 0, *more)),)


def _python(module: str, *words: str) -> Command:
    return (sys.executable, "-P", "-m", module, *words)  # -P: what lies in the current folder is none of ours


def _words(setup: Setup, name: str, accumulation: int, local: Command, way: _Way, rank: int, *more: str) -> Command:
    """Return the words of lockstep's that train a variant on one rank, or on all of them."""
    chosen, batch = setup.config.parallel.gpu_indices[: way.devices], setup.config.batch
    if way.has_two_levels and not setup.is_cpu:  # each rank has GPUs of its own
        chosen = (chosen or tuple(range(way.devices)))[rank * way.each :][: way.each]
    count = way.each if way.has_two_levels else way.devices
    devices = ("--gpus", ",".join(map(str, chosen))) if chosen else ("--devices", str(count)) if count > 1 else ()
    how = ("--output", str(setup.folder / name), "--strategy", way.strategy, *devices)
    cut: Command = ()
    watched = ("verify", "first_step") if setup.first_step else ()
    if not setup.script:
        named = [word for key, value in code(setup.config).items() for word in (f"--{key}", value)]
        cut = ("--accumulate", str(accumulation)) if accumulation != setup.accumulation else ()
        return (*watched, "train", "--config", str(setup.folder / CONFIG), *named, *how, *cut, *local, *more)
    # The reference's batch is cut as it says itself, the others' as the reference's was.
    if batch.micro_batch is not None:
        cut = ("--micro-batch", str(batch.micro_batch))
    elif batch.accumulate is not None:
        cut = ("--accumulate", str(accumulation), "--micro-batch", "none")  # which the script may name
    return (*watched, "run", *setup.flags, *how, *cut, *local, *more, *setup.script)


def write_config(setup: Setup) -> None:
    """Write what all variants share to the file that their commands name. Raises OSError.

    Those of a script have flags alone: what stands in a file would beat what it decides on.
    """
    if setup.script:
        return
    asked = setup.config
    parallel = dataclasses.replace(asked.parallel, strategy=ParallelConfig().strategy, devices=None, gpus="")
    batch = dataclasses.replace(asked.batch, accumulate=setup.accumulation, micro_batch=None)
    record = dataclasses.replace(asked.record, output=RecordConfig().output)
    config = dataclasses.replace(asked, parallel=parallel, batch=batch, record=record)
    write_whole(setup.folder / CONFIG, to_toml(config).encode())


def train(setup: Setup, variant: Variant) -> None:
    """Train a variant by its commands, each with a log beside the run's folder.

    Raises what the first command that failed has told, as the error of its exit code, and `Stopped` after Ctrl-C.
    """
    several, number = len(variant.commands) > 1, 0
    try:
        check_own(setup.folder / variant.name)
        for stage in variant.stages:
            numbers = range(number + 1, number + len(stage) + 1)
            number += len(stage)
            run(variant.name, stage, [setup.folder / f"{variant.name}{f'.{n}' * several}.log" for n in numbers])
    except KeyboardInterrupt:
        raise Stopped(f"Stopped on request while {variant.name} was trained: nothing is proved; start again.") from None
    except OSError as error:
        raise RunError(f"The variant {variant.name} cannot be started: {error.filename}: {error.strerror}.") from error
