"""Law 5: the order is a permutation, a function of (seed, epoch), uniform enough, and costs O(1) memory."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import counter
from lockstep.data.order import CHUNK, Order


def whole(samples: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Order(samples, seed=seed, epoch=epoch).indices(0, samples)


def test_each_sample_exactly_once() -> None:
    for samples in (0, 1, 2, 3, 4, 5, 7, 8, 9, 1437, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17):
        assert np.array_equal(np.sort(whole(samples)), np.arange(samples))


@given(st.integers(0, 3000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_each_sample_exactly_once_for_any_seed(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(whole(samples, seed=seed, epoch=epoch)), np.arange(samples))


@given(st.data())
def test_any_slice_is_a_slice_of_the_same_order(data: st.DataObject) -> None:
    samples = data.draw(st.sampled_from([5, 1437, 2 * CHUNK + 11]))
    order, expected = Order(samples, seed=3, epoch=1), whole(samples, seed=3, epoch=1)
    for _ in range(3):
        start = data.draw(st.integers(0, samples))
        stop = data.draw(st.integers(start, samples))
        assert np.array_equal(order.indices(start, stop), expected[start:stop])


def test_seed_and_epoch_change_the_order() -> None:
    orders = [tuple(whole(100, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100
    assert tuple(whole(100, seed=7, epoch=3)) == orders[73]


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_all_24_orders_of_four_samples_are_equally_likely() -> None:
    number = {order: place for place, order in enumerate(itertools.permutations(range(4)))}
    seen = [number[tuple(whole(4, seed=seed).tolist())] for seed in range(7200)]
    assert chi_square(np.bincount(seen, minlength=24)) < 60  # 23 degrees of freedom: above 60 once in 30,000


def test_each_sample_comes_to_each_position_equally_often() -> None:
    orders = np.stack([whole(13, seed=5, epoch=epoch) for epoch in range(3900)])
    for position in range(13):
        assert chi_square(np.bincount(orders[:, position], minlength=13)) < 42  # 12 degrees: once in 30,000


@pytest.mark.parametrize("samples", [101, 128])
def test_neighbours_in_the_order_are_unrelated(samples: int) -> None:
    steps = [np.diff(whole(samples, seed=9, epoch=epoch)) % samples for epoch in range(40_000 // samples)]
    counts = np.bincount(np.concatenate(steps), minlength=samples)[1:]
    degrees = samples - 2
    assert chi_square(counts) < degrees + 4.5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("samples", [10**9, 2**62])
def test_a_huge_data_set_costs_no_memory(samples: int) -> None:
    tracemalloc.start()
    order = Order(samples, seed=0, epoch=0)
    part = np.concatenate([order.indices(start, start + 1000).copy() for start in (0, samples // 2, samples - 1000)])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10e6
    assert len(np.unique(part)) == 3000
    assert part.min() >= 0
    assert part.max() < samples
    assert abs(part.mean() / samples - 0.5) < 5 / 12**0.5 / 3000**0.5


def test_random_numbers_are_the_published_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 1234567, as in the reference implementation's test vectors.
    words = counter.bits(np.array([1234567], np.uint64), np.arange(3))
    assert words.tolist() == [[6457827717110365317, 3203168211198807973, 9817491932198370423]]


def test_keys_are_frozen() -> None:
    assert counter.key(0, 1, 2) == 8796784308686151588
    assert counter.keys(2, 0, 1, 2).tolist() == [5469611413434694482, 2710547988631909741]


def test_numbers_are_uniform() -> None:
    random = counter.bits(counter.keys(2, 1), np.arange(50_000))
    for row in random:
        assert chi_square(np.bincount(counter.below(9, row), minlength=9)) < 32  # 8 degrees: once in 10,000
        fractions = counter.uniform(row)
        assert fractions.min() >= 0
        assert fractions.max() < 1
        assert abs(fractions.mean() - 0.5) < 4 / (12 * 50_000) ** 0.5
    assert abs(np.asarray(np.corrcoef(counter.uniform(random)))[0, 1]) < 4 / 50_000**0.5
