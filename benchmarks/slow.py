"""The time to a given accuracy between two hosts at 100 Mbit/s, by what the ranks exchange.

The hosts are the tests' network namespaces, with a processor and a thread each. All ways train one net on the same
samples in the same order, with the same optimizer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.real.hosts import hosts, missing

from .exchange import rank_environment
from .harness import Report, Skipped, verdict

WAYS: dict[str, tuple[object, ...]] = {
    "full (ddp)": (),
    "bf16": ("--exchange", "bf16"),
    "powersgd, rank 4": ("--exchange", "powersgd", "--powersgd-rank", 4),
    "local-sgd, every 180 steps": ("--exchange", "local-sgd", "--exchange-every", 180),
    "diloco, every 180 steps": ("--exchange", "diloco", "--exchange-every", 180),
}
GOAL = 1 / 20
"""Of the time that ddp takes, for the fastest way."""
_LINK = "tbf rate 100mbit burst 256kb latency 1s"
_JOB = Path(__file__).parent / "jobs" / "slow.py"


def measure() -> Report:
    """Return the seconds to the accuracy."""
    if why := missing():
        raise Skipped(why)
    reached = {name: run(flags) for name, flags in WAYS.items()}
    (_, _, full_s), *others = reached.values()
    best = min(seconds for _, _, seconds in others) / full_s
    return Report(
        title="Time to 97 % of the test images at 100 Mbit/s",
        finding=f"The fastest exchange takes {best:.3f} times what ddp takes (goal {GOAL:g}, {verdict(best <= GOAL)}).",
        columns=("exchange", "accuracy", "steps", "seconds", "÷ ddp"),
        rows=[
            (name, f"{accuracy:.1%}", f"{steps}", f"{seconds:.1f}", f"{seconds / full_s:.3f}")
            for name, (accuracy, steps, seconds) in reached.items()
        ],
        method=f"Two network namespaces with a processor and a thread each, `tc {_LINK}`. Perceptron of 2.2 million "
        "float32 parameters, SGD with momentum 0.9, 32 samples a step; an epoch has 180 steps, over the digits with "
        "noise, four times. Evaluated after each epoch; the time is that of the first epoch's end with 97 % or more, "
        "evaluations included, from the first batch on.",
        n="one run each",
    )


def run(flags: tuple[object, ...]) -> tuple[float, int, float]:
    """Return (accuracy, steps, seconds) of the first evaluation that reaches the goal."""
    with tempfile.TemporaryDirectory() as folder, hosts(2) as nodes:
        started = []
        for rank, host in enumerate(nodes):
            host.do(f"tc qdisc add dev eth0 root {_LINK}")
            env = rank_environment(rank, nodes[0].address)
            command = [sys.executable, "-m", "lockstep", "run", "--output", Path(folder) / "run", *flags, _JOB]
            started.append(host.popen(command, env, cwd=Path(folder)))
        outputs = [process.communicate(timeout=1800) for process in started]
        if started[0].returncode:
            raise RuntimeError("".join(outputs[0])[-2000:])
    lines = [line.split()[1:] for line in outputs[0][0].splitlines() if line.startswith("REACHED")]
    accuracy, steps, seconds = lines[-1]
    return float(accuracy), int(steps), float(seconds)
