"""The versions of packages, as their installers wrote them down."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str | None:
    """Return the version of `package`; None where it is not installed, but perhaps lies on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
