"""The time of one step on several ranks.

Between two points of a measured step is computation, with one sample per measured step; `traffic` has the exchanges of
several ranks at these points. docs/forecast.md describes the layout of N ranks. No parameter is fitted to a measured
step of several ranks.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from .traffic import ALL_GATHER, ALL_REDUCE, BROADCAST, END, GRADIENT, Collective, Profile, traffic


@dataclass(frozen=True)
class Link:
    """A link: (bytes, seconds until a message arrives), interpolated by size."""

    points: tuple[tuple[float, float], ...]
    gather_s: float = 0.0  # additional seconds of an all-gather's message over an all-reduce's
    beside: float = 0.0
    """Additional seconds per second of simultaneous message and computation: 1 if both always need the same processor,
    0 if neither slows the other."""

    @classmethod
    def of(cls, bytes_per_s: float, latency_s: float) -> Link:
        """Return a link of this rate, one way, and latency."""
        return cls(((0.0, latency_s), (bytes_per_s, latency_s + 1.0)))

    @property
    def latency_s(self) -> float:
        """Seconds of a small message."""
        return self.points[0][1]

    def message_s(self, size_bytes: float) -> float:
        """Return the seconds of a message."""
        smallest, latency_s = self.points[0]
        if size_bytes <= smallest:
            return latency_s
        (a, a_s), (b, b_s) = next(
            (pair for pair in zip(self.points, self.points[1:], strict=False) if size_bytes <= pair[1][0]),
            self.points[-2:],
        )
        return a_s + (b_s - a_s) / (b - a) * (size_bytes - a)

    def behind(self, other: Link) -> Link:
        """Return the two links one after the other."""
        largest = max(self.points[-1][0], other.points[-1][0])
        shares = [(link.message_s(largest), link.beside) for link in (self, other)]
        beside = sum(seconds * cost for seconds, cost in shares) / sum(seconds for seconds, _ in shares)
        sizes = sorted({size_bytes for size_bytes, _ in (*self.points, *other.points)})
        points = tuple((size, self.message_s(size) + other.message_s(size)) for size in sizes)
        return Link(points, self.gather_s + other.gather_s, beside)

    def slower(self, factor: float) -> Link:
        """Return a link whose messages take `factor` times as long."""
        points = tuple((size_bytes, seconds * factor) for size_bytes, seconds in self.points)
        return Link(points, self.gather_s * factor, self.beside)

    def instant(self) -> Link:
        """Return the link without latency."""
        points = tuple((size_bytes, max(0.0, seconds - self.latency_s)) for size_bytes, seconds in self.points)
        return Link(points, beside=self.beside)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Nodes of `per_node` devices, linked `within` and `between` nodes."""

    between: Link
    within: Link
    per_node: int = 1
    has_trees: bool = False  # whether the library may sum along trees (NCCL), or only along a ring (gloo)

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce.

        In a ring (Patarasuk & Yuan, 2009), or two trees where they are faster (Sanders, Speck & Träff, 2009).
        """
        ring_s = 2 * self._around_s(size_bytes / ranks, ranks)
        if not self.has_trees or ranks == 1:
            return ring_s
        hops_s = math.ceil(math.log2(self._nodes(ranks))) * self.between.latency_s
        hops_s += (min(self.per_node, ranks) - 1) * self.within.latency_s
        return min(ring_s, 2 * (hops_s + self._transfer_s(size_bytes, ranks)))

    def all_gather_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-gather in a ring. `size_bytes` are each rank's."""
        return max(0.0, self._around_s(size_bytes, ranks) + (ranks - 1) * self.outer(ranks).gather_s)

    def broadcast_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of a broadcast: around a ring in small pieces (NCCL), or along a binomial tree (gloo)."""
        if self.has_trees:
            return self._hops_s(ranks) + self._transfer_s(size_bytes, ranks)
        return math.ceil(math.log2(ranks)) * (self.outer(ranks).latency_s + self._transfer_s(size_bytes, ranks))

    def collective_s(self, collective: Collective) -> float:
        """Return the seconds of a collective, as a mean over steps."""
        network, size_bytes, ranks = self, collective.bytes, collective.ranks
        if not size_bytes:
            return 0.0
        if collective.stride > 1:
            network = replace(self, per_node=max(1, self.per_node // collective.stride))
            if network._nodes(ranks) > 1:  # through the node's link, together with their like
                size_bytes *= min(collective.stride, self.per_node)
        if collective.kind == ALL_REDUCE:
            seconds = network.all_reduce_s(size_bytes, ranks)
        elif collective.kind == BROADCAST:
            seconds = network.broadcast_s(size_bytes, ranks)
        elif collective.kind == ALL_GATHER:
            seconds = network.all_gather_s(size_bytes / ranks, ranks)
        else:
            seconds = network._around_s(size_bytes / ranks, ranks)
        return collective.share * seconds

    def outer(self, ranks: int) -> Link:
        """Return the outermost link that the ranks need."""
        return self.between if self._nodes(ranks) > 1 else self.within

    def instant(self) -> Network:
        """Return the network without latency."""
        return replace(self, between=self.between.instant(), within=self.within.instant())

    def _around_s(self, size_bytes: float, ranks: int) -> float:
        return self._hops_s(ranks) + (ranks - 1) * self._transfer_s(size_bytes, ranks) if ranks > 1 else 0.0

    def _hops_s(self, ranks: int) -> float:
        between = self._nodes(ranks) - 1
        return between * self.between.latency_s + (ranks - 1 - between) * self.within.latency_s

    def _nodes(self, ranks: int) -> int:
        return math.ceil(ranks / self.per_node)

    def _transfer_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of a transfer on the slowest link, without latency."""
        links = [self.between] * (self._nodes(ranks) > 1) + [self.within] * (self.per_node > 1)
        return max(link.message_s(size_bytes) - link.latency_s for link in links)


