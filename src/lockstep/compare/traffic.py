"""The exchanges of a step on several ranks, by the method of data parallelism, and the memory of a rank.

Both follow from the measured step of one rank. It is a list of points: BatchNorm exchanges its statistics, a block of
the model begins its forward or backward pass, or a gradient is ready. docs/forecast.md describes each method.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..config.registry import EXCHANGE_EVERY, KINDS, RARE

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DistributedDataParallel's defaults (torch.nn.parallel.DistributedDataParallel, `bucket_cap_mb`)."""
GATHER, REDUCE, FORWARD, BACKWARD, GRADIENT = "gather", "reduce", "forward", "backward", "gradient"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
BROADCAST = "broadcast"
END = -1  # the moment after the optimizer's step
_HEADER_BYTES, _WIRE_BYTES = 40, 2  # of the rows that ranks compare in each step; of a number under bf16 and fp16


class Point(NamedTuple):
    """A moment in a step; the bytes of its statistics or gradient; the number of its block or parameter."""

    kind: str
    bytes: int
    number: int = -1


class Parameter(NamedTuple):
    """A parameter of the measured job."""

    shape: Sequence[int]
    bytes: int
    is_trained: bool
    state_bytes: int
    """Of its optimizer state."""
    block: int = -1
    """Number of the block that gathers it under fsdp; -1 for none."""
    low_rank: int = 0
    """Rank of its matrices under powersgd; 0: its gradient is summed as it is."""

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def padded_bytes(self, ranks: int) -> int:
        """Return its bytes on all of `ranks` ranks, which have equally many rows."""
        rows = self.shape[0]
        return self.bytes // rows * -(-rows // ranks) * ranks if rows else 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured steps of one rank with `batch` samples each, and the method by which the job is to train."""

    batch: int
    points: tuple[Point, ...]
    seconds: np.ndarray
    """(steps, points + 1): of computation before each point, from the end of the last step; then after all points."""
    strategy: str = "ddp"
    exchange: str = "full"
    every: float = EXCHANGE_EVERY  # steps between two exchanges of weights
    shard_size: int | None = None
    reshards: bool = True  # fsdp frees gathered weights after each forward pass
    on_gpu: bool = False
    parameters: tuple[Parameter, ...] = ()
    buffer_bytes: int = 0  # of floating-point buffers, and of averaged weights

    @classmethod
    def of(cls, batch: int, measured: Mapping[str, Any]) -> Profile:
        """Return the profile of `measured.measure_share`."""
        arrays = {
            "points": tuple(Point(*point) for point in measured["points"]),
            "seconds": np.array(measured["seconds"]),
            "parameters": tuple(Parameter(**parameter) for parameter in measured.get("parameters", ())),
        }
        return cls(batch=batch, **{**measured, **arrays})

    @property
    def step_s(self) -> float:
        """Seconds of a mean step."""
        return float(self.seconds.sum(1).mean())

    def scaled(self, factor: float, batch: int) -> Profile:
        """Return the profile with all seconds times `factor`, for another batch."""
        return replace(self, seconds=self.seconds * factor, batch=batch)

    @property
    def trained(self) -> list[Parameter]:
        """The parameters that train."""
        return [parameter for parameter in self.parameters if parameter.is_trained]

    @property
    def buckets(self) -> dict[int, list[Point]]:
        """{number of the point that sends a bucket: the bucket's gradients}."""
        gradients = [(moment, point) for moment, point in enumerate(self.points) if point.kind == GRADIENT]
        buckets: dict[int, list[Point]] = {}
        bucket: list[Point] = []
        for moment, point in gradients:
            bucket.append(point)
            limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            if sum(member.bytes for member in bucket) >= limit or moment == gradients[-1][0]:
                buckets[moment], bucket = bucket, []
        return buckets


