"""The digest sees every bit, whatever the dtype, size, place and order in memory; each number that is none is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.config import RunConfig
from lockstep.engine import train
from lockstep.errors import RunError
from lockstep.options import override
from lockstep.record.base import Nothing
from lockstep.verify import finite
from lockstep.verify.digest import differing, digest, digests
from lockstep.world import World

from ..reading import NoReading

SIZES = (1, 3, 7, 8, 511, 512, 513, 4097, 70_001)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool)


def _some(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
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
def test_one_bit_is_seen_and_its_tensor_named(size: int, dtype: torch.dtype) -> None:
    own = {"other": _some(1000, seed=1), "this": _some(size, dtype)}
    copy = {name: each.clone() for name, each in own.items()}
    whole, each = int(digest([*own.values()])), digests([*own.values()]).tolist()
    alone = int(digest([own["this"]]))
    assert all(torch.equal(copy[name].view(torch.uint8), own[name].view(torch.uint8)) for name in own), "it was changed"
    assert (int(digest([*copy.values()])), digests([*copy.values()]).tolist()) == (whole, each)
    assert differing(own, dict(reversed(copy.items()))) == []
    bits = own["this"].nbytes * 8
    for bit in {0, 1, 7, bits // 3, bits // 2, bits - 1}:
        if dtype == torch.bool:
            bit -= bit % 8  # a truth value has one bit that means something
        copy["this"] = _flipped(own["this"], bit)
        assert int(digest([*copy.values()])) != whole
        assert int(digest([copy["this"]])) != alone
        assert digests([*copy.values()]).tolist()[0] == each[0]
        assert digests([*copy.values()]).tolist()[1] != each[1]
        assert differing(own, dict(reversed(copy.items()))) == ["this"]
    del copy["this"]
    assert differing(own, copy) == [], "a copy may have fewer tensors"


@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_no_two_of_many_are_alike(seed: int, size: int) -> None:
    tensors = [_some(size, seed=seed + number) for number in range(8)]
    tensors += [_flipped(tensors[0], bit) for bit in range(32)]
    assert len({int(digest([tensor])) for tensor in tensors}) == len({tensor.numpy().tobytes() for tensor in tensors})


def _changes() -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yield what changes, and the tensors before and after."""
    a, b, small = _some(70_001), _some(70_001, seed=1), _some(5, seed=2)
    yield "tensors change places", [a, b, small], [b, a, small]
    yield "small tensors change places", [small, a[:63], b[:4000]], [a[:63], small, b[:4000]]
    yield "a tensor comes twice", [a, b, small], [a, b, small, small]
    for shape in ((512, 512), (256, 64, 3, 3), (3, 5), (1000, 2)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        rows, flat = weight.flatten(1), weight.view(-1)
        pairs = [(rows, *pair) for pair in ((0, 1), (0, 2), (1, len(rows) - 1), (len(rows) // 2, len(rows) // 2 - 1))]
        pairs += [(flat, 0, distance) for distance in (1, 2, 3, 64, 512, 513) if distance < len(flat)]
        for held, first, second in pairs:
            turned = held.clone()
            turned[first], turned[second] = held[second], held[first]
            if not torch.equal(turned, held):
                yield f"rows or elements {first} and {second} of {shape}", [weight], [turned.view(shape)]
    wide = _some(300_000)
    for bit, distance, start in product((0, 5, 31, 63), (1, 2, 8, 64, 512, 4096, 65_536), (0, 7, 1000)):
        words = wide.view(torch.int64).clone()
        words[[start, start + distance]] ^= -(1 << 63) if bit == 63 else 1 << bit
        # As a data line does that has gone bad; distances that are powers of two, which memory has.
        yield f"bit {bit} in words {start} and {distance} on", [wide], [words.view(torch.float32)]
    weight = torch.randn(8, 4, dtype=torch.float64)
    weight[5] = weight[2].flip(0)
    yield "a row and its mirror", [weight], [weight[[0, 1, 5, 3, 4, 2, 6, 7]]]
    for size in (1, 3, 64, 40_001):
        yield f"all {size} set", [torch.zeros(size)], [torch.full((size,), -1, dtype=torch.int32).view(torch.float32)]
    yield "a number is inverted", [torch.tensor([5, 7])], [torch.tensor([~5, 7])]
    long = torch.arange((1 << 22) + 5)  # words: of two pieces
    for at in (0, (1 << 22) - 1, 1 << 22, len(long) - 1):
        changed = long.clone()
        changed[at] += 1
        yield f"word {at} of many", [long], [changed]
    image = _some(4096).view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    yield "a bit in another memory order", [image], [_flipped(image.permute(0, 2, 3, 1).contiguous(), 77)]


def test_what_changes_is_seen() -> None:
    for what, before, after in _changes():
        assert int(digest(before)) != int(digest(after)), what


@pytest.mark.parametrize(
    ("weight", "order"),
    [
        (torch.eye(8, dtype=torch.float64), (1, 0, 3, 2)),
        (torch.eye(16), (1, 2, 3, 0)),
        (torch.randn(31, 1025, dtype=torch.float64), (5, 3, 1, 0, 2, 4)),  # layers
        (torch.randn(29, 1130, dtype=torch.float64), (5, 3, 1, 0, 2, 4)),
        (torch.randn(62, 1025), (2, 3, 0, 1)),  # pairs of rows in a layer
    ],
)
def test_rows_that_change_places_are_seen_within_two_turns(weight: Tensor, order: tuple[int, ...]) -> None:
    moved = weight[[*order, *range(len(order), len(weight))]]
    assert any(int(digest([weight], turn)) != int(digest([moved], turn)) for turn in (0, 1))
    assert digests([weight]).tolist() != digests([moved]).tolist()


def test_views_and_memory_orders_are_digested_where_they_lie() -> None:
    whole = _some(4096)
    image = whole.view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    for view in (whole[1:1000], torch.randn(5, 3)[:, 1], torch.randn(50_000, 3)[:, 1], image, torch.zeros(0)):
        assert int(digest([view])) == int(digest([view.clone()]))
    assert digests([torch.zeros(0), torch.tensor(1.5), torch.zeros(2, dtype=torch.complex64)]).shape == (3,)


def test_a_copy_may_lie_in_another_order() -> None:
    image = torch.randn(4, 3, 5, 5)
    own = {"conv": image.contiguous(memory_format=torch.channels_last), "row": torch.randn(6, 4).t()}
    copy = {name: each.contiguous() for name, each in own.items()}
    assert all(own[name].stride() != each.stride() for name, each in copy.items())
    assert differing(own, copy) == []
    assert differing(own, {"conv": _flipped(copy["conv"], 99), "row": copy["row"]}) == ["conv"]


# ---- numbers that are none


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_is_found_without_the_host_waiting(dtype: torch.dtype, value: float) -> None:
    for at in (None, 0, 517, 999):
        some = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
        tensors = {"a": torch.ones(3), "b": some, "c": torch.arange(9), "d": torch.zeros(0)}
        if at is not None:
            some[at] = value
        with NoReading():
            told = finite.suspect(tensors.values())
        expected = [] if at is None else ["b"]
        assert bool(told) == bool(expected)
        assert finite.not_finite(tensors) == finite.found(World.alone(), tensors) == expected


def test_large_and_whole_numbers_and_nothing_are_finite() -> None:
    for dtype in FLOATS:
        tensors = {"large": torch.full((100,), torch.finfo(dtype).max, dtype=dtype)}
        assert finite.suspect(tensors.values()), "the squares overflow"
        assert finite.found(World.alone(), tensors) == []
    assert not finite.suspect([])
    assert not finite.suspect([torch.zeros(0), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)])


class Masked(nn.Module):
    """A net with a causal mask, which is infinite by intent, and a batch norm."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.full((image_size, image_size), -math.inf).triu(1))
        self.norm = nn.BatchNorm1d(image_size)
        self.classifier = nn.Linear(image_size * in_channels * image_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2)  # (N, rows, channels · columns)
        mixed = self.norm(self.mask.softmax(1) @ rows)
        return self.classifier(mixed.flatten(1))  # type: ignore[no-any-return]


class Overflowing(Masked):
    """The same, whose running variance overflows at the third pass of training, though the scores do not."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(x * (1e25 if self.training and self.passes == 3 else 1.0))


def _train(model: str, folder: Path, **values: object) -> None:
    asked = {"model": f"{__name__}:{model}", "data": "digits", "precision": "fp32", "strategy": "single"}
    train(override(RunConfig(), **asked, output=folder, max_steps=3, **values), World.alone(), Nothing())


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}])
def test_a_mask_is_saved_as_it_is(tmp_path: Path, options: dict[str, object]) -> None:
    _train("Masked", tmp_path, **options)
    assert checkpoint.load(tmp_path).tensors["model/mask"].isinf().any()


def test_statistics_that_are_none_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"after step 3 are not finite numbers \(model/norm.running_var\)"):
        _train("Overflowing", tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
