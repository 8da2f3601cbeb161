"""A store that gives up where nobody answers: torch's client waits for its server without end.

A node whose network is lost is told so by nothing: no connection closes, and torch's client, which gives each request a
limit for what the server is to wait for, but none for the server itself, stays in it for as long as the system tries to
send (some 15 minutes). Here each request is made by a thread of its own, which is left alone once it takes too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from .. import bounded

T = TypeVar("T")

_LOOK_S = 0.01


class Unanswered(RuntimeError):
    """Nobody answers at the store."""


class KeptPrefixStore(PrefixStore):
    """torch's PrefixStore, which keeps a store below that is written in Python: torch itself keeps but its C++ half."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self._kept = store


class BoundedStore(Store):
    """The store `inner`, of which each request is answered within `limit_s` seconds, or raises `Unanswered`."""

    def __init__(self, inner: Store, limit_s: float) -> None:
        super().__init__()
        self.inner, self._limit_s = inner, limit_s
        self.answers = True
        """Whether it has answered so far. Once it has not, no request is made any more."""

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._ask(lambda: self.inner.set(key, value))

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there. Raises `TimeoutError` where it is not within the store's time-out."""
        self.wait([key])
        return self._ask(lambda: self.inner.get(key))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Set a key to the desired value where it has the expected one; return what it has then."""
        return self._ask(lambda: self.inner.compare_set(key, _text(expected_value), _text(desired_value)))

    def add(self, key: str, value: int) -> int:
        """Add to a number; return it."""
        return self._ask(lambda: self.inner.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._ask(lambda: self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there. Raises `TimeoutError` where they are not in time."""
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # not in the stub
        until_s = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() >= until_s:
                raise TimeoutError(f"{', '.join(keys)}: not there within {limit.total_seconds():g} s")
            time.sleep(_LOOK_S)

    def clone(self) -> BoundedStore:
        """Return the same store over a connection of its own."""
        return BoundedStore(self.inner.clone(), self._limit_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long is waited for a key."""
        super().set_timeout(timeout)
        self.inner.set_timeout(timeout)

    def _ask(self, request: Callable[[], T]) -> T:
        if not self.answers:
            raise Unanswered(f"no answer within {self._limit_s:g} s")
        try:
            return bounded.within(self._limit_s, request, "store")
        except bounded.Late as error:
            self.answers = False
            raise Unanswered(str(error)) from error


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
