"""`lockstep verify gradients`: N ranks' gradients are one process's, or each cause is found, and no other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.verify.gradients import Answer, Report, examine
from lockstep.verify.workbench import gaps
from lockstep.world.world import World

from ..command import command
from ..pool import RankPool

CPU = ("--accelerator", "cpu")
_OWN = ("model", "data", "loss", "step")


def _examined(world: World, names: tuple[str, ...], values: dict[str, Any]) -> Report | str | None:
    torch.set_num_threads(1)
    asked: dict[str, Any] = {"model": "Plain", "data": "vectors", "batch": 24, "precision": "fp64"} | values
    asked |= {key: f"tests.judged:{asked[key]}" for key in _OWN if key in asked}
    step, tolerance = asked.pop("step", ""), asked.pop("tolerance", 1e-9)
    config = override(RunConfig(), **{"strategy": names[0], "channels_last": "off"} | asked)
    try:
        return examine(config, world, list(names), tolerance, step)
    except RequestError as error:
        return str(error)


def examined(pool: RankPool, *names: str, ranks: int = 2, **values: Any) -> dict[str, Answer]:
    found = pool.run(ranks, _examined, names or ("ddp",), values)[0]
    assert isinstance(found, Report), found
    return {answer.strategy: answer for answer in found.answers}


def causes(answer: Answer) -> list[str]:
    return [cause.name for cause in answer.causes]


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["ddp", "dp"], {"model": "Transformer", "data": "texts"}),
        (["ddp", "dp"], {"model": "frozen"}),
        (["ddp"], {"model": "Counting"}),
        (["ddp"], {"model": "normed", "step": "counting_step"}),
        (["ddp"], {"model": "Single", "precision": "fp32", "tolerance": 1e-4}),
    ],
    ids=str,
)
def test_what_is_one_model_agrees(pool: RankPool, names: list[str], values: dict[str, Any]) -> None:
    for answer in examined(pool, *names, ranks=3, **values).values():
        assert answer.agrees, answer
        assert len(answer.rows) == 4 - ("step" in values), "the first batch, an uneven one, the last, and micro-batches"
        assert all(row.gap < (1e-4 if "tolerance" in values else 1e-12) for row in answer.rows)


FOUND: list[tuple[str, dict[str, Any]]] = [
    ("randomness", {"model": "dropping"}),
    ("local BatchNorm", {"model": "normed", "batchnorm": "local"}),
    ("data", {"data": "unseeded", "workers": 0}),
    ("a loss that divides by the local batch", {"loss": "mean_loss"}),
    ("a loss that couples samples", {"loss": "pairwise_loss"}),
    ("mean of means", {"step": "mean_step"}),
    ("a wrong count", {"step": "halved_step"}),
    ("coupled samples", {"model": "coupled"}),
    ("state that a forward pass changes", {"model": "Tracking"}),
    ("state that a forward pass changes", {"model": "late"}),
    ("state that a forward pass changes", {"model": "Queued"}),
    ("coarser arithmetic", {"model": "PartlySingle"}),
]
UNSWITCHED = ("coupled samples", "state that a forward pass changes", "coarser arithmetic")
"""What cannot be switched off: the gap stays."""


@pytest.mark.parametrize(("expected", "values"), FOUND, ids=str)
def test_each_cause_is_found_and_no_other(pool: RankPool, expected: str, values: dict[str, Any]) -> None:
    answer = examined(pool, **values)["ddp"]
    (cause,) = answer.causes
    assert cause.name == expected
    assert expected in UNSWITCHED or cause.residual <= 1e-9 < max(cause.tensors.values()), "it can be switched off"
    assert (bool(answer.by_design), answer.fails) == (expected == "randomness", expected != "randomness")
    named = {"coupled": "1: ", "Queued": "queue: ", "Tracking": "mean: ", "late": "mean: "}
    assert cause.sentence.startswith(named.get(values.get("model", ""), "")), "layer or state is named"


@pytest.mark.parametrize(
    ("exchange", "expected"), [("powersgd", "low-rank exchange"), ("diloco", "rare exchange"), ("bf16", "rounded")]
)
def test_an_exchange_of_other_numbers_is_named_by_design(pool: RankPool, exchange: str, expected: str) -> None:
    rank = {"powersgd_rank": 1, "powersgd_start": 50} if exchange == "powersgd" else {}
    answer = examined(pool, exchange=exchange, **rank)["ddp"]
    (cause,) = answer.causes
    assert cause.name.startswith(expected)
    assert cause.residual <= 1e-9 < max(cause.tensors.values())
    assert answer.by_design
    assert not answer.fails


def test_global_draws_are_those_of_one_process_but_in_micro_batches_and_threads(pool: RankPool) -> None:
    both = examined(pool, "ddp", "dp", ranks=3, model="dropping", draws="global")
    *whole, parts = both["ddp"].rows
    assert all(row.gap < 1e-12 for row in whole)
    assert parts.gap > 1e-3
    assert causes(both["ddp"]) == ["randomness"]
    assert both["ddp"].by_design
    # Threads draw in the order in which they run, by chance that of one process.
    assert causes(both["dp"]) in ([], ["randomness"])


def test_parameters_that_the_loss_reaches_on_some_ranks_alone_agree(pool: RankPool) -> None:
    answer = examined(pool, model="Branching")["ddp"]
    assert answer.agrees
    assert all(row.gap < 1e-12 for row in answer.rows)


def test_dp_has_statistics_of_its_own_by_design_unless_asked_for(pool: RankPool) -> None:
    both = examined(pool, "ddp", "dp", model="normed")
    assert both["ddp"].agrees
    assert causes(both["dp"]) == ["local BatchNorm"]
    assert both["dp"].by_design
    assert examined(pool, "dp", ranks=1, devices=2, model="normed")["dp"].fails


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"step": "no_step"}, ["--step leaves no gradient"]),
        ({"step": "updating_step"}, ["--step changes the model's weights", "leave optimizer.step() out"]),
        ({"model": "Single"}, ["--model tests.judged:Single cannot run in float64: ", "--precision fp32"]),
    ],
    ids=str,
)
def test_what_cannot_be_judged_is_refused_on_every_rank(
    pool: RankPool, values: dict[str, Any], parts: list[str]
) -> None:
    (said,) = {*pool.run(2, _examined, ("ddp",), values)}
    assert all(part in str(said) for part in parts), said


def test_a_gap_is_measured_against_the_tensor_and_never_lost() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "zero": torch.tensor([1e-17]), "gone": torch.ones(1)}
    theirs = {"a": torch.tensor([1.0, 2.5]), "zero": torch.tensor([2e-17]), "new": torch.ones(1)}
    found = gaps(theirs, ours)
    assert found["a"] == 0.2
    assert found["zero"] < 1e-13
    assert found["gone"] == found["new"] == math.inf
    lost = {"a": torch.tensor([math.nan, 2.0])}
    assert gaps(lost, {"a": ours["a"]})["a"] == gaps(lost, lost)["a"] == math.inf


# ---- the command


@pytest.mark.long
def test_digits_on_two_devices_has_one_gradient_and_says_so(tmp_path: Path) -> None:
    done = command(tmp_path, "verify", "gradients", "digits", "--devices", 2, *CPU)
    assert (done.code, done.err) == (0, ""), done
    assert "The same gradient within 1e-09: ddp. Different by design, as explained above: dp." in done.out
    folder = tmp_path / "runs" / "digits-resnet8-gradients"
    check = json.loads((folder / "summary.json").read_text())["proof"]["gradients"]
    assert (check["outcome"], check["times"], check["tolerance"]) == ("holds", 8, "1e-09 relative")
    assert "by design (local BatchNorm), and agrees within" in check["found"]
    assert "ddp agrees within" in (folder / "proof.md").read_text()


def test_a_difference_exits_with_three_and_names_tensors_and_cause(tmp_path: Path) -> None:
    own = ("--model", "tests.judged:Plain", "--data", "tests.judged:vectors", "--step", "tests.judged:mean_step")
    words = (*own, "--batch", 12, "--devices", 2, "--strategy", "ddp", "--output", "here", *CPU)
    done = command(tmp_path, "verify", "gradients", *words)
    assert done.code == 3, done
    assert "0.weight" in done.out
    assert "mean of means: ranks' means are averaged" in done.out
    (said,) = done.err.splitlines()
    assert "ddp differs by" in said
    assert "(mean of means): not the gradient of one process. here/proof.md has the numbers." in said
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["proof"]["gradients"]["outcome"] == "fails"
