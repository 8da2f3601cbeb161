"""Chapter 14: a rank of a run is killed, with and without a checkpoint; a rank of plain DDP is killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from .chapter import Chapter, Words
from .rendezvous import free_ports

TRAIN = """
import time, torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = lockstep.session(seed=0)
x = torch.sin(torch.arange(8.0) * torch.arange(1.0, 481)[:, None])
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, data = session.prepare(model, optimizer, data)
for epoch in session.epochs(2):
    for x, y in data:
        session.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
"""
"""Sixty steps, thirty per epoch."""
PLAIN = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2,
                        timeout=timedelta(seconds=10))
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(10_000):
    model(torch.ones(4, 8)).sum().backward()
    print(step, flush=True)
    time.sleep(0.01)
"""
EVERY, KILL_AT = 5, 22
LIMIT_S = 60.0
Row = dict[str, Any]


def rows(folder: Path) -> list[Row]:
    """Return the rows that the run has recorded so far."""
    path = folder / "run" / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ranks(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the run's ranks, in the order of their start."""
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(
        (child for child in children if "spawn_main" in " ".join(child.cmdline())), key=lambda child: child.pid
    )


def train(folder: Path, *, kills: bool) -> Row:
    """Return the recorded rows and final weights of a run; `kills` a rank at step `KILL_AT`."""
    (folder / "train.py").write_text(TRAIN)
    command = f"run --devices 2 --accelerator cpu --checkpoint-every {EVERY} --log-every 1 --output run"
    options = ["--max-restarts", "1", "--resume", "auto"] if kills else []
    begin = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *command.split(), *options, "train.py"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    killed, before = None, []
    while kills and process.poll() is None and killed is None:
        before = rows(folder)
        if any(row.get("step") == KILL_AT for row in before):
            ranks(process)[-1].kill()
            killed = time.time() - begin
        time.sleep(0.005)
    code = process.wait(LIMIT_S)
    recorded = before + [row for row in rows(folder) if row.get("time", 0.0) > begin + (killed or 0.0)]
    return {
        "rows": [row | {"time": row["time"] - begin} for row in recorded if row["event"] in ("start", "log")],
        "weights": (folder / "run" / "checkpoints" / "last" / "model.safetensors").read_bytes(),
        "killed": killed,
        "code": code,
    }


def plain(folder: Path, action: signal.Signals) -> Row:
    """Return how long plain DDP's rank 0 stays alive after the signal to rank 1."""
    (folder / "plain.py").write_text(PLAIN)
    url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "plain.py", url, str(rank)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    first = processes[0].stdout
    assert first is not None
    while first.readline() not in ("20\n", ""):
        pass
    processes[1].send_signal(action)
    begin = time.perf_counter()
    processes[0].communicate(timeout=LIMIT_S)
    seconds = time.perf_counter() - begin
    processes[1].kill()
    processes[1].communicate()
    return {"rank 0 ends after, s": round(seconds, 2), "exit code": processes[0].returncode}


def measure() -> dict[str, Any]:
    """Return what a killed rank costs a run, and how plain DDP notices a dead and a stopped rank."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        undisturbed = train(Path(other), kills=False)
        run = train(Path(name), kills=True)
        neighbours = {
            "killed": plain(Path(name), signal.SIGKILL),
            "stopped": plain(Path(name), signal.SIGSTOP),
        }
    starts = [row for row in run["rows"] if row["event"] == "start"]
    logs = [row for row in run["rows"] if row["event"] == "log"]
    again = next(row for row in logs if row["time"] > starts[1]["time"])
    cold = next(row["time"] for row in undisturbed["rows"] if row["event"] == "log")
    before = max(row["step"] for row in logs if row["time"] < starts[1]["time"])
    return {
        "killed at step": before,
        "continues after step": starts[1]["first_step"],
        "steps made again": before - starts[1]["first_step"],
        "cold start to first step, s": round(cold, 1),
        "kill to next step, s": round(again["time"] - run["killed"], 1),
        "exit codes": [undisturbed["code"], run["code"]],
        "same bits as without the fault": run["weights"] == undisturbed["weights"],
        "plain DDP, time-out 10 s": neighbours,
        "kill, s": round(run["killed"], 2),
        "steps": [[round(row["time"], 2), row["step"]] for row in logs],
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the steps over time; the kill is a vertical line."""
    axes = figure.subplots()
    seconds, steps = zip(*numbers["steps"], strict=True)
    axes.plot(seconds, steps, ".", color="#2980b9", label=words("optimizer step"))
    axes.axvline(numbers["kill, s"], color="#c0392b", label=words("rank 1 is killed"))
    axes.axhline(
        numbers["continues after step"], color="#7f8c8d", linestyle="--", label=words("last checkpoint before it")
    )
    axes.set_xlim(left=0)
    axes.set_xlabel(words("seconds since the start of the command"))
    axes.set_ylabel(words("step"))
    axes.set_title(words("One rank is killed, all ranks restart"))
    axes.legend(frameon=False)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the best interval for checkpoints of 5 s and a fault every 10 hours, in seconds."""
    return abs(float(answer) - 600) < 1  # the square root of 2 × 5 s × 36 000 s


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "optimizer step": "优化器 step",
        "rank 1 is killed": "rank 1 被杀死",
        "last checkpoint before it": "之前最后一个检查点",
        "seconds since the start of the command": "命令启动后的秒数",
        "step": "step",
        "One rank is killed, all ranks restart": "一个 rank 被杀死，所有 rank 重启",
    },
)
