"""`python -m benchmarks [NAME …]`: measure, print a line each, write benchmarks/results/NAME.md; all by default.

`python -m benchmarks gpu` has options of its own, and is not among all.
"""

from __future__ import annotations

import sys
from importlib import import_module

from .harness import DISTURBED, Neighbours, Skipped, write

NAMES = (
    "start",
    "overhead",
    "feed",
    "photographs",
    "pyramidnet",
    "ddp",
    "collectives",
    "exchange",
    "memory",
    "sharding",
    "fsdp",
    "slow",
    "strategies",
    "diff",
    "verify",
    "audit",
    "reliability",
    "recovery",
    "nodes",
    "measuring",
    "compare",
    "forecast",
    "published",
    "peers",
    "peer_faults",
)


def main(names: list[str]) -> int:
    """Run the named benchmarks one after another, and return the exit code."""
    if names[:1] == ["gpu"]:
        from . import gpu

        return gpu.main(names[1:])
    if unknown := [name for name in names if name not in NAMES]:
        print(f"No benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}, and gpu.")
        return 2
    for name in names or NAMES:
        neighbours = Neighbours()
        try:
            report = import_module(f".{name}", __package__).measure()
        except Skipped as reason:
            print(f"{name}: skipped: {reason}", flush=True)
            continue
        disturbed = neighbours.share() if report.is_timed else None
        path = write(name, report, command=f"python -m benchmarks {name}", disturbed=disturbed)
        is_disturbed = disturbed is not None and disturbed > DISTURBED
        caution = f" Disturbed: other programs used {disturbed:.0%} of the processors." if is_disturbed else ""
        print(f"{name}: {report.finding}{caution} ({path})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
