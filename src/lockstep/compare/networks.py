"""Links between devices: presets, described in words, or measured by `lockstep doctor`.

A preset is a link's rate one way by its standard, and the time of a small message between two programs. All-reduces
reach a part of the rate, which differs between machines (NVIDIA's nccl-tests and `lockstep doctor` measure it): between
`_REACHED`'s ends, which the error bars hold.
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

_REACHED = (0.5, 0.7, 0.9)  # the part of the rate: pessimistic, typical, optimistic


class Links(NamedTuple):
    """A link at worst, in the middle, and at best."""

    worst: Link
    middle: Link
    best: Link


_GBIT = 1e9 / 8
_INFINIBAND_S, _PCIE_S, _NVLINK_S = (15e-6, 8e-6, 3e-6), (10e-6, 6e-6, 3e-6), (4e-6, 2e-6, 1e-6)
PRESETS: dict[str, tuple[float, tuple[float, float, float]]] = {
    **{f"{gbit}GbE": (gbit * _GBIT, (50e-6, 30e-6, 15e-6)) for gbit in (1, 10, 25, 40, 100, 200, 400)},
    **{
        f"InfiniBand-{kind}": (gbit * _GBIT, _INFINIBAND_S) for kind, gbit in (("EDR", 100), ("HDR", 200), ("NDR", 400))
    },
    **{f"PCIe{number}": (rate, _PCIE_S) for number, rate in ((3, 15.75e9), (4, 31.5e9), (5, 63e9))},
    **{f"NVLink{number}": (rate, _NVLINK_S) for number, rate in ((2, 150e9), (3, 300e9), (4, 450e9), (5, 900e9))},
}
"""{name: (bytes/s one way, seconds of a small message at worst, in the middle, at best)}; PCIe: 16 lanes."""
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": _GBIT, "mb": 1e6, "gb": 1e9}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?)"
_WORDS = re.compile(rf"{_NUMBER}\s*([kmg]bit|[mg]b)(?:/s)?\s*,\s*{_NUMBER}\s*(us|µs|ms|s)", re.IGNORECASE)
_SIZE = re.compile(r"all-(reduce|gather) (\d+) (B|KiB|MiB|GiB)")
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def links(flag: str, text: str) -> Links:
    """Return the link that the value of `flag` names.

    Raises `RequestError` for an unknown one, with the nearest names.
    """
    preset = {name.lower(): found for name, found in PRESETS.items()}.get(text.lower())
    if preset is not None:
        return Links(
            *(Link.of(part * preset[0], latency_s) for part, latency_s in zip(_REACHED, preset[1], strict=True))
        )
    if (found := _WORDS.fullmatch(text.strip())) and (rate := float(found[1]) * _RATES[found[2].lower()]):
        link = Link.of(rate, float(found[3]) * _TIMES[found[4].lower()])
        return Links(link, link, link)
    if text.endswith(".json"):
        return examined([Path(each) for each in text.split(",")])
    advice = (
        f"There are {', '.join(PRESETS)}. Or give a rate and a latency, such as 10Gbit/s,50us; FILE.json of lockstep "
        "doctor --json; or the folder of a run."
    )
    raise unknown(f"network of {flag}", text, PRESETS, advice)


def examined(paths: Sequence[Path]) -> Links:
    """Return the link of files of `lockstep doctor --json`. Raises as `measured` does."""
    told = []
    for path in paths:
        with understanding(path):
            told.append(exchanges(parse_json(read(path))))
    return measured(told)


def exchanges(told: dict[str, Any]) -> Link:
    """Read a link from the output of `lockstep doctor --json`. Without points where it has no all-reduce.

    A ring of N has made 2 (N - 1) messages of an N-th part, one after another; of an all-gather, N - 1 whole ones.
    """
    ranks = int(told["ranks"])
    found, gather_s, beside = {}, 0.0, 0.0
    for finding in told["findings"] if ranks > 1 else ():
        if finding["name"] == "computation beside all-reduce":
            beside = float(finding["value"])
        elif size := _SIZE.fullmatch(finding["name"]):
            size_bytes, seconds = int(size[2]) * _BYTES[size[3]], float(finding["value"])
            if size[1] == "reduce":
                found[size_bytes / ranks] = seconds / (2 * (ranks - 1))
            elif len(found) > 1:  # it comes after them
                gather_s = seconds / (ranks - 1) - Link(tuple(sorted(found.items()))).message_s(size_bytes)
    return Link(tuple(sorted(found.items())), gather_s, beside)


def measured(told: Sequence[Link]) -> Links:
    """Return the link of one or more measurements.

    Its uncertainty is the variation between times; of one measurement, nothing is known of it. Raises `RequestError`
    for no measurement.
    """
    times_s = [dict(each.points) for each in told]
    sizes = sorted(set.intersection(*map(set, times_s)))
    if len(sizes) < 2:
        raise RequestError("What lockstep doctor has printed holds no all-reduce: give it --devices 2 or more.")
    groups = [[each[size_bytes] for each in times_s] for size_bytes in sizes]
    error = numbers.of_next(groups)
    # A longer message that came sooner is noise.
    points = tuple(zip(sizes, itertools.accumulate(map(statistics.fmean, groups), max), strict=True))
    gather_s, beside = statistics.fmean(each.gather_s for each in told), statistics.fmean(each.beside for each in told)
    middle = Link(points, gather_s, beside)
    return Links(middle.slower(1 + error), middle, middle.slower(1 / (1 + error)))
