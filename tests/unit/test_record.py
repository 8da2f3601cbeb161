"""What a run writes down: whole lines, every bit, and nothing that a full disk or a kill could break."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep import proof
from lockstep.batching import BatchPlan
from lockstep.files import write_json, write_whole
from lockstep.proof import Check
from lockstep.record import manifest, telemetry
from lockstep.record.base import Recorders
from lockstep.record.console import PLAIN_EVERY_S, Screen, Terminal
from lockstep.record.jsonl import JsonLines, encode, rewind
from lockstep.record.table import build
from lockstep.record.telemetry import HostClock, Telemetry
from lockstep.record.tensorboard import TensorBoard
from lockstep.result import RunResult
from lockstep.topology import Topology

from ..disks import no_file_beyond

Event = tuple[str, dict[str, Any]]


class Memory:
    """Keeps the events; fails while `full`."""

    def __init__(self, *, full: bool = False) -> None:
        self.events: list[Event] = []
        self.full = full

    def record(self, event: str, **fields: Any) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.events.append((event, fields))

    def close(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


def step_row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 1 / step, "lr": 0.1, "samples": 256, **more}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- recorders ---


def test_a_recorder_that_fails_is_reported_once_and_stops_nobody() -> None:
    broken, good, other = Memory(full=True), Memory(), Memory(full=True)
    all_of_them = Recorders([broken, good, other])
    for step in (1, 2, 3):
        all_of_them.record("eval", step=step)
    broken.full = False
    all_of_them.record("eval", step=4)
    all_of_them.close()
    assert [fields["step"] for event, fields in good.events if event == "eval"] == [1, 2, 3, 4]
    assert len([event for event, _ in good.events if event == "warning"]) == 2
    assert "No space left" in next(fields["text"] for event, fields in good.events if event == "warning")
    assert broken.events[-1] == ("eval", {"step": 4})  # tried again with the next event


# --- steps.jsonl ---

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.lists(st.dictionaries(st.text(), plain, min_size=1), max_size=4))
def test_each_row_is_one_line_with_every_bit(rows: list[dict[str, Any]]) -> None:
    lines = encode(rows).split("\n")
    assert lines.pop() == ""
    assert [json.loads(line) for line in lines] == rows


def test_steps_become_lines_in_their_order(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "steps.jsonl")
    lines.record("steps", rows=[step_row(1), step_row(2, grad_norm=0.5)])
    lines.record("eval", step=2, epoch=0, top1=0.5, loss=1.0, samples=360)
    # Before close: a killed process has lost nothing of what was recorded.
    text = (tmp_path / "steps.jsonl").read_text()
    lines.close()
    assert text.splitlines()[0] == '{"event": "step", "step": 1, "epoch": 0, "loss": 1.0, "lr": 0.1, "samples": 256}'
    assert [row["event"] for row in read(tmp_path / "steps.jsonl")] == ["step", "step", "eval"]


def test_numbers_that_json_lacks_are_null_and_keep_their_text(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "steps.jsonl")
    lines.record("steps", rows=[step_row(1, grad_norm=math.inf) | {"loss": math.nan}, step_row(2)])
    lines.record("log", step=2, loss=-math.inf, nested={"a": [math.nan]})
    lines.close()
    first, second, log = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "steps.jsonl").read_text().splitlines()
    ]
    assert [first[name] for name in ("loss", "loss_repr", "grad_norm", "grad_norm_repr")] == [None, "nan", None, "inf"]
    assert second == {"event": "step", **step_row(2)}
    assert (log["loss"], log["loss_repr"], log["nested"]) == (None, "-inf", {"a": [None]})


def test_a_full_disk_loses_no_line_once_there_is_room(tmp_path: Path) -> None:
    path, ear = tmp_path / "steps.jsonl", Memory()
    recorder = Recorders([ear, JsonLines(path)])

    def record(first: int) -> None:
        recorder.record("steps", rows=[step_row(step) for step in range(first, first + 10)])

    record(1)
    size = path.stat().st_size
    with no_file_beyond(size + 50):
        record(11)
        record(21)
        assert path.stat().st_size == size, "half a line was left"
    record(31)
    recorder.close()
    assert [row["step"] for row in read(path)] == list(range(1, 41))
    assert len([event for event, _ in ear.events if event == "warning"]) == 1


def test_a_full_disk_takes_single_points_of_a_curve_and_leaves_one_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def missed(*limits: int) -> list[int]:
        """Record a point under each limit of the file's size; return those that found no room."""
        board, lost = TensorBoard(tmp_path), []
        for step, limit in enumerate(limits):
            try:
                with no_file_beyond(limit):
                    board.record("log", step=step, epoch=0, loss=2.0)
            except OSError:
                lost.append(step)
        board.close()
        return lost

    room = 1 << 30
    assert missed(0, 0, 10) == [0, 1, 2]
    assert not [*tmp_path.iterdir()]
    assert missed(0, room, 100, 110, room) == [0, 2, 3]
    assert len([*tmp_path.iterdir()]) == 1
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [point.step for point in points] == [1, 4]


