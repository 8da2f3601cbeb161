"""Sets in memory: right pixels, and augmentation that is a function of (seed, epoch, sample index) alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from lockstep.config import DataConfig
from lockstep.data import digits, resident
from lockstep.data.resident import ImageSet
from lockstep.data.sets import build
from lockstep.data.source import Source, Wish
from lockstep.topology import Topology
from lockstep.world import World

from ..real_data import cifar_images

ALL = ("crop", "flip", "cutout")


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "digits":
        return digits.read()["train"]
    pixels = cifar_images(0)[:500]
    return pixels, np.arange(500) % 10


def source(
    name: str, augment: Sequence[str], *, dtype: torch.dtype = torch.float64, channels_last: bool = True, seed: int = 0
) -> Source:
    pixels, labels = images(name)
    channels = pixels.shape[3]
    kind = ImageSet(
        classes=10, height=pixels.shape[1], width=pixels.shape[2], mean=(3.0,) * channels, std=(5.0,) * channels
    )
    config = DataConfig(augment=tuple(augment))
    wish = Wish(config=config, seed=seed, world=World.alone(), dtype=dtype, channels_last=channels_last)
    return resident.build(wish, kind, lambda: {"train": (pixels, labels), "test": (pixels[:5], labels[:5])}).train


def fetch(made: Source, *shares: Sequence[int], epoch: int = 0) -> tuple[Tensor, Tensor]:
    batches = list(made.stream((np.array(share, np.int64) for share in shares), epoch=epoch))
    assert [each.indices.tolist() for each in batches] == [list(share) for share in shares]
    assert [len(each.y) for each in batches] == [len(share) for share in shares]
    return torch.cat([each.x for each in batches]), torch.cat([each.y for each in batches])


@pytest.mark.parametrize("name", ["digits", "cifar"])
@pytest.mark.parametrize("augment", [(), ("crop",), ALL], ids="+".join)
def test_a_sample_does_not_depend_on_its_batch(name: str, augment: tuple[str, ...]) -> None:
    made = source(name, augment, dtype=torch.float32)
    order = np.random.default_rng(0).permutation(60).tolist()
    x, y = fetch(made, order, epoch=3)
    again, labels = fetch(made, order[:1], [], order[1:8], order[8:], epoch=3)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    ((none, no_labels, _),) = made.stream([np.empty(0, np.int64)], epoch=0)
    assert (none.shape, no_labels.shape) == ((0, *x.shape[1:]), (0,))
    other = source(name, augment, dtype=torch.float32)
    list(other.stream([np.arange(50)], epoch=2))
    assert torch.equal(fetch(other, order, epoch=3)[0], x)


def test_seed_and_epoch_change_the_augmentation() -> None:
    def first(seed: int, epoch: int) -> bytes:
        return fetch(source("digits", ("crop",), seed=seed), range(20), epoch=epoch)[0].numpy().tobytes()

    assert len({first(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize("name", ["digits", "cifar"])
def test_without_augmentation_images_are_normalised_and_no_more(name: str) -> None:
    pixels, labels = images(name)
    x, y = fetch(source(name, ()), [4, 2, 9])
    expected = (torch.from_numpy(pixels[[4, 2, 9]]).permute(0, 3, 1, 2).double() - 3) / 5
    torch.testing.assert_close(x, expected, rtol=1e-14, atol=1e-14)
    assert y.tolist() == labels[[4, 2, 9]].tolist()


@pytest.mark.parametrize("name", ["digits", "cifar"])
def test_crop_and_flip_are_torchvisions(name: str) -> None:
    pixels, _ = images(name)
    side = pixels.shape[1]
    pad = side // 8
    x, _ = fetch(source(name, ("crop", "flip")), range(200))
    x = (x * 5 + 3).round()
    seen = set()
    for index in range(200):
        original = torch.from_numpy(pixels[index]).permute(2, 0, 1)
        padded = reference.pad(original, [pad])
        matches = [
            (top, left, flip)
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            for flip in (False, True)
            if torch.equal(_varied(padded, top, left, side, flip), x[index])
        ]
        assert matches, f"image {index} is no crop of the padded original"
        seen.add(matches[0])
    # With 18 (digits) or 162 (CIFAR) possible outcomes, 200 draws show most of them.
    assert len(seen) > (15 if name == "digits" else 90)


def _varied(padded: Tensor, top: int, left: int, side: int, flip: bool) -> Tensor:
    cropped = reference.crop(padded, top, left, side, side)
    varied: Tensor = reference.horizontal_flip(cropped) if flip else cropped
    return varied.double()


def test_every_crop_is_equally_likely_and_half_are_mirrored() -> None:
    from lockstep.data.augment import Augment

    augment = Augment(ALL, 1, 32, 32)
    draws = augment.draw(augment.keys(0), np.arange(40_000))
    for drawn, least, most in (
        (draws.row, -4, 4),
        (draws.column, -4, 4),
        (draws.flip, 0, 1),
        (draws.cut_row, 0, 31),
        (draws.cut_column, 0, 31),
    ):
        counts = torch.bincount(drawn - least)
        assert len(counts) == most - least + 1
        expected = 40_000 / len(counts)
        assert (counts - expected).abs().max() < 5 * expected**0.5


def test_cutout_zeroes_a_clipped_square_of_half_the_side_after_normalisation() -> None:
    x, _ = fetch(source("cifar", ("cutout",)), range(300))
    plain, _ = fetch(source("cifar", ()), range(300))
    heights = []
    for cut, whole in zip(x, plain, strict=True):
        changed = (cut != whole).any(0)
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        top, bottom, left, right = int(rows.min()), int(rows.max()), int(columns.min()), int(columns.max())
        assert (cut[:, top : bottom + 1, left : right + 1] == 0).all()
        assert torch.equal(cut[:, ~changed], whole[:, ~changed])
        height, width = bottom - top + 1, right - left + 1
        assert height == 16 or (8 <= height < 16 and (top == 0 or bottom == 31))
        assert width == 16 or (8 <= width < 16 and (left == 0 or right == 31))
        heights.append(height)
    assert max(heights) == 16
    assert min(heights) < 12


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("augment", [(), ALL], ids=["plain", "augmented"])
def test_memory_and_dtype_are_as_asked(augment: tuple[str, ...], channels_last: bool) -> None:
    order = torch.channels_last if channels_last else torch.contiguous_format
    exact = fetch(source("cifar", augment), range(7))[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, y = fetch(source("cifar", augment, dtype=dtype, channels_last=channels_last), range(7))
        assert x.dtype == dtype
        assert x.is_contiguous(memory_format=order)
        assert y.dtype == torch.int64
        torch.testing.assert_close(x, exact.to(dtype), rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


def test_only_the_training_images_are_varied() -> None:
    config = DataConfig(augment=ALL)
    varied = build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)
    plain = build(DataConfig(), seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)
    assert torch.equal(fetch(varied.test, range(360))[0], fetch(plain.test, range(360))[0])
    assert not torch.equal(fetch(varied.train, range(360))[0], fetch(plain.train, range(360))[0])


@pytest.mark.parametrize("augment", [(), ALL], ids=["ready", "augmented"])
def test_off_the_device_samples_stay_in_host_memory(augment: tuple[str, ...]) -> None:
    elsewhere = World(Topology(), torch.device("meta"))  # a device that is not the host's, on any machine
    config = DataConfig(on_device="off", augment=augment)
    made = build(config, seed=0, world=elsewhere, dtype=torch.float32, channels_last=False)
    kept = vars(made.train).get("_samples", vars(made.train).get("_pixels"))
    assert kept is not None
    assert kept.device.type == "cpu"
    ((x, y, _),) = made.train.stream([np.arange(3)], epoch=0)
    assert x.device == y.device == elsewhere.device
