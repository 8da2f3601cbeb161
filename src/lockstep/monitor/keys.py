"""Texts in torch's store, read and written in bounded time.

torch's stores have no passwords: any program that reaches the port reads and writes. So a text is never code, a command
or a path; a reader checks it, and a stranger can end a job and no more.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from ..files import parse_json
from . import bounded

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

_ANSWER_S = 10.0  # for the store, whose server may be busy


class Unanswered(RuntimeError):
    """The store does not answer."""


class Keys:
    """Texts under a prefix of a store.

    torch's client waits for its server without end, so that each request has a thread, which is abandoned after
    `limit_s` seconds; later requests are refused. Raises `Unanswered`, or an error of torch (RuntimeError).
    """

    def __init__(self, store: Store, prefix: str, limit_s: float = _ANSWER_S) -> None:
        self.store = store
        self._prefix, self._limit_s, self._answers = prefix, limit_s, True

    def clone(self, name: str = "", limit_s: float = _ANSWER_S) -> Keys:
        """Return the texts whose keys begin with `name`, over a new connection.

        Works even if this connection got no answer: a server that was stopped may continue.
        """
        prefix = f"{self._prefix}/{name}" if name else self._prefix
        try:
            if host := getattr(self.store, "host", ""):
                # torch holds Python's lock while it connects, for half a minute if that host is cut off.
                socket.create_connection((host, self.store.port), limit_s).close()  # type: ignore[attr-defined]
            return Keys(bounded.within(self._limit_s, self.store.clone, "store"), prefix, limit_s)
        except (bounded.Late, OSError) as error:
            raise Unanswered(str(error)) from error

    def read(self, key: str) -> str:
        """Return a text; "" if absent."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return texts; "" for each that is absent."""
        places = [self._place(key) for key in keys]

        def request() -> list[bytes]:
            if self.store.check(places):
                return self.store.multi_get(places)
            return [self.store.get(place) if self.store.check([place]) else b"" for place in places]

        return list(map(_text, self._ask(request)))

    def await_all(self, keys: Sequence[str], limit_s: float) -> list[str]:
        """Return the texts once all exist, [] after `limit_s` seconds."""
        places, began_s, limit = [self._place(key) for key in keys], time.monotonic(), timedelta(seconds=limit_s)
        self.store.set_timeout(limit)

        def request() -> list[bytes]:
            if len(places) > 1:  # multi_get of some stores waits for each key in turn, each time for so long
                self.store.wait(places, limit)
            return self.store.multi_get(places)

        try:
            return list(map(_text, self._ask(request, limit_s)))
        except RuntimeError as error:
            if isinstance(error, Unanswered) or time.monotonic() - began_s < 0.9 * limit_s:  # the store has gone
                raise
            return []

    def write(self, key: str, text: str) -> None:
        """Set a text."""
        place, data = self._place(key), _data(text)
        self._ask(lambda: self.store.set(place, data))

    def put(self, key: str, text: str, expected: str = "") -> str:
        """Compare and set: replace the `expected` text; return the text held afterwards."""
        place = self._place(key)
        return _text(self._ask(lambda: self.store.compare_set(place, *map(_data, (expected, text)))))

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


def parsed(kind: type[T], text: str) -> T:
    """Return the flat dataclass that `text` holds as JSON. Ignores unknown fields, as of another version.

    Raises ValueError for any other text, such as a stranger's.
    """
    values, fields = parse_json(text), get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError("it holds no fields")
    arguments = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in fields
    }
    for name, value in arguments.items():
        kind_of = get_origin(fields[name]) or fields[name]
        is_meant = type(value) is kind_of or (kind_of, type(value)) == (float, int)
        if not is_meant or (kind_of is tuple and {*map(type, value)} - {*get_args(fields[name])}):
            raise ValueError(f"its {name} is of another type")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError("it lacks a field") from error


def _data(text: str) -> Any:
    return text.encode(errors="replace")  # a file's name may be no text; torch takes bytes where it says str


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
