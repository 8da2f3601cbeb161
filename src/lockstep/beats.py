"""Beats: what every rank of a world says of itself, again and again, through the store at which the ranks have met."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from . import bounded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_READ_AT_ONCE = 16
"""Ranks whose beats each rank reads at every beat; where there are more, it reads them less often."""
_SENTENCE = "sentence"
_MET = "the roll call"  # the phase of a rank that has said nothing since
_SOON_S = 0.5  # for a store to answer, whose server may be what was stopped
_LAST_BEATS = 3  # for living ranks to hear the sentence
_LOOK_S = 0.02


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


class Beats:
    """One rank's part in the exchange of beats."""

    def __init__(
        self,
        opens: Callable[[], Store],
        own: Callable[[int], Beat],
        *,
        rank: int,
        size: int,
        server: int | None,
        beat_s: float,
    ) -> None:
        """Send the first beat.

        `opens()` connects to the store, which rank `server` serves if any does, and raises RuntimeError where it does
        not answer; `own(number)` is this rank's beat now; `beat_s` are the seconds between two.
        """
        self._opens, self._own, self._rank, self._server, self._beat_s = opens, own, rank, server, beat_s
        self._others = [other for other in range(size) if other != rank]
        self._every = max(1, size // _READ_AT_ONCE)
        self._number = 0
        self._read_s = time.monotonic()
        # Who is stopped before the first beat is silent from here on.
        self._heard = {other: (Beat(0, 0, 0, _MET), self._read_s) for other in self._others}
        self._asked_s: float | None = None
        """Since when the store has not answered; None while it does."""
        self._store: Store | None = opens()
        self._send(self._store)

    def exchange(self, *, urgent: bool) -> str:
        """Send this rank's beat, read the others'; return the sentence with which the world ends, "" while it does not.

        Where there are many ranks they are not read each time, unless it is `urgent`. A store that does not answer is
        asked again the next time.
        """
        self._asked_s = self._asked_s or time.monotonic()
        try:
            store = self._store = self._store or self._opens()
            self._send(store)
            told = _sentence(store)
            if urgent or self._number % self._every == 0:
                self._read(store)
        except (RuntimeError, ValueError, TypeError):
            self._store = None  # over a new connection: an answer that comes late would be taken for the next one's
            return ""
        self._asked_s = None
        return told

    def seen(self) -> dict[int, Seen]:
        """Return the last that was heard of each rank."""
        now_s = time.monotonic()
        heard, asked_s, read_s = dict(self._heard), self._asked_s, self._read_s
        # Where the store itself does not answer, nothing is known of others than whoever serves it.
        unanswered = {self._server: 0.0 if asked_s is None else now_s - asked_s}
        others = {
            rank: Seen(beat, max(0.0, read_s - since_s) + unanswered.get(rank, 0.0))
            for rank, (beat, since_s) in heard.items()
        }
        return {**others, self._rank: Seen(self._own(self._number), 0.0)}

    def sentence(self) -> str:
        """Return what a rank of this world has found out and ends with, "" for nothing."""
        store = self._store
        with contextlib.suppress(RuntimeError):
            return _sentence(store) if store is not None else ""
        return ""

    def agree(self, sentence: str) -> str:
        """Return the sentence of the rank that spoke first; this one where it is the first, or the store is silent."""
        store = self._store
        with contextlib.suppress(RuntimeError):
            if store is not None:
                leave = functools.partial(store.compare_set, _SENTENCE, "", sentence)
                return bounded.within(_SOON_S, leave, "watch-sentence").decode()
        return sentence

    def let_others_hear(self, living: Iterable[int]) -> None:
        """Return once the `living` ranks need this one no more to hear the sentence, or after a few beats."""
        store, serves = self._store, self._rank == self._server
        if store is None:
            return
        keys = [f"heard/{rank}" for rank in living]

        def wait() -> None:
            store.set(f"heard/{self._rank}", "")
            while serves and not store.check(keys):
                time.sleep(_LOOK_S)

        with contextlib.suppress(RuntimeError):
            bounded.within(_SOON_S + serves * _LAST_BEATS * self._beat_s, wait, "watch-end")

    def _send(self, store: Store) -> None:
        self._number += 1
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._own(self._number))))

    def _read(self, store: Store) -> None:
        for rank in self._others:
            key, last = f"beat/{rank}", self._heard[rank][0].number
            if last == 0 and not store.check([key]):  # to ask for what is not there is to wait for it
                continue
            text = store.get(key)  # empty where a stranger's has taken the place of the last one (see `sealed_store`)
            beat = Beat(**json.loads(text)) if text else self._heard[rank][0]
            if beat.number != last:
                self._heard[rank] = (beat, time.monotonic())
        self._read_s = time.monotonic()


def _sentence(store: Store) -> str:
    return store.get(_SENTENCE).decode() if store.check([_SENTENCE]) else ""
