"""Short texts that one start of the ranks leaves for the next."""

from collections.abc import Callable
from dataclasses import dataclass

FOLDER = "folder"
"""The note with the run's folder."""


@dataclass(frozen=True)
class Notes:
    """How notes are read ("" for none) and written; by default none is kept."""

    read: Callable[[str], str] = lambda name: ""
    write: Callable[[str, str], None] = lambda name, text: None
