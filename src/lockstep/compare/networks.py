"""What devices may be connected by: presets, a rate and a latency in words, or what `lockstep doctor` has measured.

A preset is a link's rate one way as its standard gives it, and the time of a small message between two programs. Of the
rate, all-reduces reach a part, which differs from machine to machine (NVIDIA's nccl-tests and `lockstep doctor` tell
it): between `_REACHED`'s ends, which the error bars hold.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RequestError, unknown
from ..files import parse_json, read, understanding
from . import numbers
from .timeline import Link

_REACHED = (0.5, 0.7, 0.9)
"""The part of the rate: pessimistic, typical, optimistic."""


class Links(NamedTuple):
    """A link as it is at worst, in the middle, and at best."""

    worst: Link
    middle: Link
    best: Link


_GBIT = 1e9 / 8
_ETHERNET_S = (50e-6, 30e-6, 15e-6)
_INFINIBAND_S = (15e-6, 8e-6, 3e-6)
_PCIE_S = (10e-6, 6e-6, 3e-6)
_NVLINK_S = (4e-6, 2e-6, 1e-6)
PRESETS: dict[str, tuple[float, tuple[float, float, float]]] = {
    **{f"{gbit}GbE": (gbit * _GBIT, _ETHERNET_S) for gbit in (1, 10, 25, 40, 100, 200, 400)},
    "InfiniBand-EDR": (100 * _GBIT, _INFINIBAND_S),
    "InfiniBand-HDR": (200 * _GBIT, _INFINIBAND_S),
    "InfiniBand-NDR": (400 * _GBIT, _INFINIBAND_S),
    "PCIe3": (15.75e9, _PCIE_S),
    "PCIe4": (31.5e9, _PCIE_S),
    "PCIe5": (63e9, _PCIE_S),
    "NVLink2": (150e9, _NVLINK_S),
    "NVLink3": (300e9, _NVLINK_S),
    "NVLink4": (450e9, _NVLINK_S),
    "NVLink5": (900e9, _NVLINK_S),
}
"""{name: (bytes/s one way, seconds of a small message at worst, in the middle, at best)}; PCIe: 16 lanes."""
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": _GBIT, "mb": 1e6, "gb": 1e9}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_WORDS = re.compile(r"([\d.]+)\s*([kmg]bit|[mg]b)(?:/s)?\s*,\s*([\d.]+)\s*(us|µs|ms|s)", re.IGNORECASE)
_RATE_ALONE = re.compile(r"[\d.]+\s*([kmg]bit|[mg]b)(/s)?", re.IGNORECASE)
_SIZE = re.compile(r"all-(reduce|gather) (\d+) (B|KiB|MiB|GiB)")
_BESIDE = "computation beside all-reduce"
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def links(flag: str, text: str) -> Links:
    """Return the link that `flag`'s value names. Raises `RequestError` for what is none, with the nearest names."""
    by_name = {name.lower(): name for name in PRESETS}
    if (name := by_name.get(text.lower())) is not None:
        rate, latencies_s = PRESETS[name]
        worst, middle, best = (
            Link.of(part * rate, latency_s) for part, latency_s in zip(_REACHED, latencies_s, strict=True)
        )
        return Links(worst, middle, best)
    if found := _WORDS.fullmatch(text.strip()):
        number, unit, seconds, time = found.groups()
        try:
            rate, latency_s = float(number) * _RATES[unit.lower()], float(seconds) * _TIMES[time.lower()]
        except ValueError:
            rate = 0.0
        if rate > 0:
            link = Link.of(rate, latency_s)
            return Links(link, link, link)
    if text.endswith(".json"):
        told = []
        for path in map(Path, text.split(",")):
            with understanding(path):
                told.append(exchanges(parse_json(read(path))))
        return measured(told)
    if _RATE_ALONE.fullmatch(text.strip()):
        raise RequestError(f"{flag} {text} lacks the latency of a message: give {text},50us or what it is there.")
    if "/" in text:
        raise RequestError(f"{flag} {text} is no folder, and no network; give the folder of a run, or 10Gbit/s,50us.")
    advice = (
        f"There are {', '.join(PRESETS)}. A rate and a latency, such as 10Gbit/s,50us, FILE.json of lockstep doctor "
        "--json and the folder of a run are taken too."
    )
    raise unknown(f"network of {flag}", text, PRESETS, advice)


def measured(told: Sequence[Exchanges]) -> Links:
    """Return the link that was measured once or more.

    How much one time differs from the next is the link's uncertainty; of once, nothing is known of it. Raises
    `RequestError` where nothing was measured.
    """
    sizes = sorted(set.intersection(*(set(each.messages_s) for each in told)))
    if len(sizes) < 2:
        raise RequestError("What lockstep doctor has printed holds no all-reduce: give it --devices 2 or more.")
    error = numbers.of_next([[each.messages_s[size_bytes] for each in told] for size_bytes in sizes])
    means = [statistics.fmean(each.messages_s[size_bytes] for each in told) for size_bytes in sizes]
    # A longer message that came sooner is noise.
    points = tuple(zip(sizes, itertools.accumulate(means, max), strict=True))
    middle = Link(
        points, statistics.fmean(each.gather_s for each in told), statistics.fmean(each.beside for each in told)
    )
    return Links(middle.slower(1 + error), middle, middle.slower(1 / (1 + error)))


class Exchanges(NamedTuple):
    """What `lockstep doctor` has found of a link, once."""

    messages_s: dict[float, float]
    """{bytes: seconds of a message}, of all-reduces: in a ring of N, 2 (N - 1) of an N-th part, one after another."""
    gather_s: float
    """Seconds that a message of an all-gather takes longer: of the N - 1 of a ring."""
    beside: float
    """As `Link.beside`."""


def exchanges(told: dict[str, Any]) -> Exchanges:
    """Return the link of what `lockstep doctor --json` has printed."""
    ranks = int(told["ranks"])
    found, gather_s, beside = {}, 0.0, 0.0
    for finding in told["findings"] if ranks > 1 else ():
        if finding["name"] == _BESIDE:
            beside = float(finding["value"])
        elif size := _SIZE.fullmatch(finding["name"]):
            size_bytes, seconds = int(size[2]) * _BYTES[size[3]], float(finding["value"])
            if size[1] == "reduce":
                found[size_bytes / ranks] = seconds / (2 * (ranks - 1))
            elif len(found) > 1:  # it comes after them
                gather_s = seconds / (ranks - 1) - Link(tuple(sorted(found.items()))).message_s(size_bytes)
    return Exchanges(found, gather_s, beside)
