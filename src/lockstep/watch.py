"""The watch: every rank tells the others what it is doing, and notices when nothing moves any more.

Two threads in each rank. One sends the rank's *beat*, what its `Pulse` says and where its main thread is, to the store
at which the ranks have met, and reads the others' beats there. The other never touches the network: it looks whether
its own rank moves. A rank that has not entered a new phase for --stall-timeout looks at all beats, finds out for whom
the others wait, and leaves one sentence at the store, with which all of them end:

    Rank 3 (node b) stopped 41 s ago in data at folder.py:88; ranks 0–2 wait in all-reduce at step 512.

Whoever hangs is known because every rank enters the same phases in the same order: the rank that has entered the fewest
is waited for. A process that was stopped, or that the network has lost, is known by beats that no longer change. The
rank that serves the store ends last, when the others have read the sentence.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import bounded
from .errors import RunError, ranks_in_short
from .failures import Failure, is_library
from .pulse import Pulse

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BELOW = tuple(str(Path(__file__).with_name(name)) for name in ("watch.py", "pulse.py", "world.py", "nn"))
_WORDS = {"": "its own code", "data": "data loading", "step": "the optimizer step", "save": "saving"}
_SENTENCE = "sentence"
_SOON_S = 0.5  # for a store to answer, whose server may be what was stopped
_LAST_BEATS = 3  # for living ranks to hear the sentence
_LEAVE_S = 2.0
_LOOK_S = 0.02
_EXCHANGED_AT_ONCE = 16
"""Ranks whose beats each rank reads at every beat; where there are more, it reads them less often."""


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    number: int
    """Of this beat: one that no longer rises is that of a process which was stopped, died, or is cut off."""
    count: int
    """Phases entered."""
    step: int
    phase: str
    place: str = ""
    """The line of the user's code, or of ours, that the main thread is in."""
    idle_s: float = 0.0
    """Seconds since the rank entered its phase, as its own clock has it."""


@dataclass(frozen=True)
class Seen:
    """A rank's last beat, and for how many seconds it has been the last."""

    beat: Beat
    silent_s: float


class Watch:
    """Watches over this rank and, through their beats, the others, until `close`."""

    def __init__(
        self,
        pulse: Pulse,
        store: Store,
        *,
        rank: int,
        nodes: Sequence[str],
        server: int | None,
        stall_timeout_s: float,
        beat_s: float,
        ends: Callable[[Watch, Failure], None],
    ) -> None:
        """Send the first beat and begin to watch.

        `store` is one that only this watch uses (a clone), served by rank `server` if by any; `nodes` names each rank's
        host, in the order of the ranks; `beat_s` are the seconds between beats. `ends` is called from a thread of the
        watch's with what is to be told, once nothing moves here or on another rank, and has to end this process.
        """
        self._pulse, self._store, self._rank, self._nodes = pulse, store, rank, tuple(nodes)
        self.beat_s = beat_s
        self._server, self._stall_s, self._ends = server, stall_timeout_s, ends
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._speaks = threading.Lock()  # taken once, by who says why this process ends
        self._moved = (pulse.count, time.monotonic())
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._read_s = time.monotonic()
        self._number = 0
        self._send()
        self._threads = [
            bounded.Call(target, f"watch-{name}") for name, target in (("beats", self._exchange), ("look", self._look))
        ]
        for thread in self._threads:
            thread.start()

    def close(self, limit_s: float = _LEAVE_S) -> None:
        """Stop watching; wait `limit_s` seconds for a beat that is under way."""
        self._closed.set()
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def seen(self) -> dict[int, Seen]:
        """Return the last that was heard of each rank."""
        now_s = time.monotonic()
        # Where the store itself no longer answers, nothing is known of others than whoever serves it.
        until_s = dict.fromkeys(self._beats, self._read_s) | {self._server: now_s}
        others = {rank: Seen(beat, until_s[rank] - since_s) for rank, (beat, since_s) in self._beats.items()}
        return {**others, self._rank: Seen(self._own(), 0.0)}

    def _exchange(self) -> None:
        every = max(1, len(self._nodes) // _EXCHANGED_AT_ONCE)
        with contextlib.suppress(RuntimeError):  # the store has gone, and beats that no longer change say so
            while not self._closed.wait(self.beat_s):
                self._send()
                if told := self.sentence():
                    self._end(told)
                if self._number % every == 0 or self._idle_s() > self._stall_s / 4:
                    self._read()

    def _send(self) -> None:
        self._number += 1
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(self._own())))

    def _read(self) -> None:
        others = [rank for rank in range(len(self._nodes)) if rank != self._rank]
        for rank in others:
            beat = Beat(**json.loads(self._store.get(f"beat/{rank}")))
            if rank not in self._beats or self._beats[rank][0].number != beat.number:
                self._beats[rank] = (beat, time.monotonic())
        self._read_s = time.monotonic()

    def _look(self) -> None:
        while not self._closed.wait(self.beat_s / 2):
            count = self._pulse.count
            if count != self._moved[0]:
                self._moved = (count, time.monotonic())
            elif self._pulse.phase and self._idle_s() > self._stall_s:
                # A rank that stopped did so before the others began to wait: it has been silent for longer than this.
                self._end(self._agreed(explain(self.seen(), self._nodes, self._stall_s / 2)))
                return

    def sentence(self) -> str:
        """Return what a rank of this world has found out and ends with, "" for nothing."""
        return self._store.get(_SENTENCE).decode() if self._store.check([_SENTENCE]) else ""

    def _agreed(self, sentence: str) -> str:
        """Return the sentence of the rank that spoke first; this one where it is the first, or the store is silent."""
        told = [sentence]

        def leave() -> None:
            with contextlib.suppress(RuntimeError):
                told.append(self._store.compare_set(_SENTENCE, "", sentence).decode())

        bounded.within(_SOON_S, leave, "watch-sentence")
        return told[-1]

    def _end(self, sentence: str) -> None:
        if self._speaks.acquire(blocking=False):
            self._ends(self, Failure(self._rank, RunError.__name__, sentence, stacks()))

    def give_way(self) -> None:
        """Leave it to the caller to say why this process ends; where the watch is about to, do not return."""
        self._speaks.acquire()

    def let_others_hear(self) -> None:
        """Return once no living rank needs this one any more to hear the sentence, or after a few beats."""
        living = [rank for rank, each in self.seen().items() if each.silent_s <= self._stall_s / 2]

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"heard/{self._rank}", "")
                while self._rank == self._server and not self._store.check([f"heard/{rank}" for rank in living]):
                    time.sleep(_LOOK_S)

        bounded.within(
            _LAST_BEATS * self.beat_s + _SOON_S if self._rank == self._server else _SOON_S, wait, "watch-end"
        )

    def _idle_s(self) -> float:
        return time.monotonic() - self._moved[1]

    def _own(self) -> Beat:
        pulse = self._pulse
        return Beat(self._number, pulse.count, pulse.step, pulse.phase, place(self._main), round(self._idle_s(), 1))


