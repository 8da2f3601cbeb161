"""Runs loops on ranks and compares them with their reference.

The ranks are processes that are kept from run to run (tests/pool.py), forked from a server that has imported torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch is imported

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError, RunError
from lockstep.monitor import failures
from lockstep.sessions.script import Script, ScriptError
from lockstep.world.world import World

from .. import warm
from ..command import end, events, losses, start, weights
from ..pool import RankPool
from . import script
from .catalogue import LAW, REFUSED, RIGHT, SKIPPED, TOLD, Case, Numbers, Outcome
from .plain import Plain

SCRIPT = Path(script.__file__)
LIMIT_S = 12.0
"""A run without an end within this time hangs; a collective waits half of it."""
_DONE, _REFUSED, _FAILED, _LOST, _KILLED = "done", "refused", "failed", "lost", "killed"


Task = tuple[str, ...]
"""The script's arguments."""


@dataclass(frozen=True)
class Result:
    """What a run on some ranks came to."""

    outcome: Outcome
    """RIGHT for a run that ended: its numbers are yet to be compared."""
    message: str = ""
    numbers: Numbers = field(default_factory=list)
    is_killed: bool = False


def attempt(world: World, task: Task, options: dict[str, Any]) -> tuple[str, str, Numbers]:
    """Run the task as a rank; return how it ended, a message, and its numbers."""
    import torch

    argv, path, dtype = list(sys.argv), list(sys.path), torch.get_default_dtype()
    given = frozenset(name.replace("_", "-") for name in options)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            Script(str(SCRIPT), task, flags=given)(override(RunConfig(), **options), world)
    except BaseException as error:
        if type(error).__name__ == script.Killed.__name__:  # the script's own class is another one each time
            return _KILLED, "", []
        return _ended(error), _sentence(error), []
    finally:
        sys.argv, sys.path[:] = argv, path
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
    lines = [line for line in output.getvalue().splitlines() if line.startswith(script.PREFIX)]
    return _DONE, "", json.loads(lines[-1].removeprefix(script.PREFIX)) if lines else []


def _ended(error: BaseException) -> str:
    if failures.is_echo(error) or type(error).__name__ in ("RankLostError", "PeerLostError"):
        return _LOST
    if isinstance(error, ScriptError) or not isinstance(error, LockstepError):
        return _REFUSED if hasattr(error.__cause__ or error, "__notes__") else _FAILED  # our note has the way out
    return _LOST if isinstance(error, RunError) and "lost another rank" in str(error) else _REFUSED


