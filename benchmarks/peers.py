"""The same job in others' hands: a bare loop, torch's examples, Accelerate, Lightning's Fabric and Trainer, and ours.

The scripts are in `benchmarks/jobs`. All are started one after the other, which times their starts; then all live at
the same time and train by turns, so that what slows the machine down slows all of them.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import others
from .harness import Report, Series, interleave

RACES = 5
TURNS = 12
WARM_UP = 2
BATCH = 64
JOBS = Path(__file__).parent / "jobs"
_TURN = {"mlp": (20, 150), "rows": (10, 60), "conv": (1, 6)}
"""Steps of a turn: the first ones, which find the caches cold, and those that are timed."""
_LIMIT_S = 300.0
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_FABRIC = ("-m", "lightning.fabric.cli", "--accelerator", "cpu", "--strategy", "ddp", "--devices", "2")
_ENGINE = (
    *("train", "--model", "job:Net", "--data", "job:splits", "--batch", f"{BATCH}", "--epochs", "1", "--lr", "0.01"),
    *("--workers", "0", "--channels-last", "off"),
)
Command = Callable[[int], Sequence[str]]


def _ours(*words: str) -> Command:
    """Return our command's words by the number of ranks, with `words` after its flags' verb."""
    return lambda ranks: (
        *("-m", "lockstep", words[0], "--accelerator", "cpu", "--devices", f"{ranks}", "--output", f"run{ranks}"),
        *words[1:],
    )


@dataclass(frozen=True)
class Peer:
    """One way to do the job."""

    name: str
    script: str
    """Empty where there is none."""
    command: Command
    """Python's arguments by the number of ranks."""


def _peers() -> tuple[Peer, ...]:
    def by(script: str, *launcher: str) -> Command:
        """Return the script as Python runs it, and as its launcher runs two ranks of it."""
        path = str(JOBS / f"{script}.py")
        return lambda ranks: (*(launcher if ranks > 1 else ()), path)

    accelerate, lightning = (f"{name} {version}" for name, version in others.VERSIONS.items())
    return (
        Peer("bare loop", "bare", by("bare")),
        Peer("the loop of torch's examples", "example", by("example", *_TORCHRUN)),
        Peer(accelerate, "with_accelerate", by("with_accelerate", *_TORCHRUN)),
        Peer(f"{lightning}, Fabric", "with_fabric", by("with_fabric", *_FABRIC)),
        Peer(f"{lightning}, Trainer", "with_trainer", by("with_trainer")),
        Peer("**lockstep**, a session", "with_lockstep", _ours("run", str(JOBS / "with_lockstep.py"))),
        Peer("**lockstep** train", "", _ours(*_ENGINE)),
    )


