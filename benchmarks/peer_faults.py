"""What becomes of the same faults in others' hands: a script of one's own, Accelerate and Lightning, under torchrun."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from . import others
from .faults import EVERY, LIMIT_S, Run, running, started
from .harness import Report, Series
from .peer.work import TIMEOUT_S

ROUNDS = 3
RANKS = 3
AT_STEP = 22
"""At which the fault comes: two steps after a checkpoint."""
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{RANKS}"]
_NAMED = re.compile(r"lockstep: Rank (\d) was stopped|Root Cause.*?rank +: (\d)", re.DOTALL)
Start = Callable[[Path, int], AbstractContextManager[Run]]


@dataclass
class Found:
    """What was measured of one of them, a number a round."""

    bits: list[bool] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)
    named: list[bool] = field(default_factory=list)


def measure() -> Report:
    """Return what each did, fault by fault."""
    python = others.python()
    starts: dict[str, Start] = {
        "lockstep": _ours,
        "a script of one's own, torchrun as it comes": _torchrun("own", shares=True),
        "a script of one's own, torchrun": _torchrun("own"),
    }
    for package, version in others.VERSIONS.items():
        starts[f"{package} {version}, torchrun"] = _torchrun(f"with_{package}", python=python)
    found = {name: Found() for name in starts}
    whole = {name: undisturbed(start) for name, start in starts.items()}
    for _ in range(ROUNDS):
        for name, start in starts.items():
            killed(start, whole[name], found[name])
            ended(start, found[name])
            stopped(start, found[name])
    ours = found["lockstep"]
    return Report(
        title="The same faults in others' hands",
        finding=f"With a rank killed, lockstep made its next step after {_text(ours.restart)} of a cold start, and all "
        f"had ended {_text(ours.ends_s)} s after a kill without a restart; with one stopped, {_text(ours.stopped_s)} s "
        f"after the time-out, its user read which one {sum(ours.named)} of {ROUNDS} times.",
        columns=(
            "",
            "kill → next step ÷ cold start",
            "same bits at the end",
            "steps made again",
            "kill → all ended, s",
            "stop → all ended, s over the time-out",
            "names the stopped rank",
        ),
        rows=[
            (
                name,
                _text(each.restart),
                f"{sum(each.bits)} of {ROUNDS}",
                f"≤ {max(each.lost)}" if each.lost else "–",
                _text(each.ends_s),
                _text(each.stopped_s),
                f"{sum(each.named)} of {ROUNDS}",
            )
            for name, each in found.items()
        ],
        method=f"{RANKS} ranks, the same slow samples, a small net, a checkpoint every {EVERY} steps; the fault comes "
        f"at step {AT_STEP}: SIGKILL with one restart allowed, SIGKILL without, SIGSTOP with {TIMEOUT_S:g} s as the "
        "limit of a collective (ours: --stall-timeout). A cold start is that of the same command, to its first step. "
        "Ranks that torchrun starts again share the store of those before them, and may read their addresses: all "
        "peers but the one as it comes are given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which parts them. "
        "The scripts are in `benchmarks/peer`.",
        n=f"{ROUNDS} rounds of each fault, in turn",
    )


def undisturbed(start: Start) -> dict[str, bytes]:
    """Return the weights at the end of a run that nothing befalls."""
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 0) as run:
        said = run.process.communicate(timeout=LIMIT_S)[1]
        if run.process.returncode != 0:
            raise RuntimeError(f"without a fault: {said}")
        return run.weights()


def killed(start: Start, whole: dict[str, bytes], found: Found) -> None:
    """Kill a rank; the run may start again."""
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 1) as run:
        cold_s = run.until_step(1) - run.begun_s
        run.until_step(AT_STEP)
        run.ranks[1].kill()
        begin_s = time.perf_counter()
        with suppress(RuntimeError):  # it ended instead
            found.restart.append((run.until_step(1, start=2) - begin_s) / cold_s)
            found.lost.append(AT_STEP - run.begun_at()[-1])
        run.process.communicate(timeout=LIMIT_S)
        found.bits.append(run.process.returncode == 0 and run.weights() == whole)


def ended(start: Start, found: Found) -> None:
    """Kill a rank; the run may not start again."""
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 0) as run:
        run.until_step(AT_STEP)
        found.ends_s.append(_ends_s(run, lambda rank: rank.kill())[0])


def stopped(start: Start, found: Found) -> None:
    """Stop a rank, as a machine does that is out of memory or whose disk hangs."""
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 0) as run:
        run.until_step(AT_STEP)
        ends_s, said = _ends_s(run, lambda rank: rank.suspend())
        found.stopped_s.append(ends_s - TIMEOUT_S)
        named = _NAMED.search(said)
        found.named.append(named is not None and "1" in named.groups())


def _ends_s(run: Run, fault: Callable[[psutil.Process], None]) -> tuple[float, str]:
    """Return how long after the fault in rank 1 all processes were gone, and what the user has read."""
    ranks = run.ranks
    fault(ranks[1])
    begin_s = time.perf_counter()
    said = run.process.communicate(timeout=LIMIT_S)[1]
    psutil.wait_procs(ranks, LIMIT_S)
    return time.perf_counter() - begin_s, said


def _ours(folder: Path, restarts: int) -> AbstractContextManager[Run]:
    again = ("--max-restarts", restarts) if restarts else ()
    return running(folder, "--devices", RANKS, "--stall-timeout", f"{TIMEOUT_S:g}", *again)


def _torchrun(script: str, *, shares: bool = False, python: str = sys.executable) -> Start:
    def start(folder: Path, restarts: int) -> AbstractContextManager[Run]:
        command = [*_TORCHRUN, "--max-restarts", f"{restarts}", "-m", f"benchmarks.peer.{script}"]
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares))}
        return started(folder, command, known_by=f"benchmarks.peer.{script}", python=python, **apart)

    return start


def _text(values: list[float]) -> str:
    return Series(tuple(values)).text() if values else "–"
