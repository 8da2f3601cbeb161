"""The watch: every rank tells the others what it is doing, and notices when nothing moves any more.

Two threads in each rank. One exchanges *beats* (see `beats`): what the rank's `Pulse` says, and where its main thread
is. The other waits for neither network nor disk: it looks whether its own rank moves. A rank that has not entered a
new phase for --stall-timeout looks at all beats, finds out for whom the others wait, and leaves one sentence at the
store, with which all of them end. Nobody is judged while all live and one of them prepares or compiles, however long
that takes; nor is a rank alone that computes, since nobody waits for it. Ranks that all wait in
collectives, in different ones, wait for each other: that is told after half a minute.

    Rank 3 (node b) stopped 41 s ago in data loading at folder.py:88 (step 512); ranks 0–2 wait in all-reduce at step
    512.

Whoever hangs is known because every rank enters the same phases in the same order: the rank that has entered the fewest
is waited for. A process that was stopped, or that the network has lost, is known by beats that no longer change. The
rank that serves the store ends last, when the others have read the sentence.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ..errors import RunError, ranks_in_short
from . import bounded, tracebacks
from .failures import Failure, is_machinery
from .heartbeat import Beat, Beats, Seen
from .keys import Keys
from .progress import SETUP, Pulse

_COMPILATION = "compilation"
_AT_WORK = (SETUP, _COMPILATION)
_WAITS = "a collective"  # of the user's own, of which no phase tells
_WAITS_ALONE = ("data", "save")  # for data workers, or for a disk
_COLLECTIVES = ("all-reduce", "all-gather", "barrier", _WAITS)
_CROSSED_S = 30.0
"""For which all ranks wait, in different collectives: longer than any of them takes, of 32 MB at most."""
_COMPILERS = {"torch._dynamo.convert_frame", "torch._inductor.compile_fx"}
"""Modules that have a frame on the stack while torch compiles, and none while it runs what it has compiled."""
_WORDS = {"": "its own code", "data": "data loading", "step": "the optimizer step", "save": "saving"}
MISSED_BEATS = 3
"""So many of a living rank's beats may come late."""
_LEAVE_S = 2.0
_LOOK_S = 1.0
_HURRY_S = 0.05
_DEAD_S = 3.0  # for which nothing has moved, before it is asked whether somebody has died: as a rule an error says so
_ASK = 0.75
"""Share of --stall-timeout after which data workers are asked where they are, which a signal does."""


