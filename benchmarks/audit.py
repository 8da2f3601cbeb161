"""How long `lockstep audit` takes beside the script that it audits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .harness import Report, interleave, verdict

GOAL, GOAL_S = 2.5, 10.0
ROUNDS = 3
_SLEEP_S = 6.0
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

time.sleep(float(sys.argv[1]))  # reads an index, builds a large model
dist.init_process_group("gloo")
torch.manual_seed(0)
x, y = torch.randn(96, 20), torch.arange(96) % 4
model = DistributedDataParallel(torch.nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
for number, (a, b) in enumerate(DataLoader(data, batch_size=8, sampler=DistributedSampler(data))):
    loss = torch.nn.functional.cross_entropy(model(a), b)
    if sys.argv[2] == "wrong":
        loss = loss * dist.get_world_size()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sys.argv[2] == "alone" and number == 2:
        break
"""


def measure() -> Report:
    """Return the seconds of three steps of a script on two ranks, and of its audit."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
        found = interleave(
            {
                "alone": lambda: _seconds(0, *torchrun, script, _SLEEP_S, "alone"),
                "sound": lambda: _seconds(0, "lockstep", "audit", script, _SLEEP_S, "right"),
                "unsound": lambda: _seconds(3, "lockstep", "audit", script, _SLEEP_S, "wrong"),
            },
            rounds=ROUNDS,
        )
    own = found["alone"].median
    goal_s = GOAL * own + GOAL_S
    worst = max(found[name].median for name in ("sound", "unsound"))
    return Report(
        title="How long an audit takes",
        finding=f"A script that takes {own:.1f} s for three steps on two ranks is judged within {worst:.1f} s, "
        f"{worst / own:.2f} times as long (goal {goal_s:.1f} s, {verdict(worst <= goal_s)}).",
        columns=("command", "seconds", "÷ the script's own"),
        rows=tuple((name, each.text(), each.per(found["alone"]).text()) for name, each in found.items()),
        method=f"Wall-clock seconds of the whole command; the script sleeps {_SLEEP_S:g} s before its model is made. "
        "A sound script is started twice, an unsound one three times.",
        n=f"{ROUNDS} of each, in turns",
    )


def _seconds(code: int, *words: object, tries: int = 2) -> float:
    begin_s = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    if "terminate called without an active exception" in ended.stderr and tries > 1:  # torch, at Python's exit
        return _seconds(code, *words, tries=tries - 1)
    assert ended.returncode == code, ended
    return time.perf_counter() - begin_s
