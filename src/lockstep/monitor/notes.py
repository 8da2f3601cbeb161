"""Short texts that one start of the ranks leaves for the next."""

from collections.abc import Callable
from dataclasses import dataclass

FOLDER = "folder"
"""The note with the run's folder."""


@dataclass(frozen=True)
class Notes:
    """Functions that read (None if absent) and write notes. By default no note is kept."""

    read: Callable[[str], str | None] = lambda name: None
    write: Callable[[str, str], None] = lambda name, text: None
