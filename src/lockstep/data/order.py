"""Order of an epoch: slices of a keyed permutation, in constant memory.

A stored permutation of 10⁹ samples takes 8 GB on every rank. Instead, the sample at position p is computed by a block
cipher on [0, 2**b), where 2**b is the smallest power of two not below n: a Feistel network, whose rounds are invertible
(Luby & Rackoff, 1988). A result of n or more is enciphered again: "cycle walking" (Black & Rogaway, 2002), which is
also a bijection, and takes fewer than two passes on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import counter

SHUFFLED, ASCENDING, OF_A_SAMPLER = "shuffled by the seed", "ascending", "a sampler's own"
"""Kinds of orders. The order of a user's sampler is unknown, except that each sample occurs once."""
CHUNK = 65_536
"""Positions enciphered and cached at a time: small consecutive slices are then array slices."""
ROUNDS = 10
"""Rounds of the network. With 10, the 24 orders of 4 samples, the hardest case, are equally probable within 0.4%."""
_MULTIPLIERS = (np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15))


class Order:
    """Order of an epoch's samples, a function of (`samples`, `seed`, `epoch`)."""

    def __init__(self, samples: int, *, seed: int, epoch: int) -> None:
        assert 0 <= samples <= 2**62, samples
        self.samples = samples
        bits = max(samples - 1, 0).bit_length()
        self._low_bits, self._high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self._keys = list(counter.keys(ROUNDS, seed, epoch, samples))
        self._chunk = np.empty(0, np.int64)
        self._chunk_start = 0

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the samples at positions [start, stop), (stop - start,) int64; read-only."""
        begin, end = start - self._chunk_start, stop - self._chunk_start
        if begin >= 0 and end <= len(self._chunk):
            return self._chunk[begin:end]  # the only cost of most steps
        assert 0 <= start <= stop <= self.samples, (start, stop, self.samples)
        self._chunk = self._compute(start, max(stop, min(start + CHUNK, self.samples)))
        self._chunk_start = start
        return self._chunk[: stop - start]

    def _compute(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        values = self._encipher(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.samples)
        while outside.size:
            values[outside] = walked = self._encipher(values[outside])
            outside = outside[walked >= self.samples]
        return values.view(np.int64)

    def _encipher(self, values: counter.UInt64) -> counter.UInt64:
        low_mask = (np.uint64(1) << self._low_bits) - np.uint64(1)
        high, low = values >> self._low_bits, values & low_mask
        for round_index, key in enumerate(self._keys):
            if round_index % 2:
                high ^= _hash(low, key, self._high_bits)
            else:
                low ^= _hash(high, key, self._low_bits)
        return (high << self._low_bits) | low


def _hash(half: counter.UInt64, key: np.uint64, bits: np.uint64) -> counter.UInt64:
    """Return the highest, best mixed `bits` bits of a keyed hash. `half` is (n,); the result is 0 for 0 bits."""
    words = half + key
    words *= _MULTIPLIERS[0]
    words ^= words >> np.uint64(32)
    words *= _MULTIPLIERS[1]
    words >>= np.uint64(64) - bits
    return words
