"""What a run writes down: whole lines, every bit, and nothing that a full disk or a kill could break."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.files import write_json, write_whole
from lockstep.record import checks, telemetry
from lockstep.record.base import Epoch, Recorder, Recorders
from lockstep.record.checks import Check
from lockstep.record.console import PLAIN_EVERY_S, Terminal
from lockstep.record.jsonl import JsonLines, rewind
from lockstep.record.manifest import Documents
from lockstep.record.result import RunResult
from lockstep.record.telemetry import StepClock, Telemetry
from lockstep.record.tensorboard import TensorBoard
from lockstep.runs.meter import Meter
from lockstep.screen import Screen
from lockstep.world.world import World

from ..command import events
from ..disks import no_file_beyond
from ..loops import streamed


class Memory(Recorder):
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def record(self, event: str, **fields: Any) -> None:
        self.events.append(event)


def step_rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "epoch": 0, "loss": 1 / step, "lr": 0.1} for step in range(first, last + 1)]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows; a number that JSON lacks is a failure."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if row["event"] == "step"]


def test_events_are_lines_in_their_order_and_numbers_that_json_lacks_keep_their_text(tmp_path: Path) -> None:
    lines, odd = JsonLines(tmp_path / "steps.jsonl"), "line\nby \u2028line\udc80"
    lines.record("steps", rows=[{"step": 1, "loss": math.nan, "grad_norm": math.inf}, {"step": 2, "loss": 0.1 + 0.2}])
    lines.record("eval", step=2, loss=-math.inf, nested={"a": [math.nan], "text": odd})
    # Before close: a killed process has lost nothing of what was recorded.
    assert read(tmp_path / "steps.jsonl") == [
        {"event": "step", "step": 1, "loss": None, "loss_repr": "nan", "grad_norm": None, "grad_norm_repr": "inf"},
        {"event": "step", "step": 2, "loss": 0.1 + 0.2},
        {"event": "eval", "step": 2, "loss": None, "loss_repr": "-inf", "nested": {"a": [None], "text": odd}},
    ]
    lines.close()
    write_json(tmp_path / "summary.json", {"images_per_s": math.inf, "folder": tmp_path, "epoch_s": (1.5, math.nan)})
    numbers = {"images_per_s": None, "images_per_s_repr": "inf", "epoch_s": [1.5, None]}
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail) == (
        numbers | {"folder": str(tmp_path)}
    )


def test_a_full_disk_is_told_once_stops_nobody_and_loses_no_line_once_there_is_room(tmp_path: Path) -> None:
    path, ear = tmp_path / "steps.jsonl", Memory()
    recorder = Recorders(lambda: ([JsonLines(path), ear], Epoch()))
    recorder.record("start")
    recorder.record("steps", rows=step_rows(1, 10))
    size = path.stat().st_size
    with no_file_beyond(size + 50):
        recorder.record("steps", rows=step_rows(11, 20))
        recorder.record("steps", rows=step_rows(21, 30))
        assert path.stat().st_size == size, "half a line was left"
    recorder.record("steps", rows=step_rows(31, 40))
    recorder.close()
    assert steps_of(read(path)) == list(range(1, 41))
    assert sorted(ear.events) == ["start", *["steps"] * 4, "warning"]


def test_rewind_keeps_what_had_happened_by_the_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = JsonLines(path)
    lines.record("warning", text="early")
    lines.record("steps", rows=step_rows(1, 50))
    lines.record("eval", step=50, top1=0.5)
    lines.record("steps", rows=step_rows(51, 70))
    lines.record("warning", text="late")
    lines.record("checkpoint", step=50)  # told only once it was on the disk
    lines.close()
    with path.open("ab") as file:
        file.write(b'{"event": "step", "step": 7}')  # cut before its end of line
    rewind(path, step=50)
    rows = read(path)
    assert steps_of(rows) == list(range(1, 51))
    assert [row["event"] for row in rows if row["event"] != "step"] == ["warning", "eval", "checkpoint"]
    assert rows[0]["text"] == "early"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def _summary(run: Path, first_step: int, epoch_s: list[float], *events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the summary after one start of the run came to these events."""
    recorder = Documents(run, {})
    recorder.record("start", first_step=first_step, epoch_s=epoch_s, plan={}, chosen={})
    for event, fields in events:
        recorder.record(event, **fields)
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_a_summary_has_the_same_keys_however_the_run_ended_and_the_proofs_that_are_still_about_it(
    tmp_path: Path,
) -> None:
    scores = RunResult(top1=0.3, top5=0.8, loss=2.0, best_top1=0.4, samples=10, steps=4, epoch_s=(1.5, 1.6))
    result = replace(scores, images_per_s=3.0, data_wait_s=0.0).as_json()
    failed = ("failed", {"exit": 1, "error": "Rank 0 failed."})
    stopped = _summary(
        *(tmp_path, 0, []),
        ("epoch", {"step": 2, "epoch": 0, "epoch_s": 1.5}),
        ("eval", {"step": 2, "epoch": 0, "top1": 0.4, "top5": 0.9, "loss": 1.0, "samples": 10}),
        ("steps", {"rows": [{"step": 3}]}),
        ("failed", {"exit": 75, "error": "Stopped."}),
    )
    result["samples_per_s"] = 3.0
    assert stopped.keys() == result.keys() | {"error"}
    measured = {"steps": 3, "epoch_s": [1.5], "top1": 0.4, "best_top1": 0.4, "images_per_s": None, "exit": 75}
    assert stopped.items() >= measured.items()
    assert _summary(tmp_path, 3, [1.5], ("finish", result)) == result
    # Taken up for more epochs, and failed at once: what was measured before stays.
    assert _summary(tmp_path, 4, [1.5, 1.6], failed) == result | {"output": str(tmp_path)} | failed[1]
    (tmp_path / "summary.json").write_text('{"top1": 0.')
    assert _summary(tmp_path, 3, [1.5], ("finish", result)) == result

    # What was checked beside the run stays when it goes on; a claim about half a run's records is none about the whole.
    replicas, gradients, losses = (
        Check(name=name, claim="The same", outcome=Check.HOLDS, times=4) for name in ("replicas", "gradients", "losses")
    )
    checks.add(tmp_path, [gradients, losses])
    finished = _summary(tmp_path, 3, [1.5], ("finish", result | {"proof": checks.by_name([replicas])}))
    assert [*finished["proof"]] == ["gradients", "replicas"]
    torn = ("proof", {"checks": checks.by_name([replace(replicas, outcome=Check.FAILS)])})
    assert _summary(tmp_path, 4, [1.5, 1.6], torn, failed)["proof"]["replicas"]["outcome"] == Check.FAILS


