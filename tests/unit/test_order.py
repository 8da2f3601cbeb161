"""Law 5: the order is a permutation, a function of (seed, epoch), uniform enough, and costs O(1) memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import counter
from lockstep.data.order import CHUNK, Order


def whole(samples: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Order(samples, seed=seed, epoch=epoch).indices(0, samples)


@given(st.integers(0, 3000), st.integers(0, 2**63 - 1), st.floats(0, 1), st.floats(0, 1))
def test_each_sample_exactly_once(any_size: int, seed: int, first: float, second: float) -> None:
    for samples in (any_size, 0, 1, 2, 3, 4, 5, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17):
        found = whole(samples, seed=seed, epoch=1)
        assert np.array_equal(np.sort(found), np.arange(samples))
        start, stop = sorted((round(first * samples), round(second * samples)))
        assert np.array_equal(Order(samples, seed=seed, epoch=1).indices(start, stop), found[start:stop])


def test_seed_and_epoch_change_the_order() -> None:
    orders = [tuple(whole(100, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100
    assert tuple(whole(100, seed=7, epoch=3)) == orders[73]


def test_all_24_orders_of_four_samples_are_equally_likely() -> None:
    counts = Counter(tuple(whole(4, seed=seed).tolist()) for seed in range(7200))
    assert len(counts) == 24
    assert sum((count - 300) ** 2 / 300 for count in counts.values()) < 23 + 4.5 * 46**0.5  # χ²


def test_neighbours_in_the_order_are_unrelated() -> None:
    steps = [np.diff(whole(101, seed=9, epoch=epoch)) % 101 for epoch in range(400)]
    counts = np.bincount(np.concatenate(steps), minlength=101)[1:]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 4.5 * 198**0.5  # χ²


@pytest.mark.parametrize("samples", [10**9, 2**62])
def test_a_huge_data_set_costs_no_memory(samples: int) -> None:
    tracemalloc.start()
    order = Order(samples, seed=0, epoch=0)
    part = np.concatenate([order.indices(start, start + 1000).copy() for start in (0, samples // 2, samples - 1000)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10e6
    assert len(np.unique(part)) == 3000
    assert 0 <= part.min() <= part.max() < samples


def test_random_numbers_stay_the_same() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as in the reference implementation's test vectors.
    words = counter.bits(np.array([1234567], np.uint64), np.arange(3))
    assert words.tolist() == [[6457827717110365317, 3203168211198807973, 9817491932198370423]]
    assert counter.keys(2, 0, 1, 2).tolist() == [5469611413434694482, 2710547988631909741]
