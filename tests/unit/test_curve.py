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
from rich.console import Console

from lockstep.cli.verify import curve as verb
from lockstep.config import RunConfig
from lockstep.errors import ProofError, RequestError, RunError, Stopped
from lockstep.kinds import KINDS
from lockstep.options import override, read_toml
from lockstep.prove import commands, curve, variants
from lockstep.prove.curve import HOLDS, PARTS, Curve, Outcome, Parting, compare
from lockstep.prove.variants import Setup, Way

from ..command import gone, refusal, until

LOSSES = {step: 2.0 / step for step in range(1, 7)}


def _made(losses: dict[int, float] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Curve:
    held = {"fc.weight": torch.linspace(-1, 1, 8, dtype=torch.float64), "fc.bias": torch.zeros(3)} | (tensors or {})
    return Curve(LOSSES if losses is None else losses, {f"model/{name}": each for name, each in held.items()})


def _setup(folder: Path = Path("out"), *, devices: int = 2, is_cpu: bool = True, **values: Any) -> Setup:
    config = override(RunConfig(), **{"batch": 64, "max_steps": 6} | values)
    return Setup(config=config, folder=folder, devices=devices, is_cpu=is_cpu)


# ---- comparing


PARTED = LOSSES | {step: LOSSES[step] * (1 + 0.01 * (step - 3)) for step in (4, 5, 6)}
LAST_BIT = LOSSES | {3: math.nextafter(LOSSES[3], 9)}
WEIGHT = {"fc.weight": torch.linspace(-1, 1, 8, dtype=torch.float64)}
WEIGHT["fc.weight"][2] = math.nextafter(float(WEIGHT["fc.weight"][2]), 9)
NEGATIVE = {"fc.bias": -torch.zeros(3)}
NOISE = torch.tensor([3e-17, -5e-17, 1e-18], dtype=torch.float64)
BIAS, MORE = {"fc.bias": torch.tensor([0.0, 0.5, 0.0])}, {"more": torch.ones(2)}


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "expected"),
    [
        (_made(), _made(), 0, {"holds": True, "loss": 0, "weight": 0, "step": None, "tensor": "", "where": ""}),
        (_made(PARTED), _made(), 1e-3, {"holds": False, "step": 4, "where": "step 4", "loss": pytest.approx(3 / 103)}),
        (_made(PARTED), _made(), 0.015, {"step": 5}),
        # The last bit counts only where bits are due, and so does the sign of a zero.
        (_made(LAST_BIT), _made(), 1e-9, {"holds": True}),
        (_made(LAST_BIT), _made(), 0, {"holds": False, "step": 3}),
        (_made(None, WEIGHT), _made(), 1e-9, {"holds": True}),
        (
            _made(None, WEIGHT),
            _made(),
            0,
            {"holds": False, "step": None, "where": "after 6", "tensor": "model/fc.weight"},
        ),
        (_made(None, NEGATIVE), _made(), 1e-9, {"holds": True}),
        (_made(None, NEGATIVE), _made(), 0, {"holds": False, "weight": 0, "tensor": "model/fc.bias"}),
        # Runs without a step prove nothing, and a loss that is no number parts.
        (_made({}), _made({}), 1, {"holds": False}),
        (_made(LOSSES | {2: math.nan}), _made(LOSSES | {2: math.nan}), 1, {"holds": False, "step": 2}),
        (_made(LOSSES | {2: math.inf}), _made(LOSSES | {2: math.inf}), 1, {"holds": False, "step": 2}),
        (_made(None, BIAS), _made(), 1e-3, {"holds": False, "tensor": "model/fc.bias", "weight": 1.0, "step": None}),
        (_made(None, MORE), _made(), 1, {"holds": False, "tensor": "model/more", "weight": math.inf}),
        # Rounding noise where mathematics has a zero does not count.
        (
            _made(None, {"fc.bias": NOISE}),
            _made(None, {"fc.bias": -NOISE}),
            1e-9,
            {"holds": True, "tensor": "model/fc.bias", "weight": pytest.approx(1e-16 / curve.FLOOR)},
        ),
        (_made({1: 4e-16}), _made({1: 9e-16}), 1e-9, {"holds": True}),
        (_made({1: 4e-9}), _made({1: 9e-9}), 1e-9, {"holds": False}),
    ],
)
def test_where_two_curves_part_is_told(ours: Curve, theirs: Curve, tolerance: float, expected: dict[str, Any]) -> None:
    found = compare(ours, theirs, tolerance=tolerance)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("lacking", [1, 4, 6])
