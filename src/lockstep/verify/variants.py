"""The variants of one config: ways to train that have to come to one model, each as the commands that a person gives.

The reference is one device. Beside it stand every strategy of the table, more ranks, accumulation, the launchers, and
runs that were stopped in the middle. Which there are follows from `kinds.KINDS`; a new line there is a new variant.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..batching import BatchPlan, most_ranks
from ..config import ParallelConfig, RecordConfig, RunConfig
from ..errors import RunError, Stopped, counted
from ..files import check_own, write_whole
from ..kinds import KINDS, auto
from ..options import code, to_toml
from .commands import Command, run

CONFIG = "curve.toml"
_NODES = 2
"""Ranks that stand for nodes of several devices each."""


class Way(NamedTuple):
    """A strategy, and the number of devices that it has in all."""

    strategy: str
    devices: int

    @property
    def name(self) -> str:
        """The strategy alone where it has one device."""
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


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train, and the variant that it has to agree with."""

    name: str
    """Its row, and its folder below the output folder."""
    way: Way
    accumulation: int
    partner: str = ""
    """The name of the variant that it is compared with; empty where others are compared with this one alone."""
    same_bits: bool = False
    """Whether the two have to be the same bits: one world, strategy and accumulation."""
    starter: str = ""
    """Who starts the ranks: torchrun, hand, or empty for the command itself."""
    begun_as: Way | None = None
    """How the first half of the steps was trained, where the run was stopped there and continued."""
    local: bool = False
    """Whether each rank takes batch statistics of its own, as the partner's replicas have to."""
    note: str = ""
    """Why its partner is another one than might be expected."""


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
    def ways(self) -> list[Way]:
        """The strategies that are compared with one device: the one that was asked for, or all; and more ranks.

        Several nodes have as many devices each on a CPU; GPUs are shared out. In a loop of the user's own each process
        has one device.
        """
        asked, is_own = self.config.parallel.strategy, bool(self.script or self.config.optim.step)
        kinds = {name: kind for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all}
        if asked != "auto":
            kinds = {asked: KINDS[asked]}
        elif is_own:
            kinds = {name: kind for name, kind in kinds.items() if kind.process_per_device}
        each, found = self.devices if self.is_cpu else self.devices // _NODES, []
        for name, kind in kinds.items():
            found.append(Way(name, _NODES * each if kind.has_two_levels else self.devices))
            if kind.process_per_device and self.is_cpu:
                found.append(Way(name, self.devices + 1))
        return found

    @property
    def reference(self) -> Variant:
        """The run on one device."""
        alone = Way(auto(several=False), 1)
        return Variant(name=alone.name, way=alone, accumulation=self.accumulation)

    def check(self) -> None:
        """Raise `RequestError` where the batch cannot be shared out among the devices, as far as that is known."""
        for way in self.ways if not self.script else ():
            if way.devices != self.devices + 1:  # more are left out where they cannot be
                BatchPlan.solve(self.config.batch.size, way.ranks, accumulation=self.accumulation, devices=way.each)


def others(setup: Setup, known: Known) -> list[Variant]:
    """Return the variants beside the reference, each after its partner.

    Accumulation is a part of models with batch statistics, and of loops with several optimizers: what comes after the
    first one's step sees the step where the batch is whole, and not before.
    """
    alone, once, asked = setup.reference, setup.accumulation, setup.config.parallel
    # One world gives the same bits each time; on a GPU, --deterministic alone sees to that.
    exact = setup.is_cpu or setup.config.precision.deterministic
    found: list[Variant] = []
    for way in setup.ways:
        variant = Variant(name=way.name, way=way, accumulation=once, partner=alone.name)
        is_apart = asked.strategy == asked.batchnorm == "auto" and KINDS[way.strategy].drives_all
        if known.has_statistics and is_apart:
            note = (
                f"each of {way.devices} replicas takes batch statistics of its own: by design not one device's model, "
                "but that of as many ranks which do so too"
            )
            ranks = Way(auto(several=True), way.devices)
            partner = Variant(name=f"{ranks.name}-local", way=ranks, accumulation=once, local=True)
            found += [partner] * (partner not in found)
            variant = dataclasses.replace(variant, partner=partner.name, note=note)
        found.append(variant)
    ranked = [way for way in setup.ways if KINDS[way.strategy].process_per_device and way.devices == setup.devices]
    if ranked:
        is_cut_apart = known.has_statistics or known.optimizers > 1
        cut = f"{alone.name}-accum-{2 * once}"
        more = Variant(name=cut, way=alone.way, accumulation=2 * once, partner="" if is_cut_apart else alone.name)
        found.append(more)
        for way in ranked:
            found.append(dataclasses.replace(more, name=f"{way.name}-accum-{2 * once}", way=way, partner=cut))
    if setup.first_step:  # launchers and continuations share out no other gradients
        return found
    for way in [way for way in ranked if way.strategy == auto(several=True)] or ranked[:1]:
        again = Variant(name="", way=way, accumulation=once, partner=way.name, same_bits=exact)
        found += [
            dataclasses.replace(again, name=f"{way.name}-by-{starter}", starter=starter)
            for starter in ("torchrun", "hand")
        ]
    for way in (*ranked, *(way for way in setup.ways if way.has_two_levels)):
        name = f"{way.name}-resumed"
        found.append(Variant(name=name, way=way, accumulation=once, partner=way.name, same_bits=exact, begun_as=way))
        if not (way.has_two_levels and known.has_statistics):
            name = f"{alone.name}-then-{way.name}"
            found.append(Variant(name=name, way=way, accumulation=once, partner=alone.name, begun_as=alone.way))
    return found


