"""N ranks' gradients are one process's, or the cause is found by switching it off: each that there is, and no other."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import RunConfig
from lockstep.data.order import Order
from lockstep.errors import RequestError
from lockstep.options import override
from lockstep.prove.answer import Answer, Report, examine
from lockstep.prove.cases import Case
from lockstep.prove.gaps import Gradients, gaps
from lockstep.prove.gradients import Workbench
from lockstep.prove.switches import NOTHING, Off
from lockstep.strategies.ddp import DDP
from lockstep.world import World

from ..pool import RankPool

RANKS = ("ddp",)


def _examined(
    world: World, names: tuple[str, ...], values: dict[str, Any], tolerance: float, step: str, fault: str
) -> Report | str | None:
    torch.set_num_threads(1)
    asked = {"model": "tests.judged:Plain", "data": "tests.judged:vectors", "batch": 24, "precision": "fp64"}
    config = override(RunConfig(), **{"strategy": names[0], "channels_last": "off"} | asked | values)
    right = DDP.averages_over, DDP.sync_on, DDP.wrap, Order.__init__, Workbench.under
    if fault == "wrong count":
        DDP.averages_over = property(lambda self: self.world.size + 1)  # type: ignore[assignment]
    if fault == "sharing":
        DDP.wrap = _by_place  # type: ignore[method-assign]
    if fault == "order" and world.rank == 1:
        Order.__init__ = _reseeded  # type: ignore[method-assign]
    if fault == "bit" and world.rank == 1:
        Workbench.under = _flipped  # type: ignore[method-assign]
    if fault == "accumulation":
        DDP.sync_on = _forgetting  # type: ignore[method-assign]
    try:
        return examine(config, world, list(names), tolerance, step)
    except RequestError as error:
        return str(error)
    finally:
        DDP.averages_over, DDP.sync_on, DDP.wrap, Order.__init__, Workbench.under = right  # type: ignore[method-assign]


def _forgetting(self: DDP, replica: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Exchange gradients in the last micro-batch only, as DDP does, and weigh those before it wrongly."""
    for each in replica.parameters() if last else ():
        if each.grad is not None:
            each.grad *= 1.5
    assert isinstance(replica, DistributedDataParallel)
    return nullcontext() if last else replica.no_sync()


_wrap, _order, _under = DDP.wrap, Order.__init__, Workbench.under


def _by_place(self: DDP, model: nn.Module) -> nn.Module:
    """Wrap, and exchange a parameter once for each place that uses it."""
    for each, places in Counter(held for part in model.modules() for held in part._parameters.values()).items():
        if each is not None and places > 1:
            each.register_hook(lambda gradient, places=places: gradient * places)
    return _wrap(self, model)


def _reseeded(self: Order, samples: int, *, seed: int, epoch: int) -> None:
    _order(self, samples, seed=seed + 1, epoch=epoch)


def _flipped(self: Workbench, strategy: str, case: Case, off: Off = NOTHING) -> Gradients:
    """Flip a bit of what the exchange has left on this rank."""
    found = _under(self, strategy, case, off)
    found["0.weight"].view(-1).view(torch.int64)[3] ^= 1 << 20
    return found


def examined(
    pool: RankPool,
    *names: str,
    ranks: int = 2,
    tolerance: float = 1e-9,
    step: str = "",
    fault: str = "",
    **values: Any,
) -> dict[str, Answer]:
    report = pool.run(ranks, _examined, names or RANKS, values, tolerance, step, fault)[0]
    assert isinstance(report, Report), report
    return {answer.strategy: answer for answer in report.answers}


def causes(answer: Answer) -> list[str]:
    return [cause.name for cause in answer.causes]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("model", ["Plain", "Tied", "Frozen", "Grouped", "Normed", "Transformer"])
def test_models_that_are_the_same_agree(pool: RankPool, model: str, ranks: int) -> None:
    data = "tests.judged:texts" if model == "Transformer" else "tests.judged:vectors"
    strategies = ("ddp",) if model == "Normed" else ("ddp", "dp")
    found = examined(pool, *strategies, ranks=ranks, model=f"tests.judged:{model}", data=data)
    for answer in found.values():
        assert answer.agrees, answer
        assert len(answer.rows) == 4, "the first batch, an uneven one, the last, and micro-batches"
        assert all(row.gap < 1e-12 for row in answer.rows)


