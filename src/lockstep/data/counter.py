"""Counter-based random numbers: hashes of (seed, epoch, purpose, sample).

They do not depend on rank, worker or history (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
The hash is SplitMix64's finalizer (Steele, Lea & Flood, OOPSLA 2014), in 64-bit integers on the host.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

UNIT = 2.0**-53
"""Spacing of the numbers of `uniform`."""
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))


def key(*words: int) -> int:
    """Return a 64-bit key for a tuple of integers; the order matters."""
    state = len(words)
    for word in words:
        state = int(_mix(np.array([(state * _GOLDEN + word + _GOLDEN) % 2**64], np.uint64))[0])
    return state


@lru_cache(maxsize=64)
def keys(count: int, *words: int) -> UInt64:
    """Return `count` different 64-bit keys (count,) for a tuple of integers; read-only."""
    result = bits(np.array([key(*words)], np.uint64), np.arange(count)).reshape(count)
    result.flags.writeable = False
    return result


def bits(keys: UInt64, indices: npt.NDArray[np.int64]) -> UInt64:
    """Return 64 random bits per key and index. `keys` (k,) and `indices` (n,) give (k, n)."""
    return _mix(keys[:, None] + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))


def below(bound: int, random: UInt64) -> npt.NDArray[np.int64]:
    """Return integers in [0, bound) from random bits. Their probabilities differ by at most bound ÷ 2³², relative."""
    return ((random >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def uniform(random: UInt64) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) from random bits, as multiples of 2⁻⁵³."""
    return numerators(random).astype(np.float64) * UNIT


def numerators(random: UInt64) -> npt.NDArray[np.int64]:
    """Return the numbers of `uniform` in multiples of `UNIT`."""
    return (random >> np.uint64(11)).view(np.int64)


def _mix(words: UInt64) -> UInt64:
    words ^= words >> _SHIFT[0]
    words *= _MIX[0]
    words ^= words >> _SHIFT[1]
    words *= _MIX[1]
    words ^= words >> _SHIFT[2]
    return words
