"""Texts in torch's store that take the job's secret to write.

torch's stores know no passwords: any program that reaches the port reads and writes. So each text bears a seal, an
HMAC-SHA-256 over its key and itself; one without ours counts as not written.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from . import bounded
from .output import say

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

SECRET = "LOCKSTEP_SECRET"
"""The variable with a job's own secret, in the environment of each of its ranks."""
_SEAL = 32  # hexadecimal digits: 128 bits
_TRIES = 16  # against a stranger who writes again and again
_ANSWER_S = 10.0  # for the store, whose server may be busy
_STRANGER = (
    "somebody who does not have this job's secret writes into its store ({place}), which is ignored; where that is a "
    f"rank of its own, give all of them the same {SECRET}."
)


class Unanswered(RuntimeError):
    """The store does not answer."""


class Keys:
    """Texts under a prefix of a store.

    torch's client waits for its server without end, so that each request has a thread, which is left behind after
    `limit_s` seconds; later requests are refused. Raises `Unanswered`, or what torch raises (RuntimeError).
    """

    def __init__(self, store: Store, prefix: str, secret: bytes = b"", limit_s: float = _ANSWER_S) -> None:
        self.store = store
        self._prefix, self._secret, self._limit_s = prefix, secret, limit_s
        self._answers, self._has_warned = True, False

    def clone(self, name: str = "", limit_s: float = _ANSWER_S) -> Keys:
        """Return the texts whose keys begin with `name`, over a new connection.

        Works also where the present connection got no answer: a server that was stopped may go on.
        """
        prefix = f"{self._prefix}/{name}" if name else self._prefix
        try:
            if host := getattr(self.store, "host", ""):
                # torch holds Python's lock while it connects: for half a minute, where that host is cut off.
                socket.create_connection((host, self.store.port), limit_s).close()  # type: ignore[attr-defined]
            return Keys(bounded.within(self._limit_s, self.store.clone, "store"), prefix, self._secret, limit_s)
        except (bounded.Late, OSError) as error:
            raise Unanswered(str(error)) from error

    def read(self, key: str) -> str:
        """Return a text; "" if absent or a stranger's."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return texts; "" for each that is absent or a stranger's."""
        places = [self._place(key) for key in keys]

        def request() -> list[bytes]:
            if self.store.check(places):
                return self.store.multi_get(places)
            return [self.store.get(place) if self.store.check([place]) else b"" for place in places]

        return list(map(self._unsealed, places, self._ask(request)))

    def await_all(self, keys: Sequence[str], limit_s: float) -> list[str]:
        """Return the texts once all exist, [] after `limit_s` seconds."""
        places, began_s, limit = [self._place(key) for key in keys], time.monotonic(), timedelta(seconds=limit_s)
        self.store.set_timeout(limit)

        def request() -> list[bytes]:
            if len(places) > 1:  # some stores wait for each key in turn, each time for so long
                self.store.wait(places, limit)
            return self.store.multi_get(places)

        try:
            return list(map(self._unsealed, places, self._ask(request, limit_s)))
        except RuntimeError as error:
            if isinstance(error, Unanswered) or time.monotonic() - began_s < 0.9 * limit_s:  # the store has gone
                raise
            return []

    def write(self, key: str, text: str) -> None:
        """Set a text."""
        place = self._place(key)
        self._ask(lambda: self.store.set(place, self._sealed(place, text)))  # type: ignore[arg-type]  # bytes as well

    def put(self, key: str, text: str, expected: str = "") -> str:
        """Compare and set: replace the `expected` text; return the text held afterwards."""
        place = self._place(key)
        there, desired = self._sealed(place, expected), self._sealed(place, text)
        for _ in range(_TRIES):
            found = self._ask(lambda there=there: self.store.compare_set(place, there, desired))  # type: ignore[misc, arg-type]
            if (held := self._unsealed(place, found)) or not found:
                return held
            there = found  # a stranger's: as good as nothing
        return ""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask(lambda: self.store.check([self._place(key) for key in keys]))

    def _place(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, request: Callable[[], T], waits_s: float = 0.0) -> T:
        if not self._answers:
            raise Unanswered(f"no answer within {self._limit_s:g} s")
        try:
            return bounded.within(self._limit_s + waits_s, request, "store")
        except bounded.Late as error:
            self._answers = False
            raise Unanswered(str(error)) from error

    def _sealed(self, place: str, text: str) -> bytes:
        data = text.encode(errors="replace")  # a file's name may be no text
        return self._seal(place, data) + data if data else b""

    def _seal(self, place: str, data: bytes) -> bytes:
        message = f"{len(place)} {place} ".encode() + data
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()[:_SEAL].encode()

    def _unsealed(self, place: str, found: bytes) -> str:
        data = found[_SEAL:]
        if not found or hmac.compare_digest(found[:_SEAL], self._seal(place, data)):
            return data.decode(errors="replace")
        if not self._has_warned:
            self._has_warned = True
            say(_STRANGER.format(place=place))
        return ""
