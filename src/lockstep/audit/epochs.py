"""Judge what lies beside the steps: orders of epochs, schedules, evaluations, and files."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .causes import Finding
from .recording import Recording

_REDUCED = 1e-4  # relative, of what an evaluation reduces


def schedule(record: Recording) -> Finding | None:
    """Compare the steps of schedules. Another learning rate alone may be meant, as one that grows with the ranks."""

    def finding(when: str, theirs: int, ours: int) -> Finding:
        rates = [window.learning_rates[:1] for window in record.windows[0]][-1]
        return Finding(
            "schedule",
            f"{when} the schedule was stepped {theirs} times on {len(record.windows)} ranks and {ours} times in one "
            f"process (learning rate {', '.join(f'{rate:.6g}' for rate in rates)}): it is stepped for each rank; a "
            "schedule counts optimizer steps or epochs.",
            evidence={"ranks": theirs, "one_process": ours},
        )

    for step, window in enumerate(record.windows[0][: record.steps]):
        replayed = record.whole(step)
        if replayed is not None and window.schedule_steps != replayed.schedule_steps:
            return finding(f"By step {step + 1}", window.schedule_steps, replayed.schedule_steps)
    theirs, ours = (facts.get("next_schedule_steps") for facts in (record.facts[0], record.replay_facts()))
    if theirs is not None and ours is not None and theirs != ours:
        return finding("By the second epoch", theirs, ours)
    return None


def _loaders(record: Recording, *, training: bool) -> list[int]:
    known = {int(number) for facts in record.facts for number in facts["loaders"]}
    trained = {number for facts in record.facts for number in facts["training"]}
    return sorted(known & trained if training else known - trained)


def has_orders(record: Recording) -> bool:
    """Return whether the indices of all loaders that are trained on are known."""
    loaders = _loaders(record, training=True)
    ranks = range(len(record.windows))
    return bool(loaders) and all(record.order(rank, each, 0) is not None for each in loaders for rank in ranks)


def orders(record: Recording, unseen: list[str]) -> list[Finding]:
    """Return the findings on the samples of an epoch, and the next epoch's order; add to `unseen` what is unknown."""
    found = []
    loaders, ranks = _loaders(record, training=True), range(len(record.windows))
    for loader in loaders:
        known_by_rank = [record.order(rank, loader, 0) for rank in ranks]
        known = [order for order in known_by_rank if order is not None]
        place = record.facts[0]["loaders"].get(f"{loader}", {}).get("place", "")
        if len(known) < len(known_by_rank):
            unseen.append(f"which samples an epoch has ({place})")
            continue
        counts = torch.cat(known).bincount()
        repeats = [len(order) - int((order.bincount() > 0).sum()) for order in known]
        twice, size = int((counts - 1).clamp(min=0).sum()), int((counts > 0).sum())
        evidence = {"samples": size, "twice": twice}
        room = len(known) * (record.facts[0]["loaders"][f"{loader}"]["batch_size"])
        sets = [order.unique() for order in known]  # type: ignore[no-untyped-call]
        is_torchs = record.facts[0]["loaders"][f"{loader}"]["sampler"].startswith(
            ("torch.", "accelerate.", "lightning.")
        )
        if any(torch.equal(a, b) for a, b in itertools.combinations(sets, 2)):
            found.append(
                Finding(
                    "same samples",
                    f"Each rank trains the same {size} samples in each epoch ({place}): give the loader a "
                    "DistributedSampler, or prepare it.",
                    evidence=evidence,
                )
            )
        elif twice and max(repeats) <= room and twice < room:
            found.append(
                Finding(
                    "padded epoch",
                    f"{twice} of {size} samples come twice in an epoch ({place}), so that all ranks have as many: by "
                    "design of the sampler.",
                    by_design=True,
                    evidence=evidence,
                )
            )
        elif twice and max(repeats) <= room and is_torchs:  # others may repeat samples on purpose
            found.append(
                Finding(
                    "same samples",
                    f"{twice} of {size} samples come on several ranks in one epoch ({place}).",
                    evidence=evidence,
                )
            )
        again = record.order(0, loader, 1)
        if again is None:
            unseen.append(f"the second epoch ({place})")
        elif torch.equal(again, known[0]) and not bool((known[0].diff() > 0).all()):
            found.append(
                Finding(
                    "same order",
                    f"Each epoch has the same order of samples ({place}): the sampler is not told the epoch; call "
                    "sampler.set_epoch(epoch) before each.",
                )
            )
    return found


