"""Heartbeats: each rank writes its own at every beat into the store at which the ranks met, and reads the others'."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from . import bounded
from .keys import Keys

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
        opens: Callable[[], Keys],
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
        self._keys: Keys | None = opens()
        self._send(self._keys)

    def exchange(self, *, urgent: bool) -> str:
        """Send this rank's beat, read the others'; return the sentence with which the world ends, "" while it does not.

        Where there are many ranks they are not read each time, unless it is `urgent`. A store that does not answer is
        asked again the next time.
        """
        self._asked_s = self._asked_s or time.monotonic()
        try:
            keys = self._keys = self._keys or self._opens()
            self._send(keys)
            told = keys.read(_SENTENCE)
            if urgent or self._number % self._every == 0:
                self._read(keys)
        except (RuntimeError, ValueError, TypeError):
            self._keys = None  # over a new connection: an answer that comes late would be taken for the next one's
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

    def agree(self, sentence: str) -> str:
        """Return the sentence of the rank that spoke first; this one where it is the first, or the store is silent."""
        with contextlib.suppress(RuntimeError):
            if self._keys is not None:
                return bounded.within(_SOON_S, functools.partial(self._keys.put, _SENTENCE, sentence), "watch-sentence")
        return sentence

    def let_others_hear(self, living: Iterable[int]) -> None:
        """Return once the `living` ranks need this one no more to hear the sentence, or after a few beats."""
        keys, serves = self._keys, self._rank == self._server
        if keys is None:
            return
        names = [f"heard/{rank}" for rank in living]

        def wait() -> None:
            keys.write(f"heard/{self._rank}", "1")
            while serves and not keys.check(names):
                time.sleep(_LOOK_S)

        with contextlib.suppress(RuntimeError):
            bounded.within(_SOON_S + serves * _LAST_BEATS * self._beat_s, wait, "watch-end")

    def _send(self, keys: Keys) -> None:
        self._number += 1
        keys.write(f"beat/{self._rank}", json.dumps(asdict(self._own(self._number))))

    def _read(self, keys: Keys) -> None:
        names = [f"beat/{rank}" for rank in self._others]
        texts = keys.read_all(names) if keys.check(names) else map(keys.read, names)
        for rank, text in zip(self._others, texts, strict=True):
            last = self._heard[rank][0]
            beat = Beat(**json.loads(text)) if text else last  # a stranger's may have taken the place of the last one
            if beat.number != last.number:
                self._heard[rank] = (beat, time.monotonic())
        self._read_s = time.monotonic()