def test_a_loss_of_ones_own_that_sums_agrees(pool: RankPool) -> None:
    assert examined(pool, "ddp", "dp", loss="tests.judged:margin_loss")["ddp"].agrees


FOUND: list[tuple[list[str], dict[str, Any]]] = [
    (["randomness"], {"model": "tests.judged:Dropping"}),
    (["randomness"], {"model": "tests.judged:SkippingAtRandom"}),
    (["randomness"], {"model": "tests.judged:DroppingTransformer", "data": "tests.judged:texts"}),
    (["randomness"], {"model": "tests.judged:Checkpointed"}),
    (["randomness"], {"loss": "tests.judged:noisy_loss"}),
    (["randomness of its own"], {"model": "tests.judged:Unseedable"}),
    (["a wrong count"], {"step": "tests.judged:halved_step"}),
    (["accumulation"], {"fault": "accumulation"}),
    (["local BatchNorm"], {"model": "tests.judged:Normed", "batchnorm": "local"}),
    (["randomness", "local BatchNorm"], {"model": "tests.judged:DroppingAndNormed", "batchnorm": "local"}),
    (["data"], {"data": "tests.judged:unseeded", "workers": 0}),
    (["a loss that divides by the local batch"], {"loss": "tests.judged:mean_loss"}),
    (["a loss that couples samples"], {"loss": "tests.judged:pairwise_loss"}),
    (["mean of means"], {"step": "tests.judged:mean_step"}),
    (["mean of means", "randomness"], {"step": "tests.judged:mean_step", "model": "tests.judged:Dropping"}),
    (["a wrong count"], {"fault": "wrong count"}),
    (["shared parameters"], {"fault": "sharing", "model": "tests.judged:Tied"}),
    (["data"], {"fault": "order"}),
    (["several together"], {"model": "tests.judged:NoisyInTraining"}),
    (["coupled samples"], {"model": "tests.judged:Coupled"}),
    (["coupled samples"], {"model": "tests.judged:ByFirst"}),
    (["coarser arithmetic"], {"model": "tests.judged:PartlySingle"}),
]


@pytest.mark.parametrize(
    ("expected", "values"), FOUND, ids=lambda each: "+".join(each) if isinstance(each, list) else ""
)
def test_each_cause_is_found_and_no_other(pool: RankPool, expected: list[str], values: dict[str, Any]) -> None:
    for ranks in (2, 4):
        answer = examined(pool, ranks=ranks, **values)["ddp"]
        assert sorted(causes(answer)) == sorted(expected)
        assert any(row.tensors for row in answer.rows)
        tolerance = 1e-9
        for cause in answer.causes:
            assert cause.tensors
            if cause.name not in ("coupled samples", "coarser arithmetic", "randomness of its own"):
                assert cause.rest <= tolerance < max(cause.tensors.values())
        assert bool(answer.by_design) == (expected == ["randomness"])


def test_a_step_that_knows_its_ranks_agrees(pool: RankPool) -> None:
    for names in (("ddp",), ("ddp", "dp")):
        assert all(each.agrees for each in examined(pool, *names, step="tests.judged:counting_step").values())


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("no_step", "--step leaves no gradient"),
        ("updating_step", "--step changes the model's weights: leave optimizer.step() out"),
        ("raising_step", "--step raised KeyError"),
        ("two_argument_step", "--step raised TypeError"),
    ],
)
def test_a_step_that_cannot_be_judged_is_refused(pool: RankPool, step: str, said: str) -> None:
    for answer in pool.run(2, _examined, RANKS, {}, 1e-9, f"tests.judged:{step}", ""):
        assert isinstance(answer, str)
        assert answer.startswith(said)


def test_what_is_no_number_in_one_process_is_refused(pool: RankPool) -> None:
    said = pool.run(2, _examined, RANKS, {"model": "tests.judged:Infinite"}, 1e-9, "", "")
    assert all(each.startswith("One process's gradients are not finite numbers (0.weight") for each in said)


def test_randomness_under_dp_is_explained(pool: RankPool) -> None:
    # Noise, whose numbers depend on how many are drawn at once: dropout in threads may agree by chance.
    assert causes(examined(pool, "ddp", "dp", model="tests.judged:Noisy")["dp"]) == ["randomness"]


