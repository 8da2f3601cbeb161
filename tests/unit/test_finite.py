"""Every number that is none is found, whatever the dtype and the place; large ones, and masks, are no alarm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.config import RunConfig
from lockstep.engine import train
from lockstep.errors import RunError
from lockstep.options import override
from lockstep.record.base import Nothing
from lockstep.verify import finite
from lockstep.world import World

from ..reading import NoReading

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def _some(dtype: torch.dtype, size: int = 1000) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 517, 999])
def test_one_number_that_is_none_is_found(dtype: torch.dtype, value: float, at: int) -> None:
    tensors = {"a": _some(torch.float32), "b": _some(dtype), "c": torch.arange(9), "d": torch.zeros(0)}
    with NoReading():
        told = finite.suspect(tensors.values())
    assert not told
    assert finite.not_finite(tensors) == []
    tensors["b"][at] = value
    with NoReading():
        told = finite.suspect(tensors.values())
    assert told
    assert finite.not_finite(tensors) == finite.found(World.alone(), tensors) == ["b"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    tensors = {"large": torch.full((100,), torch.finfo(dtype).max, dtype=dtype)}
    assert finite.suspect(tensors.values()), "the squares overflow"
    assert finite.found(World.alone(), tensors) == []


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert not finite.suspect([])
    assert not finite.suspect([torch.zeros(0), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)])


def test_the_error_names_three_tensors_and_what_to_do() -> None:
    said = str(finite.error(7, [f"model/{name}" for name in "abcde"], "Lower --lr."))
    assert "after step 7 are not finite numbers (model/a, model/b, model/c), though the loss was" in said
    assert said.endswith(". Lower --lr.")


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

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(classes, in_channels, image_size)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(x * (1e25 if self.training and self.passes == 3 else 1.0))


def _train(model: str, folder: Path, **values: object) -> None:
    asked = {"model": f"{__name__}:{model}", "data": "digits", "precision": "fp32", "strategy": "single"}
    train(override(RunConfig(), **asked, output=folder, **values), World.alone(), Nothing())


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}])
def test_a_mask_is_saved_as_it_is(tmp_path: Path, options: dict[str, object]) -> None:
    _train("Masked", tmp_path, max_steps=3, **options)
    assert checkpoint.load(tmp_path).tensors["model/mask"].isinf().any()


def test_statistics_that_are_none_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"after step 3 are not finite numbers \(model/norm.running_var\)"):
        _train("Overflowing", tmp_path, max_steps=3)
    assert not list(tmp_path.rglob("*.safetensors"))