class Stage:
    """A console of a given kind, its output, and a clock that stands until it is told."""

    def __init__(self, *, live: bool, width: int = 80, total_steps: int = 300) -> None:
        self.file = io.StringIO(newline="")
        self.now_s = 0.0
        console = Screen(file=self.file, force_terminal=live, width=width, _environ={})
        self.terminal = Terminal(console, console, live=live, clock=lambda: self.now_s)
        start = {"steps_per_epoch": 100, "epochs": 3, "first_step": 0, "shape": (1, 8, 8)}
        self.terminal.record("start", lines=["batch [plan]"], total_steps=total_steps, **start)

    def log(self, step: int, eta_s: float | None = 192.0) -> None:
        fields = {"loss": 1.25, "lr": 0.1, "samples_per_s": 5120.0, "top1": 0.5, "eta_s": eta_s}
        self.terminal.record("log", step=step, epoch=0, **fields)

    def eval(self) -> None:
        scores = {"top1": 0.981, "top5": None, "loss": 0.1, "samples": 360, "on": "test set"}
        self.terminal.record("eval", step=100, epoch=0, **scores)


def test_without_a_terminal_lines_are_plain_whole_and_seldom() -> None:
    stage = Stage(live=False)
    for step in range(5, 101, 5):
        stage.log(step)
        stage.now_s += PLAIN_EVERY_S / 5
    stage.eval()
    stage.terminal.close()
    first, *lines = stage.file.getvalue().splitlines()
    assert first == "batch [plan]"
    assert [line.split("step ")[1].split()[0] for line in lines] == ["5", "30", "55", "80", "100", "100"]
    assert lines[0] == "epoch 1/3  step   5  loss 1.2500  train 50.0%  5,120 images/s  3 min 12 s left  lr 0.1"
    assert lines[-1] == "epoch 1/3  step 100  test  98.10%  loss 0.1000  360 images"


