"""What a rank of each sharding strategy holds: weights, gradients and optimizer state, beside ddp's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .harness import Report, verdict

RANKS, GOALS = 4, {"zero1": 0.65, "fsdp": 0.4}
SCRIPT = """
import ctypes, gc, json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep

def resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

session = lockstep.session(seed=0, verify_every=0)
before = resident_bytes()
model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(2048, 2048), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = TensorDataset(torch.randn(32, 2048), torch.zeros(32).long())
model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in session.epochs(1):
    for number, (x, y) in enumerate(loader):
        session.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if number == 2:
            held = session.gather(torch.tensor([resident_bytes() - before]))
            session.print("HELD " + json.dumps(held.tolist()))
        optimizer.zero_grad()
"""


def measure() -> Report:
    """Return the resident memory of each rank after three steps with AdamW."""
    held = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for strategy in ("ddp", *GOALS):
            flags = ["--accelerator", "cpu", "--devices", f"{RANKS}", "--strategy", strategy]
            flags += ["--output", f"{folder}/{strategy}", "--verify-every", "0"]
            flags += ["--shard-modules", "Linear"] * (strategy == "fsdp")
            command = [sys.executable, "-m", "lockstep", "run", *flags, str(script)]
            ended = subprocess.run(command, capture_output=True, text=True)
            assert ended.returncode == 0, ended
            line = next(line for line in ended.stdout.splitlines() if line.startswith("HELD "))
            held[strategy] = json.loads(line.removeprefix("HELD "))
    largest = {strategy: max(ranks) for strategy, ranks in held.items()}
    shares = {strategy: largest[strategy] / largest["ddp"] for strategy in GOALS}
    return Report(
        title="What a rank of each sharding strategy holds",
        finding="; ".join(
            f"A rank of {strategy} holds {share:.2f} times what a rank of ddp holds (goal {GOALS[strategy]}, "
            f"{verdict(share <= GOALS[strategy])})"
            for strategy, share in shares.items()
        )
        + ".",
        columns=("strategy", "each rank, MiB", "÷ ddp's largest"),
        rows=[
            (name, ", ".join(f"{rank / 2**20:.0f}" for rank in ranks), f"{max(ranks) / largest['ddp']:.2f}")
            for name, ranks in held.items()
        ],
        method=f"Anonymous resident memory (RssAnon) of each of {RANKS} ranks after the third optimizer step, less "
        "that before the model is made. 24 layers of 2048 × 2048, 100.7 million parameters in float32, AdamW, 8 "
        "samples a step; free memory of malloc is given back before each look.",
        n="one run each",
        is_timed=False,
    )
