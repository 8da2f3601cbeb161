"""Image folders: torchvision's crops, one sentence for each damage, and no worker left behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop, v2

from lockstep import failures
from lockstep.config import DataConfig
from lockstep.data import counter, folder
from lockstep.data.sets import build
from lockstep.data.source import Source, Splits
from lockstep.errors import RequestError, RunError
from lockstep.world import World

from ..pool import RankPool
from ..real_data import photographs


def made(root: Path, *, world: World | None = None, **options: Any) -> Splits:
    options = {"image_size": 64, "workers": 0} | options
    config = DataConfig(name="imagefolder", dir=root, **options)
    return build(config, seed=0, world=world or World.alone(), dtype=torch.float32, channels_last=True)


def fetch(source: Source, *shares: Sequence[int], epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(source.stream([np.array(share, np.int64) for share in shares], epoch=epoch))
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _, _ in batches)
    return torch.cat([x for x, _, _ in batches]), torch.cat([y for _, y, _ in batches])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of 3 + 3 training and 2 + 2 held-out photographs that a test may damage."""
    for split, count in (("train", 3), ("val", 2)):
        for name in ("ants", "bees"):
            (tmp_path / split / name).mkdir(parents=True)
            for path in sorted((photographs() / split / name).iterdir())[:count]:
                shutil.copyfile(path, tmp_path / split / name / path.name)
    return tmp_path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# --- the same images


def test_images_are_torchvisions_and_numbered_by_class_and_name() -> None:
    splits = made(photographs())
    assert (len(splits.train), len(splits.test), splits.train.classes) == (120, 80, 2)
    assert splits.train.shape == (3, 64, 64)
    whole = v2.Compose([v2.Resize(73), v2.CenterCrop(64), v2.PILToTensor()])  # 256 / 224 of 64
    normalise = v2.Normalize(folder.MEAN, folder.STD)
    for split, source, chosen in (("train", splits.train, range(0, 120, 10)), ("val", splits.test, range(0, 80, 8))):
        listed = [path for name in ("ants", "bees") for path in sorted((photographs() / split / name).iterdir())]
        expected = torch.stack([normalise(whole(folder.decode(listed[index])).float()) for index in chosen])
        x, y = fetch(source, chosen)
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
        assert y.tolist() == [int(listed[index].parent.name == "bees") for index in chosen]


def test_training_images_are_torchvisions_crops() -> None:
    image = folder.decode(next((photographs() / "train" / "ants").iterdir()))
    mirrored = 0
    for seed in range(12):
        random = counter.bits(counter.keys(23, seed), np.arange(1))[:, 0]
        left, top, right, bottom = folder.crop_box(image.width, image.height, random)
        expected = v2.functional.resized_crop(image, top, left, bottom - top, right - left, [64, 64])
        flipped = np.asarray(v2.functional.horizontal_flip(expected))
        found = np.asarray(folder.vary(image, 64, ("crop", "flip"), random))
        assert np.array_equal(found, np.asarray(expected)) or np.array_equal(found, flipped)
        mirrored += np.array_equal(found, flipped)
    assert 1 <= mirrored <= 11


def test_crop_boxes_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    random = counter.bits(counter.keys(23, 0), np.arange(4000))
    ours, theirs = [], []
    blank = torch.empty(3, 300, 500)
    for index in range(4000):
        left, top, right, bottom = folder.crop_box(500, 300, random[:, index])
        assert 0 <= left < right <= 500
        assert 0 <= top < bottom <= 300
        ours.append((top, left, bottom - top, right - left))
        theirs.append(RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]))
    a, b = np.array(ours, float), np.array(theirs, float)
    error = ((a.var(0) + b.var(0)) / 4000) ** 0.5
    assert (np.abs(a.mean(0) - b.mean(0)) < 4.5 * error).all()
    assert (np.abs(a.std(0) / b.std(0) - 1) < 0.06).all()


def test_training_images_are_varied_as_asked_and_no_more() -> None:
    def found(*augment: str, epoch: int = 0) -> torch.Tensor:
        return fetch(made(photographs(), augment=augment).train, range(12), epoch=epoch)[0]

    plain = found()
    assert torch.equal(found(epoch=1), plain)
    mirrored = (found("flip") != plain).flatten(1).any(1)
    assert 1 <= int(mirrored.sum()) <= 11
    mirrors = mirrored[:, None, None, None]
    assert torch.equal(found("flip"), torch.where(mirrors, plain.flip(3), plain))
    cropped = found("crop")
    assert (cropped != plain).flatten(1).any(1).all()
    assert torch.equal(found("crop", "flip"), torch.where(mirrors, cropped.flip(3), cropped))
    cut = found("cutout")
    changed = cut != plain
    assert changed.flatten(1).any(1).all()
    assert (cut[changed] == 0).all(), "cutout comes after normalisation"


