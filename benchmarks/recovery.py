"""How soon a run ends or goes on when one of its ranks dies or stops, and what the precautions cost."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep import RunConfig, World, launch
from lockstep.checkpoint import write as saving
from lockstep.jobs.job import assemble
from lockstep.launchers import rank
from lockstep.monitor.watchdog import Watchdog
from lockstep.runs.saving import Saver

from .faults import LIMIT_S, running
from .harness import Report, Series, interleave, verdict, verdict_within
from .loops import configured, engine_step_s, repeated, stepper

ROUNDS = 10
STOPS = 20
STALL_S = 3
COST_ROUNDS = 40
COST_STEPS = 51
GOAL_ENDS_S = 5.0
GOAL_RESTART = 1.2
GOAL_SENTENCE_S = 2.0
GOAL_COST = 0.01
GOAL_STALL = 0.1
_HELD_BACK = "LOCKSTEP_BENCHMARK_HOLDS_WATCH_BACK"


def measure() -> Report:
    """Return the times and the costs."""
    ends = Series(tuple(ended_s() for _ in range(ROUNDS)))
    restarts = [restarted() for _ in range(ROUNDS)]
    restart = Series(tuple(again for _, again in restarts)).per(Series(tuple(cold for cold, _ in restarts)))
    sentences = [sentence_s(random.Random(number).randrange(3)) for number in range(STOPS)]
    late = Series(tuple(after_s - STALL_S for after_s, _ in sentences))
    right = sum(named for _, named in sentences)
    (cost, parts, step_s), saves = precautions(), stalled()
    least, most = cost.sure()
    return Report(
        title="How soon a run goes on when a rank dies, and what the precautions cost",
        finding=f"All had ended {ends.median:.1f} s after a kill (goal {GOAL_ENDS_S:.0f} s, "
        f"{verdict(max(ends.values) <= GOAL_ENDS_S)}); the next step came after {restart.median:.2f} times a cold "
        f"start (goal {GOAL_RESTART}, {verdict(restart.median <= GOAL_RESTART)}). A stopped rank was named "
        f"{late.median:.1f} s after --stall-timeout (goal {GOAL_SENTENCE_S:.0f} s, "
        f"{verdict(max(late.values) <= GOAL_SENTENCE_S)}), the right one {right} of {STOPS} times. Watchdog and "
        f"checkpoints cost {parts.median:.2%} of a step by what they do (goal {GOAL_COST:.0%}, "
        f"{verdict(parts.median <= GOAL_COST)}), and {cost.median:.2%} by the clock, which is sure to lie between "
        f"{least:.2%} and {most:.2%} ({verdict_within((least, most), GOAL_COST)}). A save keeps training for "
        f"{saves.median:.2f} steps (goal {GOAL_STALL}, {verdict(saves.median <= GOAL_STALL)}).",
        columns=("what", "measured", "goal"),
        rows=(
            ("kill of a rank → all others ended, s", ends.text(), f"≤ {GOAL_ENDS_S:.0f}"),
            ("kill → next step ÷ a cold start", restart.text(), f"≤ {GOAL_RESTART}"),
            ("SIGSTOP → the sentence, s over --stall-timeout", late.text(), f"≤ {GOAL_SENTENCE_S:.0f}"),
            ("the right rank named", f"{right} of {STOPS}", "all"),
            (
                f"watch and checkpoints each 50 steps, share of a step (of {1000 * step_s:.0f} ms), by what they do",
                parts.text(".2%"),
                f"≤ {GOAL_COST:.0%}",
            ),
            (
                "the same by the clock, blocks with over blocks without",
                f"{cost.text('.2%')}; the median, with 95 % confidence: {least:.2%} to {most:.2%}",
                f"≤ {GOAL_COST:.0%}",
            ),
            ("checkpoint's stall ÷ a step", saves.text(), f"≤ {GOAL_STALL}"),
        ),
        method="A cold start is that of the same command, to its first step. What watch and checkpoints cost is the "
        "time of a block of steps with both over that of a block with neither, which take turns in the same two "
        "processes: ResNet-8, 16 images of 32² a rank, one thread each. What they do is the time for "
        "which the loop is in a save, the processor time of the thread that writes it, and that of the watch's "
        "threads, all of which could have been the ranks'. The replicas are compared before a save, which is a proof's "
        "cost: it is in the clock's number alone. The stall is that of ResNet-18 with momentum, "
        "32 images.",
        n=f"{ROUNDS} kills, {STOPS} stops, {COST_ROUNDS} pairs of blocks of {COST_STEPS - 1} steps",
    )


def ended_s() -> float:
    """Return the seconds from the kill of a rank to the end of all."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), "--devices", 3) as run:
        run.until_step(20)
        ranks = run.ranks
        ranks[1].kill()
        begin_s = time.perf_counter()
        run.process.wait(LIMIT_S)
        psutil.wait_procs(ranks, LIMIT_S)
        return time.perf_counter() - begin_s


def restarted() -> tuple[float, float]:
    """Return the seconds from the command to its first step, and from the kill of a rank to the next step."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), "--devices", 2, "--max-restarts", 1) as run,
    ):
        cold_s = run.until_step(1) - run.begun_s
        run.until_step(20)
        run.ranks[1].kill()
        begin_s = time.perf_counter()
        return cold_s, run.until_step(1, start=2) - begin_s


def sentence_s(rank: int) -> tuple[float, bool]:
    """Return the seconds from the stop of a rank to the sentence about it, and whether it names that rank."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), "--devices", 3, "--stall-timeout", STALL_S) as run,
    ):
        run.until_step(20)
        run.ranks[rank].suspend()
        begin_s = time.perf_counter()
        assert run.process.stderr is not None
        for line in run.process.stderr:
            if found := re.match(r"lockstep: Rank (\d) was stopped", line):
                return time.perf_counter() - begin_s, int(found[1]) == rank
    return LIMIT_S, False