def test_a_bit_that_flips_after_the_exchange_is_named(pool: RankPool) -> None:
    answer = examined(pool, ranks=3, fault="bit")["ddp"]
    assert answer.unlike == {"0.weight": {1}}
    assert answer.fails
    assert all(row.gap < 1e-12 for row in answer.rows), "rank 0 has the right ones"


def test_only_what_a_cause_touches_is_laid_to_it(pool: RankPool) -> None:
    (cause,) = examined(pool, model="tests.judged:Frozen", loss="tests.judged:mean_loss")["ddp"].causes
    assert sorted(cause.tensors) == ["2.bias", "2.weight"]  # a frozen layer has no gradient


def test_the_layer_that_couples_samples_is_named(pool: RankPool) -> None:
    (cause,) = examined(pool, model="tests.judged:Coupled")["ddp"].causes
    assert cause.sentence.startswith("1: what it makes of a sample")
    (cause,) = examined(pool, model="tests.judged:CoupledByHand")["ddp"].causes
    assert cause.sentence.startswith("the model's own forward, before 2: ")


@pytest.mark.parametrize("model", ["Unused", "Branching"])
def test_parameters_that_the_loss_does_not_reach_are_named(pool: RankPool, model: str) -> None:
    lacking = {"Unused": ["forgotten.weight", "forgotten.bias"], "Branching": ["rare.weight", "rare.bias"]}[model]
    values: dict[str, Any] = {"model": f"tests.judged:{model}"}
    answer = examined(pool, **values)["ddp"]
    assert list(answer.unused) == lacking
    assert all(row.gap < 1e-12 for row in answer.rows), "with them searched for, the gradients agree"
    assert answer.fails
    allowed = examined(pool, find_unused=True, **values)["ddp"]
    assert allowed.agrees


def test_dp_has_statistics_of_its_own_by_design_unless_asked_for(pool: RankPool) -> None:
    both = examined(pool, "ddp", "dp", model="tests.judged:Normed")
    assert both["ddp"].agrees
    assert causes(both["dp"]) == ["local BatchNorm"]
    assert both["dp"].by_design
    alone = examined(pool, "dp", ranks=1, devices=2, model="tests.judged:Normed")
    assert alone["dp"].fails


def test_what_is_so_by_design_is_told_with_what_agrees_without(pool: RankPool) -> None:
    report = pool.run(2, _examined, RANKS, {"model": "tests.judged:Dropping"}, 1e-9, "", "")[0]
    check = report.check()
    assert "but for what is so by design" in check.claim
    assert re.search(r"ddp differs by .* by design \(randomness\), and agrees within [\d.]+e-1\d without", check.found)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"model": "tests.judged:Single"}, "tests.judged:Single cannot run in float64: at aten::addmm, RuntimeError"),
        (
            {"loss": "tests.judged:single_loss"},
            "with its loss cannot run in float64: at aten::nll_loss.*, RuntimeError",
        ),
    ],
    ids=str,
)
def test_a_model_without_float64_is_told_by_its_operation(pool: RankPool, values: dict[str, Any], where: str) -> None:
    said = pool.run(2, _examined, RANKS, values, 1e-9, "", "")
    assert len(set(said)) == 1
    assert re.search(where, said[0]), said
    assert "--precision fp32, whose tolerance is 0.0001" in said[0]
    assert examined(pool, tolerance=1e-4, precision="fp32", **values)["ddp"].agrees


def test_a_data_set_smaller_than_the_ranks_is_refused(pool: RankPool) -> None:
    said = pool.run(3, _examined, RANKS, {"batch": 2}, 1e-9, "", "")[0]
    assert said.startswith("Global batch 2 does not split into 3 ranks")
    said = pool.run(3, _examined, RANKS, {"data": "tests.judged:few"}, 1e-9, "", "")[0]
    assert said.startswith("A training set of 2 samples does not split into 3 replicas")


def test_a_gap_is_measured_against_the_tensor_and_never_lost() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "zero": torch.tensor([1e-17]), "gone": torch.ones(1)}
    theirs = {"a": torch.tensor([1.0, 2.5]), "zero": torch.tensor([2e-17]), "new": torch.ones(1)}
    found = gaps(theirs, ours)
    assert found["a"] == 0.25
    assert found["zero"] < 1e-13
    assert found["gone"] == found["new"] == math.inf
    assert gaps({"a": torch.tensor([math.nan, 2.0])}, {"a": ours["a"]})["a"] == math.inf