def test_rewind_keeps_what_had_happened_by_the_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = JsonLines(path)
    lines.record("start", lines=["a"])
    lines.record("steps", rows=[step_row(s) for s in range(1, 51)])
    lines.record("warning", text="early")
    lines.record("eval", step=50, top1=0.5)
    lines.record("steps", rows=[step_row(s) for s in range(51, 71)])
    lines.record("warning", text="late")
    lines.record("checkpoint", step=50, path="p", kind="last")  # told only once it was on the disk
    lines.close()
    with path.open("ab") as file:
        file.write(b'{"event": "step", "step": 7}')  # cut before its end of line
    rewind(path, step=50)
    rows = read(path)
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 51))
    assert [row["event"] for row in rows if row["event"] != "step"] == ["start", "warning", "eval", "checkpoint"]
    assert all(row.get("text") != "late" for row in rows)
    whole = path.read_bytes()
    rewind(path, step=50)
    assert path.read_bytes() == whole
    rewind(tmp_path / "none.jsonl", step=1)
    assert sorted(tmp_path.iterdir()) == [path]


# --- files ---


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_json_files_hold_no_token_that_json_lacks(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"images_per_s": math.inf, "folder": tmp_path, "epoch_s": (1.5, math.nan)})
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written == {
        "images_per_s": None,
        "images_per_s_repr": "inf",
        "folder": str(tmp_path),
        "epoch_s": [1.5, None],
    }


def test_manifest_says_what_is_needed_to_run_again(tmp_path: Path) -> None:
    plan = asdict(BatchPlan.solve(10, 4))
    recorder = manifest.Manifest(tmp_path, topology=Topology(rank=1, size=2), hardware={"cores": 2})
    recorder.record("start", lines=[], plan=plan, chosen={"strategy": "ddp", "dir": Path("x")}, first_step=3)
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert written["versions"]["torch"] == torch.__version__
    assert written["batch_plan"] == plan
    assert written["topology"]["size"] == 2
    assert written["hardware"] == {"cores": 2}
    assert written["chosen"] == {"strategy": "ddp", "dir": "x"}


def test_a_summary_has_the_same_keys_however_the_run_ended(tmp_path: Path) -> None:
    def summary() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
        return found

    stopped = manifest.Summary(tmp_path)
    stopped.record("start", first_step=0, epoch_s=[])
    stopped.record("epoch", step=2, epoch=0, epoch_s=1.5)
    stopped.record("eval", step=2, epoch=0, top1=0.4, top5=0.9, loss=1.0, samples=10)
    stopped.record("steps", rows=[{"step": 3}])
    assert not list(tmp_path.iterdir())
    stopped.record("failed", exit=75, error="Stopped.")
    scores = RunResult(top1=0.3, top5=0.8, loss=2.0, best_top1=0.4, samples=10, steps=4, epoch_s=(1.5, 1.6))
    result = replace(scores, images_per_s=3.0, data_wait_s=0.0).as_json()
    assert summary().keys() == result.keys() | {"error"}
    measured = ("steps", "epoch_s", "top1", "best_top1", "images_per_s", "exit", "error")
    assert [summary()[key] for key in measured] == [3, [1.5], 0.4, 0.4, None, 75, "Stopped."]

    resumed = manifest.Summary(tmp_path)
    resumed.record("start", first_step=3, epoch_s=[1.5])
    resumed.record("finish", **result)
    assert summary() == result

    # What was checked beside the run stays when it goes on; what it checks itself is as it now is.
    proof.add(tmp_path, [Check(name="gradients", claim="The same", outcome=Check.HOLDS)])
    going_on = manifest.Summary(tmp_path)
    going_on.record("start", first_step=3, epoch_s=[1.5])
    replicas = Check(name="replicas", claim="The same bits", outcome=Check.HOLDS)
    going_on.record("finish", **result | {"proof": proof.by_name([replicas])})
    assert [*summary()["proof"]] == ["gradients", "replicas"]
    # A claim about half a run's records is none about the whole run's; what a start has looked at is never lost.
    half = Check(name="losses", claim="Each loss is a number", outcome=Check.HOLDS, times=4)
    proof.add(tmp_path, [half])
    going_on.record("finish", **result | {"proof": proof.by_name([replicas])})
    assert [*summary()["proof"]] == ["gradients", "replicas"]
    broken = manifest.Summary(tmp_path)
    broken.record("start", first_step=4, epoch_s=[1.5, 1.6])
    torn = Check(name="replicas", claim="The same bits", outcome=Check.FAILS, times=1)
    broken.record("proof", checks=proof.by_name([torn]))
    broken.record("failed", exit=3, error="The replicas are not the same bits.")
    assert summary()["proof"]["replicas"]["outcome"] == "fails"
    (tmp_path / "summary.json").write_text('{"top1": 0.')
    going_on.record("finish", **result)
    assert summary() == result

    # Taken up for more epochs, and failed at once: what was measured before stays.
    failed = manifest.Summary(tmp_path)
    failed.record("start", first_step=4, epoch_s=[1.5, 1.6])
    failed.record("failed", exit=1, error="Rank 0 failed.")
    assert summary() == result | {"output": str(tmp_path), "exit": 1, "error": "Rank 0 failed."}