def _sentence(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def run_command(folder: Path, size: int, task: Task, options: dict[str, Any]) -> Result:
    """Run the task by `lockstep run`."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        ended = end(start(folder, "run", "--accelerator", "cpu", "--devices", size, *flags, SCRIPT, *task), LIMIT_S * 5)
    except subprocess.TimeoutExpired as error:
        return Result(Outcome.HUNG, str(error))
    if ended.code == 0:
        lines = [line for line in ended.out.splitlines() if line.startswith(script.PREFIX)]
        return Result(RIGHT, numbers=json.loads(lines[0].removeprefix(script.PREFIX)))
    message = " ".join(ended.err.split())[-400:]
    is_killed = len(task) > 1 and "Error" not in message
    is_refused = "Traceback" not in ended.err and "lockstep: " in ended.err and not is_killed
    return Result(REFUSED if is_refused else Outcome.FAILED, message, is_killed=is_killed)


class Runner:
    """Ranks for loops, and a folder for their runs."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder, self._count = pool, folder, 0
        self._whole: dict[tuple[str, int, int], Result] = {}

    def new_folder(self) -> Path:
        """Return a path for a run's folder."""
        self._count += 1
        return self._folder / str(self._count)

    def run(self, size: int, task: Task, *, needs_processes: bool = False, **options: Any) -> Result:
        """Run the task on `size` ranks. With `needs_processes`, which data workers do, by `lockstep run`."""
        options = {"precision": "fp64"} | options
        if needs_processes:
            return run_command(self.new_folder(), size, task, options)
        try:
            ends = self._pool.run(size, attempt, task, options, timeout_s=LIMIT_S)
        except TimeoutError as error:
            return Result(Outcome.HUNG, str(error))
        except (EOFError, OSError):
            return Result(Outcome.FAILED, "a rank's process is gone", is_killed=True)
        return merge(ends)

    def compare(self, task: Task, reference: Numbers, size: int, *, exact: bool = False, **options: Any) -> Result:
        """Run the task; compare its numbers with the reference."""
        output = self.new_folder()
        result = self.run(size, task, output=str(output), **options)
        judged = judge(result, reference, output, options.get("accumulate", 1), exact=exact)
        shutil.rmtree(output, ignore_errors=True)
        return judged

    def resume(self, task: Task, size: int, *, way: str = "exit", **options: Any) -> Result:
        """Kill the run at two thirds, resume it; compare it with the uninterrupted run."""
        options = {"checkpoint_every": 2, "log_every": 1} | options
        if options["checkpoint_every"] is None:
            del options["checkpoint_every"]
        whole, cut = self.new_folder(), self.new_folder()
        try:
            reference = self.run(size, task, output=str(whole), **options)
            if reference.outcome == Outcome.DIFFERENT:  # its ranks differ
                return Result(_told(whole), reference.message)
            if reference.outcome != RIGHT:
                return reference
            steps = max((step for step, _ in losses(whole)), default=0)
            if steps < 4:
                return Result(SKIPPED, f"it has {steps} steps")
            last = str(max(3, 2 * steps // 3))
            killed = self.run(size, (*task, last, str(cut), way), output=str(cut), **options)
            if not killed.is_killed:
                return Result(Outcome.FAILED, f"not killed: {killed.message or killed.outcome}")
            resumed = self.run(size, task, output=str(cut), resume="auto", **options)
            if resumed.outcome != RIGHT:
                return resumed
            differences = [
                name
                for name, values in (
                    ("numbers", [result.numbers[0] for result in (reference, resumed)]),
                    ("losses", [losses(folder) for folder in (whole, cut)]),
                    ("weights", [weights(folder) for folder in (whole, cut)]),
                )
                if values[0] != values[1]
            ]
            if not differences:
                return resumed
            message = f"the resumed run's {', '.join(differences)} differ: {_pair(reference.numbers, resumed.numbers)}"
            return Result(_told(cut), message, resumed.numbers)
        finally:
            shutil.rmtree(whole, ignore_errors=True)
            shutil.rmtree(cut, ignore_errors=True)

    def resume_case(self, case: Case, size: int) -> Result:
        """Kill and resume a case of the catalogue."""
        options = {"needs_processes": case.needs_processes, **case.options}
        if case.saves_by_epoch:
            options["checkpoint_every"] = None
        return self.resume((str(case),), size, **options)

    def observe(self, case: Case, size: int, accumulate: int) -> Result:
        """Run a case of the catalogue; compare it with its reference."""
        if not (case.allowed(size, accumulate) & ~SKIPPED):
            return Result(SKIPPED)
        options = {"accumulate": accumulate, "needs_processes": case.needs_processes, **case.options}
        is_plain = case.has_plain if accumulate == 1 else case.has_accumulated_plain
        if is_plain:
            return self.compare((str(case),), plain(case), size, **options)
        reference = self._alone(case, accumulate)
        if reference.outcome != RIGHT or size == 1:
            return reference
        return self.compare((str(case),), reference.numbers, size, **options)

    def _alone(self, case: Case, accumulate: int) -> Result:
        key = (str(case), 1, accumulate)
        if key not in self._whole:
            output = self.new_folder()
            options = {"accumulate": accumulate, "needs_processes": case.needs_processes, **case.options}
            self._whole[key] = self.run(1, (str(case),), output=str(output), **options)
            shutil.rmtree(output, ignore_errors=True)
        return self._whole[key]


def merge(ends: Sequence[tuple[str, str, Numbers]]) -> Result:
    """Return the result of ranks. A refusal on any of them ends all, as in a job under a supervisor."""
    for kind, outcome in ((_REFUSED, REFUSED), (_FAILED, Outcome.FAILED), (_LOST, Outcome.HUNG)):
        for rank, (kind_of_end, message, _) in enumerate(ends):
            if kind_of_end == kind:
                return Result(outcome, f"rank {rank}: {message}")
    if any(end == _KILLED for end, _, _ in ends):
        return Result(Outcome.FAILED, "killed", is_killed=True)
    numbers = ends[0][2]
    for rank, (_, _, theirs) in enumerate(ends):
        if not gap(numbers, theirs) < LAW:
            return Result(Outcome.DIFFERENT, f"ranks 0 and {rank} differ: {_pair(numbers, theirs)}", numbers)
    return Result(RIGHT, numbers=numbers)


def gap(one: Numbers, other: Numbers) -> float:
    """Return the largest relative difference; infinite for NaN and for other lengths."""
    if len(one) != len(other):
        return math.inf
    gaps = [0.0 if a == b else abs(a - b) / max(abs(a), 1e-3) for a, b in zip(one, other, strict=True)]
    return max((math.inf if math.isnan(value) else value for value in gaps), default=math.inf)


def judge(result: Result, reference: Numbers, output: Path, accumulate: int, *, exact: bool = False) -> Result:
    """Compare a run's numbers with the reference."""
    if result.outcome not in (RIGHT, Outcome.DIFFERENT):
        return result
    one, other = reference, result.numbers
    if accumulate > 1 and len(one) != len(other):  # one number a micro-batch
        one, other = one[:1], other[:1]
    is_same = one == other if exact else gap(one, other) < LAW
    if result.outcome == RIGHT and is_same:
        return result
    return Result(_told(output), result.message or _pair(one, other), result.numbers)


def _told(output: Path) -> Outcome:
    # That a run cannot be resumed explains no other numbers.
    told = [row for row in events(output, "warning") if "cannot be resumed" not in row["text"]]
    return TOLD if told else Outcome.DIFFERENT


def _pair(one: Numbers, other: Numbers) -> str:
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} numbers"
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if gap([a], [b]) >= LAW] or [*zip(one, other, strict=True)]
    return f"{pairs[0][0]:.12g} and {pairs[0][1]:.12g}"


def plain(case: Case) -> Numbers:
    """Run the plain twin in this process."""
    import torch

    with contextlib.redirect_stdout(io.StringIO()):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        torch.set_grad_enabled(True)
        return case.function()(cast(Any, Plain()), case.how)


@contextlib.contextmanager
def runner() -> Iterator[Runner]:
    """Start ranks outside of pytest."""
    if sys.platform == "linux":
        warm.spawn_from(warm.server)
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Runner(pool, Path(folder))
    finally:
        pool.close()
        warm.close()