def test_a_sample_does_not_depend_on_its_batch_or_worker_and_workers_stay_until_the_end() -> None:
    augment, before = ("crop", "flip", "cutout"), set(psutil.Process().children())
    here, workers = made(photographs(), augment=augment), made(photographs(), workers=2, augment=augment)
    x, y = fetch(here.train, [7, 100, 3, 64, 7], epoch=4)
    unfinished = workers.train.stream([np.array([index]) for index in range(50)], epoch=0)
    next(unfinished)  # which leaves nothing in the next epoch
    started = set(psutil.Process().children()) - before
    again, labels = fetch(workers.train, [7, 100], [], [3], [64, 7], epoch=4)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert torch.equal(x[0], x[4])
    assert not torch.equal(fetch(here.train, [7], epoch=5)[0], x[:1])
    assert torch.equal(fetch(here.test, [7], epoch=5)[0], fetch(workers.test, [7], epoch=6)[0])
    assert len(started) == 2
    assert set(psutil.Process().children()) - before == started
    next(workers.train.stream([np.array([index]) for index in range(50)], epoch=5))
    workers.close()
    assert set(psutil.Process().children()) == before


def test_a_worker_that_is_killed_is_one_sentence() -> None:
    before = set(psutil.Process().children())
    splits = made(photographs(), workers=2, image_size=224)
    stream = splits.train.stream([np.arange(index, index + 4) for index in range(100)], epoch=0)
    next(stream)
    next(stream)  # answers come in order, and the second worker's is the second: both have begun

    def go_on() -> None:
        (set(psutil.Process().children()) - before).pop().kill()
        list(stream)

    # torch notices by SIGCHLD too, and then raises in whatever the rank is doing: a RuntimeError, outside the stream.
    with pytest.raises((RunError, RuntimeError)) as caught:
        go_on()
    splits.close()  # as a run does before it tells: until then torch may notice once more
    told = failures.describe(caught.value, 0).sentence
    assert re.search(r"data worker .*(died|killed by SIGKILL|ended)", told), told
    assert "\n" not in told
    assert set(psutil.Process().children()) == before


# --- damage


def _skipped(world: World, root: Path) -> tuple[tuple[str, ...], int]:
    train = made(root, world=world, skip_corrupt=True).train
    return train.skipped, len(train)


def test_damaged_images_are_named_or_left_out_and_counted_where_asked(small: Path, pool: RankPool) -> None:
    bees = sorted((small / "train" / "bees").iterdir())
    note = small / "val" / "ants" / "note.jpg"
    note.write_text("not an image")
    truncate(bees[1])
    for workers in (0, 1):
        splits = made(small, workers=workers)
        with pytest.raises(RequestError, match=f"{bees[1]}.*--skip-corrupt"):
            fetch(splits.train, [0, 1], [2, 4])
        splits.close()
    splits = made(small, skip_corrupt=True)
    assert (splits.train.skipped, splits.test.skipped) == ((str(bees[1]),), (str(note),))
    assert (len(splits.train), len(splits.test)) == (5, 4)
    assert pool.run(2, _skipped, small) == [((str(bees[1]),), 5)] * 2
    x, y = fetch(splits.train, range(5))
    assert y.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(x[:3], fetch(made(small).train, range(3))[0])
    for path in bees:
        truncate(path)
    with pytest.raises(RequestError, match=rf"train/bees without an image: none of its 3 .*{bees[0].name}"):
        made(small, skip_corrupt=True)


def test_classes_that_are_empty_missing_or_hidden(small: Path) -> None:
    (small / "train" / ".cache").mkdir()
    assert made(small).train.classes == 2
    (small / "train" / "wasps").mkdir()
    (small / "train" / "wasps" / "readme.txt").write_text("soon")
    with pytest.raises(RequestError, match=r"train/wasps holds no images"):
        made(small)
    shutil.rmtree(small / "train" / "wasps")
    (small / "val" / "bees").rename(small / "val" / "beees")
    with pytest.raises(RequestError, match=r"differ: beees, bees \(2 in all\); beees is in val only"):
        made(small)


def test_images_of_any_mode_are_read(small: Path) -> None:
    for number, mode in enumerate(("L", "CMYK", "RGBA", "P")):
        Image.new(mode, (30, 20), 1).save(small / "val" / "ants" / f"{number}.{'jpg' if number < 2 else 'png'}")
    assert fetch(made(small).test, range(8))[0].shape == (8, 3, 64, 64)
