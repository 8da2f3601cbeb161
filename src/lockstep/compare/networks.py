"""Links between devices: presets, described in words, or measured by `lockstep doctor`.

A preset is a link's standard one-way rate, and the time of a small message between two programs. All-reduces reach a
part of that rate, which differs between machines (NVIDIA's nccl-tests and `lockstep doctor` measure it). The error bars
cover the parts in `_REACHED`.
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
    """Return the link named by the value of `flag`.

    Raises `RequestError` for an unknown name, with the nearest ones.
    """
    preset = {name.lower(): preset for name, preset in PRESETS.items()}.get(text.lower())
    if preset is not None:
        return Links(
            *(Link.of(part * preset[0], latency_s) for part, latency_s in zip(_REACHED, preset[1], strict=True))
        )
    if (match := _WORDS.fullmatch(text.strip())) and (rate := float(match[1]) * _RATES[match[2].lower()]):
        link = Link.of(rate, float(match[3]) * _TIMES[match[4].lower()])
        return Links(link, link, link)
    if text.endswith(".json"):
        return examined([Path(name) for name in text.split(",")])
    advice = (
        f"There are {', '.join(PRESETS)}. Or give a rate and a latency, such as 10Gbit/s,50us; FILE.json of lockstep "
        "doctor --json; or the folder of a run."
    )
    raise unknown(f"network of {flag}", text, PRESETS, advice)


def examined(paths: Sequence[Path]) -> Links:
    """Return the link of files of `lockstep doctor --json`. Raises as `measured` does."""
    measurements = []
    for path in paths:
        with understanding(path):
            measurements.append(exchanges(parse_json(read(path))))
    return measured(measurements)


def exchanges(report: dict[str, Any]) -> Link:
    """Read a link from the output of `lockstep doctor --json`; without points if that has no all-reduce.

    An all-reduce in a ring of N is 2 (N - 1) consecutive messages of an N-th part; an all-gather is N - 1 full ones.
    """
    ranks = int(report["ranks"])
    message_s, gather_s, beside = {}, 0.0, 0.0
    for finding in report["findings"] if ranks > 1 else ():
        if finding["name"] == "computation beside all-reduce":
            beside = float(finding["value"])
        elif size := _SIZE.fullmatch(finding["name"]):
            size_bytes, seconds = int(size[2]) * _BYTES[size[3]], float(finding["value"])
            if size[1] == "reduce":
                message_s[size_bytes / ranks] = seconds / (2 * (ranks - 1))
            elif len(message_s) > 1:  # the report lists it after the all-reduces
                gather_s = seconds / (ranks - 1) - Link(tuple(sorted(message_s.items()))).message_s(size_bytes)
    return Link(tuple(sorted(message_s.items())), gather_s, beside)


def measured(measurements: Sequence[Link]) -> Links:
    """Return the link of one or more measurements.

    Its uncertainty is the variation between measurements, 0 for a single one. Raises `RequestError` if they have no
    all-reduce.
    """
    times_s = [dict(link.points) for link in measurements]
    sizes = sorted(set.intersection(*map(set, times_s)))
    if len(sizes) < 2:
        raise RequestError("The output of lockstep doctor has no all-reduce: give it --devices 2 or more.")
    groups = [[times[size_bytes] for times in times_s] for size_bytes in sizes]
    error = numbers.of_next(groups)
    # A longer message that takes less time is noise.
    points = tuple(zip(sizes, itertools.accumulate(map(statistics.fmean, groups), max), strict=True))
    gather_s = statistics.fmean(link.gather_s for link in measurements)
    middle = Link(points, gather_s, statistics.fmean(link.beside for link in measurements))
    return Links(middle.slower(1 + error), middle, middle.slower(1 / (1 + error)))
