"""Environment variables, set temporarily. A launcher may run in a user's program, which gets its own values back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def having(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables within the block; restore the former values afterwards."""
    former = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(former)


def unset(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that the environment does not have."""
    return {name: value for name, value in variables.items() if name not in os.environ}
