"""Image folders: torchvision's crops, one sentence for each damage, and no worker left behind."""

from __future__ import annotations

import re
import shutil
import signal
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
from lockstep.data import counter, folder, tree
from lockstep.data.sets import build
from lockstep.data.source import Source, Splits
from lockstep.errors import RequestError, RunError
from lockstep.world import World

from ..real_data import photographs


def made(root: Path, **options: Any) -> Splits:
    options = {"image_size": 64, "workers": 0} | options
    config = DataConfig(name="imagefolder", dir=root, **options)
    return build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=True)


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


def test_classes_and_files_are_numbered_by_name() -> None:
    splits = made(photographs())
    assert (len(splits.train), len(splits.test), splits.train.classes) == (120, 80, 2)
    assert splits.train.shape == (3, 64, 64)
    assert fetch(splits.test, range(0, 80, 8))[1].tolist() == [0] * 5 + [1] * 5
    config = DataConfig(name="imagefolder", dir=photographs())
    listed = tree.table(tree.scan(config), config, "test")
    expected = [path for name in ("ants", "bees") for path in sorted((photographs() / "val" / name).iterdir())]
    assert [listed.path(index) for index in range(80)] == expected


@pytest.mark.parametrize("size", [64, 224])
def test_held_out_images_are_torchvisions(size: int) -> None:
    transform = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    for path in sorted((photographs() / "val" / "bees").iterdir())[:6]:
        image = folder.decode(path)
        for shaped in (image, image.rotate(90, expand=True)):
            assert np.array_equal(np.asarray(folder.centre(shaped, size)), np.asarray(transform(shaped)))


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
    images = [folder.decode(path) for path in sorted((photographs() / "train" / "ants").iterdir())[:12]]

    def found(*augment: str, epoch: int = 0) -> torch.Tensor:
        return fetch(made(photographs(), augment=augment).train, range(12), epoch=epoch)[0]

    normalise = v2.Normalize(folder.MEAN, folder.STD)
    whole = [normalise(v2.functional.pil_to_tensor(folder.centre(image, 64)).float()) for image in images]
    plain = found()
    torch.testing.assert_close(plain, torch.stack(whole), rtol=1e-5, atol=1e-5)
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


def test_a_sample_does_not_depend_on_its_batch_or_worker() -> None:
    augment = ("crop", "flip", "cutout")
    here, workers = made(photographs(), augment=augment), made(photographs(), workers=2, augment=augment)
    x, y = fetch(here.train, [7, 100, 3, 64, 7], epoch=4)
    unfinished = workers.train.stream([np.array([index]) for index in range(50)], epoch=0)
    next(unfinished)  # which leaves nothing in the next epoch
    again, labels = fetch(workers.train, [7, 100], [], [3], [64, 7], epoch=4)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert torch.equal(x[0], x[4])
    assert not torch.equal(fetch(here.train, [7], epoch=5)[0], x[:1])
    assert torch.equal(fetch(here.test, [7], epoch=5)[0], fetch(workers.test, [7], epoch=6)[0])
    workers.close()


# --- damage


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(small: Path, workers: int) -> None:
    path = sorted((small / "train" / "bees").iterdir())[1]
    truncate(path)
    splits = made(small, workers=workers)
    with pytest.raises(RequestError, match=f"{path}.*--skip-corrupt"):
        fetch(splits.train, [0, 1], [2, 4])
    splits.close()


def test_damaged_images_are_left_out_and_counted_where_asked(small: Path) -> None:
    bees = sorted((small / "train" / "bees").iterdir())
    note = small / "val" / "ants" / "note.jpg"
    note.write_text("not an image")
    truncate(bees[1])
    splits = made(small, skip_corrupt=True)
    assert (splits.train.skipped, splits.test.skipped) == ((str(bees[1]),), (str(note),))
    assert (len(splits.train), len(splits.test)) == (5, 4)
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
    shutil.rmtree(small / "val")
    with pytest.raises(RequestError, match="val is not there"):
        made(small)


def test_images_of_any_mode_are_read(small: Path) -> None:
    for number, mode in enumerate(("L", "CMYK", "RGBA", "P")):
        Image.new(mode, (30, 20), 1).save(small / "val" / "ants" / f"{number}.{'jpg' if number < 2 else 'png'}")
    assert fetch(made(small).test, range(8))[0].shape == (8, 3, 64, 64)


# --- workers


def children() -> set[psutil.Process]:
    """Return this process's children, those that ended and were not waited for included."""
    return set(psutil.Process().children())


def test_workers_stay_between_epochs_and_end_at_close() -> None:
    before = children()
    splits = made(photographs(), workers=2)
    fetch(splits.train, [0], [1], epoch=0)
    first = children() - before
    fetch(splits.train, [0], [1], epoch=1)
    fetch(splits.test, [0])
    assert children() - before == first
    assert len(first) == 2
    unfinished = splits.train.stream([np.array([index]) for index in range(50)], epoch=2)
    next(unfinished)
    splits.close()
    assert children() - before == set()


def test_workers_leave_interrupts_to_the_rank_and_a_dead_one_is_one_sentence() -> None:
    before = children()
    splits = made(photographs(), workers=2, image_size=224)
    stream = splits.train.stream([np.arange(index, index + 4) for index in range(100)], epoch=0)
    next(stream)
    next(stream)  # answers come in order, and the second worker's is the second: both have begun, and ignore signals
    workers = list(children() - before)
    assert len(workers) == 2
    for worker in workers:
        worker.send_signal(signal.SIGINT)
    for _ in range(10):
        next(stream)

    def go_on() -> None:
        workers[0].kill()
        list(stream)

    # torch notices by SIGCHLD too, and then raises in whatever the rank is doing: a RuntimeError, outside the stream.
    with pytest.raises((RunError, RuntimeError)) as caught:
        go_on()
    splits.close()  # as a run does before it tells: until then torch may notice once more
    told = failures.describe(caught.value, 0).sentence
    assert re.search(r"data worker .*(died|killed by SIGKILL|ended)", told), told
    assert "\n" not in told
    assert children() - before == set()
