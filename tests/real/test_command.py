"""The command from end to end, in processes of its own: what it leaves, and that nothing which ends it loses a bit."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import checkpoint
from lockstep.config.options import from_toml, to_toml

from ..command import Ended, command, events, losses, refusal, sentence, until, weights

DDP = ("--strategy", "ddp", "--devices", 2)
ONE = ("--strategy", "single")
# 23 steps an epoch; BatchNorm, crops, momentum and a schedule: whatever a continuation could get wrong.
STEPS = 30
NET = ("train", "digits", "--max-steps", STEPS, "--log-every", 2)


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Ended]]:
    """Return the folder of an uninterrupted run with these options, and how it ended; each is run once."""
    runs: dict[tuple[object, ...], tuple[Path, Ended]] = {}

    def of(*words: object) -> tuple[Path, Ended]:
        if words not in runs:
            folder = tmp_path_factory.mktemp("whole")
            runs[words] = folder / "run", command(folder, *words, "--output", "run")
            assert runs[words][1].code == 0, runs[words][1]
        return runs[words]

    return of


Whole = Callable[..., tuple[Path, Ended]]


def _signalled(folder: Path, *words: object, number: signal.Signals, at: int, **how: object) -> Ended:
    """Run the command with a net that sends it a signal in this process's training pass `at`; nobody is left then."""
    asked = json.dumps({"number": number, "at": at} | how)
    ended = command(folder, *words, "--model", "tests.models:signalling", SIGNALLING=asked)
    until(lambda: not _lives_in(folder.resolve()), 10)
    return ended


def _lives_in(folder: Path) -> bool:
    """Whether a process has this current folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                return True
    return False


def test_a_run_leaves_what_tools_read(whole: Whole) -> None:
    run, ended = whole(*NET, *DDP)
    assert [row["step"] for row in events(run, "step")] == list(range(1, STEPS + 1))
    assert {*events(run, "step")[0]} >= {"event", "step", "epoch", "loss", "lr", "samples"}
    # An epoch of 1,437 digits in batches of 64 ends with one of 29.
    assert [row["samples"] for row in events(run, "step")[:23]] == [64] * 22 + [29]
    evaluated = events(run, "eval")
    assert [(row["step"], row["samples"]) for row in evaluated] == [(23, 360), (STEPS, 360)]
    assert {*evaluated[0]} >= {"top1", "top5", "loss"}

    summary = _summary(run)
    assert {*summary} >= {"top5", "images_per_s", "data_wait_s"}
    assert {*summary["peak_memory_bytes"]} == {"host", "device"}
    assert (summary["steps"], summary["exit"], len(summary["epoch_s"])) == (STEPS, 0, 1)  # the second was cut short
    assert summary["top1"] == evaluated[-1]["top1"]
    assert summary["best_top1"] == max(row["top1"] for row in evaluated)
    assert 0 < summary["step_p50_s"] <= summary["step_p95_s"]
    assert f"last after step {STEPS}" in summary["proof"]["replicas"]["found"]

    text = (run / "config.toml").read_text()
    assert to_toml(from_toml(text)) == text
    assert (tomllib.loads(text)["model"], tomllib.loads(text)["max-steps"]) == ("resnet8", STEPS)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["batch_plan"] == {"global_size": 64, "ranks": 2, "accumulation": 1, "devices": 1}
    assert manifest["topology"]["size"] == 2
    chosen = {"strategy": "ddp", "launcher": "spawn", "devices": 2, "batchnorm": "sync", "precision": "fp32"}
    assert manifest["chosen"].items() >= chosen.items()
    assert {"torch", "python", "lockstep-torch"} <= {*manifest["versions"]}
    assert "command" in manifest

    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert checkpoint.load(run / "checkpoints" / "last").meta["step"] == STEPS
    assert checkpoint.load(run / "checkpoints" / "best").meta["best_top1"] == summary["best_top1"]
    assert not (run / "failures").exists()
    assert "\x1b" not in ended.out + ended.err
    assert ended.out.splitlines()[0] == "global batch 64 = 2 ranks × 1 micro-batch × 32"
    assert f"test accuracy {summary['top1']:.2%}" in ended.out
    assert ended.err == ""


@pytest.mark.parametrize(
    "devices", [pytest.param(ONE, id="single", marks=pytest.mark.long), pytest.param(DDP, id="ddp")]
)
def test_interrupted_at_any_step_a_run_ends_with_the_same_bits(
    whole: Whole, tmp_path: Path, devices: tuple[object, ...]
) -> None:
    expected, _ = whole(*NET, *devices)
    # A kill in the step after one that was saved, at a moment that falls into the writing of the checkpoint too.
    every, rehearsals = (2, 0) if devices is ONE else (4, 1)
    chance = random.Random(20 + len(devices))
    how = {"group": devices is ONE, "pause_s": chance.uniform(0, 0.02)}
    words = (*NET, *devices, "--checkpoint-every", every, "--output", "run", "--resume", "auto")
    passes = rehearsals + every * chance.randint(2, 3) + 1
    assert _signalled(tmp_path, *words, number=signal.SIGKILL, at=passes, **how).code == -signal.SIGKILL
    assert not (tmp_path / "run" / "summary.json").exists()
    number = signal.SIGTERM if devices is ONE else signal.SIGINT
    said = sentence(_signalled(tmp_path, *words, number=number, at=9), code=75)
    stopped = len(losses(tmp_path / "run"))
    assert said.startswith(f"Stopped on request at step {stopped} of {STEPS} and saved; continue with ")
    assert said.endswith("the same command and --resume run.")
    assert _summary(tmp_path / "run")["exit"] == 75
    ended = command(tmp_path, *words, "--model", "tests.models:signalling")
    assert ended.code == 0, ended
    assert losses(tmp_path / "run") == losses(expected)
    assert weights(tmp_path / "run") == weights(expected)
    found, scores = (
        [(row["step"], row["top1"]) for row in events(run, "eval")] for run in (tmp_path / "run", expected)
    )
    assert found == scores


def test_what_is_another_run_is_refused_and_nothing_is_changed(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole(*NET, *DDP)[0], tmp_path / "run", symlinks=True)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for option, value, had in (("--model", "mlp", "resnet8"), ("--seed", 1, 0)):
        said = refusal(capsys, *NET, *ONE, option, value, "--resume", "run")
        assert f"another run: this one has {option} {value} (the checkpoint has {had})" in said
        assert "give these flags the checkpoint's values" in said
    assert "they are part of the model" in refusal(capsys, *NET, *ONE, "--accumulate", 2, "--resume", "run")
    changed = {path.name for path, time_ns in before.items() if path.stat().st_mtime_ns != time_ns}
    assert changed <= {".lock"}  # who looked last


def test_a_checkpoint_has_the_scores_that_the_run_gave(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = whole(*NET, *DDP)
    scores = events(run, "eval")[-1]
    said = f"test accuracy {scores['top1']:.2%}  top-5 {scores['top5']:.2%}  loss {scores['loss']:.4f}  360 samples"
    said += f"  step {STEPS}"
    many = command(run.parent, "eval", "run", "--devices", 3, "--batch", 2)  # no batch of two ranks' is split here
    assert (many.code, many.out.strip(), many.err) == (0, said, "")
    best = max(events(run, "eval"), key=lambda row: row["top1"])
    one = command(run.parent, "eval", "run/checkpoints/best")
    assert (one.code, one.err) == (0, "")
    assert f"{best['top1']:.2%}" in one.out
    assert f"step {best['step']}" in one.out