def explain(seen: dict[int, Seen], nodes: Sequence[str], silence_s: float) -> str:
    """Return one sentence that says who stopped where, and who waits for it.

    `seen` has the last beat of every rank that was heard of. One that is older than `silence_s` is that of a rank
    which does not live or cannot be reached; its idle time goes on from there.
    """
    silent = {rank: each for rank, each in seen.items() if each.silent_s > silence_s}
    fewest = min(each.beat.count for each in seen.values())
    behind = silent or {rank: each for rank, each in seen.items() if each.beat.count == fewest}
    waiting = {rank: each for rank, each in seen.items() if rank not in behind}
    who = ranks_in_short(behind)
    where = whereabouts(next(iter(behind.values())))
    at = f" ({_hosts(behind, nodes)})" if len(set(nodes)) > 1 else ""
    # A process that was stopped or killed, or whose host is cut off, all look alike from here.
    how = "was stopped, died or was cut off" if silent else "stopped"
    idle_s = max(each.silent_s if silent else each.beat.idle_s for each in behind.values())
    waits = ""
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        waits = f"; {ranks_in_short(waiting)} {verb} in {waits_in(next(iter(waiting.values())))}"
    return f"{who[0].upper()}{who[1:]}{at} {how} {idle_s:.0f} s ago in {where}{waits}"


def whereabouts(seen: Seen) -> str:
    """Return where a rank was when it was last heard of: what it did, at which line, at which step."""
    beat = seen.beat
    place = f" at {beat.place}" if beat.place else ""
    return f"{_WORDS.get(beat.phase, beat.phase)}{place} (step {beat.step})"


def waits_in(seen: Seen) -> str:
    """Return the collective in which a rank waits for another one, and the step."""
    beat = seen.beat
    # Backward and forward passes compute, or wait for an all-reduce that is part of them; with the others stopped, it
    # is that.
    phase = "all-reduce" if beat.phase in ("forward", "backward") else beat.phase
    return f"{phase or 'a collective'} at step {beat.step}"


def _hosts(ranks: dict[int, Seen], nodes: Sequence[str]) -> str:
    names = list(dict.fromkeys(nodes[rank] for rank in ranks))
    return f"node{'s' * (len(names) > 1)} {', '.join(names)}"


def place(thread: int | None) -> str:
    """Return FILE:LINE of the innermost frame of a thread that is the user's code or ours, "" if there is none."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def _is_machinery(file: str) -> bool:
    """Whether a frame's file says less than its caller's: a library's, or the world's collectives."""
    return is_library(file) or file.startswith(_BELOW)


def stacks() -> str:
    """Return the stacks of all threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    first = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: ident != first)
    return "".join(
        f"Thread {names.get(ident, ident)}, innermost call last:\n{''.join(traceback.format_stack(frames[ident]))}\n"
        for ident in order
    )
