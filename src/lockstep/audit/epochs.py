"""Judge epochs, schedules, evaluations and files."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .findings import Finding, make_finding
from .gradients import COARSE
from .recording import Recording
from .tensors import are_equal, has_equal_pair

_REDUCED = 1e-4  # relative, of a number that an evaluation reduces


def judge_schedule(record: Recording) -> Finding | None:
    """Compare the steps of schedules. Another learning rate alone may be meant, as one that grows with the ranks."""
    counts: list[tuple[str, int | None, int | None]] = [
        (f"By step {step + 1}", window.schedule_steps, reference.schedule_steps)
        for step, window in enumerate(record.windows[0][: record.steps])
        if (reference := record.read_reference(step)) is not None
    ]
    facts, replay_facts = record.facts[0], record.read_replay_facts()
    counts.append(("By the second epoch", facts.get("next_schedule_steps"), replay_facts.get("next_schedule_steps")))
    for moment, ranks, one_process in counts:
        if None not in (ranks, one_process) and ranks != one_process:
            rates = record.windows[0][-1].learning_rates[:1]
            return make_finding(
                "schedule", moment, len(record.ranks), ranks=ranks, one_process=one_process, learning_rate=rates
            )
    return None


def _list_loaders(record: Recording, *, training: bool) -> list[int]:
    loaders = {int(number) for facts in record.facts for number in facts["loaders"]}
    trained = {number for facts in record.facts for number in facts["training"]}
    return sorted(loaders & trained if training else loaders - trained)


def has_orders(record: Recording) -> bool:
    """Return whether the indices of all loaders that are trained on are known."""
    loaders = _list_loaders(record, training=True)
    return bool(loaders) and all(record.read_orders(loader) for loader in loaders)


def judge_orders(record: Recording, unseen: list[str]) -> list[Finding | None]:
    """Return the findings on an epoch's samples and the next one's order; add to `unseen` the parts not known."""
    findings = list[Finding | None]()
    for loader in _list_loaders(record, training=True):
        orders, facts = record.read_orders(loader), record.facts[0]["loaders"].get(f"{loader}", {})
        place = facts.get("place", "")
        if orders is None:
            unseen.append(f"which samples an epoch has ({place})")
            continue
        universe = torch.cat([record.read_universe(rank, loader) for rank in record.ranks]).unique()  # type: ignore[no-untyped-call]
        findings.append(_judge_epoch(orders, universe, facts))
        following = record.read_order(0, loader, 1)
        if following is None:
            unseen.append(f"the second epoch ({place})")
        elif torch.equal(following, orders[0]) and not bool((orders[0].diff() > 0).all()):
            findings.append(make_finding("same order", place=place))
    return findings


def _judge_epoch(orders: list[Tensor], universe: Tensor, facts: dict[str, Any]) -> Finding | None:
    """Look for samples that an epoch has twice or never. A sampler may pad or drop less than a batch of each rank."""
    counts = torch.cat(orders).bincount()
    sets = [order.unique() for order in orders]  # type: ignore[no-untyped-call]
    repeats = max(len(order) - len(samples) for order, samples in zip(orders, sets, strict=True))
    repeated, padding = int((counts - 1).clamp(min=0).sum()), len(orders) * facts["batch_size"]
    evidence: dict[str, Any] = {"samples": int((counts > 0).sum()), "repeated": repeated, "place": facts["place"]}
    if has_equal_pair(sets):
        return make_finding("same samples: epoch", **evidence)
    missing = len(universe) - evidence["samples"]
    if missing >= padding and facts["sampler"] == "torch.utils.data.distributed":
        return make_finding("missing samples", missing=missing, of=len(universe), place=facts["place"])
    if not repeated or repeats > padding:
        return None
    if repeated < padding:
        return make_finding("padded epoch", **evidence)
    if facts["sampler"].startswith(("torch.", "accelerate.", "lightning.")):  # others may repeat samples on purpose
        return make_finding("same samples: some", **evidence)
    return None


@dataclass
class _Evaluated:
    """A data set that is evaluated."""

    place: str
    orders: dict[int, list[Tensor]] = field(default_factory=dict)
    """Indices of the samples read, by loader and rank."""
    universes: list[Tensor] = field(default_factory=list)
    is_whole: bool = True
    """Whether every batch was evaluated while it was recorded."""

    @property
    def divided(self) -> dict[int, list[Tensor]]:
        """Orders of the loaders of which each rank reads another part."""
        return {loader: ranks for loader, ranks in self.orders.items() if not are_equal(ranks)}

    @cached_property
    def universe(self) -> Tensor:
        """Indices (n) of its samples."""
        return torch.cat(self.universes).unique()  # type: ignore[no-untyped-call,no-any-return]

    @property
    def missing(self) -> int:
        """Number of samples that no loader reads."""
        read = torch.cat([order for ranks in self.orders.values() for order in ranks])
        return int((read.bincount(minlength=int(self.universe.max()) + 1)[self.universe] == 0).sum())


def judge_evaluation(record: Recording, unseen: list[str]) -> list[Finding | None]:
    """Return the findings on an evaluation's samples and reduced numbers; add to `unseen` the parts not known."""
    findings = list[Finding | None]()
    by_dataset = dict[int, _Evaluated]()
    for loader in _list_loaders(record, training=False):
        facts, ranks = record.facts[0]["loaders"].get(f"{loader}", {}), record.read_orders(loader)
        if "dataset" in facts and ranks is not None:
            evaluated = by_dataset.setdefault(facts["dataset"], _Evaluated(facts["place"]))
            evaluated.orders[loader] = ranks
            evaluated.universes += [record.read_universe(rank, loader) for rank in record.ranks]
            evaluated.is_whole &= facts.get("is_whole", True)
    if not by_dataset:
        unseen.append("an evaluation")
    is_comparable = True
    for evaluated in by_dataset.values():
        if not evaluated.divided:
            continue
        padding = {loader: _count_repeats(ranks) for loader, ranks in evaluated.divided.items()}
        counted = {loader: _counts_padding(record, evaluated, loader, n) for loader, n in padding.items() if n}
        findings += _judge_parts(
            record, evaluated, max([padding[n] for n, value in counted.items() if value], default=0)
        )
        for loader, value in counted.items():
            if not value:
                is_comparable = False  # one process has no padding to leave out
                phrase = "whether it leaves out" if value is None else "the numbers without"
                unseen.append(f"of an evaluation, {phrase} the {padding[loader]} samples of its padding")
    return [*findings, _judge_reductions(record, unseen) if is_comparable else None]


