"""`lockstep audit` of scripts that do not use lockstep: correct ones, and ones with one fault each."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockstep.audit import start

from ..command import command
from ..needs import need
from ..ports import free_port

SCRIPTS = Path(__file__).parents[1] / "audited"
PEERS = {
    "accelerated": "accelerate",
    "fabric": "lightning",
    "lightning_trainer": "lightning",
    "hf_trainer": "transformers",
}
"""The packages of scripts."""
RIGHT = {
    "ddp": "plain adam frozen clip dropout noise numpy accumulate by-hand tokens-right tokens-right-accumulate stream "
    "batchnorm-eval gathered-right schedule evaluation-right evaluation-split evaluation-masked scaler zero "
    "augmentation flips drop-path shared-noise lengths lengths-left",
    "accelerated": "plain accumulate dropout clip tokens-right evaluation-right evaluation-long",
    "fabric": "plain dropout accumulate auto",
    "lightning_trainer": "plain accumulate clip dropout evaluation-auto",
    "hf_trainer": "plain padded accumulate",
    "imagenet": "right",
    "mnist": "right",
    "nanogpt": "right",
    "gan": "right constant lazy",
    "of_session": "plain dropout",
}
FAULTS = {
    "ddp": {
        "gradients differ": "unwrapped outside module accumulate-never by-hand-weights",
        "weights differ": "seeds",
        "buffers differ": "buffers buffers-by-hand",
        "same samples": "same-samples shuffled overlap same-stream no-loader",
        "same draws": "same-noise same-dropout same-augmentation same-augmentation-of-workers same-flips",
        "missing samples": "divided-data",
        "same order": "same-order",
        "wrong count": "sum times-ranks clip-times-ranks by-hand-sum divided-twice",
        "clipped alone": "by-hand-clip",
        "mean of means": "uneven",
        "mean over other counts": "tokens tokens-accumulate",
        "coupled samples": "contrastive contrastive-accumulate",
        "gathered without gradients": "gathered gathered-own",
        "last window": "last-window last-window-dropped",
        "schedule": "schedule-ranks",
        "evaluation pads": "evaluation-pads",
        "evaluation drops": "evaluation-drops",
        "evaluation differs": "evaluation-means",
        "evaluation of a part": "evaluation-part",
        "checkpoint by every rank": "checkpoint-by-all",
        "steps differ": "skips",
    },
    "accelerated": {
        "gradients differ": "unwrapped-call",
        "same samples": "loader-unprepared",
        "same draws": "same-dropout",
        "wrong count": "times-ranks",
        "mean over other counts": "tokens",
        "coupled samples": "contrastive",
        "last window": "last-window",
        "schedule": "schedule",
        "evaluation pads": "evaluation-pads",
        "evaluation of a part": "evaluation-part",
    },
    "fabric": {
        "gradients differ": "unwrapped-call",
        "same samples": "loader-unprepared",
        "same draws": "same-dropout",
        "wrong count": "times-ranks",
        "mean over other counts": "tokens",
        "checkpoint by every rank": "checkpoint-by-all",
    },
    "lightning_trainer": {
        "same samples": "loader-unprepared",
        "same draws": "same-dropout",
        "wrong count": "times-ranks",
        "mean over other counts": "tokens",
        "coupled samples": "contrastive",
        "evaluation pads": "evaluation-pads",
    },
    "hf_trainer": {
        "mean over other counts": "tokens tokens-by-rank",
        "same draws": "dropout",
        "wrong count": "classifier",
    },
    "imagenet": {
        "evaluation pads": "evaluation-pads",
        "evaluation drops": "evaluation-drops",
        "evaluation of a part": "evaluation-part",
        "checkpoint by every rank": "checkpoint-by-all",
        "schedule": "schedule",
        "same order": "same-order",
    },
    "mnist": {
        "gradients differ": "unwrapped",
        "same draws": "same-dropout",
        "wrong count": "sum",
        "checkpoint by every rank": "checkpoint-by-all",
    },
    "nanogpt": {"gradients differ": "never unwrapped", "same samples": "same-samples", "wrong count": "undivided"},
    "gan": {"gradients differ": "unwrapped", "same draws": "same-noise same-constant", "wrong count": "times-ranks"},
}
BY_DESIGN = {
    "ddp": {"local BatchNorm": "batchnorm", "no_sync missing": "accumulate-always", "padded epoch": "padded"},
    "accelerated": {"local BatchNorm": "batchnorm"},
    "fabric": {"no_sync missing": "accumulate-always"},
    "lightning_trainer": {"local BatchNorm": "batchnorm"},
    "imagenet": {"local BatchNorm": "batchnorm"},
    "nanogpt": {"no_sync missing": "no-sync-missing"},
}
OFTEN_WITH = {"weights differ": ["gradients differ"]}
"""Faults that come together."""
QUICK = ("ddp tokens",)
LONG = (
    "ddp plain",
    "ddp dropout",
    "ddp contrastive",
    "ddp evaluation-pads",
    "hf_trainer padded",
    "lightning_trainer plain",
)
"""The rest is as slow, and shows less."""


def _cases(table: dict[str, Any]) -> list[Any]:
    tiers = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(LONG, (pytest.mark.long,))}
    cases = []
    for script, by_kind in table.items():
        kinds = by_kind.items() if isinstance(by_kind, dict) else [("", by_kind)]
        cases += [(script, kind, finding) for finding, names in kinds for kind in names.split()]
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=tiers.get(f"{case[0]} {case[1]}", (pytest.mark.slow,)))
        for case in cases
    ]


def _audit(script: str, kind: str, folder: Path, code: int) -> dict[str, Any]:
    if script in PEERS:
        need([] if find_spec(PEERS[script]) else [PEERS[script]])
    ended = command(folder, "audit", "--output", "found", SCRIPTS / f"{script}.py", kind)
    assert ended.code == code, ended
    audit: dict[str, Any] = json.loads((folder / "found" / "audit.json").read_text())
    return audit


@pytest.mark.parametrize(("script", "kind", "finding"), _cases(RIGHT))
def test_a_right_script_is_sound(script: str, kind: str, finding: str, tmp_path: Path) -> None:
    audit = _audit(script, kind, tmp_path, 0)
    assert (audit["findings"], audit["ranks"]) == ([], 2)
    assert 0 < audit["largest_gap"] < 1e-12
    assert audit["steps"] >= 3
    assert not [*tmp_path.glob("*.pt")]


@pytest.mark.parametrize(("script", "kind", "finding"), _cases(FAULTS))
def test_a_fault_is_named(script: str, kind: str, finding: str, tmp_path: Path) -> None:
    findings = _audit(script, kind, tmp_path, 3)["findings"]
    faults = {fault["kind"] for fault in findings if not fault["by_design"]}
    assert finding in faults
    assert faults <= {finding, *OFTEN_WITH.get(finding, ())}


@pytest.mark.parametrize(("script", "kind", "finding"), _cases(BY_DESIGN))
def test_what_a_script_does_by_design_is_no_fault(script: str, kind: str, finding: str, tmp_path: Path) -> None:
    findings = _audit(script, kind, tmp_path, 0)["findings"]
    assert [(choice["kind"], choice["by_design"]) for choice in findings] == [(finding, True)]


EXAMPLES = {
    "token_mean": "mean over other counts",
    "inner_model": "gradients differ",
    "same_noise": "same draws",
    "contrastive": "coupled samples",
    "last_window": "last window",
    "padded_evaluation": "evaluation pads",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_finding_of_its_docstring(name: str, tmp_path: Path) -> None:
    script = SCRIPTS.parents[1] / "examples" / "audit" / f"{name}.py"
    assert f'"""Finding: {EXAMPLES[name]}. ' in script.read_text()
    ended = command(tmp_path, "audit", "--output", "found", script)
    assert ended.code == 3, ended
    findings = json.loads((tmp_path / "found" / "audit.json").read_text())["findings"]
    assert [finding["kind"] for finding in findings] == [EXAMPLES[name]]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("plain", 0), ("unwrapped", 3)])