def obstacle(setup: Setup, known: Known, variant: Variant) -> str:
    """Return why a variant cannot be trained, in words; empty where it can."""
    way, batch = variant.way, setup.config.batch.size
    if not known.has_batches and variant.accumulation > setup.accumulation:
        return "the loop has no DataLoader whose batches could be cut"
    if known.has_batches and way.ranks > most_ranks(batch // variant.accumulation, way.each):
        parts = f"{counted(variant.accumulation, 'micro-batch')} on {counted(way.ranks, 'rank')}"
        return f"--batch {batch} does not split into {parts}"
    if variant.begun_as and known.steps < 2:
        return "one step has no middle"
    if variant.begun_as and not known.has_epochs:
        return "a loop that does not go over session.epochs(…) cannot be continued"
    is_other_model = known.has_statistics and setup.config.parallel.batchnorm == "local"
    if variant.begun_as not in (None, variant.way) and is_other_model:
        return "with --batchnorm local another number of replicas is another model"
    return ""


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


def commands(setup: Setup, variant: Variant, *, steps: int) -> list[list[Command]]:
    """Return the commands that train a variant: each inner list is started at once, and ends before the next begins.

    A run that is continued is stopped after half of its `steps`.
    """
    if variant.begun_as:
        begun = _at_once(setup, variant, variant.begun_as, "--max-steps", str(steps // 2))
        return [begun, _at_once(setup, variant, variant.way, "--resume", "auto")]
    return [_at_once(setup, variant, variant.way)]


def _at_once(setup: Setup, variant: Variant, way: Way, *more: str) -> list[Command]:
    """Return the commands that are started at once: one for each rank that is started by hand, else one for all."""
    ranks = way.ranks
    if variant.starter == "torchrun":
        # --: of a script's own flags, it would take some for its own.
        per_node = ("--standalone", "--nproc-per-node", str(ranks), "--no-python", "--")
        return [_python("torch.distributed.run", *per_node, *_python("lockstep", *_words(setup, variant, way, *more)))]
    if variant.starter == "hand" or way.has_two_levels:
        place = (setup.folder / f"{variant.name}.meeting").resolve().as_uri()
        meet = (*more, "--launcher", "manual", "--init-method", place, "--world-size", str(ranks))
        return [
            _python("lockstep", *_words(setup, variant, way, *meet, "--rank", str(rank), rank=rank))
            for rank in range(ranks)
        ]
    return [_python("lockstep", *_words(setup, variant, way, *more))]


def _python(module: str, *words: str) -> Command:
    return (sys.executable, "-P", "-m", module, *words)  # -P: what lies in the current folder is none of ours


def _words(setup: Setup, variant: Variant, way: Way, *more: str, rank: int = 0) -> Command:
    chosen, batch = setup.config.parallel.gpu_indices[: way.devices], setup.config.batch
    if way.has_two_levels and not setup.is_cpu:  # each rank has GPUs of its own
        chosen = (chosen or tuple(range(way.devices)))[rank * way.each :][: way.each]
    count = way.each if way.has_two_levels else way.devices
    devices = ("--gpus", ",".join(map(str, chosen))) if chosen else ("--devices", str(count)) if count > 1 else ()
    how = ("--output", str(setup.folder / variant.name), "--strategy", way.strategy, *devices)
    local = ("--batchnorm", "local") if variant.local else ()
    watched = ("verify", "first_step") if setup.first_step else ()
    if not setup.script:
        named = [word for key, value in code(setup.config).items() for word in (f"--{key}", value)]
        cut = () if variant.accumulation == setup.accumulation else ("--accumulate", str(variant.accumulation))
        return (*watched, "train", "--config", str(setup.folder / CONFIG), *named, *how, *cut, *local, *more)
    # The reference's batch is cut as it says itself, the others' as the reference's was.
    cut = ("--micro-batch", str(batch.micro_batch)) if batch.micro_batch is not None else ()
    if batch.micro_batch is None and batch.accumulate is not None:
        cut = ("--accumulate", str(variant.accumulation), "--micro-batch", "none")  # which the script may name
    return (*watched, "run", *setup.flags, *how, *cut, *local, *more, *setup.script)


def train(setup: Setup, variant: Variant, *, steps: int) -> list[Command]:
    """Train a variant by its commands, each with a log beside the run's folder, and return them.

    Raises what the first command that failed has told, as the error of its exit code, and `Stopped` after Ctrl-C.
    """
    stages = commands(setup, variant, steps=steps)
    given = [command for stage in stages for command in stage]
    logs = _logs(setup.folder / f"{variant.name}.log", len(given))
    try:
        check_own(setup.folder / variant.name)
        for stage in stages:
            run(variant.name, stage, [next(logs) for _ in stage])
    except KeyboardInterrupt:
        raise Stopped(f"Stopped on request while {variant.name} was trained: nothing is proved; start again.") from None
    except OSError as error:
        raise RunError(f"The variant {variant.name} cannot be started: {error.filename}: {error.strerror}.") from error
    return given


def _logs(log: Path, count: int) -> Iterator[Path]:
    yield from [log] if count == 1 else [log.with_name(f"{log.stem}.{n}.log") for n in range(1, count + 1)]
