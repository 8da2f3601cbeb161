"""What a step costs between two hosts at 1 Gbit/s: a session beside plain DistributedDataParallel, in turns.

The hosts are the tests' network namespaces, with a processor each.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.real.conftest import CODE
from tests.real.hosts import hosts, missing

from .harness import Report, Series, Skipped, verdict

TURNS, STEPS = 8, 4
GOALS = {640: 0.8, 256: 0.9}
"""{rows a rank: the goal for a session's step over DDP's}."""
_LINK = "tbf rate 1gbit burst 64kb latency 1s"
_JOB = Path(__file__).parent / "jobs" / "exchanging.py"


def measure() -> Report:
    """Return the steps' milliseconds."""
    if why := missing():
        raise Skipped(why)
    rows, told = [], []
    for size, goal in GOALS.items():
        found = run(size)
        ratios = [
            ours / theirs for ours, theirs in zip(_by_turn(found["session"]), _by_turn(found["ddp"]), strict=True)
        ]
        ratio = statistics.median(ratios)
        told.append(f"{size} rows: {ratio:.2f} × DDP's step (goal {goal}, {verdict(ratio <= goal)})")
        rows.append((f"{size}", *(Series(tuple(found[name])).text(".0f") for name in found), f"{ratio:.2f}"))
    return Report(
        title="A step between two hosts at 1 Gbit/s",
        finding="; ".join(told) + ".",
        columns=("rows a rank", "session, ms", "plain DDP, ms", "one rank alone, ms", "session ÷ DDP"),
        rows=tuple(rows),
        method="Six layers of 1,024 × 1,024 in float32, 25 MB of gradients, SGD; two network namespaces with a "
        f"processor each, `tc {_LINK}`; in one process, turns of {STEPS} steps of each. DDP has its own buckets of "
        "25 MB. The ratio is the median over the turns.",
        n=f"{TURNS} turns of {STEPS} steps",
    )


def _by_turn(steps: list[float]) -> list[float]:
    return [statistics.median(steps[at : at + STEPS]) for at in range(0, len(steps), STEPS)]


def run(rows: int) -> dict[str, list[float]]:
    """Return each way's milliseconds a step."""
    with tempfile.TemporaryDirectory() as folder, hosts(2) as nodes:
        for host in nodes:
            host.do(f"tc qdisc add dev eth0 root {_LINK}")
        started = []
        for rank, host in enumerate(nodes):
            env = {
                "RANK": rank,
                "WORLD_SIZE": 2,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "GROUP_RANK": rank,
                "MASTER_ADDR": nodes[0].address,
                "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": "eth0",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": 1,
                "PYTHONPATH": CODE,
            }
            command = [sys.executable, _JOB, rows, TURNS, STEPS]
            started.append(host.popen(command, {key: str(value) for key, value in env.items()}, cwd=Path(folder)))
        outputs = [process.communicate(timeout=300) for process in started]
        if started[0].returncode:
            raise RuntimeError(outputs[0][1][-2000:])
        found: dict[str, list[float]] = json.loads(outputs[0][0].splitlines()[-1])
        return found