def test_a_step_that_one_lacks_is_where_they_part(lacking: int) -> None:
    cut = {step: loss for step, loss in LOSSES.items() if step != lacking}
    for found in (compare(_made(cut), _made(), tolerance=1), compare(_made(), _made(cut), tolerance=1)):
        assert (found.holds, found.step, found.loss, found.last_step) == (False, lacking, math.inf, 6)


def test_losses_are_read_to_the_last_bit_and_null_is_no_number(tmp_path: Path) -> None:
    rows = [
        {"event": "start", "step": 0},
        {"event": "step", "step": 1, "loss": 0.1 + 0.2},
        {"event": "step", "step": 2, "loss": None, "loss_repr": "nan"},
        {"event": "eval", "step": 2, "loss": 7.0},
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = curve.losses_of(tmp_path)
    assert read[1] == 0.1 + 0.2
    assert math.isnan(read[2])
    assert len(read) == 2


def test_the_tolerance_is_that_of_the_arithmetic() -> None:
    assert curve.default_tolerance(override(RunConfig(), precision="fp64")) == 1e-9
    assert curve.default_tolerance(override(RunConfig(), precision="bf16")) == 1e-3
    assert curve.default_tolerance(override(RunConfig(), precision="fp64", optimizer="muon")) == 1e-2


# ---- which variants there are


@pytest.mark.parametrize("has_statistics", [True, False])
def test_every_strategy_of_the_table_is_held_against_one_device(
    has_statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "other", KINDS["ddp"])
    setup = _setup()
    found = variants.others(setup, has_statistics=has_statistics)
    assert [each.name for each in found if each.partner == "single" and not each.begun_as] == [
        *([] if has_statistics else ["dp-2"]),
        *("ddp-2", "ddp-3"),
        *([] if has_statistics else ["hybrid-2x2"]),
        *("other-2", "other-3"),
        *([] if has_statistics else ["single-accum-2"]),
    ]
    # One process cannot synchronise statistics: it is held against ranks that do not either.
    assert [each.name for each in found if each.partner == "ddp-2-local"] == (["dp-2"] if has_statistics else [])
    assert [each.name for each in found if each.partner == "ddp-4-local"] == (["hybrid-2x2"] if has_statistics else [])
    assert [each.name for each in found if each.partner == "single-accum-2"] == ["ddp-2-accum-2", "other-2-accum-2"]
    assert [each.name for each in found if each.same_bits] == [
        *("ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-2-resumed", "other-2-resumed", "hybrid-2x2-resumed"),
    ]
    # What one device has begun, replicas with statistics of their own cannot go on with.
    continued = {each.name for each in found if each.begun_as == Way("single", 1)}
    assert ("single-then-hybrid-2x2" in continued) == (not has_statistics)
    seen = {setup.reference.name}
    for each in found:
        assert each.name not in seen
        assert not each.partner or each.partner in seen, "a partner is trained first"
        seen.add(each.name)


def test_a_strategy_that_is_asked_for_is_the_only_one() -> None:
    assert {each.way.strategy for each in variants.others(_setup(strategy="ddp"), has_statistics=True)} == {
        *("single", "ddp"),
    }
    (only,) = variants.others(_setup(strategy="dp"), has_statistics=True)
    assert (only.way, only.partner) == (Way("dp", 2), "single")
    local = variants.others(_setup(batchnorm="local"), has_statistics=True)
    assert {each.partner for each in local if each.way.strategy == "dp"} == {"single"}


def test_gpus_are_those_there_are_and_bits_are_due_where_they_can_be() -> None:
    found = variants.others(_setup(is_cpu=False), has_statistics=True)
    assert max(each.way.devices for each in found) == 2
    assert not any(each.same_bits for each in found)
    setup = _setup(is_cpu=False, deterministic=True, gpus="5,3")
    found = variants.others(setup, has_statistics=True)
    assert any(each.same_bits for each in found)
    for each in found:
        for stage in variants.commands(setup, each, steps=6):
            for command in stage:
                chosen = command[command.index("--gpus") + 1]
                assert "--devices" not in command
                if "hybrid" in command:
                    assert chosen == {"0": "5", "1": "3"}[command[command.index("--rank") + 1]]
                else:
                    assert chosen == ("5" if "single" in command else "5,3")


@pytest.mark.parametrize(("gpus", "count", "shares"), [("", 4, ["0,1", "2,3"]), ("6,4,2,0,1", 5, ["6,4", "2,0"])])
def test_ranks_that_drive_several_gpus_have_each_their_own(gpus: str, count: int, shares: list[str]) -> None:
    setup = _setup(is_cpu=False, gpus=gpus, strategy="hybrid", devices=count)
    first, again = variants.others(setup, has_statistics=True)
    assert (first.name, again.name) == ("hybrid-2x2", "hybrid-2x2-resumed")
    for variant in (first, again):
        for stage in variants.commands(setup, variant, steps=6):
            assert [command[command.index("--gpus") + 1] for command in stage] == shares
            assert [command[-1] for command in stage] == ["0", "1"]
    (on_cpu,) = variants.commands(_setup(strategy="hybrid"), first, steps=6)
    assert [command[command.index("--devices") + 1] for command in on_cpu] == ["2", "2"]


def test_what_a_batch_cannot_be_shared_out_for_is_left_out_with_the_reason() -> None:
    setup = _setup(batch=2)
    found = variants.others(setup, has_statistics=True)
    why = {each.name: variants.obstacle(setup, each, steps=1, has_statistics=True) for each in found}
    assert {name for name, reason in why.items() if reason} == {
        *("ddp-3", "ddp-2-accum-2", "ddp-2-resumed", "single-then-ddp-2"),
        *("ddp-4-local", "hybrid-2x2", "hybrid-2x2-resumed"),
    }
    local = _setup(batchnorm="local")
    why = {each.name: variants.obstacle(local, each, steps=6, has_statistics=True) for each in found}
    assert [name for name, reason in why.items() if reason] == ["single-then-ddp-2"]
    assert not any(variants.obstacle(local, each, steps=6, has_statistics=False) for each in found)


def test_all_variants_share_a_config_without_what_tells_them_apart(tmp_path: Path) -> None:
    setup = _setup(tmp_path, strategy="ddp", devices=2, micro_batch=20, output=Path("asked"))
    variants.write_config(setup)
    shared = read_toml(tmp_path / variants.CONFIG)
    # 64 samples, at most 20 of them at once on one device
    assert shared == override(_setup().config, accumulate=4)
    first, then = variants.commands(setup, _variant(setup, "single-then-ddp-2"), steps=7)
    assert first[0][-4:] == ("--strategy", "single", "--max-steps", "3")
    assert then[0][-6:] == ("--strategy", "ddp", "--devices", "2", "--resume", "auto")
    (ranks,) = variants.commands(setup, _variant(setup, "ddp-2-by-hand"), steps=7)
    assert [command[-1] for command in ranks] == ["0", "1"]
    (local,) = variants.commands(_setup(tmp_path), _variant(_setup(tmp_path), "ddp-2-local"), steps=7)
    assert local[0][-6:] == ("--strategy", "ddp", "--devices", "2", "--batchnorm", "local")
    (cut,) = variants.commands(setup, _variant(setup, "ddp-2-accum-8"), steps=7)
    assert cut[0][-2:] == ("--accumulate", "8")


def _variant(setup: Setup, name: str) -> variants.Variant:
    (found,) = (each for each in variants.others(setup, has_statistics=True) if each.name == name)
    return found


# ---- running them

_STUBBORN = 'trap "" TERM; (trap "" TERM; sleep 300) & echo $! > PID; echo READY; wait; wait'


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("echo 'lockstep: Out of luck.'; echo 'lockstep: an echo'; exit 1", RunError, "Out of luck."),
        ("echo 'lockstep: Asked too much.'; exit 2", RequestError, "Asked too much."),
        ("echo 'lockstep: Replicas differ.'; exit 3", ProofError, "Replicas differ."),
        ("echo 'lockstep: Stopped.'; exit 75", Stopped, "Stopped."),
        ("kill -9 $$", RunError, "killed by signal 9 and no word; its output is in LOG."),
    ],
)
def test_a_command_that_fails_is_told_in_its_own_words(
    script: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    log = tmp_path / "x.log"
    with pytest.raises(error) as raised:
        commands.run("ddp-2", [("sh", "-c", script)], [log])
    assert str(raised.value) == f"The variant ddp-2 failed: {said.replace('LOG', str(log))}"
    assert log.read_text().startswith("$ sh -c ")


def test_the_others_end_with_the_first_that_fails_and_so_does_all_they_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = f"until [ -s {pid} ]; do sleep 0.05; done; exit 1"
    stage = [("sh", "-c", _STUBBORN.replace("PID", str(pid))), ("sh", "-c", waits)]
    with pytest.raises(RunError):
        commands.run("ddp-2", stage, [tmp_path / "0.log", tmp_path / "1.log"], grace_s=0.2)
    assert not any(child.name() == "sh" for child in psutil.Process(os.getpid()).children(recursive=True))
    grandchild = int(pid.read_text())
    if psutil.pid_exists(grandchild):
        until(lambda: gone([psutil.Process(grandchild)]), 5)


def test_a_command_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    ready, asked = tmp_path / "ready", tmp_path / "asked"
    polite = f"trap 'touch {asked}; exit 0' TERM; touch {ready}; while :; do sleep 0.02; done"
    waits = f"until [ -e {ready} ]; do sleep 0.02; done; exit 1"
    with pytest.raises(RunError):
        commands.run("x", [("sh", "-c", polite), ("sh", "-c", waits)], [tmp_path / "0.log", tmp_path / "1.log"])
    assert asked.exists()


# ---- what is asked and what is told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tolerance", "-1"), "--tolerance -1: give 0 or more"),
        (("--tolerance",), "--tolerance lacks its value"),
        (("--resume", "auto"), "no use for --resume auto"),
        (("--rank", 0, "--world-size", 2), "no use for --rank 0"),
        (("--launcher", "spawn"), "no use for --launcher spawn"),
        (("--strategy", "single"), "--strategy single is what the others are compared with"),
        (("--devices", 1), "--devices 1 leaves nothing to compare"),
        (("--batch", 1), "Global batch 1 does not split into 2 ranks"),
        (("--batch", 64, "--accumulate", 40), "does not split into 40 micro-batches on 2 ranks"),
        (("--output", "held"), "--output held holds a run already"),
        (("--output", "file"), "--output file cannot be made"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_run(
    words: tuple[object, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held" / "single").mkdir(parents=True)
    (tmp_path / "held" / "single" / "manifest.json").touch()
    (tmp_path / "file").touch()
    assert said in refusal(capsys, "verify", "curve", "digits", "--accelerator", "cpu", *words)
    assert {path.name for path in tmp_path.iterdir()} == {"held", "file"}


def test_a_rank_of_somebody_elses_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(variable, value)
    assert "starts all ranks itself" in refusal(capsys, "verify", "curve", "digits", "--accelerator", "cpu")


def test_the_table_is_whole_at_80_columns() -> None:
    setup = _setup()
    parting = Parting(loss=1.2e-16, step=12, weight=math.inf, tensor="a", last_step=20, holds=False)
    found = [
        Outcome(variant=each, verdict=verdict, parting=dataclasses.replace(parting, step=step))
        for each in variants.others(setup, has_statistics=True)
        for verdict, step in ((PARTS, 12), (HOLDS, None))
    ]
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(verb._table(found))
    lines = captured.get().splitlines()
    assert len(lines) == len(found) + 1
    for each, line in zip(found, lines[1:], strict=True):
        cells = (each.variant.name, each.variant.partner, "1.2e-16", "inf", each.verdict)
        assert all(cell in line for cell in cells)
        assert ("step 12" if each.verdict == PARTS else "after 20") in line
