"""Tar shards: the samples of the same images in a folder, and one sentence for each damage."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import DataConfig
from lockstep.data.sets import build
from lockstep.data.source import Source, Splits
from lockstep.errors import RequestError
from lockstep.world.world import World

from ..tars import jpeg, shards, write


def made(root: Path, name: str = "webdataset", **options: Any) -> Splits:
    config = DataConfig(name=name, dir=root, **{"image_size": 8, "workers": 0} | options)
    return build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)


def fetch(source: Source, *indices: int) -> tuple[torch.Tensor, torch.Tensor]:
    ((x, y, read),) = source.stream([np.array(indices, np.int64)], epoch=2)
    assert read.tolist() == list(indices)
    return x, y


def test_shards_have_the_samples_of_the_same_images_in_folders(tmp_path: Path) -> None:
    tars = shards(tmp_path / "tars", classes=2)
    for path in tars.glob("*/*.tar"):
        with tarfile.open(path) as archive:
            for number, member in enumerate(member for member in archive if member.name.endswith("jpg")):
                place = tmp_path / "folders" / path.parent.name / "ab"[number % 2] / f"{path.stem}-{member.name}"
                place.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content
                place.write_bytes(content.read())
    ours, expected = made(tars), made(tmp_path / "folders", "imagefolder")
    assert (len(ours.train), len(ours.test), ours.train.classes, ours.names) == (40, 8, 2, ())
    x, y = fetch(ours.train, *range(0, 40, 2), *range(1, 40, 2))
    x_folder, y_folder = fetch(expected.train, *range(40))
    assert torch.equal(x, x_folder)
    assert torch.equal(y, y_folder)
    augmented, workers = (made(tars, augment=("crop", "flip"), workers=workers).train for workers in (0, 1))
    varied = fetch(augmented, 39, 3, 17)[0]
    assert torch.equal(varied, fetch(workers, 39, 3, 17)[0])
    assert torch.equal(varied[1], fetch(augmented, 3)[0][0])
    workers.close()


def test_keys_end_at_the_first_dot_and_other_members_are_left_out(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        members = {"b/x.y.json": b"{}", "b/x.cls": b"1\n", "a/x.cls": b"0", "a/x.PNG": jpeg(0), "b/x.jpg": jpeg(1)}
        write(tmp_path / split / "1.tar", members)
        write(tmp_path / split / "0.tar", {"../../up.jpg": jpeg(2), "../../up.cls": b"0"})
        (tmp_path / split / "._0.tar").write_bytes(b"of a Mac")
    splits = made(tmp_path)
    assert fetch(splits.train, 0, 1, 2)[1].tolist() == [0, 0, 1]
    assert splits.train.files
    assert splits.train.files[1].tolist() == [b"0.tar/../../up.jpg", b"1.tar/a/x.PNG", b"1.tar/b/x.jpg"]
    assert splits.validation is not None


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.jpg": b""}, "a has no .cls"),
        ({"a.cls": b"0"}, "a has no .jpg"),
        ({"a.cls": b"ant", "a.jpg": b""}, "a.cls holds no class number"),
        ({"a.cls": b"1" * 10, "a.jpg": b""}, "a.cls holds no class number"),
        ({"a.cls": b"0", "a.jpg": b"", "a.png": b""}, "a.png is a second image"),
        ({"a.txt": b""}, "holds no images"),
        ({"a.jpg": jpeg(1), "a.cls": b"4"}, "label 4, and train has labels 0 to 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shard_of_other_members_is_refused(members: dict[str, bytes], words: str, tmp_path: Path) -> None:
    write(shards(tmp_path, train=4, val=4) / "val" / "shard-000000.tar", members)
    with pytest.raises(RequestError, match=words):
        made(tmp_path)


def test_a_shard_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, train=3, val=3)
    path = tmp_path / "train" / "shard-000000.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        begins = [member.offset for member in archive]
        end = archive.offset
    for size in (0, 100, begins[1] - 1, begins[1], begins[2], begins[2] + 100, begins[4], end, end + 512):
        path.write_bytes(whole[:size])
        with pytest.raises(RequestError, match=r"train/shard-000000\.tar cannot be read"):
            made(tmp_path)
    path.write_bytes(whole[: begins[2]] + b"\xff" * 512 + whole[begins[2] + 512 :])
    with pytest.raises(RequestError, match="cut short or damaged"):
        made(tmp_path)
    path.write_bytes(whole[: end + 1024])
    assert len(made(tmp_path).train) == 3


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_special_files_in_a_shard_are_refused(kind: bytes, tmp_path: Path) -> None:
    path = shards(tmp_path, train=3, val=3) / "train" / "shard-000001.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = kind, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(RequestError, match=r"shard-000001.tar cannot be read \(a.jpg is a link or special file"):
        made(tmp_path)


def test_damaged_images_in_shards_are_named_or_left_out(tmp_path: Path) -> None:
    shards(tmp_path, train=3, val=3)
    image = jpeg(9)
    members = {"bad.jpg": image[: len(image) // 2], "bad.cls": b"2", "good.jpg": image, "good.cls": b"1"}
    write(tmp_path / "train" / "shard-000001.tar", members)
    with pytest.raises(RequestError, match=r"train/shard-000001.tar/bad.jpg cannot be decoded .*--skip-corrupt"):
        fetch(made(tmp_path).train, 3)
    splits = made(tmp_path, skip_corrupt=True)
    assert splits.train.skipped == (f"{tmp_path}/train/shard-000001.tar/bad.jpg",)
    assert fetch(splits.train, *range(4))[1].tolist() == [0, 1, 2, 1]
    (tmp_path / "train" / "shard-000001.tar").write_bytes(b"")  # after it was listed
    with pytest.raises(RequestError, match=r"good\.jpg cannot be decoded \(it is cut short"):
        fetch(splits.train, 3)
