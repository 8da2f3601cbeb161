"""What a step costs between two hosts at 1 Gbit/s: ours beside plain DistributedDataParallel's, in turns.

Ours are a loop over a session, and `lockstep train`. The hosts are the tests' network namespaces, with a processor
each, that computes with one thread and serves the network as well. Their network card cuts what is sent into packets,
as real ones do (TCP segmentation offload): the limit on the rate lets 256 KiB through at once, more than the 64 KiB
that TCP hands over in one piece. One of 64 KiB had the processor cut them into packets of 1,500 bytes and join them
again. An exchange that takes the link 220 ms then took the processor 270 ms, and not 30, so that nothing could overlap.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.command import CODE
from tests.real.hosts import hosts, missing

from .harness import Report, Series, Skipped, verdict

TURNS, STEPS = 8, 4
GOALS = {640: 0.8, 256: 0.9}
"""{rows a rank: the goal for our step over DDP's}."""
_LINK = "tbf rate 1gbit burst 256kb latency 1s"
_JOB = Path(__file__).parent / "jobs" / "exchanging.py"


def ways(rows: int) -> dict[str, list[object]]:
    """Return the commands of a rank, by what they are called."""
    train = ["--model", "exchanging:Net", "--data", "exchanging:splits", "--batch", 2 * rows, "--epochs", 1]
    plain_sgd = ["--lr", 1e-3, "--momentum", 0, "--weight-decay", 0]
    return {"session": [_JOB], "lockstep train": ["-m", "lockstep", "train", *train, *plain_sgd]}


def measure() -> Report:
    """Return the steps' milliseconds."""
    if why := missing():
        raise Skipped(why)
    rows, told = [], []
    for size, goal in GOALS.items():
        for way in ways(size):
            found = run(size, way)
            ratios = [a / b for a, b in zip(_by_turn(found["ours"]), _by_turn(found["ddp"]), strict=True)]
            ratio = statistics.median(ratios)
            told.append(f"{size} rows, {way}: {ratio:.3f} × DDP's step (goal {goal}, {verdict(ratio <= goal)})")
            rows.append((f"{size}", way, *(Series(tuple(found[of])).text(".0f") for of in found), f"{ratio:.3f}"))
    return Report(
        title="A step between two hosts at 1 Gbit/s",
        finding="; ".join(told) + ".",
        columns=(
            *("rows a rank", "ours", "ours, ms", "plain DDP, ms", "one rank alone, ms", "exchange alone, ms"),
            "ours ÷ DDP",
        ),
        rows=tuple(rows),
        method="Six layers of 1,024 × 1,024 and one of 10, in float32, 25 MB of gradients, fused SGD; two network "
        f"namespaces with a processor and a thread each, `tc {_LINK}`; in one process, turns of {STEPS} steps of each. "
        "DDP has its own buckets of 25 MB, of which the first is complete at 1 MiB, so that a sixth of its exchange "
        "overlaps too; it has, as the rank alone, a batch that lies ready. No exchange can begin before the last "
        "layer's gradient is there: with 256 rows that leaves ours the forward pass, a sixth of the backward pass, and "
        "the link's own time. The ratio is the median over the turns.",
        n=f"{TURNS} turns of {STEPS} steps",
    )


def _by_turn(steps: list[float]) -> list[float]:
    return [statistics.median(steps[at : at + STEPS]) for at in range(0, len(steps), STEPS)]


def rank_environment(rank: int, address: str, *folders: Path) -> dict[str, str]:
    """Return the environment of one of two ranks, each on a host of its own, with further `folders` to import from."""
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": f"{rank}",
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join([CODE, *map(str, folders)]),
    }


def run(rows: int, way: str) -> dict[str, list[float]]:
    """Return the milliseconds a step of ours, of DDP, and of a rank alone."""
    with tempfile.TemporaryDirectory() as folder, hosts(2) as nodes:
        for host in nodes:
            host.do(f"tc qdisc add dev eth0 root {_LINK}")
        started = []
        for rank, host in enumerate(nodes):
            env = rank_environment(rank, nodes[0].address, _JOB.parent)
            env |= {"ROWS": f"{rows}", "TURNS": f"{TURNS} {STEPS}", "FOUND": f"{folder}/found.json"}
            command = [sys.executable, *ways(rows)[way]]
            started.append(host.popen(command, env, cwd=Path(folder)))
        outputs = [process.communicate(timeout=300) for process in started]
        if started[0].returncode:
            raise RuntimeError("".join(outputs[0])[-2000:])
        found: dict[str, list[float]] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        return found