def _count_repeats(ranks: list[Tensor]) -> int:
    """Return the number of samples that come once more over the ranks."""
    return int((torch.cat(ranks).bincount() - 1).clamp(min=0).sum())


def _counts_padding(record: Recording, evaluated: _Evaluated, loader: int, repeated: int) -> bool | None:
    """Return whether the numbers of an evaluation include its `repeated` samples; None if it is not known."""
    if any(loader in facts["gathers"] for facts in record.facts):
        return False
    reductions = [reduction for reduction in record.facts[0]["reductions"] if reduction["loader"] == loader]
    reduced = {value for reduction in reductions for value in reduction["values"]}
    read = sum(map(len, evaluated.orders[loader]))
    if reduced and evaluated.is_whole:
        if read not in reduced and read - repeated in reduced:
            return False
        other_calls = list[str]()
        return read in reduced or (_judge_reductions(record, other_calls) is None and not other_calls) or None
    return True if record.facts[0].get("is_accelerated") and not reduced else None


def _judge_parts(record: Recording, evaluated: _Evaluated, padding: int) -> list[Finding | None]:
    """Return the findings on the samples of a data set; its numbers include `padding` samples twice."""
    has_exchanged = any(facts["gathers"] or facts["collectives"] for facts in record.facts)
    evidence = {"of": len(evaluated.universe), "place": evaluated.place}
    samples = len(next(iter(evaluated.divided.values()))[0])
    return [
        None if has_exchanged else make_finding("evaluation of a part", samples=samples, **evidence),
        make_finding("evaluation drops", missing=evaluated.missing, **evidence) if evaluated.missing else None,
        make_finding("evaluation pads", repeated=padding, **evidence) if padding and has_exchanged else None,
    ]


def _judge_reductions(record: Recording, unseen: list[str]) -> Finding | None:
    """Compare the numbers that an evaluation reduces with one process's, or with its number for each rank."""
    reductions, references = record.facts[0]["reductions"], record.read_replay_facts().get("reductions", [])
    if [reduction["place"] for reduction in reductions] != [reference["place"] for reference in references]:
        unseen.append("what the evaluation reduces")
        return None
    count = len(record.ranks)
    tolerance = COARSE if any(window.is_coarse for window in record.windows[0]) else _REDUCED
    for reduction, reference in zip(reductions, references, strict=True):
        for pair in zip(reduction["values"], reference["values"], strict=False):
            ranks, one_process = (math.nan if value is None else value for value in pair)
            candidates = (one_process, one_process * count)
            most = 1.0 if all(float(value).is_integer() for value in pair if value is not None) else 1e-12  # of hits
            if not any(math.isclose(ranks, value, rel_tol=tolerance, abs_tol=most) for value in candidates):
                nearest = min(candidates, key=lambda value: abs(value - ranks))
                place = reduction["place"]
                return make_finding("evaluation differs", count, ranks=ranks, one_process=nearest, place=place)
    return None


def judge_files(record: Recording) -> Finding | None:
    """Look for a file that several ranks write."""
    writers = collections.defaultdict[str, list[int]](list)
    places = dict[str, str]()
    for rank, facts in enumerate(record.facts):
        for save in facts["saves"]:
            places[save["path"]] = save["place"]
            writers[save["path"]] += [rank] * (rank not in writers[save["path"]])
    for path, ranks in writers.items():
        if len(ranks) > 1:
            return make_finding("checkpoint by every rank", len(ranks), path=path, ranks=ranks, place=places[path])
    return None
