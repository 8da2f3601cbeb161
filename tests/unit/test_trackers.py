"""Trackers get a run's config, numbers and end, and cost the run nothing, whatever they do."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import lockstep
from lockstep.cli.main import main
from lockstep.config.registry import TRACKERS
from lockstep.errors import RequestError
from lockstep.record import trackers, tracking
from lockstep.record.base import Epoch, Recorder, Recorders
from lockstep.record.tracking import Tracking
from lockstep.sessions import script
from lockstep.world.world import World

from .. import loops
from ..command import events, refusal
from ..own_trackers import got

OWN = "tests.own_trackers:"
TRAIN = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--quiet")


class Warnings(Recorder):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, event: str, **fields: Any) -> None:
        if event == "warning":
            self.texts.append(fields["text"])


def _tracked(folder: Path, name: str, points: int) -> tuple[list[str], float]:
    """Record a run of `points` intervals with a tracker; return its warnings, and the seconds that recording took."""
    warnings = Warnings()
    recorders = Recorders(lambda: ([Tracking(name, folder, {"lr": 0.1, "clip": None}), warnings], Epoch()))
    recorders.record("start", chosen={"strategy": "ddp"})
    begun_s = time.perf_counter()
    for step in range(1, points + 1):
        recorders.record("log", step=step, epoch=0, loss=1 / step, lr=0.1, host_cpu_percent=50.0)
    recorders.record("eval", step=points, epoch=0, score=0.5, on="test set")
    recorders.record("values", step=points, epoch=0, margin=0.25)
    seconds = time.perf_counter() - begun_s
    recorders.record("finish", exit=0)
    recorders.close()
    return warnings.texts, seconds


def test_a_tracker_gets_config_numbers_and_end_and_a_later_start_goes_on_in_its_record(tmp_path: Path) -> None:
    (tmp_path / "proof.md").write_text("# Proofs")
    hook = sys.excepthook
    assert _tracked(tmp_path, OWN + "Plain", 2)[0] == []
    assert sys.excepthook is hook
    start, *values, finish = got(tmp_path)
    assert start == ["start", tmp_path.name, {"lr": 0.1, "strategy": "ddp"}, ""]
    numbers = {"train/epoch": 0, "train/lr": 0.1, "train/host_cpu_percent": 50.0}
    assert values == [
        ["log", 1, numbers | {"train/loss": 1.0}],
        ["log", 2, numbers | {"train/loss": 0.5}],
        ["log", 2, {"eval/score": 0.5}],
        ["log", 2, {"values/margin": 0.25}],
    ]
    assert finish == ["finish", 0, {"proof.md": "# Proofs"}]
    first_id = json.loads((tmp_path / "trackers" / f"{OWN}Plain.json").read_text())["id"]
    _tracked(tmp_path, OWN + "Plain", 1)
    assert got(tmp_path)[6][3] == first_id


def test_a_tracker_beside_the_script_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "beside.py").write_text("from tests.own_trackers import Plain")
    monkeypatch.syspath_prepend(tmp_path / "script")
    assert _tracked(tmp_path, "beside:Plain", 1)[0] == []
    assert got(tmp_path)[-1] == ["finish", 0, {}]


def test_a_tracker_that_is_down_is_told_once_and_its_losses_at_the_end(tmp_path: Path) -> None:
    texts, _ = _tracked(tmp_path, OWN + "Down", 20)
    *early, late = texts
    reason = "ConnectionError: no answer from https://tracker.example/api"
    if early:  # before the end, the process may not have started
        assert early == [
            f"The record of {OWN}Down could not be written ({reason}); training goes on, the record may have gaps."
        ]
    assert late == (
        f"The record of {OWN}Down could not be written (22 of 22 points are lost: {reason}); the record has gaps."
    )
    assert got(tmp_path)[-1] == ["finish", 0, {}]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "secret" in path.read_text()]
    assert "no answer from" in (tmp_path / "trackers" / f"{OWN}Down.txt").read_text(), "no trace"


@pytest.mark.parametrize("name", ["Slow", "Hanging"])
def test_a_slow_tracker_fills_its_queue_and_the_run_does_not_wait(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_MOST", 100)
    monkeypatch.setattr(tracking, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(tracking, "_STARTING_S", 0.5)
    begun_s = time.perf_counter()
    (full, lost), seconds = _tracked(tmp_path, OWN + name, 500)
    assert "it is slower than the run" in full
    assert "points are lost: it is slower than the run" in lost
    assert seconds < 0.5
    assert time.perf_counter() - begun_s < 5
    assert not [child for child in psutil.Process().children() if name in " ".join(child.cmdline())]


def test_a_tracker_that_asks_gets_no_answer_and_one_whose_process_ends_is_told(tmp_path: Path) -> None:
    *_, late = _tracked(tmp_path, OWN + "Silent", 1)[0]
    assert "3 of 3 points are lost: EOFError" in late


def test_a_tracker_ends_its_run_as_failed_where_rank_0_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep.record.tracking", f"{OWN}Plain", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(json.dumps(["start", "run", str(tmp_path), {}, ""]) + "\n", timeout=60)
    assert json.loads(out)["id"]
    assert got(tmp_path)[-1] == ["finish", 1, {}]


def test_a_resumed_run_is_tracked_in_one_record_and_its_tables_have_its_rows(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--log-every", "5", "--checkpoint-every", "5", "--output", str(run), "--resume", "auto")
    for steps in ("12", "20"):
        assert main([*TRAIN, *words, "--max-steps", steps, "--track", f"{OWN}Plain", "csv", "tensorboard"]) == 0
    calls, note = got(run), json.loads((run / "trackers" / f"{OWN}Plain.json").read_text())
    assert [call[3] for call in calls if call[0] == "start"] == ["", note["id"]]
    losses = {call[1]: call[2]["train/loss"] for call in calls if call[0] == "log" and "train/loss" in call[2]}
    assert losses == {row["step"]: row["loss"] for row in events(run, "log")}
    assert [call[1] for call in calls if call[0] == "finish"] == [0, 0]
    assert calls[-1][2]["proof.md"] == (run / "proof.md").read_text()
    assert len([*run.glob("events.out.tfevents.*")]) == 2, "one for each start"
    for event in ("step", "eval"):
        with (run / f"{event}s.csv").open() as file:
            rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
        assert rows == [{key: str(value) for key, value in row.items() if key != "event"} for row in events(run, event)]
        assert rows


def test_values_of_a_session_are_tracked(tmp_path: Path) -> None:
    with loops.session(World.alone(), output=tmp_path / "run", track=[f"{OWN}Plain"]) as session:
        for _ in session.epochs(1):
            session.log(margin=0.5)
    assert ["log", 0, {"values/margin": 0.5}] in got(tmp_path / "run")


def test_a_session_without_a_folder_is_not_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "take", lambda: None)
    with pytest.raises(RequestError, match="give output="):
        lockstep.session(track=["csv"])


def test_trackers_that_cannot_be_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    words = (*TRAIN, "--output", tmp_path / "run", "--track")
    assert all(callable(getattr(trackers.make(name), "start", None)) for name in TRACKERS), "a name without a class"
    assert "did you mean mlflow?" in refusal(capsys, *words, "ml-flow")
    assert refusal(capsys, *words, "csv", "csv") == "--track names csv twice; name each tracker once."
    assert "pip install 'lockstep-torch[wandb]'" in refusal(capsys, *words, "wandb")
    assert f"{OWN}Partial has no log and no finish" in refusal(capsys, *words, f"{OWN}Partial")
    assert not (tmp_path / "run").exists()
