"""`lockstep audit`: scripts that have never heard of lockstep, right and with one fault each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lockstep.audit import start

from ..command import command

SCRIPT = Path(__file__).parents[1] / "audited.py"
RIGHT = (
    *("plain", "adam", "frozen", "clip", "dropout", "noise", "accumulate", "accumulate-always"),
    *("by-hand", "tokens-right", "batchnorm-eval"),
)
FAULTS = {
    "unwrapped": "gradients differ",
    "outside": "gradients differ",
    "module": "gradients differ",
    "accumulate-never": "gradients differ",
    "seeds": "weights differ",
    "same-samples": "same samples",
    "shuffled": "same samples",
    "same-noise": "same draws",
    "sum": "wrong count",
    "times-ranks": "wrong count",
    "by-hand-sum": "wrong count",
    "uneven": "mean of means",
    "tokens": "mean over other counts",
    "contrastive": "coupled samples",
}
QUICK = ("plain", "tokens")
LONG = ("dropout", "accumulate", "unwrapped", "outside", "same-noise", "contrastive")
"""The rest is as slow, and shows less."""


def _tiers(kinds: Iterable[str]) -> list[Any]:
    tiers = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(LONG, (pytest.mark.long,))}
    return [pytest.param(kind, marks=tiers.get(kind, (pytest.mark.slow,))) for kind in kinds]


def _audited(kind: str, folder: Path, code: int) -> dict[str, object]:
    ended = command(folder, "audit", "--output", "found", SCRIPT, kind)
    assert ended.code == code, ended
    found: dict[str, object] = json.loads((folder / "found" / "audit.json").read_text())
    return found


@pytest.mark.parametrize("kind", _tiers(RIGHT))
def test_a_right_script_is_sound(kind: str, tmp_path: Path) -> None:
    found = _audited(kind, tmp_path, 0)
    assert (found["findings"], found["steps"], found["ranks"]) == ([], 3, 2)
    assert 0 < float(str(found["largest_gap"])) < 1e-12


@pytest.mark.parametrize("kind", _tiers(FAULTS))
def test_a_fault_is_named(kind: str, tmp_path: Path) -> None:
    found = _audited(kind, tmp_path, 3)
    findings = found["findings"]
    assert isinstance(findings, list)
    assert FAULTS[kind] in [each["kind"] for each in findings if not each["by_design"]]


@pytest.mark.long
def test_a_recorded_run_has_the_bits_of_one_that_is_not_observed(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(SCRIPT),
        "dropout",
    ]
    alone = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    assert start.run("record", words, tmp_path, steps=3) == 0
    outputs = (alone, (tmp_path / "record.txt").read_text())
    plain, observed = ([line for line in text.splitlines() if line.startswith("weights")] for text in outputs)
    assert len(observed) >= 2  # the process ends with its third step
    assert plain[: len(observed)] == observed


@pytest.mark.long
def test_what_a_script_does_by_design_is_no_fault(tmp_path: Path) -> None:
    findings = _audited("batchnorm", tmp_path, 0)["findings"]
    assert isinstance(findings, list)
    assert [(each["kind"], each["by_design"]) for each in findings] == [("local BatchNorm", True)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("raise ValueError('of its own')", 1, "ValueError: of its own"),
        ("print('no step')", 2, "cannot be judged: no optimizer has stepped"),
        (
            f"import runpy, sys\nsys.argv[1:] = ['no-loader']\nrunpy.run_path({str(SCRIPT)!r})",
            2,
            "cannot be judged: its batches come from no DataLoader",
        ),
    ],
)
def test_a_script_that_cannot_be_judged_is_told_in_a_sentence(text: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    ended = command(tmp_path, "audit", "train.py")
    assert (ended.code, words in ended.err) == (code, True), ended