class Collective(NamedTuple):
    """A collective of a step. `bytes` are of the whole tensor, such as an all-gather's result."""

    moment: int
    """Number of the point at which it begins, or `END`."""
    kind: str
    bytes: float
    ranks: int
    is_awaited: bool = False
    """Whether ranks wait for its end."""
    is_prefetch: bool = False
    """Whether it begins when the last prefetch has ended, for which ranks wait."""
    share: float = 1.0
    """Of the steps that have it."""
    stride: int = 1
    """Distance between its ranks; the ranks between them have a collective like it at the same time."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends around a ring, as a mean over ranks and steps."""
        return self.share * (1 + (self.kind == ALL_REDUCE)) * (self.ranks - 1) / self.ranks * self.bytes


def bytes_a_step(profile: Profile, ranks: int) -> float:
    """Return the bytes that a rank sends, as a mean over ranks and steps."""
    return sum(collective.sent_bytes for collective in traffic(profile, ranks))


def traffic(profile: Profile, ranks: int) -> list[Collective]:
    """Return the collectives of a step on several ranks."""
    if ranks == 1:
        return []
    last = max((moment for moment, point in enumerate(profile.points) if point.kind == GRADIENT), default=END)
    if profile.exchange in RARE:
        # Each rank steps and normalises alone. What differs after that is averaged.
        drifted = profile.buffer_bytes + sum(parameter.bytes + parameter.state_bytes for parameter in profile.trained)
        header = Collective(last, ALL_GATHER, ranks * _HEADER_BYTES, ranks, is_awaited=True)
        return [header, Collective(END, ALL_REDUCE, drifted, ranks, is_awaited=True, share=1 / profile.every)]
    collectives = [
        Collective(moment, ALL_REDUCE, point.bytes, ranks, is_awaited=True)
        if point.kind == REDUCE
        else Collective(moment, ALL_GATHER, ranks * point.bytes, ranks, is_awaited=True)
        for moment, point in enumerate(profile.points)
        if point.kind in (GATHER, REDUCE)
    ]
    if KINDS[profile.strategy].divides_weights:
        return [*collectives, *_sharded(profile, ranks)]
    for moment, bucket in profile.buckets.items():
        collectives += _bucket(profile, bucket, moment, last, ranks)
    if KINDS[profile.strategy].divides_state:
        weights = _loads([(parameter.bytes, parameter.bytes) for parameter in profile.trained], ranks)
        collectives += [Collective(END, BROADCAST, size_bytes, ranks, is_awaited=True) for size_bytes in weights]
    return collectives


def _bucket(profile: Profile, bucket: list[Point], moment: int, last: int, ranks: int) -> Iterator[Collective]:
    """Yield the collectives that sum a bucket of gradients."""
    if profile.exchange in ("bf16", "fp16"):
        size_bytes = _WIRE_BYTES * sum(profile.parameters[point.number].numbers for point in bucket)
        yield Collective(moment, ALL_TO_ALL, size_bytes, ranks)
        yield Collective(last, ALL_GATHER, size_bytes, ranks)
        return
    first_bytes, second_bytes = 0.0, 0.0
    for point in bucket:
        if profile.exchange == "powersgd" and (matrix := profile.parameters[point.number]).low_rank:
            columns = math.prod(matrix.shape[1:])
            first_bytes += matrix.low_rank * matrix.bytes / columns
            second_bytes += matrix.low_rank * matrix.bytes / matrix.shape[0]
        else:
            first_bytes += point.bytes
    yield Collective(moment, ALL_REDUCE, first_bytes, ranks)
    if second_bytes:
        yield Collective(last, ALL_REDUCE, second_bytes, ranks)


