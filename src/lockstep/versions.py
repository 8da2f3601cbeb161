"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """Return the version of `package`; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
