"""The digest sees every bit, whatever the dtype, the size, the place in memory and the order in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.verify.digest import _LAYERED, _LAYERS, differing, digest, digests, largest_gap

SIZES = (1, 3, 7, 8, 511, 512, 513, 4097, 70_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def _some(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (size * 8,), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        return values[:size] > 127
    return values[: size * torch.empty(0, dtype=dtype).element_size()].view(dtype)


def _flipped(tensor: Tensor, bit: int) -> Tensor:
    copy = tensor.clone()
    view = copy.view(-1).view(torch.uint8)
    view[bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_bit_is_seen_wherever_it_is(size: int, dtype: torch.dtype) -> None:
    tensor, other = _some(size, dtype), _some(1000, torch.float32, seed=1)
    before = int(digest([other, tensor]))
    assert before == int(digest([other.clone(), tensor.clone()]))
    bits = tensor.nbytes * 8
    for bit in {0, 1, 7, bits // 3, bits // 2, bits - 1}:
        if dtype == torch.bool:
            bit -= bit % 8  # a truth value has one bit that means something
        changed = _flipped(tensor, bit)
        assert int(digest([other, changed])) != before
        assert digests([other, changed]).tolist()[1] != digests([other, tensor]).tolist()[1]


@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_no_two_of_many_are_alike(seed: int, size: int) -> None:
    tensors = [_some(size, torch.float32, seed=seed + number) for number in range(8)]
    tensors += [_flipped(tensors[0], bit) for bit in range(32)]
    assert len({int(digest([tensor])) for tensor in tensors}) == len({tensor.numpy().tobytes() for tensor in tensors})


@pytest.mark.parametrize("tensor", [torch.arange(9), torch.randn(64), torch.arange(40_000), torch.zeros(0)], ids=len)
def test_what_is_digested_stays_as_it_is(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    digest([tensor])
    digests([tensor])
    assert torch.equal(tensor, before)


def test_tensors_that_change_places_are_seen() -> None:
    a, b, small = _some(70_001, torch.float32), _some(70_001, torch.float32, seed=1), _some(5, torch.float32, seed=2)
    assert len({int(digest(each)) for each in ([a, b, small], [b, a, small], [a, b, small, small])}) == 3
    few = [_some(size, torch.float32, seed=3) for size in (64, 63, 4000)]
    assert int(digest(few)) != int(digest([few[1], few[0], few[2]]))


@pytest.mark.parametrize("shape", [(64, 1024), (512, 512), (256, 64, 3, 3), (3, 5), (1000, 2)], ids=str)
def test_elements_and_rows_that_change_places_are_seen(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = int(digest([weight]))
    rows = weight.flatten(1)
    for first, second in ((0, 1), (0, 2), (1, len(rows) - 1), (len(rows) // 2, len(rows) // 2 - 1)):
        turned = rows.clone()
        turned[first], turned[second] = rows[second], rows[first]
        assert int(digest([turned.view(shape)])) != before
    flat = weight.view(-1)
    for distance in (1, 2, 3, 64, 512, 513):
        turned = flat.clone()
        turned[0], turned[distance % len(flat)] = flat[distance % len(flat)], flat[0]
        assert torch.equal(turned, flat) or int(digest([turned.view(shape)])) != before


@pytest.mark.parametrize("bit", [0, 5, 31, 63])
def test_one_bit_that_flips_in_two_words_is_seen(bit: int) -> None:
    # As a data line does that has gone bad; distances that are powers of two, which memory has.
    tensor = _some(300_000, torch.float32)
    before, words = int(digest([tensor])), tensor.view(torch.int64)
    mask = -(1 << 63) if bit == 63 else 1 << bit
    for distance in (1, 2, 8, 64, 512, 4096, 65_536):
        for start in (0, 7, 1000):
            changed = words.clone()
            changed[start] ^= mask
            changed[start + distance] ^= mask
            assert int(digest([changed.view(torch.float32)])) != before


def _rows(weight: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return weight[[*order, *range(len(order), len(weight))]]


MOVED = {
    "rows of ones and zeros": (torch.eye(8, dtype=torch.float64), (1, 0, 3, 2)),
    "more rows of them": (torch.eye(16), (1, 2, 3, 0)),
    "layers": (torch.randn(31, 1025, dtype=torch.float64), (5, 3, 1, 0, 2, 4)),
    "other layers": (torch.randn(29, 1130, dtype=torch.float64), (5, 3, 1, 0, 2, 4)),
    "pairs of rows in a layer": (torch.randn(62, 1025), (2, 3, 0, 1)),
}


@pytest.mark.parametrize("name", MOVED)
def test_rows_that_change_places_are_seen_within_two_turns(name: str) -> None:
    weight, order = MOVED[name]
    moved = _rows(weight, order)
    assert any(int(digest([weight], turn)) != int(digest([moved], turn)) for turn in (0, 1))
    assert digests([weight]).tolist() != digests([moved]).tolist()


def test_a_row_and_its_mirror_are_told_apart() -> None:
    weight = torch.randn(8, 4, dtype=torch.float64)
    weight[5] = weight[2].flip(0)
    assert int(digest([weight])) != int(digest([_rows(weight, (0, 1, 5, 3, 4, 2))]))


@pytest.mark.parametrize("size", [1, 3, 64, 40_001])
def test_all_bits_set_are_told_from_none(size: int) -> None:
    zeros = torch.zeros(size)
    ones = zeros.clone()
    ones.view(torch.int32).fill_(-1)
    assert int(digest([zeros])) != int(digest([ones]))
    assert int(digest([torch.tensor([5, 7])])) != int(digest([torch.tensor([~5, 7])]))


def test_no_two_words_meet_in_both_layerings() -> None:
    first, second = _LAYERS
    for words in range(_LAYERED, 4 * _LAYERED):
        depths = words // first, words // second
        assert math.lcm(*depths) >= min(first * depths[0], second * depths[1])


def test_a_column_of_a_matrix_is_digested() -> None:
    for length in (5, 50_000):
        column = torch.randn(length, 3)[:, 1]
        assert int(digest([column])) == int(digest([column.clone()]))


def test_a_tensor_of_many_pieces_is_digested_whole() -> None:
    tensor = torch.arange(3 * (1 << 22) + 5)  # words
    before = int(digest([tensor]))
    for at in (0, 1 << 22, len(tensor) - 1):
        changed = tensor.clone()
        changed[at] += 1
        assert int(digest([changed])) != before


def test_views_and_memory_orders_are_digested_where_they_lie() -> None:
    whole = _some(4096, torch.float32)
    assert int(digest([whole[1:1000]])) == int(digest([whole[1:1000].clone()]))
    image = whole.view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    assert int(digest([image])) == int(digest([image.clone()]))
    assert int(digest([image])) != int(digest([_flipped(image.permute(0, 2, 3, 1).contiguous(), 77)]))
    assert digests([torch.zeros(0), torch.tensor(1.5), torch.zeros(2, dtype=torch.complex64)]).shape == (3,)
    assert int(digest([torch.zeros(0)])) == int(digest([torch.zeros(0)]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_a_copy_that_differs_in_one_bit_is_named(dtype: torch.dtype) -> None:
    own = {f"model/{size}": _some(size, dtype, seed=size) for size in (5, 70_001)}
    for name, tensor in own.items():
        for bit in (0, tensor.nbytes * 8 - 8):
            copy = {other: each.clone() for other, each in reversed(own.items())}
            assert differing(own, copy) == []
            copy[name] = _flipped(copy[name], bit)
            assert differing(own, copy) == [name]
            del copy[name]
            assert differing(own, copy) == []


def test_a_copy_may_lie_in_another_order() -> None:
    image = torch.randn(4, 3, 5, 5)
    own = {"conv": image.contiguous(memory_format=torch.channels_last), "row": torch.randn(6, 4).t()}
    copy = {name: each.contiguous() for name, each in own.items()}
    assert all(own[name].stride() != each.stride() for name, each in copy.items())
    assert differing(own, copy) == []
    assert differing(own, {"conv": _flipped(copy["conv"], 99), "row": copy["row"]}) == ["conv"]


def test_the_largest_gap_is_that_of_the_values() -> None:
    a = torch.tensor([1.0, -2.0, 3.0])
    assert largest_gap(a, torch.tensor([1.0, 2.0, 3.5])) == 4.0
    assert largest_gap(a.to(torch.complex64), torch.tensor([1.0, -2.0, 3.0 + 2.0j])) == 2.0
    assert largest_gap(torch.zeros(0), torch.zeros(0)) == 0.0
    assert largest_gap(a, torch.tensor([1.0, float("nan"), 3.0])) != 0.0