def evaluation(record: Recording, unseen: list[str]) -> list[Finding]:
    """Return the findings on samples and reduced numbers of an evaluation; add to `unseen` what is not known."""
    found = []
    parts: dict[int, list[list[Tensor]]] = {}
    sizes, places = dict[int, Tensor](), dict[int, str]()
    for loader in _loaders(record, training=False):
        facts = record.facts[0]["loaders"].get(f"{loader}", {})
        known_by_rank = [record.order(rank, loader, 0) for rank in range(len(record.windows))]
        known = [order for order in known_by_rank if order is not None]
        if "dataset" in facts and len(known) == len(known_by_rank):
            places[facts["dataset"]] = facts["place"]
            parts.setdefault(facts["dataset"], []).append(known)
            sets = [record.universe(rank, loader) for rank in range(len(record.windows))]
            sizes[facts["dataset"]] = torch.cat([sizes.get(facts["dataset"], sets[0]), *sets]).unique()  # type: ignore[no-untyped-call]
    if not parts:
        unseen.append("an evaluation")
    has_gathered = any(facts["gathers"] for facts in record.facts)
    has_exchanged = has_gathered or any(facts["collectives"] for facts in record.facts)
    for dataset, loaders in parts.items():
        universe, where = sizes[dataset], places[dataset]
        size = len(universe)
        # A loader that all ranks read alike is everybody's own.
        shared = [known for known in loaders if not all(torch.equal(known[0], other) for other in known[1:])]
        if not shared:
            continue
        own = [known[0] for known in loaders if not any(known is each for each in shared)]
        counts = torch.cat([*(order for known in shared for order in known), *own]).bincount(
            minlength=int(universe.max()) + 1
        )
        twice, never = int((counts - 1).clamp(min=0).sum()), int((counts[universe] == 0).sum())
        if not has_exchanged:
            mine = len(shared[0][0])
            found.append(
                Finding(
                    "evaluation of a part",
                    f"Each rank evaluates its own part, rank 0 {mine} of {size} samples ({where}), and nothing is "
                    "reduced: what is reported, and chosen by, is one rank's; all-reduce sums and counts.",
                    evidence={"samples": mine, "of": size},
                )
            )
        if never:
            found.append(
                Finding(
                    "evaluation drops",
                    f"{never} of {size} samples are never evaluated ({where}): the sampler or loader drops what does "
                    "not divide; keep it, or evaluate the rest apart.",
                    evidence={"never": never, "of": size},
                )
            )
        if twice and has_exchanged and not has_gathered:
            found.append(
                Finding(
                    "evaluation pads",
                    f"{twice} of {size} samples are evaluated twice ({where}): the sampler pads, and the mean counts "
                    "them again; leave out what was padded.",
                    evidence={"twice": twice, "of": size},
                )
            )
    if (finding := _reductions(record, unseen)) is not None:
        found.append(finding)
    return found


def _reductions(record: Recording, unseen: list[str]) -> Finding | None:
    theirs, ours = record.facts[0]["reductions"], record.replay_facts().get("reductions", [])
    ranks = len(record.windows)
    if [each["place"] for each in theirs] != [each["place"] for each in ours]:
        unseen.append("what the evaluation reduces")
        return None
    for many, one in zip(theirs, ours, strict=True):
        for a, b in zip(many["values"], one["values"], strict=False):
            if not any(math.isclose(a, b * times, rel_tol=_REDUCED, abs_tol=1e-12) for times in (1, ranks)):
                return Finding(
                    "evaluation differs",
                    f"The evaluation reduces {a:.6g} over {ranks} ranks ({many['place']}), where one process has "
                    f"{b:.6g} of the same samples: a mean of means; reduce sums and counts, and divide once.",
                    evidence={"ranks": a, "one_process": b, "place": many["place"]},
                )
    return None


def saves(record: Recording) -> Finding | None:
    """Return the finding for a file that several ranks write."""
    writers: dict[str, list[int]] = {}
    places = {}
    for rank, facts in enumerate(record.facts):
        for each in facts["saves"]:
            places[each["path"]] = each["place"]
            if rank not in writers.setdefault(each["path"], []):
                writers[each["path"]].append(rank)
    for path, ranks in writers.items():
        if len(ranks) > 1:
            return Finding(
                "checkpoint by every rank",
                f"{len(ranks)} ranks write {path} at once ({places[path]}): readers may find it torn; let rank 0 write "
                "it, under another name that is renamed when it is whole.",
                evidence={"path": path, "ranks": ranks},
            )
    return None
