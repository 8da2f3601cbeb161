"""Signals to a run, however it was started: it saves and stops, or ends at once, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep import checkpoint
from lockstep.monitor.signals import STOPPING

from ..command import (
    GATED,
    LIMIT_S,
    Running,
    command,
    end,
    events,
    gate,
    gone,
    losses,
    processes,
    ranks_of,
    sentence,
    start,
    until,
)

DDP = ("--strategy", "ddp", "--devices", 2)
ENDLESS = ("--epochs", 1000, "--workers", 1)
WAYS: dict[str, tuple[object, ...]] = {
    "single": ("--strategy", "single"),
    "spawn": DDP,
    "elastic": (*DDP, "--max-restarts", 2),
    "torchrun": (),
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _held(folder: Path, way: str) -> tuple[Running, list[psutil.Process]]:
    """Start a run whose data workers stop after some steps; return it, and all its processes."""
    gate(folder, 3)
    run = start(folder, *GATED, *ENDLESS, *WAYS[way], through=TORCHRUN if way == "torchrun" else ())
    until(lambda: len(losses(folder / "run")) >= 3 or run.poll() is not None)
    family = processes(run)
    assert len(family) >= (2 if way == "single" else 5)
    return run, family


@pytest.mark.parametrize(
    ("way", "number", "group"),
    [
        ("single", signal.SIGTERM, True),
        ("spawn", signal.SIGINT, True),
        ("elastic", signal.SIGTERM, False),
        pytest.param("torchrun", signal.SIGTERM, False, marks=pytest.mark.long),
    ],
)
def test_the_first_signal_saves_and_stops(way: str, number: signal.Signals, group: bool, tmp_path: Path) -> None:
    run, family = _held(tmp_path, way)
    with run:
        (os.killpg if group else os.kill)(run.pid, number)
        run.says(STOPPING)
        (tmp_path / "gate").unlink()
        ended = end(run)
    made = len(losses(tmp_path / "run"))
    assert f"lockstep: Stopped on request at step {made} of 10000 and saved" in ended.err, ended
    assert ended.code == 75 or way == "torchrun"
    assert checkpoint.load(tmp_path / "run").meta["step"] == made
    assert not (tmp_path / "run" / "failures").exists()
    until(lambda: gone(family), 5)


@pytest.mark.parametrize("way", ["spawn", "elastic"])
def test_a_second_signal_ends_all_at_once(way: str, tmp_path: Path) -> None:
    run, family = _held(tmp_path, way)
    with run:
        run.send_signal(signal.SIGTERM)
        run.says(STOPPING)
        time.sleep(0.8)  # for half a second it would be the first one once more
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        assert sentence(end(run, 20), code=1).startswith("Killed by a second signal, without saving")
        until(lambda: gone(family), 5)


@pytest.mark.parametrize("way", ["spawn", "elastic"])
def test_nobody_outlives_a_command_that_is_killed(way: str, tmp_path: Path) -> None:
    run, family = _held(tmp_path, way)
    with run:
        run.kill()
        run.wait()
        try:
            until(lambda: gone(family), 10)
        finally:
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


_STARTS = """
import pathlib, subprocess, time, lockstep

with lockstep.session() as session:
    started = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(f"started{session.rank}").write_text(str(started.pid))
    time.sleep(1000)
"""


def test_what_a_script_has_started_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_STARTS)
    with start(tmp_path, "run", "--accelerator", "cpu", "--devices", 2, "train.py") as run:
        files = [tmp_path / f"started{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        family = [*processes(run), *(psutil.Process(int(file.read_text())) for file in files)]
        run.kill()
        until(lambda: gone(family), 10)


def test_a_stop_while_ranks_start_is_told_as_one(tmp_path: Path) -> None:
    with start(tmp_path, *GATED, *ENDLESS, *DDP) as run:
        until(lambda: len(ranks_of(run)) >= 2)
        run.send_signal(signal.SIGTERM)
        assert sentence(end(run), code=75).startswith("Stopped ")


@pytest.mark.long
def test_a_stop_does_not_wait_for_the_end_of_an_evaluation(tmp_path: Path) -> None:
    words = ["train", "digits", *DDP, "--batch", 50, "--max-steps", 12, "--model", "tests.models:SlowToEvaluate"]
    words += ["--output", "run", "--resume", "auto"]
    with start(tmp_path, *words, "--eval-batch", 2) as run:  # 45 seconds and more
        until(lambda: bool(events(tmp_path / "run", "evaluate")))
        run.send_signal(signal.SIGTERM)
        assert "Stopped on request at step 12 of 12 and saved" in sentence(end(run, 20), code=75)
    again = command(tmp_path, *words)
    assert again.code == 0, again
    assert [row["step"] for row in events(tmp_path / "run", "eval")] == [12]


_SLOWED = """
import pathlib, time, torch, lockstep

with lockstep.session() as session:
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for _ in session.epochs(10**6):
        for (x,) in loader:
            if pathlib.Path("slow").exists():
                time.sleep(1)
                if session.is_main:
                    pathlib.Path("slow").open("a").write("a step\\n")
            session.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_stop_comes_with_the_next_step_also_where_steps_have_become_slow(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SLOWED)
    words = ("--accelerator", "cpu", "--devices", 2, "--log-every", 1000, "--output", "run")
    with start(tmp_path, "run", *words, "train.py") as run:
        until(lambda: len(losses(tmp_path / "run")) >= 200)  # so that the next interval would have hundreds
        slow = tmp_path / "slow"
        slow.touch()
        until(lambda: slow.stat().st_size > 0)
        made = len(slow.read_text().splitlines())
        run.send_signal(signal.SIGTERM)
        ended = end(run)
    assert ended.code == 75, ended
    assert len(slow.read_text().splitlines()) <= made + 3


_CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.mark.long
def test_a_terminal_that_is_closed_stops_a_run_as_a_signal_does(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = "train digits --model mlp --accelerator cpu --epochs 1000 --output run --strategy ddp --devices 2"
    with subprocess.Popen(
        # What it takes for a terminal to be closed over a process: to be the one that controls it.
        [sys.executable, "-c", _CONTROLLED, "-m", "lockstep", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as run:
        try:
            os.close(theirs)
            while not losses(tmp_path / "run"):
                assert run.poll() is None
                if select.select([ours], [], [], 0.1)[0]:
                    os.read(ours, 65536)
            os.close(ours)
            assert run.wait(LIMIT_S) == 75
        finally:
            run.kill()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == 75
    assert not list((tmp_path / "run").glob("failures/*"))