def test_git_commit_of_a_folder(tmp_path: Path) -> None:
    assert manifest.git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "f").write_text("1")
    for command in (["init", "-q"], ["add", "f"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *command], check=True)
    clean = manifest.git_commit(tmp_path)
    (tmp_path / "f").write_text("2")
    assert clean is not None
    assert len(clean) == 40
    assert manifest.git_commit(tmp_path) == f"{clean}-dirty"


# --- console ---


class Stage:
    """A console of a given kind, its output, and a clock that stands until it is told."""

    def __init__(self, *, live: bool, width: int = 100) -> None:
        self.file = io.StringIO(newline="")
        self.now_s = 0.0
        console = Console(file=self.file, force_terminal=live, width=width, highlight=False, _environ={})
        self.terminal = Terminal(console, console, live=live, clock=lambda: self.now_s)
        self.terminal.record(
            "start", lines=["batch [plan]"], steps_per_epoch=100, epochs=3, total_steps=300, first_step=0
        )

    def log(self, step: int, **more: Any) -> None:
        fields = {"step": step, "epoch": (step - 1) // 100, "loss": 1.25, "lr": 0.1, "images_per_s": 5120.0, **more}
        self.terminal.record("log", **fields)

    @property
    def text(self) -> str:
        return self.file.getvalue()


def test_without_a_terminal_lines_are_plain_whole_and_seldom() -> None:
    stage = Stage(live=False, width=20)
    for step in range(5, 101, 5):
        stage.log(step, top1=0.5, eta_s=192.0)
        stage.now_s += PLAIN_EVERY_S / 5
    stage.terminal.record("eval", step=100, epoch=0, top1=0.981, top5=None, loss=0.1, samples=360)
    stage.terminal.close()
    lines = stage.text.splitlines()
    assert "\x1b" not in stage.text
    assert [line.split("step ")[1].split()[0] for line in lines[1:]] == ["5", "30", "55", "80", "100", "100"]
    assert lines[0] == "batch [plan]"
    assert lines[1] == "epoch 1/3  step   5  loss 1.2500  train 50.0%  5,120 images/s  3 min 12 s left  lr 0.1"
    assert lines[-1] == "epoch 1/3  step 100  test  98.10%  loss 0.1000  360 images"


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_on_a_terminal_the_bar_is_one_line_and_results_stay_above(width: int) -> None:
    stage = Stage(live=True, width=width)
    for step in (50, 100):
        stage.now_s += 1
        stage.log(step, top1=0.5, eta_s=192.0)
    stage.terminal.record("eval", step=100, epoch=0, top1=0.981, loss=0.1, samples=360)
    stage.terminal.record("warning", text="odd [thing]")
    stage.terminal.record("finish", top1=0.981, best_top1=0.99, steps=300, epoch_s=[1.0, 2.0], exit=0, output="runs/a")
    shown = screen(stage.text)
    bars = [line for line in shown if "━" in line]
    assert len(bars) == 1
    assert len(bars[0]) <= width
    assert bars[0].startswith("epoch 1/3 ")
    assert "loss 1.2500" in bars[0]
    assert shown.index(bars[0]) > max(index for index, line in enumerate(shown) if "98.10%" in line and "step" in line)
    assert "warning: odd [thing]" in shown
    assert any("best 99.00%" in line for line in shown)
    assert "\x1b[?25h" in stage.text  # the cursor is back


def screen(text: str) -> list[str]:
    """Return what a terminal shows after `text`, which moves the cursor by lines and erases lines."""
    lines, row = [""], 0
    position = 0
    while position < len(text):
        if text[position] == "\x1b":
            end = next(i for i in range(position + 2, len(text)) if text[i].isalpha())
            count, kind = text[position + 2 : end], text[end]
            if kind == "A":
                row -= int(count or 1)
            elif kind == "K":
                lines[row] = ""
            position = end
        elif text[position] == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif text[position] != "\r":
            lines[row] += text[position]
        position += 1
    return lines


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """`lockstep train | head`: rich alone would exit the process."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone:
        console = Screen(file=gone)
        lines = JsonLines(tmp_path / "steps.jsonl")
        recorder = Recorders([Terminal(console, console, live=False), lines])
        recorder.record("start", lines=["hello"], steps_per_epoch=1, epochs=1, total_steps=1, first_step=0)
        recorder.record("eval", step=1, top1=0.5, loss=1.0)
        recorder.close()
        with pytest.raises(BrokenPipeError):
            gone.flush()
        # What Python holds back for the closed pipe would raise once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
    assert sorted(row["event"] for row in read(tmp_path / "steps.jsonl")) == ["eval", "start", "warning"]


# --- TensorBoard ---


def test_tensorboard_reads_the_curves_and_a_resume_replaces_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def board(values: dict[int, float], resume_step: int | None) -> None:
        writer = TensorBoard(tmp_path, resume_step=resume_step)
        for step, loss in values.items():
            writer.record("steps", rows=[step_row(step)])
            writer.record("log", step=step, epoch=0, loss=loss, lr=0.5, images_per_s=10.0, top1=None)
        writer.record("eval", step=max(values), epoch=0, top1=0.75, loss=0.5, samples=360)
        writer.close()

    board({50: 2.0, 100: 1.5, 150: 1.25}, None)
    board({150: 1.0}, 100)
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in curves.Scalars("train/loss")] == [(50, 2.0), (100, 1.5), (150, 1.0)]
    assert [point.value for point in curves.Scalars("train/lr")] == [0.5] * 3
    assert curves.Scalars("eval/top1")[-1].value == 0.75
    assert not any("step" in tag or "samples" in tag for tag in curves.Tags()["scalars"])


# --- telemetry ---


def test_the_clock_times_steps_and_not_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter((10.0, 11.0, 13.0, 16.0, 100.0, 104.0))
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    clock = HostClock()
    for _ in range(3):
        clock.tick()
    clock.start()
    clock.tick()
    assert clock.flush() == [1.0, 2.0, 3.0, 4.0]
    assert clock.flush() == []
    assert clock.percentiles(50, 100) == [2.5, 4.0]
    assert next(now_s, None) is None


def test_telemetry_of_a_cpu_is_the_processs_own() -> None:
    sampler = Telemetry([torch.device("cpu")])
    sample, peak = sampler.sample(), sampler.peak_memory_bytes()
    assert sample["host_memory_bytes"] > 10e6  # Python and torch
    assert sample["process_cpu_percent"] >= 0
    assert peak["device"] is None
    assert peak["host"] is not None
    assert peak["host"] > 10e6


# --- all together ---


def test_the_recorder_of_a_run_writes_all_its_files(tmp_path: Path) -> None:
    memory = Memory()
    start = {"lines": [], "plan": {}, "chosen": {}, "first_step": 0, "epoch_s": [], "total_steps": 3, "epochs": 1}
    first = build(tmp_path, topology=Topology(), hardware={}, config_toml="epochs = 1\n", console=memory)
    first.record("failed", exit=2, error="refused before it started")
    assert not list(tmp_path.iterdir())
    first.record("start", **start)
    first.record("steps", rows=[step_row(s) for s in range(1, 4)])
    first.record("log", step=3, epoch=0, loss=0.5, lr=0.1, images_per_s=3.0)
    first.close()
    second = build(
        tmp_path, topology=Topology(), hardware={}, config_toml="epochs = 2\n", resume_step=2, console=memory
    )
    second.record("start", **start | {"first_step": 2})
    second.record("steps", rows=[step_row(3)])
    second.close()
    assert [row["step"] for row in read(tmp_path / "steps.jsonl") if row["event"] == "step"] == [1, 2, 3]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    assert [event for event, _ in memory.events] == ["start", "steps", "log", "start", "steps"]
    assert (tmp_path / "config.toml").read_text() == "epochs = 2\n"