class Watch:
    """Watches over this rank and, through their beats, the others, until `close`."""

    def __init__(
        self,
        pulse: Pulse,
        opens: Callable[[], Keys],
        *,
        rank: int,
        nodes: Sequence[str],
        server: int | None,
        stall_timeout_s: float,
        beat_s: float,
        ends: Callable[[Watch, Failure], None],
        dead: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Send the first beat and begin to watch.

        `opens()` connects to the store (see `Beats`); `nodes` names each rank's host, in the order of the ranks;
        `beat_s` are the seconds between beats. `ends` is called from a thread of the watch's with what is to be told,
        once nothing moves here or on another rank, and has to end this process. `dead` returns the processes, in words
        by their rank, that are seen to have ended before they were done; it may wait for the store.
        """
        self._pulse, self._rank, self._nodes, self.beat_s = pulse, rank, tuple(nodes), beat_s
        self._stall_s, self._ends, self._dead, self._server = stall_timeout_s, ends, dead, server
        # A rank that stopped did so before the others began to wait: it has been silent for longer than this.
        self._silence_s = max(stall_timeout_s / 2, MISSED_BEATS * beat_s)
        self._main = threading.main_thread().ident
        # By beats that are not old: since the last but two, a rank may have gone on.
        self._crossed_s = min(stall_timeout_s, max(_CROSSED_S, 2 * MISSED_BEATS * beat_s))
        self._closed, self._hurried, self._told = threading.Event(), False, ""
        self._speaks = threading.Lock()  # taken once, by who says why this process ends
        self._idle_s = 0.0
        self._beats = Beats(opens, self._own, rank=rank, size=len(nodes), server=server, beat_s=beat_s)
        self.seen = self._beats.seen
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

    def lost(self, limit_s: float, gives_up: Callable[[], bool]) -> str:
        """Return the sentence about a rank that was lost, of which an error here is an echo, after `give_way`.

        "" where none is found within `limit_s` seconds, or before `gives_up()`.
        """
        self._hurried, until_s = True, time.monotonic() + limit_s
        while not self._told and not gives_up() and time.monotonic() < until_s:
            time.sleep(_HURRY_S)
        return self._told

    def give_way(self) -> None:
        """Leave it to the caller to say why this process ends; where the watch is about to, do not return."""
        self._speaks.acquire()

    def let_others_hear(self) -> None:
        """Return once no living rank needs this one any more to hear the sentence, or after a few beats."""
        self._beats.let_others_hear(rank for rank, each in self.seen().items() if each.silent_s <= self._silence_s)

    def _exchange(self) -> None:
        sent_s = time.monotonic()
        while not self._closed.wait(min(self.beat_s, _HURRY_S) if self._hurried else self.beat_s):
            told = self._found_lost() if self._hurried else ""  # without the store, which may have gone with the rank
            if not told and time.monotonic() - sent_s >= 0.9 * self.beat_s:
                sent_s = time.monotonic()
                told = self._beats.exchange(urgent=self._hurried or self._may_be_stuck)
                # NCCL's collectives wait for a rank that is dead, as one does that reads a long batch.
                waits = self._pulse.phase and self._idle_s > _DEAD_S and not _in_debugger(self._main)
                told = told or (self._found_lost() if waits else "")
            if told:
                self._told = told
                self._end(told)
                return

    def _found_lost(self) -> str:
        """Return the sentence about a rank that has died, or, where an error says that one was lost, is silent."""
        seen, silence_s = self.seen(), MISSED_BEATS * self.beat_s
        if dead := self._dead():
            sentence = obituary(dead, seen)
            return sentence if self._server in dead else self._beats.agree(sentence)
        if self._hurried and any(each.silent_s > silence_s for each in seen.values()):
            return self._beats.agree(explain(seen, self._nodes, silence_s))
        return ""

    def _look(self) -> None:
        count, looked_s = self._pulse.count, time.monotonic()
        stalled_s = 0.0  # as `_idle_s`, less the time for which it was right to wait
        while not self._closed.wait(min(self.beat_s, _LOOK_S) / 2):
            now_s = time.monotonic()
            # Time for which this process was stopped, or its machine asleep, is none for which nothing moved.
            passed_s, looked_s = min(now_s - looked_s, self._crossed_s / 2), now_s
            if count != self._pulse.count:
                count, self._idle_s, stalled_s = self._pulse.count, 0.0, 0.0
                continue
            self._idle_s += passed_s
            stalled_s += passed_s
            if not self._may_be_stuck:  # asked well before it is judged: beats of a busy machine come late
                continue
            if self._may_last(seen := self.seen()):
                stalled_s = 0.0
            elif stalled_s > (self._crossed_s if are_crossed(seen, self._crossed_s / 2) else self._stall_s):
                self._end(self._beats.agree(explain(seen, self._nodes, self._silence_s)))
                return

    @property
    def _may_be_stuck(self) -> bool:
        waits = self._pulse.phase in _COLLECTIVES
        return self._idle_s > (self._crossed_s if waits else self._stall_s) / 4

    def _may_last(self, seen: dict[int, Seen]) -> bool:
        """Whether this rank's phase may last: of an idle one, nobody waits in vain."""
        phase = seen[self._rank].beat.phase
        if not phase or _in_debugger(self._main):
            return True
        if len(seen) == 1:
            return phase not in _WAITS_ALONE
        all_live = all(each.silent_s <= MISSED_BEATS * self.beat_s for each in seen.values())
        return all_live and any(each.beat.phase in _AT_WORK for each in seen.values())

    def _end(self, sentence: str) -> None:
        if self._speaks.acquire(blocking=False):
            self._ends(self, Failure(self._rank, RunError.__name__, sentence, tracebacks.of_all()))

    def _own(self, number: int) -> Beat:
        pulse = self._pulse
        return Beat(number, pulse.count, pulse.step, self._phase(), self._place(), round(self._idle_s, 1))

    def _phase(self) -> str:
        """Return the phase of this rank, or, where the stacks tell more of it, what they tell."""
        phase, frames = self._pulse.phase, sys._current_frames()
        if any(_COMPILERS & _modules(frame) for frame in frames.values()):
            return _COMPILATION
        if phase in ("", SETUP) and "torch.distributed.distributed_c10d" in _modules(frames.get(self._main or 0)):
            return _WAITS
        if phase == "eval" and "torch.utils.data.dataloader" in _modules(frames.get(self._main or 0)):
            return "data"
        return phase

    def _place(self) -> str:
        """Return where the main thread is, or the data worker that it waits for."""
        if self._pulse.phase == "data" and self._idle_s > _ASK * self._stall_s:
            for text in tracebacks.of_workers().values():
                if found := _innermost(text):
                    return found
        return place(self._main)


def are_crossed(seen: dict[int, Seen], least_s: float) -> bool:
    """Whether all ranks have waited for `least_s`, in collectives that are not the same, so that none will end."""
    waits = all(each.beat.phase in _COLLECTIVES and each.beat.idle_s > least_s for each in seen.values())
    return waits and len({_call(each) for each in seen.values()}) > 1


def _call(seen: Seen) -> tuple[str, int, str]:
    # A collective of the user's own may have other lines on other ranks, where one sends and another receives.
    beat = seen.beat
    return beat.phase, beat.step, "" if beat.phase == _WAITS else beat.place


def explain(seen: dict[int, Seen], nodes: Sequence[str], silence_s: float) -> str:
    """Return one sentence that says who stopped where, and who waits for it.

    `seen` has the last beat of every rank that was heard of. One that is older than `silence_s` is that of a rank
    which does not live or cannot be reached; its idle time goes on from there.
    """
    silent = {rank: each for rank, each in seen.items() if each.silent_s > silence_s}
    if not silent and are_crossed(seen, 0.0):
        first = min(seen)
        other = next(rank for rank in sorted(seen) if _call(seen[rank]) != _call(seen[first]))
        return (
            f"Rank {first} waits in {_whereabouts(seen[first])} and rank {other} in {_whereabouts(seen[other])}, each "
            "for the other: every rank has to call the same collectives, in the same order and as often"
        )
    fewest = min(map(_entered, seen.values()))
    behind = silent or {rank: each for rank, each in seen.items() if _entered(each) == fewest}
    waiting = {rank: each for rank, each in seen.items() if rank not in behind and each.beat.phase not in _AT_WORK}
    who = ranks_in_short(behind)
    where = _whereabouts(next(iter(behind.values())))
    at = f" ({_hosts(behind, nodes)})" if len(set(nodes)) > 1 else ""
    # A process that was stopped or killed, or whose host is cut off, all look alike from here.
    how = "was stopped, died or was cut off" if silent else "stopped"
    idle_s = max(each.silent_s if silent else each.beat.idle_s for each in behind.values())
    waits = "" if silent else "; give more --stall-timeout where it was only slow"
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        waits = f"; {ranks_in_short(waiting)} {verb} in {_waits_in(next(iter(waiting.values())))}{waits}"
    heard = ", last heard of" if silent else ""
    return f"{who[0].upper()}{who[1:]}{at} {how} {idle_s:.0f} s ago{heard} in {where}{waits}"


def _entered(seen: Seen) -> tuple[int, bool]:
    """Return by what ranks are compared: who waits in a collective of the user's own is no further back for it."""
    return seen.beat.count, seen.beat.phase == _WAITS


def obituary(dead: Mapping[int, str], seen: dict[int, Seen]) -> str:
    """Return one sentence about a rank that has died, the first of `dead`: processes in words by their rank."""
    rank, who = min(dead.items())
    is_heard = rank in seen and seen[rank].beat.number > 0  # since the ranks met
    heard = f", last heard of in {_whereabouts(seen[rank])}" if is_heard else ""
    return f"Rank {rank} ({who}) died{heard}: its own message, if it could leave one, says why"


def _whereabouts(seen: Seen) -> str:
    """Return where a rank was when it was last heard of: what it did, at which line, at which step."""
    beat = seen.beat
    place = f" at {beat.place}" if beat.place else ""
    return f"{_WORDS.get(beat.phase, beat.phase)}{place} (step {beat.step})"


def _waits_in(seen: Seen) -> str:
    """Return the collective in which a rank waits for another one, and the step."""
    beat = seen.beat
    # These compute, or wait for an all-reduce that is part of them or, on a GPU, for the numbers that one before them
    # brings; with the others stopped, it is that.
    phase = "all-reduce" if beat.phase in ("forward", "backward", "step", "eval") else beat.phase
    return f"{phase or _WAITS} at step {beat.step}"


def _hosts(ranks: dict[int, Seen], nodes: Sequence[str]) -> str:
    names = list(dict.fromkeys(nodes[rank] for rank in ranks))
    return f"node{'s' * (len(names) > 1)} {', '.join(names)}"


def place(thread: int | None) -> str:
    """Return FILE:LINE of the innermost frame of a thread that is the user's code or ours, "" if there is none."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def _innermost(stack: str) -> str:
    """Return FILE:LINE of the innermost frame in faulthandler's words that is the user's code or ours, "" for none."""
    for file, line in re.findall(r'File "(.+)", line (\d+)', stack):
        if not is_machinery(file):
            return f"{Path(file).name}:{line}"
    return ""


def _in_debugger(thread: int | None) -> bool:
    """Whether a person looks at this process: it stands in pdb's prompt, or under a debugger that may hold it."""
    return "bdb" in _modules(sys._current_frames().get(thread or 0)) or "pydevd" in sys.modules


def _modules(frame: FrameType | None) -> set[str]:
    """Return the names of the modules that have a frame on the stack which ends with `frame`."""
    found = set()
    while frame is not None:
        found.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    return found