def test_a_script_that_spawns_its_ranks_is_judged(kind: str, code: int, tmp_path: Path) -> None:
    words = (sys.executable, SCRIPTS / "ddp.py", kind, "--spawn", free_port())
    ended = command(tmp_path, "audit", "--", *words)
    assert ended.code == code, ended


@pytest.mark.long
def test_a_recorded_run_has_the_bits_of_one_that_is_not_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [str(SCRIPTS / "ddp.py"), "dropout"]
    alone = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    assert start.run("record", [start.Process(words, {})], tmp_path, steps=3) == 0
    outputs = (alone, (tmp_path / "record.txt").read_text())
    plain, observed = ([line for line in text.splitlines() if line.startswith("weights")] for text in outputs)
    assert len(observed) >= 3
    assert plain[:3] == observed[:3]


def _run_ddp(kind: str) -> str:
    path = str(SCRIPTS / "ddp.py")
    return f"import runpy, sys\nsys.argv[1:] = [{kind!r}]\nrunpy.run_path({path!r}, run_name='__main__')"


_FAILS_THEN = """\
import os
with open("runs", "a+") as file:  # two ranks record, and a third process replays
    file.write("1")
    if file.tell() > 3:
        os._exit(1)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("raise ValueError('no data')", 1, "ValueError: no data"),
        ("print('no step')", 2, "cannot be judged: no optimizer has stepped"),
        ("import time\ntime.sleep(60)", 2, "no optimizer has stepped after a model's call within 3 s"),
        (_run_ddp("own-numpy"), 2, "cannot be judged: it draws from `random` or NumPy"),
        (_run_ddp("other-loader"), 2, "cannot be judged: in one process it reads a loader that its ranks do not read"),
        (
            _FAILS_THEN + _run_ddp("last-window"),
            2,
            "cannot be judged: it failed in the replays that show causes (first",
        ),
        (_run_ddp("lengths-unusual"), 2, "cannot be judged: lockstep fails to observe it (TypeError: Unusual"),
    ],
    ids=["fails", "no step", "no end", "draws", "other loader", "failed replay", "unusual batch"],
)
def test_a_script_that_cannot_be_judged_has_a_sentence(text: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    limit = ("--timeout", 3) if "time" in text else ()
    ended = command(tmp_path, "audit", *limit, "-m", "train")
    assert (ended.code, words in ended.err) == (code, True), ended
