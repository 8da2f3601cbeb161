"""What a proof writes: beside what is there in the folder's proof.md and summary.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ... import proof
from ...proof import Check


def unwritten(folder: Path, checks: Iterable[Check]) -> str:
    """Add the checks to the folder's files; return why that could not be done, "" where it was."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        proof.add(folder, checks)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # not writable, or not what we have written
        foreign = isinstance(error, TypeError | AttributeError)
        why = f"its {proof.SUMMARY} is none of ours" if foreign else getattr(error, "strerror", None) or error
        return f"{proof.SHEET} and {proof.SUMMARY} in {folder} could not be written ({why}); the verdict stands."
    return ""
