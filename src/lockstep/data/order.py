"""Order of an epoch: slices of a keyed permutation, in constant memory.

A stored permutation of 10⁹ samples takes 8 GB on every rank. Instead, position p's sample is *computed* by a block
cipher on [0, 2**b), 2**b being the smallest power of two that is not below n: a Feistel network, each round of which
can be undone (Luby & Rackoff, 1988). Where a value falls at or above n, the network is applied again: "cycle walking"
(Black & Rogaway, 2002), again a bijection, in fewer than two passes on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import counter

SHUFFLED, ASCENDING, OF_A_SAMPLER = "shuffled by the seed", "ascending", "a sampler's own"
"""Orders of an epoch; of a sampler's own, only that each sample comes once is known."""
CHUNK = 65_536
"""Positions enciphered at a time and kept, so that small consecutive slices are plain slices of an array."""
ROUNDS = 10
"""Rounds of the network. With 10, the 24 orders of 4 samples, the hardest case, are equally likely within 0.4%."""
_MULTIPLIERS = (np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15))


class Order:
    """Order of an epoch's samples, from (`samples`, `seed`, `epoch`) alone."""

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
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _hash(low, key, self._high_bits)
            else:
                low ^= _hash(high, key, self._low_bits)
        return (high << self._low_bits) | low


def _hash(half: counter.UInt64, key: np.uint64, bits: np.uint64) -> counter.UInt64:
    """Return the highest `bits` bits of a keyed hash, its best. half is (n,); 0 for no bits."""
    words = half + key
    words *= _MULTIPLIERS[0]
    words ^= words >> np.uint64(32)
    words *= _MULTIPLIERS[1]
    words >>= np.uint64(64) - bits
    return words
