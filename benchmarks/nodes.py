"""What becomes of a run on three nodes when one is lost: its link is cut, and nobody helps.

The nodes are the tests' network namespaces, each with an address, a name and a processor of its own.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.command import Running
from tests.curves import Curve, apart, of_run
from tests.real.conftest import CODE
from tests.real.hosts import Host, hosts, missing

from .faults import EVERY, LIMIT_S, RUN, Run, running
from .harness import Report, Series, Skipped, verdict

ROUNDS = 5
GOAL_APART = 1e-9
_FIRST, _LAST = 20, 60  # steps, between which the link is cut
_LONG = ("--epochs", 30, "--precision", "fp64")
_PORT = 29500
WHICH = {"with rank 0": "a", "another": "c"}
"""Of the nodes a, b and c, which are numbered in this order, the one that is lost."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run that lost a node."""

    goes_on_s: float
    """From the cut to the next step of those that are left."""
    steps_lost: int
    """Recorded when the link was cut, and made again."""
    apart: float
    """The largest relative difference of losses and weights from those of a run that nothing happened to."""


def measure() -> Report:
    """Return what came of the cuts."""
    if why := missing():
        raise Skipped(why)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), "--devices", 3, *_LONG) as run:
        run.process.wait(LIMIT_S)
        undisturbed = of_run(Path(folder) / "run")
    found = {which: [lost(name, number, undisturbed) for number in range(ROUNDS)] for which, name in WHICH.items()}
    every = [each for outcomes in found.values() for each in outcomes]
    steps, difference = max(each.steps_lost for each in every), max(each.apart for each in every)
    return Report(
        title="What becomes of a run that loses one of its three nodes",
        finding=f"All {len(every)} runs went on with two nodes and came to their end; at most {steps} steps were made "
        f"again (goal {EVERY}, {verdict(steps <= EVERY)}), and losses and weights are those of a run that nothing "
        f"happened to, but for {difference:.0e} (goal {GOAL_APART:.0e}, {verdict(difference <= GOAL_APART)}).",
        columns=("the node that is lost", "runs", "cut → next step, s", "steps made again", "relative difference"),
        rows=tuple(
            (
                which,
                f"{len(outcomes)}",
                Series(tuple(each.goes_on_s for each in outcomes)).text(".1f"),
                f"≤ {max(each.steps_lost for each in outcomes)}",
                f"≤ {max(each.apart for each in outcomes):.0e}",
            )
            for which, outcomes in found.items()
        ),
        method="`lockstep train --nodes 2:3` on three network namespaces, which meet at a node that is not lost; the "
        f"link of one is cut at a random step, --stall-timeout is ten minutes, as by default, and there is a "
        f"checkpoint every {EVERY} steps. In float64, where three ranks and two differ by rounding alone.",
        n=f"{ROUNDS} cuts of each node",
    )


def lost(name: str, number: int, undisturbed: Curve) -> Outcome:
    """Return what comes of a run whose node of this name is cut off; the step is drawn with the seed `number`."""
    with tempfile.TemporaryDirectory() as folder, hosts(3) as nodes, contextlib.ExitStack() as ends:
        gone = next(host for host in nodes if host.name == name)
        left = [host for host in nodes if host is not gone]
        agents = {host.name: ends.enter_context(_agent(host, left[-1], Path(folder))) for host in nodes}
        run = Run(agents[left[0].name], Path(folder), time.perf_counter(), "spawn_main")
        run.until_step(random.Random(number).randrange(_FIRST, _LAST))
        made, cut_s = len(run.steps()), time.perf_counter()
        gone.cut()
        goes_on_s = run.until_step(1, start=2) - cut_s
        _check_ended([agents[host.name] for host in left])
        return Outcome(goes_on_s, max(0, made - run.begun_at()[1]), apart(of_run(Path(folder) / "run"), undisturbed))


def _agent(host: Host, meets_at: Host, folder: Path) -> Running:
    words = (
        "--nodes",
        "2:3",
        "--devices",
        1,
        "--max-restarts",
        3,
        "--init-method",
        f"tcp://{meets_at.address}:{_PORT}",
    )
    command = [sys.executable, "-m", "lockstep", *RUN, *map(str, (*_LONG, *words))]
    return host.popen(command, {"CUDA_VISIBLE_DEVICES": "", **CODE}, cwd=folder, stdout=subprocess.DEVNULL)


def _check_ended(agents: Sequence[Running]) -> None:
    for agent in agents:
        _, told = agent.communicate(timeout=LIMIT_S)
        if agent.returncode != 0:
            raise RuntimeError(f"a node that was left ended with {agent.returncode}: {told}")
