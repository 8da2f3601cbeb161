"""The watchdog: each rank's thread that reports which rank stopped where.

    Rank 3 (node b) stopped 41 s ago in data loading at folder.py:88 (step 512); ranks 0–2 wait in all-reduce at step
    512.

A rank that has entered no new phase for --stall-timeout writes such a sentence to the store, and all ranks end with it.
All ranks enter the same phases in the same order: the one that hangs has entered the fewest. The heartbeats of a rank
that has died, was stopped or is cut off no longer rise. There is no stall while all live and one prepares or compiles,
or this rank runs the user's code, nor on a lone rank that computes. On an accelerator, the user's code may wait for the
device, and that for another rank: an event shows it. The rank that serves the store ends last.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from ..errors import RunError, ranks_in_short
from . import tracebacks
from .failures import Failure, is_machinery
from .heartbeat import Beat, Heartbeats
from .keys import Keys
from .progress import EXCHANGES, SETUP, Progress

MISSED_BEATS = 3
"""Beats that a live rank may miss."""
_COMPILATION = "compilation"
_MAY_LAST = (SETUP, _COMPILATION)
_COLLECTIVE = "a collective"  # of the user's code, which enters no phase
_WAITS_ALONE = ("data", "save")  # for data workers, or for a disk
_WORDS = {"": "its own code", "data": "data loading", "step": "the optimizer step", "save": "saving"}
_CLOSE_S = 2.0
_LOOK_S = 0.5
_LONGEST_PAUSE_S = 15.0  # between two looks of a running process: the store may take long to answer
_UNWINDS_S = 10.0  # for a rank with an error to close its records, in spite of a sentence of another one
_LOST_S = 5.0  # at most, to find the lost rank
_LOST_LOOK_S = 0.05


class Watchdog:
    """A watchdog over this rank and, by their heartbeats, the others."""

    def __init__(
        self,
        progress: Progress,
        opens: Callable[[], Keys],
        *,
        rank: int,
        nodes: Sequence[str],
        server: int | None,
        stall_timeout_s: float,
        beat_s: float,
        ends: Callable[[Watchdog, Failure], None],
    ) -> None:
        """Start the thread.

        `opens` and `server` are those of `Heartbeats`; `nodes` names each rank's host. The thread calls `ends` with the
        failure, to end this process.
        """
        self._progress, self._rank, self._nodes, self._server = progress, rank, tuple(nodes), server
        self._stall_s, self._beat_s, self._ends = stall_timeout_s, beat_s, ends
        self._late_s = MISSED_BEATS * beat_s
        self._idle_s = self._stalled_s = 0.0
        self._closed = threading.Event()
        self._reports = threading.Lock()  # acquired once, by the thread that reports why this process ends
        self._heartbeats = Heartbeats(opens, rank=rank, size=len(nodes), server=server)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self, limit_s: float = _CLOSE_S) -> None:
        """Stop watching; wait for a heartbeat under way."""
        self._closed.set()
        self._thread.join(limit_s)

    def leave(self, limit_s: float) -> None:
        """Close; the rank that serves the store waits for the others."""
        self.close(limit_s)
        self._heartbeats.leave(self._beat(), limit_s)

    def give_way(self) -> None:
        """Close: the caller reports why this process ends. Never return if the watchdog has reported it."""
        self._reports.acquire()
        self.close()

    def lost(self) -> str:
        """Return the sentence about a lost rank, or "". Call after `give_way`."""
        until_s = time.monotonic() + min(self._late_s + 2 * self._beat_s, _LOST_S)
        while time.monotonic() < until_s:
            if published := self._heartbeats.exchange(self._beat(), urgent=True):
                return published
            seen = self._heartbeats.seen(self._beat())
            if any(beat.silent_s > self._late_s for beat in seen.values()):
                sentence = explain(seen, self._nodes, self._late_s)
                return sentence if published is None else self._heartbeats.agree(sentence)
            time.sleep(_LOST_LOOK_S)
        return ""

    def publish(self, sentence: str) -> None:
        """End the other ranks with this sentence. Call after `give_way`."""
        self._heartbeats.agree(sentence)
        self.wait_for_readers()

    def wait_for_readers(self) -> None:
        """As the store's server, wait until the others have read the sentence."""
        if self._rank == self._server and len(self._nodes) > 1:
            time.sleep(2 * self._beat_s)

    def _run(self) -> None:
        looked_s, sent_s, count = time.monotonic(), 0.0, self._progress.count
        while not self._closed.wait(min(self._beat_s / 2, _LOOK_S)):
            now_s = time.monotonic()
            # Time during which this process was stopped, or its machine asleep, does not count as a stall.
            passed_s, looked_s = min(now_s - looked_s, _LONGEST_PAUSE_S, self._stall_s / 2), now_s
            self._idle_s, self._stalled_s = self._idle_s + passed_s, self._stalled_s + passed_s
            if count != self._progress.count:
                count, self._idle_s, self._stalled_s = self._progress.count, 0.0, 0.0
            may_be_stuck = self._idle_s > self._stall_s / 4
            published = ""
            if now_s - sent_s >= 0.9 * self._beat_s:
                sent_s = now_s
                published = self._heartbeats.exchange(self._beat(), urgent=may_be_stuck) or ""
            if self._idle_s <= min(_UNWINDS_S, self._stall_s / 2):
                published = ""
            sentence = published or (self._stall() if may_be_stuck else "")
            if sentence and self._reports.acquire(blocking=False):
                trace, is_echo = tracebacks.of_all(), bool(published)
                self._ends(self, Failure(self._rank, RunError.__name__, sentence, trace, is_echo=is_echo))
                self._reports.release()  # for a lone rank of an interactive session, which continues
                return

    def _stall(self) -> str:
        """Return the sentence about a stall, or ""."""
        if self._may_last(seen := self._heartbeats.seen(self._beat())):
            self._stalled_s = 0.0
        elif self._stalled_s > self._stall_s:
            # A rank that was stopped before the others began to wait has been silent for longer than this.
            return self._heartbeats.agree(explain(seen, self._nodes, max(self._stall_s / 2, self._late_s)))
        return ""

    def _may_last(self, seen: dict[int, Beat]) -> bool:
        phase = seen[self._rank].phase
        if len(seen) == 1:
            return phase not in _WAITS_ALONE
        all_live = all(beat.silent_s <= self._late_s for beat in seen.values())
        return all_live and (not phase or any(beat.phase in _MAY_LAST for beat in seen.values()))

    def _beat(self) -> Beat:
        from .._torch import COMPILERS  # late: it imports torch, which this process has loaded, and its parent not

        progress, frames = self._progress, sys._current_frames()
        main = _frames(frames.get(threading.main_thread().ident or 0))
        names, phase = _modules(main), progress.phase
        if any(COMPILERS & _modules(_frames(frame)) for frame in frames.values()):
            phase = _COMPILATION
        elif phase in ("", SETUP) and "torch.distributed.distributed_c10d" in names:
            phase = _COLLECTIVE
        elif not phase and self._idle_s > self._stall_s / 4 and progress.device_waits():
            phase = EXCHANGES[0]
        elif phase == "eval" and "torch.utils.data.dataloader" in names:
            phase = "data"
        frame = next((frame for frame in main if not is_machinery(frame.f_code.co_filename)), None)
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
        return Beat(progress.count, progress.step, phase, place, round(self._idle_s, 1))


