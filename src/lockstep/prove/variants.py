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
    def strategies(self) -> tuple[str, ...]:
        """The strategies that are compared with one device: the one that was asked for, or all there are."""
        asked = self.config.parallel.strategy
        several = {name: kind for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all}
        if self.is_own_loop:  # each process of which has one device
            several = {name: kind for name, kind in several.items() if kind.process_per_device}
        return tuple(several) if asked == "auto" else (asked,)

    @property
    def is_own_loop(self) -> bool:
        """Whether a session trains: in a script, or with a step of the user's own."""
        return bool(self.script or self.config.optim.step)

    @property
    def reference(self) -> Variant:
        """The run on one device."""
        alone = Way(auto(several=False), 1)
        return Variant(name=alone.name, way=alone, accumulation=self.accumulation)


def check(setup: Setup) -> None:
    """Raise `RequestError` where the batch cannot be shared out among the devices, as far as that is known."""
    for strategy in setup.strategies:
        way = _way(setup, strategy)
        if setup.script:
            continue
        BatchPlan.solve(setup.config.batch.size, way.ranks, accumulation=setup.accumulation, devices=way.each)


def others(setup: Setup, *, has_statistics: bool, optimizers: int = 1) -> list[Variant]:
    """Return the variants beside the reference, each after its partner.

    Accumulation is a part of models with batch statistics, which is what `has_statistics` says, and of loops with
    several optimizers: what comes after the first one's step sees the step where the batch is whole, and not before.
    """
    is_cut_apart = has_statistics or optimizers > 1
    alone, once, twice = setup.reference, setup.accumulation, 2 * setup.accumulation
    ways = list(_ways(setup))
    found: list[Variant] = []
    for way in ways:
        variant = Variant(name=way.name, way=way, accumulation=once, partner=alone.name)
        pair = _apart(variant) if has_statistics and _keeps_statistics_apart(setup, way) else [variant]
        found += [each for each in pair if each not in found]
    ranked = [way for way in ways if KINDS[way.strategy].process_per_device and way.devices == setup.devices]
    if ranked:
        cut = Variant(
            name=f"{alone.name}-accum-{twice}",
            way=alone.way,
            accumulation=twice,
            partner="" if is_cut_apart else alone.name,
        )
        found += [cut, *(_accumulated(way, cut) for way in ranked)]
    ours = [way for way in ranked if way.ranks > 1]
    for way in [way for way in ours if way.strategy == auto(several=True)] or ours[:1]:
        found += [_started(way, once, starter, same_bits=_is_exact(setup)) for starter in ("torchrun", "hand")]
    for way in ours:
        found += _continued(way, alone, same_bits=_is_exact(setup))
    for way in (way for way in ways if way.has_two_levels):
        found += _continued(way, alone, same_bits=_is_exact(setup))[: 1 if has_statistics else None]
    if setup.first_step:  # launchers and continuations share out no other gradients
        found = [each for each in found if not each.starter and not each.begun_as]
    return found


def _keeps_statistics_apart(setup: Setup, way: Way) -> bool:
    """Whether nobody asked for it, and yet each replica has to take batch statistics of its own."""
    asked = setup.config.parallel
    return asked.strategy == "auto" and asked.batchnorm == "auto" and way.devices > 1 and KINDS[way.strategy].drives_all


def _apart(variant: Variant) -> list[Variant]:
    """Return ranks that take batch statistics of their own as well, and the variant compared with them."""
    way = Way(auto(several=True), variant.way.devices)
    partner = dataclasses.replace(variant, name=f"{way.name}-local", way=way, partner="", local=True)
    note = (
        f"each of {variant.way.devices} replicas takes batch statistics of its own: by design not one device's model, "
        "but that of as many ranks which do so too"
    )
    return [partner, dataclasses.replace(variant, partner=partner.name, note=note)]


def _ways(setup: Setup) -> Iterator[Way]:
    for strategy in setup.strategies:
        yield _way(setup, strategy)
        if KINDS[strategy].process_per_device and setup.is_cpu:
            yield Way(strategy, setup.devices + 1)