def test_on_a_terminal_the_bar_is_one_line_and_results_are_lines_of_their_own() -> None:
    stage = Stage(live=True)
    for step in (50, 100):
        stage.now_s += 1
        stage.log(step)
    stage.eval()
    stage.terminal.record("warning", text="odd [thing]")
    scores = {"top1": 0.981, "best_top1": 0.99, "best_on": "test set", "proof": {}}
    stage.terminal.record("finish", steps=300, epoch_s=[1.0, 2.0], exit=0, output="runs/a", **scores)
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", stage.file.getvalue()))
    bars = [line for line in shown if "━" in line]
    assert max(map(len, bars)) <= 80
    assert bars[-1].startswith("epoch 1/3 ")
    assert "loss 1.2500" in bars[-1]
    assert any("98.10%" in line and "step" in line for line in shown)
    assert "warning: odd [thing]" in shown
    assert any("best 99.00%" in line for line in shown)
    assert "\x1b[?25h" in stage.file.getvalue()  # the cursor is back


def test_a_run_of_unknown_length_tells_no_steps_in_all_and_no_time_that_is_left(tmp_path: Path) -> None:
    streamed(World.alone(), output=str(tmp_path))
    assert {row["eta_s"] for row in events(tmp_path, "log")} == {None}
    stage = Stage(live=True, total_steps=0)
    stage.log(50, eta_s=None)
    stage.terminal.close()
    told = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", stage.file.getvalue())
    assert " 50  loss 1.2500  train 50.0%  5,120 images/s" in told


def test_tensorboard_reads_the_curves_and_a_resume_replaces_them(tmp_path: Path) -> None:
    for resume_step, values in ((0, {50: 2.0, 100: 1.5, 150: 1.25}), (100, {150: 1.0})):
        writer = TensorBoard(tmp_path, config={}, identity=(), resume_step=resume_step)
        for step, loss in values.items():
            writer.record("log", step=step, epoch=0, loss=loss, lr=0.5, top1=None)
        writer.record("eval", step=150, epoch=0, top1=0.75, samples=360)
        writer.close()
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in curves.Scalars("train/loss")] == [(50, 2.0), (100, 1.5), (150, 1.0)]
    assert curves.Scalars("eval/top1")[-1].value == 0.75
    assert not any(tag.endswith(("/step", "/samples")) for tag in curves.Tags()["scalars"])


def test_the_clock_times_steps_and_not_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter((10.0, 11.0, 13.0, 16.0, 100.0, 104.0))
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        clock.tick()
    clock.start()
    clock.tick()
    assert clock.flush() == [1.0, 2.0, 3.0, 4.0]
    assert clock.percentiles(50, 100) == [2.5, 4.0]


def test_telemetry_of_a_cpu_is_the_processs_own() -> None:
    telemetry = Telemetry([torch.device("cpu")])
    assert telemetry.sample()["host_memory_bytes"] > 10e6  # Python and torch
    peak = telemetry.peak_memory_bytes()
    assert (peak["host"] or 0) > 10e6
    assert peak["device"] is None


def test_an_interval_ends_with_two_waits_for_the_device() -> None:
    counted = Counter[str]()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[func.name()] += 1
            return func(*args, **kwargs or {})

    rows: list[dict[str, Any]] = []
    recorder: Any = SimpleNamespace(record=lambda event, **fields: rows.append({"event": event, **fields}))
    meter = Meter(World.alone(), recorder, [], log_every=2)
    meter.start()
    for step in (1, 2):
        meter.add(step, 0, 0.1, 4, torch.tensor(0.5), None)
    meter.pending.last = (torch.eye(4), torch.tensor([0, 1, 2, 0]))
    with Count():
        meter.flush(stop=False, total_steps=0)
    assert counted["aten::_local_scalar_dense"] == 1  # and one list, of every number
    assert rows[-1]["top1"] == 0.75
    assert [row["loss"] for row in rows[0]["rows"]] == [0.5, 0.5]