def explain(seen: dict[int, Beat], nodes: Sequence[str], silence_s: float) -> str:
    """Return the sentence that names the stopped and the waiting ranks.

    A rank whose last beat is older than `silence_s` is dead or cannot be reached.
    """
    silent = {rank: beat for rank, beat in seen.items() if beat.silent_s > silence_s}
    # A rank that waits in a collective of the user's code is further than one that runs the user's code.
    entered = {rank: (beat.count, beat.phase == _COLLECTIVE) for rank, beat in seen.items()}
    behind = silent or {rank: beat for rank, beat in seen.items() if entered[rank] == min(entered.values())}
    waiting = {rank: beat for rank, beat in seen.items() if rank not in behind and beat.phase not in _MAY_LAST}
    hosts = list(dict.fromkeys(nodes[rank] for rank in behind))
    names = f" (node{'s' * (len(hosts) > 1)} {', '.join(hosts)})" if len(set(nodes)) > 1 else ""
    # Stopped, killed and cut off look alike from here.
    event = "was stopped, died or was cut off" if silent else "stopped"
    idle_s = max(beat.silent_s if silent else beat.idle_s for beat in behind.values())
    places = " and ".join(list(dict.fromkeys(map(_place, behind.values())))[:3])
    places = f", last heard of in {places}" if silent else f" in {places}"
    waits = "" if silent else "; raise --stall-timeout if it was only slow"
    if waiting:
        verb, first = "waits" if len(waiting) == 1 else "wait", next(iter(waiting.values()))
        # While others have stopped, a rank that computes waits for an all-reduce within it, or, on a GPU, before it.
        computes = first.phase in ("forward", "backward", "step", "eval")
        phase = "all-reduce" if computes else first.phase or _COLLECTIVE
        waits = f"; {ranks_in_short(waiting)} {verb} in {phase} at step {first.step}{waits}"
    return f"{ranks_in_short(behind).capitalize()}{names} {event} {idle_s:.0f} s ago{places}{waits}"


def _place(beat: Beat) -> str:
    return f"{_WORDS.get(beat.phase, beat.phase)}{f' at {beat.place}' if beat.place else ''} (step {beat.step})"


def _modules(frames: Sequence[FrameType]) -> set[str]:
    return {str(frame.f_globals.get("__name__")) for frame in frames}


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return a stack's frames from the innermost on."""
    return [caller for caller, _ in traceback.walk_stack(frame)] if frame else []
