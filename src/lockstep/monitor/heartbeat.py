"""Heartbeats, which ranks write to the store and read from one another."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from .keys import Keys, parsed

_END = "end"  # the phase in the last beat of a rank that no longer needs the others
_START = "the roll call"  # the phase of a rank without a beat
_SENTENCE = "sentence"
_READ_ALWAYS = 16  # ranks: reading more costs O(ranks²), and waits until a problem is likely
_LOOK_S = 0.02


@dataclass(frozen=True)
class Beat:
    """A rank's report of its progress."""

    count: int
    """Phases entered."""
    step: int
    phase: str
    place: str = ""
    """The line of the user's code, or of lockstep, that the main thread is in."""
    idle_s: float = 0.0
    """Seconds in this phase, by the rank's own clock."""
    number: int = 0
    """Number of this beat, which no longer rises if the process was stopped, died, or is cut off."""
    silent_s: float = 0.0
    """Seconds for which this has been the last beat, by the reader's clock."""


class Heartbeats:
    """One rank's side of the exchange.

    `opens()` connects to the store, which rank `server` serves, if any. After a request without an answer, the next one
    uses a new connection: a late answer would be taken for that of the next request.
    """

    def __init__(self, opens: Callable[[], Keys], *, rank: int, size: int, server: int | None) -> None:
        self._opens, self._rank, self._server = opens, rank, server
        self._keys: Keys | None = None
        self._read_s = self._answered_s = time.monotonic()
        self._number = 0
        self._heard = {other: (Beat(0, 0, _START), self._read_s) for other in range(size) if other != rank}

    def exchange(self, beat: Beat, *, urgent: bool) -> str | None:
        """Exchange beats; return the sentence that ends all ranks, or "". None if the store does not answer.

        Beats of more than 16 ranks are read only if `urgent`.
        """
        try:
            self._send(beat)
            if urgent or len(self._heard) < _READ_ALWAYS:
                self._read()
            sentence = self._store().read(_SENTENCE)
        except (RuntimeError, ValueError):  # ValueError: a stranger has overwritten a beat
            self._keys = None
            return None
        self._answered_s = time.monotonic()
        return sentence

    def seen(self, beat: Beat) -> dict[int, Beat]:
        """Return the last beat of each rank that has not left, with this rank's `beat`."""
        # A store that does not answer shows that its server is silent, and nothing about the other ranks.
        unanswered = {self._server: max(0.0, time.monotonic() - self._answered_s)}
        beats = {
            rank: replace(last, silent_s=max(0.0, self._read_s - since_s) + unanswered.get(rank, 0.0))
            for rank, (last, since_s) in dict(self._heard).items()
            if last.phase != _END
        }
        return {**beats, self._rank: beat}

    def agree(self, sentence: str) -> str:
        """Publish `sentence`; return the sentence that was published first."""
        with contextlib.suppress(RuntimeError):
            return self._store().put(_SENTENCE, sentence) or sentence
        return sentence

    def leave(self, beat: Beat, limit_s: float) -> None:
        """Send the last beat. The store's server waits for the last beats of all others."""
        until_s = time.monotonic() + limit_s
        with contextlib.suppress(RuntimeError):
            self._send(replace(beat, phase=_END))
            while self._rank == self._server and time.monotonic() < until_s:
                self._read()
                if all(last.phase == _END for last, _ in self._heard.values()):
                    break
                time.sleep(_LOOK_S)

    def _store(self) -> Keys:
        self._keys = self._keys or self._opens()
        return self._keys

    def _send(self, beat: Beat) -> None:
        self._number += 1
        self._store().write(f"beat/{self._rank}", json.dumps(asdict(replace(beat, number=self._number))))

    def _read(self) -> None:
        texts = self._store().read_all([f"beat/{rank}" for rank in self._heard])
        for (rank, (last, _)), text in zip([*self._heard.items()], texts, strict=True):
            beat = parsed(Beat, text) if text else last
            if beat.number != last.number:
                self._heard[rank] = (beat, time.monotonic())
        self._read_s = time.monotonic()
