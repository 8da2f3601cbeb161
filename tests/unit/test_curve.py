"""How two curves are compared, which variants a config has, and that no command of them is left behind."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.cli.verify.curve import checked, judge, parsed
from lockstep.config.options import override
from lockstep.config.registry import KINDS
from lockstep.config.schema import RunConfig
from lockstep.errors import ProofError, RequestError, RunError
from lockstep.verify import commands, curve, variants
from lockstep.verify.curve import Curve, Outcome, compare
from lockstep.verify.variants import ReferenceFacts, Setup, Variant

from ..command import gone, until

# ---- comparing

LOSSES = {step: 2.0 / step for step in range(1, 7)}
PARTED = LOSSES | {step: LOSSES[step] * (1 + 0.01 * (step - 3)) for step in (4, 5, 6)}
LAST_BIT = LOSSES | {3: math.nextafter(LOSSES[3], 9)}
NAN = LOSSES | {2: math.nan}
TENSORS = {"weight": torch.linspace(-1, 1, 8, dtype=torch.float64), "bias": torch.zeros(3)}
WEIGHT = TENSORS["weight"].clone()
WEIGHT[2] = math.nextafter(float(WEIGHT[2]), 9)


@pytest.mark.parametrize(
    ("losses", "theirs", "tensors", "tolerance", "expected"),
    [
        (LOSSES, LOSSES, {}, 0, {"holds": True, "loss": 0, "weight": 0, "step": None, "tensor": "", "place": ""}),
        (PARTED, LOSSES, {}, 1e-3, {"holds": False, "step": 4, "place": "at step 4", "loss": pytest.approx(3 / 103)}),
        # The last bit counts only where bits are due, and so does the sign of a zero.
        (LAST_BIT, LOSSES, {}, 1e-9, {"holds": True}),
        (LAST_BIT, LOSSES, {}, 0, {"holds": False, "step": 3}),
        (LOSSES, LOSSES, {"weight": WEIGHT}, 1e-9, {"holds": True}),
        (
            LOSSES,
            LOSSES,
            {"weight": WEIGHT},
            0,
            {"holds": False, "step": None, "place": "after step 6", "tensor": "weight"},
        ),
        (LOSSES, LOSSES, {"bias": -torch.zeros(3)}, 0, {"holds": False, "weight": 0, "tensor": "bias"}),
        (LOSSES, LOSSES, {"bias": torch.full((3,), 0.5)}, 1e-3, {"holds": False, "tensor": "bias", "weight": 1.0}),
        (LOSSES, LOSSES, {"more": torch.ones(2)}, 1, {"holds": False, "tensor": "more", "weight": math.inf}),
        # Runs without a step prove nothing; a loss that is no number, or a step that one lacks, parts.
        ({}, {}, {}, 1, {"holds": False}),
        (NAN, NAN, {}, 1, {"holds": False, "step": 2}),
        ({1: 2.0, 2: 1.0}, {1: 2.0}, {}, 1, {"holds": False, "step": 2, "loss": math.inf}),
        # Rounding noise where mathematics has a zero does not count.
        (LOSSES, LOSSES, {"bias": torch.full((3,), 3e-17)}, 1e-9, {"holds": True, "tensor": "bias"}),
    ],
)
def test_where_two_curves_part_is_told(
    losses: dict[int, float],
    theirs: dict[int, float],
    tensors: dict[str, torch.Tensor],
    tolerance: float,
    expected: dict[str, Any],
) -> None:
    found = compare(Curve(losses, TENSORS | tensors), Curve(theirs, TENSORS), tolerance=tolerance)
    assert {name: getattr(found, name) for name in expected} == expected


def test_losses_are_read_to_the_last_bit_and_null_is_no_number(tmp_path: Path) -> None:
    rows = [{"event": "step", "step": 1, "loss": 0.1 + 0.2}, {"event": "step", "step": 2, "loss": None}]
    rows.append({"event": "eval", "step": 2, "loss": 7.0})
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = curve.losses_of(tmp_path)
    assert (list(read), read[1]) == ([1, 2], 0.1 + 0.2)
    assert math.isnan(read[2])


def test_the_tolerance_is_that_of_the_arithmetic() -> None:
    assert curve.default_tolerance(override(RunConfig(), precision="fp64")) == 1e-9
    assert curve.default_tolerance(override(RunConfig(), precision="bf16")) == 1e-3
    assert curve.default_tolerance(override(RunConfig(), precision="fp64", optimizer="muon")) == 1e-9
    assert curve.default_tolerance(override(RunConfig(), precision="bf16", optimizer="muon")) == 1e-2


# ---- which variants there are

KNOWN = ReferenceFacts(steps=6, accumulation=1, batch=64, has_statistics=True, has_epochs=True, optimizers=1)
SCRIPT = ("mine.py", "--lr", "1")


def _setup(*, devices: int = 2, is_cpu: bool = True, script: tuple[str, ...] = (), **values: Any) -> Setup:
    config = override(RunConfig(), **{"batch": 64, "max_steps": 6} | values)
    given = ("run" if script else "train", "--precision", "fp64")
    return Setup(config=config, folder=Path("out"), devices=devices, is_cpu=is_cpu, arguments=given, script=script)


def _others(setup: Setup, **known: Any) -> dict[str, Variant]:
    return {each.name: each for each in variants.derive(setup, KNOWN._replace(**known))}


def _after(words: tuple[str, ...], flag: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == flag]


def _strategies(found: dict[str, Variant]) -> set[str]:
    return {name for each in found.values() for words in each.commands for name in _after(words, "--strategy")}


@pytest.mark.parametrize("has_statistics", [True, False])
def test_every_strategy_of_one_host_is_held_against_one_device(
    has_statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "other", KINDS["ddp"])
    found = _others(_setup(), has_statistics=has_statistics)
    partners = {name: each.partner for name, each in found.items()}
    assert {partners[name] for name in ("ddp-2", "ddp-3", "other-2", "other-3", "single-then-ddp-2")} == {"single"}
    assert partners["other-2-accum-2"] == "single-accum-2"
    # One process cannot synchronise statistics: it is another model by design.
    assert bool(found["dp-2"].why_not) == has_statistics
    exact = ["ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-2-resumed", "other-2-resumed"]
    assert [name for name, each in found.items() if each.same_bits] == exact
    assert _strategies(_others(_setup(strategy="ddp"), has_statistics=has_statistics)) == {"single", "ddp"}


@pytest.mark.parametrize("gpus", ["5,3", ""])
def test_gpus_are_those_there_are_and_bits_are_due_where_they_can_be(gpus: str) -> None:
    asked: dict[str, Any] = {"is_cpu": False, "gpus": gpus}
    found = _others(_setup(**asked))
    assert not any(each.same_bits for each in found.values())
    assert any(each.same_bits for each in _others(_setup(**asked, deterministic=True)).values())
    for words in (words for each in found.values() for words in each.commands):
        chosen = [gpus.split(",")[0] if "single" in words else gpus] if gpus else []
        assert _after(words, "--gpus") == chosen


def test_what_cannot_be_trained_is_left_out() -> None:
    for setup, known, names in (
        (_setup(batch=2), {"batch": 2, "has_statistics": False}, {"ddp-3", "ddp-2-accum-2"}),
        (_setup(), {"steps": 1}, {"dp-2", "ddp-2-resumed", "single-then-ddp-2"}),
        (_setup(batchnorm="local"), {}, {"single-then-ddp-2"}),
        (_setup(script=SCRIPT), {"has_statistics": False, "batch": 0}, {"single-accum-2", "ddp-2-accum-2"}),
        (_setup(script=SCRIPT), {"has_statistics": False, "has_epochs": False}, {"ddp-2-resumed", "single-then-ddp-2"}),
    ):
        assert {name for name, each in _others(setup, **known).items() if each.why_not} == names


def test_a_job_of_which_every_variant_is_left_out_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setup = _setup(devices=4, batch=2, output=str(tmp_path / "out"))
    left = [each for each in _others(setup, batch=2).values() if each.partner]
    found = [Outcome(variant=each, verdict=curve.LEFT_OUT, why_not=each.why_not) for each in left]
    monkeypatch.setattr(curve, "outcomes", lambda setup, tolerance: found)
    with pytest.raises(RequestError, match=r"Nothing could be compared: --batch 2 does not split .* 4 devices"):
        judge(setup, 1e-9)


@pytest.mark.parametrize(("names", "said"), [("ddp-2-resumed single-then-ddp-2", "counter"), ("ddp-2", "gradients")])
def test_what_parts_once_it_is_resumed_alone_has_state_outside_of_checkpoints(names: str, said: str) -> None:
    others = _others(_setup())
    apart = curve.Parting(loss=0.1, step=6, weight=0.1, tensor="model/a", last_step=20, holds=False)
    found = [Outcome(variant=others[name], verdict=curve.PARTS, parting=apart) for name in names.split()]
    text = curve.check("curve", found, 1e-9, "fp64", 1.0).found
    assert ("a counter in Python" in text) == (said == "counter")
    assert ("verify gradients looks" in text) == (said == "gradients")


def test_each_variant_has_the_flags_given_and_is_cut_as_the_reference_was() -> None:
    (only,) = variants.reference(_setup(script=SCRIPT)).commands
    assert only[3:7] == ("lockstep", "run", "--precision", "fp64")
    assert only[-3:] == SCRIPT
    assert _after(only, "--accumulate") == [], "what a script decides on is its own"
    found = _others(_setup(script=SCRIPT), accumulation=3, has_statistics=False)
    assert _strategies(found) == {"single", "ddp"}, "each process of a script has one device"
    for each in found.values():
        for words in each.commands:
            assert words[-3:] == SCRIPT
            assert _after(words, "--accumulate") == ["6" if "accum" in each.name else "3"]
    assert _strategies(_others(_setup(step="mine:step"))) == {"single", "ddp"}


def test_all_variants_share_the_flags_given_but_those_that_tell_them_apart() -> None:
    shared = ("digits", "--accelerator", "cpu", "--label-smoothing", "0", "--loss", "mine:loss", "--micro_batch", "16")
    varied = ("--strategy", "ddp", "--devices=2", "--output", "asked", "--max-steps", "6")
    setup = checked(*parsed([*shared, *varied], (), prog="lockstep verify curve"), ())
    assert setup.arguments == ("train", *shared, "--precision", "fp64")


def test_accumulation_is_a_part_of_loops_with_several_optimizers() -> None:
    found = _others(_setup(script=SCRIPT), has_statistics=False, optimizers=2)
    assert (found["single-accum-2"].partner, found["ddp-2-accum-2"].partner) == ("", "single-accum-2")


# ---- running them


def test_a_command_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    for script, error, told in (
        ("echo 'lockstep: Out of luck.'; echo 'lockstep: an echo'; exit 1", RunError, "Out of luck."),
        ("echo 'lockstep: Asked too much.'; exit 2", RequestError, "Asked too much."),
        ("echo 'lockstep: Replicas differ.'; exit 3", ProofError, "Replicas differ."),
        ("kill -9 $$", RunError, "killed by signal 9.*x.log"),
    ):
        with pytest.raises(error, match=rf"variant ddp-2 failed: {told}"):
            commands.run("ddp-2", [("sh", "-c", script)], [tmp_path / "x.log"])


def test_the_others_end_with_the_first_that_fails_and_so_does_all_they_started(tmp_path: Path) -> None:
    pid, asked = tmp_path / "pid", tmp_path / "asked"
    # Notes that it is asked to end, and does not; nor does what it has started, in a session of its own as ranks are.
    ranks = f'setsid sh -c "trap : TERM; echo \\$\\$ > {pid}; sleep 300; wait"'
    stubborn = f'trap "touch {asked}" TERM; {ranks} & while :; do wait; done'
    fails = f"until [ -s {pid} ]; do sleep 0.02; done; exit 1"
    with pytest.raises(RunError):
        commands.run("x", [("sh", "-c", stubborn), ("sh", "-c", fails)], [tmp_path / "0", tmp_path / "1"], grace_s=0.3)
    assert asked.exists()
    assert not any(child.name() == "sh" for child in psutil.Process(os.getpid()).children(recursive=True))
    grandchild = int(pid.read_text())
    if psutil.pid_exists(grandchild):
        until(lambda: gone([psutil.Process(grandchild)]), 5)
