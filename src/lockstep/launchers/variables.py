"""Environment variables for a while: a launcher may run in a program of the user's, which gets them back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def having(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables within the block, inherited by what it starts; then those from before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def unset(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those that the environment does not have."""
    return {name: value for name, value in variables.items() if name not in os.environ}
