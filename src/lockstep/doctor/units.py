"""Numbers for people: bytes, rates and times with their units."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(count: float) -> str:
    """Return a number of bytes as memory is counted: 64 KiB, 1.5 GiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if count >= factor:
            return f"{_three(count / factor)} {unit}"
    return f"{count:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Return bytes in a second as links are sold: 1.25 GB/s is 10 Gbit/s."""
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{_three(bytes_per_s / factor)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def span(seconds: float) -> str:
    """Return a time: 0.15 ms, 3.2 s."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def _three(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
