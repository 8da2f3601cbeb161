"""How two curves are compared, which variants a config has, and that no command of them is left behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.config.options import override, read_toml
from lockstep.config.registry import KINDS
from lockstep.config.schema import RunConfig
from lockstep.errors import ProofError, RequestError, RunError
from lockstep.verify import commands, curve, variants
from lockstep.verify.curve import Curve, compare
from lockstep.verify.variants import Known, Setup, Variant

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
        (LOSSES, LOSSES, {}, 0, {"holds": True, "loss": 0, "weight": 0, "step": None, "tensor": "", "where": ""}),
        (PARTED, LOSSES, {}, 1e-3, {"holds": False, "step": 4, "where": "step 4", "loss": pytest.approx(3 / 103)}),
        # The last bit counts only where bits are due, and so does the sign of a zero.
        (LAST_BIT, LOSSES, {}, 1e-9, {"holds": True}),
        (LAST_BIT, LOSSES, {}, 0, {"holds": False, "step": 3}),
        (LOSSES, LOSSES, {"weight": WEIGHT}, 1e-9, {"holds": True}),
        (LOSSES, LOSSES, {"weight": WEIGHT}, 0, {"holds": False, "step": None, "where": "after 6", "tensor": "weight"}),
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
    assert curve.default_tolerance(override(RunConfig(), precision="fp64", optimizer="muon")) == 1e-2


# ---- which variants there are


def _setup(folder: Path = Path("out"), *, devices: int = 2, is_cpu: bool = True, **values: Any) -> Setup:
    config = override(RunConfig(), **{"batch": 64, "max_steps": 6} | values)
    return Setup(config=config, folder=folder, devices=devices, is_cpu=is_cpu)


def _others(setup: Setup, *, has_statistics: bool = True, steps: int = 6, **known: Any) -> list[Variant]:
    return variants.others(setup, Known(steps=steps, has_statistics=has_statistics, **known))


def _after(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1] if flag in words else ""


def _strategies(found: list[Variant]) -> set[str]:
    return {_after(words, "--strategy") for each in found for words in each.commands}


@pytest.mark.parametrize("has_statistics", [True, False])
def test_every_strategy_of_the_table_is_held_against_one_device(
    has_statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "other", KINDS["ddp"])
    found = _others(_setup(), has_statistics=has_statistics)
    partners = {each.name: each.partner for each in found}
    assert {partners[name] for name in ("ddp-2", "ddp-3", "other-2", "other-3", "single-then-ddp-2")} == {"single"}
    assert partners["other-2-accum-2"] == "single-accum-2"
    # One process cannot synchronise statistics: it is held against ranks that do not either, nor can they go on with
    # what one device has begun.
    assert partners["dp-2"] == ("ddp-2-local" if has_statistics else "single")
    assert partners["hybrid-2x2"] == ("ddp-4-local" if has_statistics else "single")
    assert ("single-then-hybrid-2x2" in partners) == (not has_statistics)
    exact = ["ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-2-resumed", "other-2-resumed", "hybrid-2x2-resumed"]
    assert [each.name for each in found if each.same_bits] == exact
    assert _strategies(_others(_setup(strategy="ddp"), has_statistics=has_statistics)) == {"single", "ddp"}


@pytest.mark.parametrize(("gpus", "strategy"), [("5,3", "auto"), ("", "hybrid")])
def test_gpus_are_those_there_are_and_bits_are_due_where_they_can_be(gpus: str, strategy: str) -> None:
    chosen = gpus.split(",") if gpus else [*"0123"]
    asked: dict[str, Any] = {"is_cpu": False, "gpus": gpus, "strategy": strategy, "devices": len(chosen)}
    found = _others(_setup(**asked))
    assert not any(each.same_bits for each in found)
    assert any(each.same_bits for each in _others(_setup(**asked, deterministic=True)))
    for each in found:
        for stage in each.stages:
            taken = [_after(words, "--gpus").split(",") for words in stage]
            if "hybrid" in stage[0]:  # each rank has GPUs of its own
                assert [gpu for gpus in taken for gpu in gpus] == chosen
            else:
                assert all(gpus == (chosen[:1] if "single" in stage[0] else chosen) for gpus in taken)


def test_code_of_the_users_own_is_named_to_each_variant() -> None:
    for each in _others(_setup(loss="mine:loss", model="mine:Net")):
        assert all({"mine:loss", "mine:Net"} <= {*words} for words in each.commands)


def test_what_cannot_be_trained_is_left_out() -> None:
    for setup, known, names in (
        (_setup(batch=2), {}, {"ddp-3", "ddp-4-local", "ddp-2-accum-2", "hybrid-2x2", "hybrid-2x2-resumed"}),
        (_setup(), {"steps": 1}, {"ddp-2-resumed", "single-then-ddp-2", "hybrid-2x2-resumed"}),
        (_setup(batchnorm="local"), {}, {"single-then-ddp-2"}),
        (_scripted(), {"has_statistics": False, "has_batches": False}, {"single-accum-2", "ddp-2-accum-2"}),
        (_scripted(), {"has_statistics": False, "has_epochs": False}, {"ddp-2-resumed", "single-then-ddp-2"}),
    ):
        assert {each.name for each in _others(setup, **known) if each.why_not} == names


def test_all_variants_share_a_config_without_what_tells_them_apart(tmp_path: Path) -> None:
    variants.write_config(_setup(tmp_path, strategy="ddp", micro_batch=20, output=Path("asked")))
    # 64 samples, at most 20 of them at once on one device
    assert read_toml(tmp_path / variants.CONFIG) == override(_setup().config, accumulate=4)


def _scripted(**values: Any) -> Setup:
    script, flags = ("mine.py", "--lr", "1"), ("--precision", "fp64", "--max-steps", "6")
    return dataclasses.replace(_setup(**values), script=script, flags=flags)


def test_a_script_is_run_by_each_process_with_the_flags_given_alone(tmp_path: Path) -> None:
    # Of how its batch is cut the reference leaves the decision to the script, and the others take over that.
    for setup, cut in (
        (_scripted(), ()),
        (_scripted(micro_batch=9), ("--micro-batch", "9")),
        (_scripted(accumulate=3), ("--accumulate", "3", "--micro-batch", "none")),
    ):
        (only,) = setup.reference.commands
        shared = ("run", "--precision", "fp64", "--max-steps", "6", "--output", "out/single", "--strategy", "single")
        assert only[4:] == (*shared, *cut, "mine.py", "--lr", "1")
        assert _strategies(_others(setup, has_statistics=False)) == {"single", "ddp"}
    for each in _others(setup, has_statistics=False):
        assert all(words[-3:] == ("mine.py", "--lr", "1") for words in each.commands)
        assert {_after(words, "--accumulate") for words in each.commands} == {"6" if "accum" in each.name else "3"}
    variants.write_config(dataclasses.replace(setup, folder=tmp_path))
    assert not list(tmp_path.iterdir())  # a file would beat what the script decides on


def test_a_step_of_ones_own_is_trained_by_processes_with_one_device_each() -> None:
    found = _others(_setup(step="mine:step"), has_statistics=False)
    assert _strategies(found) == {"single", "ddp"}
    assert all(each.partner for each in found)


def test_accumulation_is_a_part_of_loops_with_several_optimizers() -> None:
    found = {each.name: each for each in _others(_scripted(), has_statistics=False, optimizers=2)}
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
    # Notes that it is asked to end, and does not; neither does what it has started.
    stubborn = f'trap "touch {asked}" TERM; (trap "" TERM; sleep 300) & echo $! > {pid}; wait; wait'
    fails = f"until [ -s {pid} ]; do sleep 0.02; done; exit 1"
    with pytest.raises(RunError):
        commands.run("x", [("sh", "-c", stubborn), ("sh", "-c", fails)], [tmp_path / "0", tmp_path / "1"], grace_s=0.3)
    assert asked.exists()
    assert not any(child.name() == "sh" for child in psutil.Process(os.getpid()).children(recursive=True))
    grandchild = int(pid.read_text())
    if psutil.pid_exists(grandchild):
        until(lambda: gone([psutil.Process(grandchild)]), 5)
