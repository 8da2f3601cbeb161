"""The digest sees every bit, whatever the dtype, size and memory order; each number that is not finite is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checks import finite
from lockstep.checks.digest import digest, find_differing
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RunError
from lockstep.record.base import Nothing
from lockstep.trainer import train
from lockstep.world.world import World

from ..reading import NoReading

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool)


def some(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (size * 8,), generator=generator, dtype=torch.uint8)
    return values[:size] > 127 if dtype == torch.bool else values[: size * dtype.itemsize].view(dtype)


def _flipped(tensor: Tensor, bit: int) -> Tensor:
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 513, 70_001])
def test_one_bit_is_seen_and_its_tensor_named(size: int, dtype: torch.dtype) -> None:
    own = {"other": some(1000, seed=1), "this": some(size, dtype)}
    copy = {name: each.clone() for name, each in reversed(own.items())}
    whole = int(digest([*own.values()]))
    assert whole == int(digest([each.clone() for each in own.values()]))
    assert find_differing(own, copy) == []
    bits = own["this"].nbytes * 8
    for bit in {0, 1, 7, bits // 3, bits // 2, bits - 1}:
        if dtype == torch.bool:
            bit -= bit % 8  # a truth value has one bit that means something
        copy["this"] = _flipped(own["this"], bit)
        assert int(digest([own["other"], copy["this"]])) != whole
        assert find_differing(own, copy) == ["this"]


def _changes() -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yield what changes, and the tensors before and after."""
    a, b, small = some(70_001), some(70_001, seed=1), some(5, seed=2)
    yield "tensors change places", [a, b, small], [b, a, small]
    yield "small tensors change places", [small, a[:63], b[:4000]], [a[:63], small, b[:4000]]
    yield "a tensor comes twice", [a, b, small], [a, b, small, small]
    for shape in ((512, 512), (256, 64, 3, 3), (3, 5)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for held, distance in product((weight.flatten(1), weight.view(-1)), (1, 2, len(weight) - 1)):
            turned = held.clone()
            turned[0], turned[distance] = held[distance], held[0]
            yield f"rows or elements {distance} apart of {shape}", [weight], [turned.view(shape)]
    wide = some(300_000)
    for bit, distance in product((0, 31, 63), (1, 8, 64, 512, 4096, 65_536)):
        words = wide.view(torch.int64).clone()
        words[[7, 7 + distance]] ^= -(1 << 63) if bit == 63 else 1 << bit
        # As a data line does that has gone bad; distances that are powers of two, which memory has.
        yield f"bit {bit} in two words {distance} apart", [wide], [words.view(torch.float32)]
    long = torch.arange((1 << 22) + 5)  # words: of two pieces
    for at in (0, (1 << 22) - 1, 1 << 22, len(long) - 1):
        changed = long.clone()
        changed[at] += 1
        yield f"word {at} of many", [long], [changed]


def test_what_changes_is_seen() -> None:
    for what, before, after in _changes():
        assert int(digest(before)) != int(digest(after)), what


def test_memory_order_and_place_say_nothing() -> None:
    whole = some(4096)
    image = whole.view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    for view in (whole[1:1000], torch.randn(50_000, 3)[:, 1], image, torch.zeros(0)):
        assert int(digest([view])) == int(digest([view.clone()]))
    own = {"conv": image, "row": torch.randn(6, 4).t()}
    copy = {name: each.contiguous() for name, each in own.items()}
    assert find_differing(own, copy) == []
    assert find_differing(own, {"conv": _flipped(copy["conv"], 99), "row": copy["row"]}) == ["conv"]


# ---- numbers that are not finite


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_number_that_is_not_finite_is_found_without_the_host_waiting(dtype: torch.dtype) -> None:
    for value, at in product((math.nan, math.inf, -math.inf), (None, 0, 517, 999)):
        numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
        tensors = {"a": torch.ones(3), "b": numbers, "c": torch.arange(9), "d": torch.zeros(0)}
        if at is not None:
            numbers[at] = value
        with NoReading():
            told = finite.suspect(tensors.values())
        assert bool(told) == (at is not None)
        assert finite.find_non_finite(World.alone(), tensors) == ([] if at is None else ["b"])
    large = {"large": torch.full((100,), torch.finfo(dtype).max, dtype=dtype)}
    assert finite.find_non_finite(World.alone(), large) == [], "though their squares overflow"


class Masked(nn.Module):
    """A net with a causal mask, which is infinite by intent, and a batch norm; a third pass may overflow its variance.

    The scores of that pass are finite.
    """

    passes, overflows = 0, False

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.full((image_size, image_size), -math.inf).triu(1))
        self.norm = nn.BatchNorm1d(image_size)
        self.classifier = nn.Linear(image_size * in_channels * image_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        x = x * (1e25 if self.training and self.passes == 3 and self.overflows else 1.0)
        rows = x.transpose(1, 2).flatten(2)  # (N, rows, channels · columns)
        return self.classifier(self.norm(self.mask.softmax(1) @ rows).flatten(1))  # type: ignore[no-any-return]


def test_statistics_that_are_not_finite_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is, which was meant to be so from the beginning."""
    asked = {"model": f"{__name__}:Masked", "data": "digits", "precision": "fp32", "strategy": "single", "ema": 0.9}
    config = override(RunConfig(), **asked, max_steps=3)
    train(override(config, output=tmp_path / "mask"), World.alone(), Nothing())
    assert checkpoint.load(tmp_path / "mask").tensors["model/mask"].isinf().any()
    monkeypatch.setattr(Masked, "overflows", True)
    with pytest.raises(RunError, match=r"after step 3 are not finite numbers \(.*model/norm.running_var"):
        train(override(config, output=tmp_path / "ruined"), World.alone(), Nothing())
    assert not list((tmp_path / "ruined").rglob("*.safetensors"))
