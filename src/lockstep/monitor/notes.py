"""What a start of the ranks leaves for the next one, where something outlives them: short texts by name."""

from __future__ import annotations

from typing import Protocol

FOLDER = "folder"
"""The name under which a run's folder is noted."""


class Notes(Protocol):
    """Texts that outlive the ranks which write them."""

    def read(self, name: str) -> str:
        """Return the text, "" where there is none."""

    def write(self, name: str, text: str) -> None:
        """Keep the text under this name, in the place of an earlier one."""


class NoNotes:
    """Notes of ranks that are started once: nobody reads them."""

    def read(self, name: str) -> str:
        """Return ""."""
        return ""

    def write(self, name: str, text: str) -> None:
        """Keep nothing."""