class Started:
    """A command under way, whose ranks train by turns."""

    def __init__(self, python: str, words: Sequence[str], ranks: int, name: str, folder: Path) -> None:
        """Start it and wait for its first step."""
        self._log = folder / "log"
        folder.mkdir()
        place = folder / "turns"
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(str(place))
            listener.listen()
            skipped, timed = _TURN[name]
            steps = 1 + (WARM_UP + TURNS) * (skipped + timed)
            asked = {"JOB": name, "BATCH": f"{BATCH}", "STEPS": f"{steps}", "DEVICES": f"{ranks}"}
            turns = {"TURNS": str(place), "TURN": f"{skipped} {timed}"}
            fixed = {"PYTHONPATH": str(JOBS), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            env = os.environ | asked | turns | fixed
            begin_s = time.monotonic()
            self.process = subprocess.Popen([python, *words], cwd=folder, env=env, stdout=log, stderr=log)
            self._ranks: list[socket.socket] = []
            try:
                self._ranks += [self._accept(listener) for _ in range(ranks)]
                self._files = [each.makefile("r") for each in self._ranks]
                self.start_s = max(each["seconds"] for each in self._told()) - begin_s
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(1.0)
        for _ in range(int(_LIMIT_S)):
            with contextlib.suppress(TimeoutError):
                rank = listener.accept()[0]
                rank.settimeout(_LIMIT_S)
                return rank
            if self.process.poll() is not None:
                break
        raise self._failed()

    def _failed(self) -> RuntimeError:
        return RuntimeError(f"{self.process.args!r}: {self._log.read_text(errors='replace')[-2000:]}")

    def _told(self) -> list[dict[str, float]]:
        lines = [file.readline() for file in self._files]
        if not all(lines):
            raise self._failed()
        told: list[dict[str, float]] = [json.loads(line) for line in lines]
        assert all(each["threads"] == 1 for each in told)
        self.peak_bytes = statistics.fmean(each["peak"] for each in told)
        return told

    def turn(self) -> float:
        """Train a turn and return the seconds of a step of the slower rank."""
        self._go_on()
        return max(each["seconds"] for each in self._told())

    def _go_on(self) -> None:
        for each in self._ranks:
            each.sendall(b".")

    def end(self) -> None:
        """Let it go on to its end, which is one without an error."""
        self._go_on()
        if self.process.wait(_LIMIT_S) != 0:
            raise self._failed()

    def close(self) -> None:
        """Leave nothing behind: without its benchmark a rank goes on to its end."""
        for each in self._ranks:
            each.close()
        self.process.terminate()
        try:
            self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Raced:
    """What one race found of one peer; of turns the median, of two ranks the slower one's time, their mean memory."""

    step_us: float
    over_us: float
    """Over the bare loop's step."""
    speed: float
    """Samples a second over the bare loop's."""
    start_s: float
    peak_mib: float


def race(python: str, peers: Sequence[Peer], name: str, ranks: int) -> dict[str, Raced]:
    """Start all peers and have them train by turns; the bare loop is one process in every race."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as kept:
        started: dict[str, Started] = {}
        for peer in peers:
            own = ranks if peer is not peers[0] else 1
            one = Started(python, peer.command(own), own, name, Path(folder, f"{len(started)}"))
            kept.callback(one.close)
            started[peer.name] = one
        found = interleave({each: one.turn for each, one in started.items()}, rounds=TURNS, warm_up=WARM_UP)
        for one in started.values():
            one.end()
    bare = found[peers[0].name]
    return {
        each: Raced(
            step_us=found[each].median * 1e6,
            over_us=found[each].minus(bare).median * 1e6,
            speed=bare.per(found[each]).median,
            start_s=one.start_s,
            peak_mib=one.peak_bytes / 2**20,
        )
        for each, one in started.items()
    }


@dataclass(frozen=True)
class Column:
    """A column of the table: a number of each race, and in which direction it is better."""

    title: str
    short: str
    race: tuple[str, int]
    value: Callable[[Raced], float]
    form: str
    more_is_better: bool = False
    bare: str = ""
    """How the bare loop's own number is written, from its steps: {us} or {rate}; empty where the value itself is."""


_ONE, _TWO = ("conv", 1), ("conv", 2)
_OVER, _SPEED = (lambda raced: raced.over_us), (lambda raced: raced.speed)
_START, _PEAK = (lambda raced: raced.start_s), (lambda raced: raced.peak_mib)
COLUMNS = (
    Column("a step over the bare loop's, µs", "a step of a small net", ("mlp", 1), _OVER, "+.0f", bare="{us:.0f} µs"),
    Column("data read one by one, µs", "data read one by one", ("rows", 1), _OVER, "+.0f", bare="{us:.0f} µs"),
    Column("samples/s ÷ bare, 1 process", "1 process", _ONE, _SPEED, ".3f", True, "{rate:.0f}/s"),
    Column("samples/s ÷ bare, 2 ranks", "2 ranks", _TWO, _SPEED, ".2f", True, "1 process"),
    Column("peak of 1 process, MiB", "memory of 1 process", _ONE, _PEAK, ".0f"),
    Column("peak of each of 2, MiB", "memory of 2 ranks", _TWO, _PEAK, ".0f", bare="–"),
    Column("first step, s", "start of 1 process", _ONE, _START, ".2f"),
    Column("first step of 2 ranks, s", "start of 2 ranks", _TWO, _START, ".2f", bare="–"),
)


def measure() -> Report:
    """Return what the job costs in each one's hands."""
    python, peers = others.python(), _peers()
    races = [{of: race(python, peers, *of) for of in (("mlp", 1), ("rows", 1), _ONE, _TWO)} for _ in range(RACES)]

    def series(column: Column, peer: Peer) -> Series:
        return Series(tuple(column.value(found[column.race][peer.name]) for found in races))

    def cell(column: Column, peer: Peer) -> str:
        if peer is not peers[0] or not column.bare:
            return series(column, peer).text(column.form)
        step_us = statistics.median(found[column.race][peer.name].step_us for found in races)
        return column.bare.format(us=step_us, rate=BATCH / step_us * 1e6)

    return Report(
        title="The same job in others' hands",
        finding=_finding(peers, series),
        columns=("", *(column.title for column in COLUMNS), "changed lines"),
        rows=[(peer.name, *(cell(column, peer) for column in COLUMNS), _changed(peer.script)) for peer in peers],
        method="Scripts as each one's documentation has them, in `benchmarks/jobs`: SGD(fused=True) with momentum and "
        f"weight decay, float32, a global batch of {BATCH}, one thread a process, gloo or what a peer takes in its "
        "place, the records and checkpoints that it makes by itself, one epoch without its end. The first two columns: "
        "a perceptron (64–128–10), from a TensorDataset and from a class that reads its samples one by one; others: "
        "a net of two convolutions and two linear layers (1 × 28 × 28) without batch statistics. All start one after "
        "the other, to the end of their first optimizer step; then all live at once and train by turns, timed by the "
        "same clock after torch's `sgd`; of two ranks the slower one counts. With two ranks, the bare loop remains one "
        "process. Two ranks are started by torchrun (the examples, Accelerate), `fabric run`, the Trainer itself, and "
        "`lockstep`, by which our single process is started too, so that it records and saves. Memory is VmHWM of a "
        "rank's process (the mean of two) at its last turn. Lines are those other than the bare script's, without "
        "blank ones and docstrings; `lockstep train` has no script, but takes the net and the data.",
        n=f"{RACES} races from fresh starts, {TURNS} turns of each (after {WARM_UP} that do not count) of "
        + ", ".join(f"{timed} steps ({name})" for name, (_, timed) in _TURN.items())
        + "; a race counts by the median of its turns",
    )


def _finding(peers: Sequence[Peer], series: Callable[[Column, Peer], Series]) -> str:
    """Return where ours are behind the bare loop or a peer: in every race, or by the median alone."""
    bare, ours = peers[0], [peer for peer in peers if "lockstep" in peer.name]
    parts = []
    for own in ours:
        surely, perhaps = [], []
        for column in COLUMNS:
            # Of two ranks there is no bare loop.
            rivals = [peer for peer in peers if peer not in ours and (peer is not bare or column.race != _TWO)]
            sign = -1 if column.more_is_better else 1
            lags = {peer.name: series(column, own).minus(series(column, peer)) for peer in rivals}
            behind = [name for name, lag in lags.items() if min(sign * each for each in lag.values) > 0]
            doubtful = [name for name, lag in lags.items() if sign * lag.median > 0 and name not in behind]
            surely += [f"{column.short} ({', '.join(behind)})"] if behind else []
            perhaps += [f"{column.short} ({', '.join(doubtful)})"] if doubtful else []
        parts.append(
            f"{own.name} is behind in every race in {'; '.join(surely) or 'nothing'}; by the median, but not in every "
            f"race, in {'; '.join(perhaps) or 'nothing'}."
        )
    return f"{' '.join(parts)} (Goal: behind no peer in any column, and as fast as the bare loop.)"


def _changed(script: str) -> str:
    """Return how many of the bare script's lines are others, or new, or gone."""
    if not script:
        return "no script"

    def lines(name: str) -> list[str]:
        return [line for line in (JOBS / f"{name}.py").read_text(encoding="utf-8").splitlines()[1:] if line.strip()]

    matched = difflib.SequenceMatcher(None, lines("bare"), lines(script), autojunk=False).get_opcodes()
    return str(sum(max(b - a, d - c) for kind, a, b, c, d in matched if kind != "equal"))
