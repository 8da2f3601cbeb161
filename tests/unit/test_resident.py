"""Sets in memory: right pixels, and augmentation that is a function of (seed, epoch, sample index) alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from lockstep.config.schema import DataConfig
from lockstep.data import digits, resident
from lockstep.data.images import Transform
from lockstep.data.sets import build
from lockstep.data.source import Request, Source
from lockstep.world.world import World

from ..real_data import cifar_images

ALL = ("crop", "flip", "cutout")


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    return digits.read()["train"] if name == "digits" else (cifar_images(0)[:500], np.arange(500) % 10)


def fetch(name: str, augment: Sequence[str], count: int, *, seed: int = 0, epoch: int = 0) -> tuple[Tensor, Tensor]:
    pixels, labels = images(name)
    config, channels = DataConfig(augment=tuple(augment)), pixels.shape[3]
    request = Request(config=config, seed=seed, world=World.alone(), dtype=torch.float64, channels_last=True)
    read = lambda: {"train": (pixels, labels), "test": (pixels[:5], labels[:5])}  # noqa: E731
    return first(resident.build(request, read, 10, (3.0,) * channels, (5.0,) * channels).train, count, epoch)


def first(made: Source, count: int, epoch: int = 0) -> tuple[Tensor, Tensor]:
    ((x, y, indices),) = made.stream([np.arange(count)], epoch=epoch)
    assert indices.tolist() == list(range(count))
    assert x.is_contiguous(memory_format=torch.channels_last)
    return x, y


def test_seed_and_epoch_change_the_augmentation() -> None:
    pairs = list(product(range(3), repeat=2))
    found = [fetch("digits", ("crop",), 20, seed=seed, epoch=epoch)[0].numpy().tobytes() for seed, epoch in pairs]
    assert len(set(found)) == 9


@pytest.mark.parametrize("name", ["digits", "cifar"])
def test_images_are_normalised_and_crop_and_flip_are_torchvisions(name: str) -> None:
    pixels, labels = (torch.from_numpy(each) for each in images(name))
    pixels = pixels.permute(0, 3, 1, 2)[:200].double()
    plain, y = fetch(name, (), 200)
    torch.testing.assert_close(plain, (pixels - 3) / 5, rtol=1e-14, atol=1e-14)
    assert y.tolist() == labels[:200].tolist()
    side = pixels.shape[2]
    pad = side // 8
    ways = list(product(range(2 * pad + 1), range(2 * pad + 1), (False, True)))
    varied = (fetch(name, ("crop", "flip"), 200)[0] * 5 + 3).round()
    seen = set()
    for original, found in zip(pixels, varied, strict=True):
        padded = reference.pad(original, [pad])
        for top, left, flips in ways:
            cropped = reference.crop(padded, top, left, side, side)
            if torch.equal(reference.horizontal_flip(cropped) if flips else cropped, found):
                seen.add((top, left, flips))
                break
        else:
            pytest.fail("an image is no crop of the padded original")
    # With 18 (digits) or 162 (CIFAR) possible outcomes, 200 draws show most of them.
    assert len(seen) > (15 if name == "digits" else 90)


def test_every_crop_is_equally_likely_and_half_are_mirrored() -> None:
    request = Request(config=DataConfig(), seed=1, world=World.alone(), dtype=torch.float32, channels_last=True)
    draws = Transform(request, (1, 32, 32), ALL).draw(0, np.arange(40_000))
    for drawn, least, most in zip(draws, (-4, -4, 0, 0, 0), (4, 4, 1, 31, 31), strict=True):
        counts = torch.bincount(drawn - least)
        assert len(counts) == most - least + 1
        expected = 40_000 / len(counts)
        assert (counts - expected).abs().max() < 5 * expected**0.5


def test_cutout_zeroes_a_clipped_square_of_half_the_side_after_normalisation() -> None:
    sizes = set()
    for cut, whole in zip(fetch("cifar", ("cutout",), 300)[0], fetch("cifar", (), 300)[0], strict=True):
        changed = (cut != whole).any(0)
        rows, columns = changed.any(1), changed.any(0)
        for along in (rows, columns):
            start, end = int(along.nonzero().min()), int(along.nonzero().max())
            assert end - start == 15 or (end - start >= 7 and (start == 0 or end == 31))
            sizes.add(end - start)
        assert (cut[:, rows][:, :, columns] == 0).all()
    assert {8, 15} < sizes


def test_only_the_training_images_are_varied() -> None:
    made = {"seed": 0, "world": World.alone(), "dtype": torch.float32, "channels_last": True}
    varied, plain = (build(DataConfig(augment=augment), **made) for augment in (ALL, ()))  # type: ignore[arg-type]
    assert torch.equal(first(varied.test, 360)[0], first(plain.test, 360)[0])
    assert not torch.equal(first(varied.train, 360)[0], first(plain.train, 360)[0])