def _way(setup: Setup, strategy: str) -> Way:
    """Return how a strategy uses the devices: on a CPU, as many on each of several nodes; GPUs are shared out."""
    if not KINDS[strategy].has_two_levels:
        return Way(strategy, setup.devices)
    return Way(strategy, _NODES * (setup.devices if setup.is_cpu else setup.devices // _NODES))


def _is_exact(setup: Setup) -> bool:
    """Whether one world gives the same bits each time: on a GPU, --deterministic alone sees to that."""
    return setup.is_cpu or setup.config.precision.deterministic


def _accumulated(way: Way, partner: Variant) -> Variant:
    name = f"{way.name}-accum-{partner.accumulation}"
    return Variant(name=name, way=way, accumulation=partner.accumulation, partner=partner.name)


def _started(way: Way, accumulation: int, starter: str, *, same_bits: bool) -> Variant:
    name = f"{way.name}-by-{starter}"
    return Variant(
        name=name, way=way, accumulation=accumulation, partner=way.name, same_bits=same_bits, starter=starter
    )


def _continued(way: Way, alone: Variant, *, same_bits: bool) -> list[Variant]:
    whole = Variant(
        name=f"{way.name}-resumed",
        way=way,
        accumulation=alone.accumulation,
        partner=way.name,
        same_bits=same_bits,
        begun_as=way,
    )
    name = f"{alone.name}-then-{way.name}"
    return [
        whole,
        dataclasses.replace(whole, name=name, partner=alone.name, same_bits=False, begun_as=alone.way),
    ]


def obstacle(
    setup: Setup,
    variant: Variant,
    *,
    steps: int,
    has_statistics: bool,
    has_batches: bool = True,
    has_epochs: bool = True,
) -> str:
    """Return why a variant of a run of `steps` steps cannot be trained, in words; empty where it can.

    A loop of the user's own may prepare no DataLoader, which is what `has_batches` says, and `has_epochs` whether it
    goes over session.epochs.
    """
    way, batch = variant.way, setup.config.batch.size
    if not has_batches and variant.accumulation > setup.accumulation:
        return "the loop has no DataLoader whose batches could be cut"
    if has_batches and way.ranks > most_ranks(batch // variant.accumulation, way.each):
        parts = f"{counted(variant.accumulation, 'micro-batch')} on {counted(way.ranks, 'rank')}"
        return f"--batch {batch} does not split into {parts}"
    if variant.begun_as and steps < 2:
        return "one step has no middle"
    if variant.begun_as and not has_epochs:
        return "a loop that does not go over session.epochs(…) cannot be continued"
    if variant.begun_as not in (None, variant.way) and has_statistics and setup.config.parallel.batchnorm == "local":
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
        begun = _started_ranks(setup, variant, variant.begun_as, "--max-steps", str(steps // 2))
        return [begun, _started_ranks(setup, variant, variant.way, "--resume", "auto")]
    return [_started_ranks(setup, variant, variant.way)]


def _started_ranks(setup: Setup, variant: Variant, way: Way, *more: str) -> list[Command]:
    """Return the commands that are started at once: one for each rank that is started by hand, else one for all."""
    ranks = way.ranks
    if variant.starter == "torchrun":
        # --: of a script's own flags, it would take some for its own.
        per_node = ("--standalone", "--nproc-per-node", str(ranks), "--no-python", "--")
        return [_python("torch.distributed.run", *per_node, *_python("lockstep", *_train(setup, variant, way, *more)))]
    if variant.starter == "hand" or way.has_two_levels:
        place = (setup.folder / f"{variant.name}.meeting").resolve().as_uri()
        meet = (*more, "--launcher", "manual", "--init-method", place, "--world-size", str(ranks))
        return [
            _python("lockstep", *_train(setup, variant, way, *meet, "--rank", str(rank), rank=rank))
            for rank in range(ranks)
        ]
    return [_python("lockstep", *_train(setup, variant, way, *more))]


def _python(module: str, *words: str) -> Command:
    return (sys.executable, "-P", "-m", module, *words)  # -P: what lies in the current folder is none of ours


def _train(setup: Setup, variant: Variant, way: Way, *more: str, rank: int = 0) -> Command:
    how = ("--output", str(setup.folder / variant.name), "--strategy", way.strategy, *_devices(setup, way, rank))
    local = ("--batchnorm", "local") if variant.local else ()
    watched = ("verify", "first_step") if setup.first_step else ()
    if setup.script:
        return (*watched, "run", *setup.flags, *how, *_cut(setup, variant), *local, *more, *setup.script)
    named = [word for key, value in code(setup.config).items() for word in (f"--{key}", value)]
    cut = () if variant.accumulation == setup.accumulation else ("--accumulate", str(variant.accumulation))
    return (*watched, "train", "--config", str(setup.folder / CONFIG), *named, *how, *cut, *local, *more)


def _cut(setup: Setup, variant: Variant) -> Command:
    """Return how a script's batch is cut: the reference's as it says itself, the others' as the reference's was."""
    batch = setup.config.batch
    if batch.micro_batch is not None:
        return ("--micro-batch", str(batch.micro_batch))
    if batch.accumulate is None:
        return ()
    return ("--accumulate", str(variant.accumulation), "--micro-batch", "none")  # which the script may name


def _devices(setup: Setup, way: Way, rank: int) -> Command:
    chosen = setup.config.parallel.gpu_indices[: way.devices]
    if way.has_two_levels and not setup.is_cpu:  # each rank has GPUs of its own
        chosen = (chosen or tuple(range(way.devices)))[rank * way.each :][: way.each]
    if chosen:
        return ("--gpus", ",".join(map(str, chosen)))
    count = way.each if way.has_two_levels else way.devices
    return ("--devices", str(count)) if count > 1 else ()


def train(setup: Setup, variant: Variant, *, steps: int) -> list[Command]:
    """Train a variant by its commands, each with a log beside the run's folder, and return them.

    Raises what the first command that failed has told, as the error of its exit code, and `Stopped` after Ctrl-C.
    """
    stages = commands(setup, variant, steps=steps)
    given = [command for stage in stages for command in stage]
    log = setup.folder / f"{variant.name}.log"
    logs = [log] if len(given) == 1 else [log.with_name(f"{variant.name}.{n}.log") for n in range(1, len(given) + 1)]
    waiting = iter(logs)
    try:
        check_own(setup.folder / variant.name)
        for stage in stages:
            run(variant.name, stage, [next(waiting) for _ in stage])
    except KeyboardInterrupt:
        raise Stopped(f"Stopped on request while {variant.name} was trained: nothing is proved; start again.") from None
    except OSError as error:
        raise RunError(f"The variant {variant.name} cannot be started: {error.filename}: {error.strerror}.") from error
    return given
