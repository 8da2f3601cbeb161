"""`lockstep verify gradients`: N ranks' gradients are one process's, or each cause is found, and no other."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.options import override
from lockstep.prove.answer import Answer, Report, examine
from lockstep.prove.cases import Case
from lockstep.prove.gaps import Gradients, gaps
from lockstep.prove.gradients import Workbench
from lockstep.prove.switches import NOTHING, Off
from lockstep.strategies.ddp import DDP
from lockstep.world import World

from ..command import command, refusal
from ..pool import RankPool

CPU = ("--accelerator", "cpu")
TEXTS = {"data": "texts"}
_OWN = ("model", "data", "loss", "step")
_wrap, _under = DDP.wrap, Workbench.under


def _by_place(self: DDP, model: nn.Module) -> nn.Module:
    """Wrap, and exchange a parameter once for each place that uses it."""
    for each, places in Counter(held for part in model.modules() for held in part._parameters.values()).items():
        if each is not None and places > 1:
            each.register_hook(lambda gradient, places=places: gradient * places)
    return _wrap(self, model)


def _flipped(self: Workbench, strategy: str, case: Case, off: Off = NOTHING) -> Gradients:
    """Flip a bit of what the exchange has left on rank 1."""
    found = _under(self, strategy, case, off)
    if self.world.rank == 1:
        found["0.weight"].view(-1).view(torch.int64)[3] ^= 1 << 20
    return found


FAULTS: dict[str, tuple[type, str, Any]] = {
    "sharing": (DDP, "wrap", _by_place),
    "bit": (Workbench, "under", _flipped),
}


def _examined(world: World, names: tuple[str, ...], fault: str, values: dict[str, Any]) -> Report | str | None:
    torch.set_num_threads(1)
    asked: dict[str, Any] = {"model": "Plain", "data": "vectors", "batch": 24, "precision": "fp64"} | values
    asked |= {key: f"tests.judged:{asked[key]}" for key in _OWN if key in asked}
    step, tolerance = asked.pop("step", ""), asked.pop("tolerance", 1e-9)
    config = override(RunConfig(), **{"strategy": names[0], "channels_last": "off"} | asked)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(*FAULTS[fault])
        try:
            return examine(config, world, list(names), tolerance, step)
        except RequestError as error:
            return str(error)


def examined(pool: RankPool, *names: str, ranks: int = 2, fault: str = "", **values: Any) -> dict[str, Answer]:
    found = pool.run(ranks, _examined, names or ("ddp",), fault, values)[0]
    assert isinstance(found, Report), found
    return {answer.strategy: answer for answer in found.answers}


def causes(answer: Answer) -> list[str]:
    return [cause.name for cause in answer.causes]


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["ddp", "dp"], {"model": "Tied"}),
        (["ddp", "dp"], {"model": "frozen"}),
        (["ddp", "dp"], {"model": "Transformer"} | TEXTS),
        (["ddp", "dp"], {"loss": "margin_loss"}),
        (["ddp", "dp"], {"step": "counting_step"}),
        (["ddp"], {"model": "normed"}),
        (["ddp"], {"model": "Single", "precision": "fp32", "tolerance": 1e-4}),
    ],
    ids=str,
)
def test_what_is_one_model_agrees(pool: RankPool, names: list[str], values: dict[str, Any]) -> None:
    for answer in examined(pool, *names, ranks=3, **values).values():
        assert answer.agrees, answer
        assert len(answer.rows) == 4 - ("step" in values), "the first batch, an uneven one, the last, and micro-batches"
        assert all(row.gap < (1e-4 if "tolerance" in values else 1e-12) for row in answer.rows)


FOUND: list[tuple[list[str], dict[str, Any]]] = [
    (["randomness"], {"model": "dropping"}),
    (["randomness"], {"model": "DroppingTransformer"} | TEXTS),
    (["randomness of its own"], {"model": "Unseedable"}),
    (["local BatchNorm"], {"model": "normed", "batchnorm": "local"}),
    (["local BatchNorm", "randomness"], {"model": "dropping_and_normed", "batchnorm": "local"}),
    (["data"], {"data": "unseeded", "workers": 0}),
    (["a loss that divides by the local batch"], {"loss": "mean_loss"}),
    (["a loss that couples samples"], {"loss": "pairwise_loss"}),
    (["mean of means"], {"step": "mean_step"}),
    (["a wrong count"], {"step": "halved_step"}),
    (["shared parameters"], {"fault": "sharing", "model": "Tied"}),
    (["coupled samples"], {"model": "coupled"}),
    (["coarser arithmetic"], {"model": "PartlySingle"}),
]
UNSWITCHED = ("coupled samples", "coarser arithmetic", "randomness of its own")
"""What cannot be switched off: the gap stays."""


@pytest.mark.parametrize(("expected", "values"), FOUND, ids=str)
def test_each_cause_is_found_and_no_other(pool: RankPool, expected: list[str], values: dict[str, Any]) -> None:
    answer = examined(pool, **values)["ddp"]
    assert sorted(causes(answer)) == expected
    assert any(row.tensors for row in answer.rows)
    for cause in answer.causes:
        assert cause.tensors
        assert cause.name in UNSWITCHED or cause.rest <= 1e-9 < max(cause.tensors.values())
    assert bool(answer.by_design) == (expected == ["randomness"])
    assert answer.causes[0].sentence.startswith("1: ") or values.get("model") != "coupled", "the layer is named"


def test_only_what_a_cause_touches_is_laid_to_it(pool: RankPool) -> None:
    (cause,) = examined(pool, model="frozen", loss="mean_loss")["ddp"].causes
    assert sorted(cause.tensors) == ["2.bias", "2.weight"]  # a frozen layer has no gradient


def test_a_bit_that_flips_after_the_exchange_is_named(pool: RankPool) -> None:
    answer = examined(pool, ranks=3, fault="bit")["ddp"]
    assert answer.unlike == {"0.weight": {1}}
    assert answer.fails
    assert all(row.gap < 1e-12 for row in answer.rows), "rank 0 has the right ones"


def test_parameters_that_the_loss_does_not_reach_on_some_rank_are_named(pool: RankPool) -> None:
    answer = examined(pool, model="Branching")["ddp"]
    assert list(answer.unused) == ["rare.weight", "rare.bias"]
    assert all(row.gap < 1e-12 for row in answer.rows), "with them searched for, the gradients agree"
    assert answer.fails
    assert examined(pool, find_unused=True, model="Branching")["ddp"].agrees


def test_dp_has_statistics_of_its_own_by_design_unless_asked_for(pool: RankPool) -> None:
    both = examined(pool, "ddp", "dp", model="normed")
    assert both["ddp"].agrees
    assert causes(both["dp"]) == ["local BatchNorm"]
    assert both["dp"].by_design
    assert examined(pool, "dp", ranks=1, devices=2, model="normed")["dp"].fails


REFUSED: list[tuple[int, dict[str, Any], list[str]]] = [
    (2, {"step": "no_step"}, ["--step leaves no gradient"]),
    (2, {"step": "updating_step"}, ["--step changes the model's weights", "leave optimizer.step() out"]),
    (2, {"step": "raising_step"}, ["--step raised KeyError"]),
    (2, {"model": "Infinite"}, ["not finite numbers (0.weight"]),
    (2, {"model": "Single"}, ["tests.judged:Single cannot run in float64: at aten::addmm", "--precision fp32"]),
    (3, {"batch": 2}, ["Global batch 2 does not split into 3 ranks"]),
    (3, {"data": "few"}, ["A training set of 2 samples does not split into 3 replicas"]),
]


@pytest.mark.parametrize(("ranks", "values", "parts"), REFUSED, ids=str)
def test_what_cannot_be_judged_is_refused_on_every_rank(
    pool: RankPool, ranks: int, values: dict[str, Any], parts: list[str]
) -> None:
    said = {*pool.run(ranks, _examined, ("ddp",), "", values)}
    assert len(said) == 1
    assert all(part in str(*said) for part in parts), said


def test_a_gap_is_measured_against_the_tensor_and_never_lost() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "zero": torch.tensor([1e-17]), "gone": torch.ones(1)}
    theirs = {"a": torch.tensor([1.0, 2.5]), "zero": torch.tensor([2e-17]), "new": torch.ones(1)}
    found = gaps(theirs, ours)
    assert found["a"] == 0.25
    assert found["zero"] < 1e-13
    assert found["gone"] == found["new"] == math.inf
    assert gaps({"a": torch.tensor([math.nan, 2.0])}, {"a": ours["a"]})["a"] == math.inf


# ---- the command


def test_digits_on_two_devices_has_one_gradient_and_says_so(tmp_path: Path) -> None:
    done = command(tmp_path, "verify", "gradients", "digits", "--devices", 2, *CPU)
    assert (done.code, done.err) == (0, ""), done
    assert "The same gradient within 1e-09: ddp. Another one by design, as said above: dp." in done.out
    assert "64 = 32 + 32" in done.out
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "gradient"], "'gradient': did you mean gradients?"),
        (["verify", "gradients", "digits", "--devices", 1, *CPU], "--devices 1 leaves nothing to compare"),
        (["verify", "gradients", "digits", "--strategy", "single"], "--strategy single has one replica"),
        (["verify", "gradients", "digits", "--tolerance", "-1"], "--tolerance -1: give 0 or more"),
        (["verify", "gradients", "digits", "--step", "nowhere:step"], "--step nowhere:step: no module 'nowhere'"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], words: list[object], said: str) -> None:
    assert said in refusal(capsys, *words)