FREE = Network(between=Link.of(math.inf, 0.0), within=Link.of(math.inf, 0.0))  # exchanges take no time


def step_s(profile: Profile, ranks: int, network: Network) -> float:
    """Return the seconds of a step on `ranks` such ranks."""
    *gaps, tail = profile.seconds.T
    cost = 1 + network.outer(ranks).beside
    # From the moment when all gradients are ready: the optimizer's step, then the next step up to that moment.
    now_s, since, computed_s = 0.0, np.zeros_like(tail), 0.0
    left_s, later_s = 0.0, 0.0  # of exchanges in progress; of those after the last prefetch

    def compute() -> None:
        """Advance until the slowest rank has computed `since`."""
        nonlocal now_s, computed_s, left_s
        more_s = max(0.0, _slowest_of(since, ranks) - computed_s)
        both_s = min(more_s, left_s)
        now_s, computed_s, left_s = now_s + both_s * cost + more_s - both_s, computed_s + more_s, left_s - both_s

    by_moment: defaultdict[int, list[Collective]] = defaultdict(list)
    for collective in traffic(profile, ranks):
        by_moment[collective.moment].append(collective)
    for moment, gap in enumerate((tail, *gaps), END):  # which is -1: right before point 0
        since += gap
        for collective in by_moment.get(moment, ()):
            compute()
            seconds = network.collective_s(collective)
            if collective.is_awaited or collective.is_prefetch:
                waited_s = left_s if collective.is_awaited else max(0.0, left_s - later_s)
                now_s, left_s, later_s = now_s + waited_s, left_s - waited_s, min(later_s, left_s - waited_s)
                since, computed_s = np.zeros_like(since), 0.0
            if collective.is_awaited:
                now_s += seconds
            else:
                left_s, later_s = left_s + seconds, 0.0 if collective.is_prefetch else later_s + seconds
    compute()
    return now_s + left_s


def data_parallel_s(profile: Profile, ranks: int, network: Network) -> float:
    """Return the seconds of a step of torch's DataParallel.

    Nothing overlaps, and statistics are not exchanged. Weights are sent to all devices before the forward pass and
    gradients summed on the first after the backward pass.
    """
    size_bytes = sum(point.bytes for point in profile.points if point.kind == GRADIENT)
    exchange_s = network.all_reduce_s(size_bytes, ranks)  # a broadcast and a reduction
    return _slowest_of(profile.seconds.sum(1), ranks) + exchange_s


def _slowest_of(values: np.ndarray, ranks: int) -> float:
    """Return the expected maximum of N draws from samples, by order statistics.

    Assumes no distribution. For more ranks than samples, the result is at least a normal distribution's (Blom, 1958).
    """
    samples = len(values)
    by_order = float(np.sort(values) @ np.diff((np.arange(samples + 1) / samples) ** ranks))
    if not ranks > samples > 1:
        return by_order
    far = statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return max(by_order, float(values.mean() + far * values.std(ddof=1)))
