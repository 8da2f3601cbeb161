"""A store in which the notes of strangers count for nothing.

torch's stores know no passwords: whoever reaches the port reads and writes there. So each value bears a seal, which
takes the job's secret to make (HMAC-SHA-256 over its place and itself), and what bears none of ours is as if nobody had
written it. Numbers that torch counts with `add` bear none; strangers can spoil those, and keep a job from beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import sys
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from ..printable import told

_SEAL = 32  # hexadecimal digits: 128 bits
_STRANGER = (
    "somebody who does not have this job's secret writes into its store ({place}), which is ignored; where that is a "
    "rank of its own, give all of them the same LOCKSTEP_SECRET."
)
_TRIES = 16  # against a stranger who writes again and again


class Seal:
    """What the ranks of a job, who have its secret, put on a value at its place; an empty secret is no secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._has_told = False

    def put(self, place: str, value: Any) -> bytes:
        """Return the value with its seal; what is empty is as good as not there, and has none."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        return self._of(place, data) + data if data else b""

    def take(self, place: str, found: bytes) -> bytes | None:
        """Return the value without its seal; None for a stranger's, of which it is told once."""
        seal, data = found[:_SEAL], found[_SEAL:]
        if not found or hmac.compare_digest(seal, self._of(place, data)):
            return data
        if not self._has_told:
            self._has_told = True
            with contextlib.suppress(OSError, AttributeError):  # it was started with `2>&-`
                sys.stderr.write(told(_STRANGER.format(place=place)))
        return None

    def _of(self, place: str, data: bytes) -> bytes:
        sealed = f"{len(place)} {place} ".encode() + data
        return hmac.new(self._secret, sealed, hashlib.sha256).hexdigest()[:_SEAL].encode()


class SealedStore(Store):
    """The store `inner`, in which what bears another seal, or none, counts for nothing."""

    def __init__(self, inner: Store, seal: Seal, name: str) -> None:
        """`name` tells this store's values from those of others with the same seal."""
        super().__init__()
        self.inner, self._seal, self._name = inner, seal, name

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self.inner.set(key, self._seal.put(self._place(key), value))  # type: ignore[arg-type]  # it takes bytes as well as str

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there; empty where it is a stranger's."""
        return self._seal.take(self._place(key), self.inner.get(key)) or b""

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Set a key to the desired value where it has the expected one; return what it has then."""
        place = self._place(key)
        expected, desired = self._seal.put(place, expected_value), self._seal.put(place, desired_value)
        for _ in range(_TRIES):
            found = self.inner.compare_set(key, expected, desired)  # type: ignore[arg-type]
            value = self._seal.take(place, found)
            if value is not None:
                return value
            if expected_value:
                break
            expected = found  # a stranger's: as good as nothing
        return b""

    def add(self, key: str, value: int) -> int:
        """Add to a number; return it."""
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there."""
        self.inner.wait(keys) if timeout is None else self.inner.wait(keys, timeout)

    def clone(self) -> SealedStore:
        """Return the same store over a connection of its own."""
        return SealedStore(self.inner.clone(), self._seal, self._name)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long is waited for a key."""
        super().set_timeout(timeout)
        self.inner.set_timeout(timeout)

    def _place(self, key: str) -> str:
        return f"{self._name}/{key}"
