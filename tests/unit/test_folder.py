"""Image folders: torchvision's crops, one sentence for each damage, and no worker left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from PIL import Image
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lockstep.cli.main import main
from lockstep.config.schema import DataConfig
from lockstep.data import counter, folder, users
from lockstep.data.feed import GENERATORS, Feed
from lockstep.data.sets import build
from lockstep.data.source import Source, Splits
from lockstep.errors import RequestError, RunError
from lockstep.models import table
from lockstep.monitor import failures
from lockstep.world.world import World

from ..command import end, refusal, start
from ..hostile import images, mutated_images, often
from ..needs import need
from ..pool import RankPool
from ..real_data import photographs


def made(root: Path, *, world: World | None = None, **options: Any) -> Splits:
    config = DataConfig(name="imagefolder", dir=root, **{"image_size": 64, "workers": 0} | options)
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


def test_images_are_torchvisions_and_numbered_by_class_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)  # some builds of torch cannot load it
    splits = made(photographs())
    assert (len(splits.train), len(splits.test), splits.train.classes) == (120, 80, 2)
    assert splits.train.shape == (3, 64, 64)
    whole = v2.Compose([v2.Resize(73), v2.CenterCrop(64)])  # 256 / 224 of 64
    _, least = folder.transform(64)
    normalise = v2.Normalize(folder.MEAN, folder.STD)
    for split, source, chosen in (("train", splits.train, range(0, 120, 10)), ("val", splits.test, range(0, 80, 8))):
        listed = [path for name in ("ants", "bees") for path in sorted((photographs() / split / name).iterdir())]
        expected = torch.stack([normalise(whole(folder.decode(listed[index], least)).float()) for index in chosen])
        x, y = fetch(source, chosen)
        torch.testing.assert_close(x, expected, rtol=0, atol=0.018)  # one of 255 levels
        assert y.tolist() == [int(listed[index].parent.name == "bees") for index in chosen]


def test_training_images_are_varied_as_asked_and_no_more() -> None:
    def found(*augment: str, epoch: int = 0) -> torch.Tensor:
        return fetch(made(photographs(), augment=augment).train, range(12), epoch=epoch)[0]

    plain, cropped, both, cut = found(), found("crop"), found("crop", "flip"), found("cutout")
    assert torch.equal(found(epoch=1), plain)
    for before, after in ((plain, found("flip")), (cropped, both)):
        mirrored = (after != before).flatten(1).any(1)
        assert 1 <= int(mirrored.sum()) <= 11
        assert torch.equal(after, torch.where(mirrored[:, None, None, None], before.flip(3), before))
    assert (cropped != plain).flatten(1).any(1).all()
    changed = cut != plain
    assert changed.flatten(1).any(1).all()
    assert (cut[changed] == 0).all(), "cutout comes after normalisation"


def test_randaugment_and_random_erasing_are_torchvisions() -> None:
    image = torch.randint(0, 256, (3, 90, 80), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    centre, varied = (folder.transform(64, names)[0] for names in ((), ("random-erasing", "flip", "randaugment")))
    theirs = [v2.RandomHorizontalFlip(), v2.RandAugment(), v2.RandomErasing(value=[124, 116, 104])]
    for seed in range(20):
        torch.manual_seed(seed)
        found = varied(image)
        torch.manual_seed(seed)
        assert torch.equal(found, v2.Compose(theirs)(centre(image)))


def test_a_sample_does_not_depend_on_its_batch_or_worker_and_workers_stay_until_the_end() -> None:
    augment, before = ("crop", "flip", "randaugment", "random-erasing", "cutout"), set(psutil.Process().children())
    here, workers = made(photographs(), augment=augment), made(photographs(), workers=2, augment=augment)
    x, y = fetch(here.train, [7, 100, 3, 64, 7], epoch=4)
    unfinished = workers.train.stream([np.array([index]) for index in range(50)], epoch=0)
    next(unfinished)  # which leaves nothing in the next epoch
    started = set(psutil.Process().children()) - before
    again, labels = fetch(workers.train, [7, 100], [3], [64, 7], epoch=4)
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert not torch.equal(fetch(here.train, [7], epoch=5)[0], x[:1])
    assert torch.equal(fetch(here.test, [7], epoch=5)[0], fetch(workers.test, [7], epoch=6)[0])
    assert len(started) == 2
    assert set(psutil.Process().children()) - before == started
    next(workers.train.stream([np.array([index]) for index in range(50)], epoch=5))
    workers.close()
    assert set(psutil.Process().children()) == before


def test_a_worker_does_not_collect_its_ranks_garbage() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    garbage = [store]
    garbage.append(garbage)  # type: ignore[arg-type]
    feed = Feed(_Collecting(), stays=False, num_workers=1, pin_memory=False)
    gc.disable()
    try:
        del store, garbage
        assert list(feed.answers(counter.keys(GENERATORS, 0), [0, 1])) == [0, 1]
    finally:
        gc.enable()


class _Collecting(Dataset[int]):
    dataset = None

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


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
    with contextlib.suppress(RuntimeError):
        splits.close()  # as a run does before it tells: until then torch may notice once more
    splits.close()
    told = failures.describe(caught.value, 0).sentence
    assert re.search(r"DataLoader worker .*(killed|exited)|A data worker died as it sent samples", told), told
    assert "\n" not in told
    assert set(psutil.Process().children()) == before


# --- decoding


def _jpegs(tmp_path: Path) -> list[Path]:
    ramp = np.linspace(0, 255, 160 * 96 * 3).reshape(160, 96, 3)
    noise = np.random.default_rng(0).integers(-40, 40, ramp.shape)
    image = Image.fromarray((ramp + noise).clip(0, 255).astype(np.uint8))
    ways: list[tuple[str, dict[str, Any]]] = [
        *(("RGB", {"subsampling": value}) for value in (0, 1, 2)),
        *(("RGB", {"progressive": True}), ("L", {}), ("CMYK", {})),
    ]
    for number, (mode, options) in enumerate(ways):
        image.convert(mode).save(tmp_path / f"{number}.jpg", **options)
    return [tmp_path / f"{number}.jpg" for number in range(len(ways))]


def test_a_build_of_torch_without_torchvision_decodes_the_same_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _jpegs(tmp_path)
    assert folder._jpeg()
    images = [folder.decode(path) for path in paths]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as under -W error: torchvision deprecates its decoder
        assert all(torch.equal(image, folder.decode(path)) for image, path in zip(images, paths, strict=True))
    monkeypatch.setattr(folder, "_jpeg", lambda: None)
    assert all(torch.equal(image, folder.decode(path)) for image, path in zip(images, paths, strict=True))


def test_large_jpegs_are_decoded_smaller_and_nearly_the_same(tmp_path: Path) -> None:
    for path in _jpegs(tmp_path)[:4]:
        whole, half, same = (folder.decode(path, least) for least in (0, 48, 49))
        assert (half.shape, same.shape) == ((3, 80, 48), (3, 160, 96))
        assert torch.equal(whole, same)
        resize, least = folder.transform(21)
        assert torch.equal(folder.decode(path, least), half)
        assert (resize(half).float() - resize(whole).float()).abs().mean() < 2
    _, least = folder.transform(10, ("crop",))
    smallest = (0.08 * 3 / 4) ** 0.5 * least
    assert 20 <= smallest <= 20.2, "the smallest crop has twice the size asked for"


@pytest.mark.parametrize(("processors", "ranks", "workers"), [(2, 1, 2), (12, 2, 6), (3, 8, 1), (192, 8, 16)])
def test_a_rank_has_a_data_worker_for_each_of_its_processors(
    processors: int, ranks: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(users, "Feed", lambda reader, num_workers, **options: asked.append(num_workers))
    monkeypatch.setattr("lockstep.hardware.cpus", lambda: processors)
    topology = dataclasses.replace(World.alone().topology, local_size=ranks)
    alone = dataclasses.replace(World.alone(), topology=topology)
    monkeypatch.setattr("lockstep.data.ranks.shared", lambda world, build: build())
    made(_drawn(tmp_path, "ants", "bees"), workers=None, world=alone)
    assert asked == [workers] * 2


# --- formats and names


def test_grey_of_more_than_8_bits_is_refused(tmp_path: Path) -> None:
    for name, dtype in (("grey.png", "uint16"), ("grey.tif", "uint16"), ("grey.tif", "int32"), ("grey.tif", "float32")):
        Image.fromarray(np.zeros((2, 2), dtype)).save(tmp_path / name)
        with pytest.raises(
            RequestError, match=rf"{name} cannot be decoded \(its pixels have mode .*; save it with 8 bits"
        ):
            folder.decode(tmp_path / name)


def _drawn(root: Path, *classes: str) -> Path:
    """Make a folder of three training images and two others per class."""
    for split, name in itertools.product(("train", "val"), classes):
        (root / split / name).mkdir(parents=True)
        for number in range(3 if split == "train" else 2):
            Image.new("RGB", (9, 9)).save(root / split / name / f"{number}.jpg")
    return root


def test_pillows_endings_are_read_and_others_counted(tmp_path: Path) -> None:
    train = _drawn(tmp_path, "ants", "bees") / "train"
    (train / "bees" / "0.jpg").rename(train / "bees" / "0.JFIF")
    (train / "bees" / "1.jpg").rename(train / "bees" / "1.heic")
    Image.new("RGB", (9, 9)).save(train / "ants" / "z.gif")
    for name in (".DS_Store", "README"):
        (train / "ants" / name).touch()
    splits = made(tmp_path, image_size=8)
    assert fetch(splits.train, range(6))[1].tolist() == [0] * 4 + [1] * 2
    (line,) = splits.cautions
    assert line.endswith(": no ending 1, .heic 1")


def test_nested_folders_are_in_imagefolders_order(tmp_path: Path) -> None:
    train = _drawn(tmp_path, "ants", "bees") / "train"
    for number, name in enumerate(("b/z", "b-1/a", "b/c/a", "B/a", "zz/a")):
        (train / "ants" / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (10 * number,) * 3).save(train / "ants" / f"{name}.png")
    expected = [v2.functional.pil_to_tensor(image) for image, _ in ImageFolder(str(train))]
    x, _ = fetch(made(tmp_path, image_size=8).train, range(len(expected)))
    images = torch.stack([image[:, :8, :8] for image in expected]).float()
    torch.testing.assert_close(x, v2.functional.normalize(images, folder.MEAN, folder.STD))


# --- damage


def _skipped(world: World, root: Path) -> tuple[tuple[str, ...], int]:
    train = made(root, world=world, skip_corrupt=True).train
    return train.skipped, len(train)


def test_damaged_images_are_named_or_left_out_and_counted_where_asked(small: Path, pool: RankPool) -> None:
    bees, note = sorted((small / "train" / "bees").iterdir()), small / "val" / "ants" / "note.jpg"
    note.write_text("not an image")
    bees[1].write_bytes(bees[1].read_bytes()[:5000])
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
        path.write_text("nor this")
    with pytest.raises(RequestError, match=r"train/bees holds no images .* that can be decoded"):
        made(small, skip_corrupt=True)


def test_classes_that_are_empty_missing_hidden_or_linked_and_images_of_any_mode(small: Path) -> None:
    for number, mode in enumerate(("L", "CMYK", "RGBA", "P")):
        Image.new(mode, (30, 20), 1).save(small / "val" / "ants" / f"{number}.{'jpg' if number < 2 else 'png'}")
    assert fetch(made(small).test, range(8))[0].shape == (8, 3, 64, 64)
    (small / "train" / ".cache").mkdir()
    (small / "train" / "bees" / "again").symlink_to(".")
    (small / "train" / "bees").rename(small / "elsewhere")
    (small / "train" / "bees").symlink_to("../elsewhere")
    assert (made(small).train.classes, len(made(small).train)) == (2, 6)
    for split in ("train", "val"):
        (small / split / "wasps").mkdir()
    (small / "train" / "wasps" / "readme.txt").write_text("soon")
    with pytest.raises(RequestError, match="train/wasps holds no images"):
        made(small)
    (small / "val" / "bees").rename(small / "val" / "beees")
    with pytest.raises(RequestError, match=r"train and val in .* differ: beees, bees \(2 in all\)"):
        made(small)


def test_folders_behind_links_are_read_but_hidden_ones_and_circles_are_not(small: Path) -> None:
    ants, bees, elsewhere = small / "train" / "ants", small / "train" / "bees", small / "elsewhere"
    shutil.copytree(bees, ants / ".thumbnails")
    for place in (ants, bees):
        for link, target in (("a", "."), ("b", "../ants")):
            (place / link).symlink_to(target)
    assert len(made(small).train) == 9  # bees/b is no circle
    (bees / "b").unlink()
    shutil.copytree(ants, elsewhere / "inner", ignore=shutil.ignore_patterns("?"))
    for link in ("more", "twice"):
        (ants / link).symlink_to(elsewhere)
    assert fetch(made(small).train, range(9))[1].tolist() == [0] * 6 + [1] * 3, "one folder, on two paths"
    # A chain of folders, each with two links to the next, would be read 2 ** 30 times.
    for number in range(30):
        (small / f"{number}").mkdir()
        for link in ("a", "b"):
            (small / f"{number}" / link).symlink_to(f"../{number + 1}")
    shutil.copytree(bees, small / "30", symlinks=True)
    (ants / "chain").symlink_to("../../0")
    assert len(made(small).train) == 12


# --- what somebody else's folder may hold


def test_a_small_file_costs_little_whatever_it_is(tmp_path: Path) -> None:
    files = images()
    for name, (data, _) in files.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    (tmp_path / "honest.png").symlink_to("wide.png")
    ended = end(start(tmp_path.parent, tmp_path, module="tests.decoding"))
    assert ended.code == 0, ended.err[-2000:]
    told = json.loads(ended.out)
    no_file = dict.fromkeys(("pipe.jpg", "endless.png"), "no regular file")
    for name, word in ({name: word for name, (_, word) in files.items()} | no_file | {"honest.png": ""}).items():
        if word:
            assert re.search(rf"{name} cannot be decoded \(.*({word}).*--skip-corrupt", told[name]), told[name]
        else:
            assert told[name] == "(3, 224, 224)"


def test_the_centre_of_any_image_is_torchvisions() -> None:
    whole = v2.Compose([v2.Resize(73), v2.CenterCrop(64)])
    for width, height in ((10, 401), (1000, 12), (16, 1), (301, 160)):
        ramp = np.linspace(0, 255, max(width, height)).reshape((height, 1) if height > width else (1, width))
        image = Image.fromarray(np.broadcast_to(ramp[:, :, None], (height, width, 3)).astype(np.uint8))
        found = folder.transform(64)[0](v2.functional.pil_to_tensor(image))
        apart = found.permute(1, 2, 0).numpy().astype(int) - np.asarray(whole(image), int)
        assert abs(apart).max() <= 1, (width, height)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of what it finds damaged and reads all the same
@often
@given(mutated_images())
def test_a_damaged_image_is_an_image_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "mutated.png"
    file.write_bytes(data)
    with contextlib.suppress(RequestError):
        assert folder.transform(8)[0](folder.decode(file, 18)).shape == (3, 8, 8)


@pytest.mark.slow
def test_photographs_for_a_network_of_timm_are_timms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need([] if find_spec("timm") else ["timm"])
    from timm import data, get_pretrained_cfg

    for name in ("vit_tiny_patch16_224", "test_resnet"):
        config, look = get_pretrained_cfg(name), folder.Look(**table.images(f"timm.{name}"))
        theirs = data.create_transform(**data.resolve_data_config({}, pretrained_cfg=config.to_dict()))
        ours, _ = folder.transform(config.input_size[-1], (), look)
        normalise = v2.Normalize(look.mean, look.std)
        for path in sorted((photographs() / "val" / "bees").iterdir())[:6]:
            expected = theirs(Image.open(path).convert("RGB"))
            torch.testing.assert_close(normalise(ours(folder.decode(path)).float()), expected, rtol=0, atol=2 / 127)
    words = ["train", "--data", "imagefolder", "--data-dir", str(photographs()), "--model", "timm.test_vit"]
    words += ["--image-size", "48", "--batch", "40", "--max-steps", "1", "--workers", "0", "--accelerator", "cpu"]
    assert main([*words, "--devices", "1", "--output", str(tmp_path / "run")]) == 0
    line = "mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5, bicubic, centre of 0.95 of the shorter side"
    assert f"{line}; they were trained at --image-size 160" in " ".join(capsys.readouterr().out.split())
    assert main(["eval", str(tmp_path / "run"), "--accelerator", "cpu", "--devices", "1", "--workers", "0"]) == 0
    assert refusal(capsys, "eject", tmp_path / "run").startswith("lockstep eject: --model timm.test_vit expects other")
