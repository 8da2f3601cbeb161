"""Data workers and the signals that stop a run: they outlast the stop, so that it can save, and never the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data.sets import build
from lockstep.world import World

from ..command import end, gone, losses, processes, sentence, start, until

DATA = """
import time
import torch
from torch.utils.data import Dataset

class Slow(Dataset):
    classes = 4
    def __len__(self): return 20_000
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((4,), float(index % 7)), index % 4

class Stuck(Slow):
    def __getitem__(self, index):
        time.sleep(1e6 if index == 8 else 0)
        return super().__getitem__(index)

def slow(): return Slow(), torch.utils.data.Subset(Slow(), range(8))
def stuck(): return Stuck(), torch.utils.data.Subset(Slow(), range(8))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WORDS = (
    "--data",
    "workers_data:slow",
    "--model",
    "mlp",
    "--batch",
    8,
    "--max-steps",
    100_000,
    "--output",
    "run",
    "--workers",
    1,
    "--log-every",
    1,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a data set of slow samples, for commands that start there."""
    (tmp_path / "workers_data.py").write_text(DATA)
    return tmp_path


def _training(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Wait until the run in `folder` trains; return all its processes."""
    until(lambda: len(losses(folder / "run")) >= 3 or process.poll() is not None)
    return processes(process)


def test_a_signal_to_the_whole_group_saves(folder: Path) -> None:
    process = start(folder, "train", *WORDS, "--strategy", "single")
    family = _training(process, folder)
    assert len(family) > 1
    os.killpg(process.pid, signal.SIGTERM)
    assert "Stopped on request" in sentence(end(process), code=75)
    assert (folder / "run" / "checkpoints" / "last").is_dir()
    until(lambda: gone(family), 5)


def test_a_signal_to_torchrun_saves(folder: Path) -> None:
    process = start(folder, "train", *WORDS, through=TORCHRUN)
    family = _training(process, folder)
    assert len(family) > 4
    process.send_signal(signal.SIGTERM)
    ended = end(process)
    assert "Stopped on request" in ended.err, ended
    assert (folder / "run" / "checkpoints" / "last").is_dir()
    until(lambda: gone(family), 5)


def test_workers_do_not_outlive_a_killed_rank(folder: Path) -> None:
    process = start(folder, "train", *WORDS, "--strategy", "single")
    family = _training(process, folder)
    assert len(family) > 1
    process.kill()
    process.communicate()
    until(lambda: gone(family), 5)


HELD = """
import multiprocessing, time, torch
from lockstep.config import DataConfig
from lockstep.data.sets import build
from lockstep.world import World

config = DataConfig(name="workers_data:stuck", workers=1)
splits = build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)
stream = splits.train.stream([torch.arange(4).numpy(), torch.arange(8, 12).numpy()], epoch=0)
next(stream)
time.sleep(0.3)
print(*(each.pid for each in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


def test_a_worker_that_is_stuck_does_not_outlive_a_killed_rank(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], cwd=folder, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        workers = [psutil.Process(int(word)) for word in rank.stdout.readline().split()]
        rank.kill()
    assert workers
    until(lambda: gone(workers), 5)


def test_workers_that_are_stuck_are_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = DataConfig(name="workers_data:stuck", workers=1)
    splits = build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)
    stream = splits.train.stream([torch.arange(4).numpy(), torch.arange(4, 12).numpy()], epoch=0)
    others = psutil.Process().children(recursive=True)  # ranks that tests share
    next(iter(stream))
    workers = [each for each in psutil.Process().children(recursive=True) if each not in others]
    assert workers
    splits.close()
    assert gone(workers)
