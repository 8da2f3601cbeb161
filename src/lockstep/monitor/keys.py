"""Texts in torch's store that only those who have the job's secret can write.

torch's stores know no passwords: whoever reaches the port reads and writes there. So each text bears a seal, which
takes the job's secret to make (HMAC-SHA-256 over its place and itself), and what bears none of ours is as if nobody had
written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..printable import told
from . import bounded

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

SECRET = "LOCKSTEP_SECRET"
"""The variable that holds a job's own secret, in the environment of each of its ranks."""
_SEAL = 32  # hexadecimal digits: 128 bits
_TRIES = 16  # against a stranger who writes again and again
_ANSWER_S = 10.0  # for the store, whose server may be busy
_STRANGER = (
    "somebody who does not have this job's secret writes into its store ({place}), which is ignored; where that is a "
    f"rank of its own, give all of them the same {SECRET}."
)


class Unanswered(RuntimeError):
    """Nobody answers at the store."""


class Keys:
    """Texts under a prefix of a store.

    torch's client waits for its server without end, so that each request has a thread, which is left alone once it
    takes longer than `limit_s`; nothing more is asked then. Raises `Unanswered`, or what torch raises (RuntimeError).
    """

    def __init__(self, store: Store, prefix: str, secret: bytes = b"", limit_s: float = _ANSWER_S) -> None:
        self.store = store
        self._prefix, self._secret, self._limit_s = prefix, secret, limit_s
        self._answers, self._has_told = True, False

    def under(self, name: str) -> Keys:
        """Return those whose names begin with this one."""
        return Keys(self.store, f"{self._prefix}/{name}", self._secret, self._limit_s)

    def clone(self) -> Keys:
        """Return the same over a connection of its own: others may wait on theirs."""
        return Keys(self._ask(self.store.clone), self._prefix, self._secret, self._limit_s)

    def read(self, key: str) -> str:
        """Return a key's text; "" where it is not there, or is a stranger's."""
        place = self._place(key)
        return self._unsealed(place, self._ask(lambda: self.store.get(place) if self.store.check([place]) else b""))

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return the texts of keys that are there, in one request."""
        places = [self._place(key) for key in keys]
        found = self._ask(lambda: self.store.multi_get(places))
        return [self._unsealed(place, each) for place, each in zip(places, found, strict=True)]

    def write(self, key: str, text: str) -> None:
        """Set a key."""
        place = self._place(key)
        self._ask(lambda: self.store.set(place, self._sealed(place, text)))  # type: ignore[arg-type]  # bytes as well

    def put(self, key: str, text: str, expected: str = "") -> str:
        """Set a key where it has the expected text; return what it has then."""
        place = self._place(key)
        there, desired = self._sealed(place, expected), self._sealed(place, text)
        for _ in range(_TRIES):
            found = self._ask(lambda there=there: self.store.compare_set(place, there, desired))  # type: ignore[misc, arg-type]
            if (held := self._unsealed(place, found)) or not found:
                return held
            there = found  # a stranger's: as good as nothing
        return ""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self._ask(lambda: self.store.check([self._place(key) for key in keys]))

    def _place(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, request: Callable[[], T]) -> T:
        if not self._answers:
            raise Unanswered(f"no answer within {self._limit_s:g} s")
        try:
            return bounded.within(self._limit_s, request, "store")
        except bounded.Late as error:
            self._answers = False
            raise Unanswered(str(error)) from error

    def _seal(self, place: str, data: bytes) -> bytes:
        message = f"{len(place)} {place} ".encode() + data
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()[:_SEAL].encode()

    def _sealed(self, place: str, text: str) -> bytes:
        data = text.encode()
        return self._seal(place, data) + data if data else b""

    def _unsealed(self, place: str, found: bytes) -> str:
        """Return the text without its seal; "" for a stranger's, of which is told once."""
        data = found[_SEAL:]
        if not found or hmac.compare_digest(found[:_SEAL], self._seal(place, data)):
            return data.decode(errors="replace")
        if not self._has_told:
            self._has_told = True
            with contextlib.suppress(OSError, AttributeError):  # it was started with `2>&-`
                sys.stderr.write(told(_STRANGER.format(place=place)))
        return ""