def precautions() -> tuple[Series, Series, float]:
    """Return what watch and checkpoints add to a step, as a share of it, by block of steps; and a step's seconds.

    First by the clock, then by what they do. Blocks with and without take turns in the same two processes: their
    differences are smaller than those between runs.
    """
    asked = configured(
        model="resnet8",
        data="fake",
        samples=32 * COST_STEPS,
        image_size=32,
        batch=32,
        strategy="ddp",
        max_steps=COST_STEPS,
        log_every=10,
    )
    config = dataclasses.replace(asked, parallel=dataclasses.replace(asked.parallel, devices=2))
    os.environ[_HELD_BACK] = "1"  # inherited by the ranks, which read it when they import this module
    try:
        measured: tuple[Series, Series, float] | None = launch(_shares, config)
    finally:
        del os.environ[_HELD_BACK]
    assert measured is not None
    return measured


def _shares(config: RunConfig, world: World) -> tuple[Series, Series, float]:
    torch.set_num_threads(1)
    spent = _Spent()
    spent.listen()
    found = interleave(
        {"guarded": lambda: _guarded_s(config, world, spent), "bare": lambda: _step_s(config, world)},
        rounds=COST_ROUNDS,
    )
    shares, step_s = found["guarded"].per(found["bare"]).values, found["bare"].median
    parts = [saving_s / ((COST_STEPS - 1) * step_s) + share for saving_s, share in spent.blocks[-COST_ROUNDS:]]
    return Series(tuple(share - 1 for share in shares)), Series(tuple(parts)), step_s


class _Spent:
    """What watch and checkpoints do in this rank."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, float]] = []
        """Of each block, the seconds for its save, in the loop and in the writing thread, and the watch's share of a
        processor."""
        self._saving_s = 0.0
        self._is_timed = False

    def listen(self) -> None:
        """Time saves from now on."""
        save, write = Saver.save, saving._write

        def timed_save(saver: Saver, *given: Any, **named: Any) -> None:
            # The block's own, and not the one at its end.
            begin_s, self._is_timed = time.perf_counter(), named["step"] < COST_STEPS
            save(saver, *given, **named)
            self._saving_s += (time.perf_counter() - begin_s) * self._is_timed

        def timed_write(*given: Any) -> None:
            is_timed, begin_s = self._is_timed, time.thread_time()
            write(*given)
            self._saving_s += (time.thread_time() - begin_s) * is_timed

        Saver.save, saving._write = timed_save, timed_write  # type: ignore[method-assign,assignment]

    def block(self, work: Callable[[], float]) -> float:
        """Return what `work` does, a block under the watch, and note what it took."""
        self._saving_s, begin_s, before_s = 0.0, time.perf_counter(), _watching_s()
        step_s = work()
        watching_s = _watching_s() - before_s
        self.blocks.append((self._saving_s, watching_s / (time.perf_counter() - begin_s)))
        return step_s


def _watching_s() -> float:
    """Return the processor time, in seconds, that the watch's threads have had."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name == "watch"]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in ids) / 1e9


def _guarded_s(config: RunConfig, world: World, spent: _Spent) -> float:
    watch = _watches[0]()
    try:
        return spent.block(lambda: _step_s(config, world, checkpoint_every=COST_STEPS - 1))
    finally:
        watch.close(LIMIT_S)


def _step_s(config: RunConfig, world: World, **saving: Any) -> float:
    """Train a block and return the mean seconds of a step, saves and all."""
    with tempfile.TemporaryDirectory() as own:
        shared = Path(world.gather(own)[0])
        output = shared / "run" if saving else None
        config = dataclasses.replace(
            config,
            checkpoint=dataclasses.replace(config.checkpoint, **saving),
            record=dataclasses.replace(config.record, output=output),
        )
        if output is not None:
            (output / "output").mkdir(parents=True, exist_ok=True)
        world.progress.folder = output  # as `run` has it: for what the watch keeps there
        step_s = engine_step_s(config, Path(own) / "steps.jsonl", world)
        world.barrier()
        return step_s


class _Unwatched:
    """In the place of a watch: it sends nothing and looks at nothing."""

    def give_way(self) -> None:
        """Do nothing."""

    def leave(self, limit_s: float) -> None:
        """Do nothing."""

    def tell(self, sentence: str) -> None:
        """Do nothing."""

    def lost(self) -> str:
        """Return "": nothing is known of other ranks."""
        return ""


_watches: list[Callable[[], Watchdog]] = []
"""What starts this rank's watch."""


def _hold_back(*given: Any) -> _Unwatched:
    _watches.append(functools.partial(_watch, *given))
    return _Unwatched()


_watch = rank.start_watchdog
if _HELD_BACK in os.environ:
    rank.start_watchdog = _hold_back  # type: ignore[assignment]


def stalled() -> Series:
    """Return how long a save keeps training, by the time of a step: ResNet-18 with momentum, 32 images."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        job = assemble(configured(model="resnet18", data="fake", samples=64, image_size=32, batch=32), World.alone())
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = saving.Checkpoints(Path(folder), warn=print)

            def save_s() -> float:
                checkpoints.wait()  # 50 steps later the one before it is on the disk
                begin_s = time.perf_counter()
                state = job.state(1)
                checkpoints.save(dataclasses.replace(state, meta={"step": 1}), step=1, best=False)
                return time.perf_counter() - begin_s

            found = interleave({"save": save_s, "step": stepper(job, repeated(job), steps=1)}, rounds=ROUNDS)
            checkpoints.wait()
        return found["save"].per(found["step"])
    finally:
        torch.set_num_threads(threads)