def _sharded(profile: Profile, ranks: int) -> Iterator[Collective]:
    """Yield the collectives of fully_shard. On GPUs, it gathers a block while the last one computes."""
    size = profile.shard_size or ranks
    weights: defaultdict[int, int] = defaultdict(int)
    gradients: defaultdict[int, int] = defaultdict(int)
    for parameter in profile.parameters:
        if parameter.block >= 0:
            weights[parameter.block] += parameter.padded_bytes(size)
            gradients[parameter.block] += parameter.is_trained * parameter.padded_bytes(size)
    passes = (FORWARD, BACKWARD) if profile.reshards else (FORWARD,)
    gathered = [
        (moment, weights[point.number])
        for moment, point in enumerate(profile.points)
        if point.kind in passes and weights[point.number]
    ]
    for number, (moment, size_bytes) in enumerate(gathered):
        if not profile.on_gpu or not number:
            yield Collective(moment, ALL_GATHER, size_bytes, size, is_awaited=True)
        if profile.on_gpu:
            next_bytes = gathered[number + 1][1] if number + 1 < len(gathered) else 0
            yield Collective(moment, ALL_GATHER, next_bytes, size, is_prefetch=True)
    ready = {
        profile.parameters[point.number].block: moment
        for moment, point in enumerate(profile.points)
        if point.kind == GRADIENT
    }
    kind, scale = REDUCE_SCATTER if profile.on_gpu else ALL_REDUCE, 1.0  # as torch's gloo does it
    if profile.exchange in ("bf16", "fp16"):
        first = profile.trained[0]
        kind, scale = ALL_TO_ALL, _WIRE_BYTES * first.numbers / first.bytes
    for block, moment in ready.items():
        if block >= 0:
            yield Collective(moment, kind, scale * gradients[block], size, is_awaited=not profile.on_gpu)
            if size < ranks:
                part = Collective(moment, ALL_REDUCE, gradients[block] / size, ranks // size, stride=size)
                yield part._replace(is_awaited=not profile.on_gpu)


def memory_bytes(profile: Profile, ranks: int, alone_bytes: float) -> float:
    """Return the peak memory of a rank, from that of a rank alone with whole weights, gradients and state."""
    trained, exchange = profile.trained, profile.exchange
    if ranks == 1:
        return alone_bytes
    trained_bytes = sum(parameter.bytes for parameter in trained)
    if exchange in RARE:  # the weights of the last exchange, and an outer momentum
        return alone_bytes + trained_bytes * (1 + (RARE[exchange][1] > 0))
    if exchange == "powersgd":  # errors, and copies of the gradients
        alone_bytes += 2 * sum(parameter.bytes for parameter in trained if parameter.low_rank)
    # Numbers that a rank sends and receives in 16 bits; of one message at a time, two copies in 32 bits.
    message_bytes, copies_bytes = (2 * _WIRE_BYTES, 2 * 4) if exchange in ("bf16", "fp16") else (0, 0)
    kind = KINDS[profile.strategy]
    if kind.divides_weights:
        size, blocks = profile.shard_size or ranks, defaultdict[int, float](float)
        for parameter in profile.parameters:
            if parameter.block >= 0:
                whole_bytes = parameter.bytes * (profile.reshards + parameter.is_trained)
                sent_bytes = parameter.is_trained * parameter.numbers * (message_bytes + copies_bytes)
                blocks[parameter.block] += whole_bytes + sent_bytes
                part = parameter.padded_bytes(size) / size / max(parameter.bytes, 1)
                parts_bytes = part * (parameter.bytes * (1 + parameter.is_trained) + parameter.state_bytes)
                alone_bytes += parts_bytes - whole_bytes - parameter.state_bytes
        return alone_bytes + max(blocks.values(), default=0.0)
    if message_bytes:
        buckets = profile.buckets.values()
        numbers = [sum(profile.parameters[point.number].numbers for point in bucket) for bucket in buckets]
        alone_bytes += message_bytes * sum(numbers) + copies_bytes * max(numbers, default=0)
    if kind.divides_state:
        states = [(parameter.bytes, parameter.state_bytes) for parameter in trained]
        return alone_bytes - sum(state for _, state in states) + max(_loads(states, ranks), default=0.0)
    return alone_bytes


def _loads(sizes: list[tuple[int, int]], ranks: int) -> list[int]:
    """Return the second sizes' sum on each rank that has any: the largest by the first go to the emptiest rank."""
    loads = [(0, rank) for rank in range(ranks)]
    sums: defaultdict[int, int] = defaultdict(int)
    for weight_bytes, size_bytes in sorted(sizes, key=lambda pair: -pair[0]):
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + weight_bytes, rank))
        sums[rank] += size_bytes
    return [*sums.values()]
