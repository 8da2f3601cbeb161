"""`lockstep verify curve` as a person uses it: real commands for all variants, and what they leave."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ..command import Ended, end, gone, losses, processes, sentence, start, until

CURVE = ("verify", "curve", "digits")
LIMIT_S = 540

pytestmark = pytest.mark.timeout(600)


def _ended(folder: Path, *words: object) -> Ended:
    """Run the proof to its end: ten commands, each of which takes seconds where nobody else keeps the cores busy."""
    with start(folder, *CURVE, *words) as process:
        return end(process, LIMIT_S)


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_all_variants_of_the_recipe_are_one_model(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "--max-steps", 6, "--batch", 64)
    assert ended.code == 0, ended
    run = tmp_path / "runs" / "digits-resnet8-curve"
    rows = {row["name"]: row for row in _summary(run)["variants"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "single": "reference",
        "ddp-2-local": "reference",
        "dp-2": "holds",
        "ddp-2": "holds",
        "ddp-3": "holds",
        "ddp-4-local": "reference",
        "hybrid-2x2": "holds",
        "hybrid-2x2-resumed": "holds",
        "single-accum-2": "reference",
        "ddp-2-accum-2": "holds",
        "ddp-2-by-torchrun": "holds",
        "ddp-2-by-hand": "holds",
        "ddp-2-resumed": "holds",
        "single-then-ddp-2": "holds",
    }
    for name, row in rows.items():
        assert [step for step, _ in losses(run / name)] == [1, 2, 3, 4, 5, 6]
        assert name in ended.out
        assert f"{name}: {row['verdict']}" in ended.err
    # Each is what its name says, by its own record.
    for name, launcher, ranks in (
        ("ddp-3", "spawn", 3),
        ("ddp-2-by-torchrun", "environment", 2),
        ("single", "inline", 1),
        ("hybrid-2x2", "manual", 2),
    ):
        manifest = json.loads((run / name / "manifest.json").read_text())
        assert (manifest["chosen"]["launcher"], manifest["topology"]["size"]) == (launcher, ranks)
        assert manifest["chosen"]["precision"] == "fp64"
    for name in ("ddp-2-resumed", "single-then-ddp-2", "hybrid-2x2-resumed"):
        assert json.loads((run / name / "manifest.json").read_text())["first_step"] == 3
    assert [len(rows[name]["commands"]) for name in ("ddp-2", "ddp-2-by-hand", "ddp-2-resumed")] == [1, 2, 2]
    assert 0 < rows["ddp-2"]["loss"] < 1e-9
    check = _summary(run)["proof"]["curve"]
    assert (check["outcome"], check["times"]) == ("holds", 10)
    assert 0 < rows["hybrid-2x2"]["loss"] < 1e-9
    assert "dp-2, hybrid-2x2: by design not one device's model" in check["found"]
    assert "**holds**" in (run / "proof.md").read_text()
    assert "The same model: 10 comparisons over 6 steps" in ended.out


def test_dropout_parts_ranks_from_one_device_and_not_the_launchers(tmp_path: Path) -> None:
    words = ("--model", "tests.models:Dropped", "--strategy", "ddp", "--batch", 2, "--max-steps", 1, "--output", "out")
    ended = _ended(tmp_path, *words)
    told = sentence(ended, code=3)
    assert "ddp-2 parts from single at step 1, losses by " in told
    assert "most in " in told
    assert "body." in told
    rows = {row["name"]: row for row in _summary(tmp_path / "out")["variants"]}
    names = ("single", "ddp-2", "ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-3")
    verdicts = ["reference", "parts", "holds", "holds", "left out"]  # one world draws alike, whoever starts it
    assert [rows[name]["verdict"] for name in names] == verdicts
    for side in ("single", "ddp-2"):
        (repeated,) = rows[side]["commands"]
        assert repeated in ended.out
    assert "ddp-3: --batch 2 does not split into 1 micro-batch on 3 ranks" in ended.out
    assert _summary(tmp_path / "out")["proof"]["curve"]["outcome"] == "fails"


def test_local_batch_statistics_part_where_they_were_asked_for(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "--strategy", "dp", "--batchnorm", "local", "--max-steps", 2, "--output", "out")
    assert "dp-2 parts from single at step 1" in sentence(ended, code=3)
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"single", "dp-2"}


def test_a_variant_that_is_refused_tells_why_and_leaves_no_folder(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "--model", "mlp", "--classes", 3)
    assert sentence(ended).startswith("The variant single failed: --classes 3 is less than the 10 classes of digits")
    assert not list((tmp_path / "runs").iterdir())


def test_a_stop_ends_the_variant_that_is_trained_and_leaves_nobody(tmp_path: Path) -> None:
    process = start(tmp_path, *CURVE, "--model", "tests.models:Slow", "--output", "out")
    with process:
        until((tmp_path / "stepping").exists)  # a step of a minute has begun
        living = processes(process)
        assert len(living) > 1
        process.send_signal(signal.SIGTERM)
        told = sentence(end(process, 30), code=75)
    assert told == "Stopped on request while single was trained: nothing is proved; start again."
    assert gone(living)
