"""Replicas that are the same bits pass every check; one bit on one rank is found within K steps and named.

That a check ends the run, and how, is seen in tests/faults; that runs which are right pass it, in the laws.
"""

from __future__ import annotations

import math
import re
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checks.replicas import SHARE, ReplicaCheck
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import ProofError, RunError
from lockstep.jobs.job import assemble
from lockstep.record.checks import Check
from lockstep.world.world import World

from ..pool import RankPool
from ..stepping import steps


def _paid(world: World) -> tuple[float, list[int]]:
    times_s = count(step=0.002)  # so long does each check take
    check = ReplicaCheck(world, lambda: {"head": torch.ones(3)}, None, lambda: float(next(times_s)))
    due = []
    for step in range(1, 2001):
        if check.due(step):
            check.check(step, 0.01)
            due.append(step)
        if step % 500 == 0:
            check.confirm(step, 0.01)  # as before a checkpoint: paid for out of the same budget
    return check.cost_s, due


def test_by_default_all_checks_together_keep_to_the_budget(pool: RankPool) -> None:
    (cost_s, due), other = pool.run(2, _paid)
    assert due == other[1]
    assert due[:2] == [1, 2]  # what a check costs is known after the first
    budget_s = SHARE * 2000 * 0.01
    assert 0.9 * budget_s < cost_s < budget_s + 2 * 0.002  # the first check, and one that a checkpoint asked for


def test_a_copy_on_another_device_is_compared_too() -> None:
    tensors, copy = {"head": torch.ones(10, 64)}, {"head": torch.ones(10, 64)}
    check = ReplicaCheck(World.alone(), lambda: tensors, 1, copies=lambda: [copy])
    check.check(1, 0.1)
    copy["head"].view(torch.int32)[1, 2] ^= 1
    with pytest.raises(ProofError, match=r"after step 2: rank 0's copy on cpu differs from its own weights in head"):
        check.check(2, 0.1)
    proof = check.proof()
    assert (proof.outcome, proof.times) == (Check.FAILS, 2)


# ---- in training

TRAINED = {"data": "digits", "model": "resnet8", "strategy": "ddp", "batch": 24, "lr": 0.05, "precision": "fp32"}
WEIGHT = "classifier.weight"
MOMENTUM = f"optimizer/{WEIGHT}/momentum_buffer"


def _ruin(tensor: Tensor, flips: bool) -> None:
    """Flip a bit of the largest element, or make that NaN."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    at = int(flat.abs().argmax())
    if flips:
        flat.view(torch.int32)[at] ^= 1 << 18
    else:
        flat[at] = math.nan


def _ruined(world: World, name: str, ranks: tuple[int, ...], every: int, flips: bool, options: dict[str, Any]) -> str:
    """Train six steps; ruin a tensor on some ranks after the fourth; return what a check says of it."""
    torch.set_num_threads(1)
    job = assemble(override(RunConfig(), **TRAINED | {"verify_every": 0} | options), world)
    check = ReplicaCheck(world, job.replicated, every)
    try:
        for step, _ in zip(range(1, 7), steps(job), strict=False):
            if step == 4 and world.rank in ranks:
                _ruin(job.replicated()[name], flips)
            if check.due(step):
                check.check(step, 0.1)
    except (ProofError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        job.data.close()
    return ""


@pytest.mark.parametrize(
    ("name", "ranks", "at", "every", "options", "told"),
    [
        (MOMENTUM, 3, 1, 3, {}, "rank 1 differs from the others"),
        (f"ema/{WEIGHT}", 2, 1, 1, {"ema": 0.9}, "rank 0 and rank 1 differ"),
        ("model/stem.1.running_var", 3, 0, 1, {"batchnorm": "sync"}, "rank 0 differs from the others"),
    ],
)
def test_one_bit_that_flips_while_training_is_found(
    pool: RankPool, name: str, ranks: int, at: int, every: int, options: dict[str, Any], told: str
) -> None:
    (said,) = {*pool.run(ranks, _ruined, name, (at,), every, True, options)}
    found_at = -(-4 // every) * every
    assert said.startswith(f"ProofError: The replicas are not the same bits after step {found_at}: {told} in "), said
    named = {*re.findall(r"(\S+) by up to", said)}
    assert name in named
    assert all(name.split("/")[1] in each for each in named), "no tensor but that one and what is made of it"
    assert f"they were the same after step {found_at - every}." in said


def test_what_is_not_finite_on_all_ranks_is_named(pool: RankPool) -> None:
    (said,) = {*pool.run(2, _ruined, MOMENTUM, (0, 1), 1, False, {})}
    named = rf"RunError: .* after step 4 are not finite numbers \([^)]*\b{re.escape(MOMENTUM)}\), though the loss was"
    assert re.match(named, said), said


def _lost(world: World, flips: bool) -> tuple[str, str]:
    """Return what is said of a loss that is not finite some steps after a check, and what becomes of the proof."""
    held = {"model/frozen": torch.ones(64)}
    check = ReplicaCheck(world, lambda: held, 20)
    check.check(20, 0.1)
    if flips and world.rank == 1:
        _ruin(held["model/frozen"], flips)
    try:
        said = check.explain_loss(25, 24)
    except ProofError as error:
        said = str(error)
    return said, check.proof().outcome


@pytest.mark.parametrize(
    ("flips", "told", "outcome"),
    [
        (
            True,
            "rank 1 differs from the others in model/frozen by up to 0.0312; .* the same after step 20",
            Check.FAILS,
        ),
        (False, "^The replicas were the same after step 20; --verify-every 1", Check.OPEN),
    ],
)
def test_a_loss_that_is_not_finite_has_the_replicas_compared(
    pool: RankPool, flips: bool, told: str, outcome: str
) -> None:
    ((said, found),) = {*pool.run(3, _lost, flips)}
    assert re.search(told, said), said
    assert found == outcome
