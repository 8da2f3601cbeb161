"""The table of data sets: the right images under each name, and one sentence for each thing that can be wrong."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
import random
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.config import DataConfig
from lockstep.data import cifar, digits
from lockstep.data.sets import build
from lockstep.data.source import Pair, Source, Splits
from lockstep.errors import LockstepError, RequestError, RunError
from lockstep.world import World

from ..real_data import cifar_images, real_data


def made(config: DataConfig, *, seed: int = 0, channels_last: bool = False) -> Splits:
    return build(config, seed=seed, world=World.alone(), dtype=torch.float32, channels_last=channels_last)


def batch(source: Source, *indices: int, epoch: int = 0) -> Pair:
    ((x, y, read),) = source.stream([np.array(indices, np.int64)], epoch=epoch)
    assert read.tolist() == list(indices)
    return x, y


# --- digits


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    real = datasets.load_digits()
    held_out = np.arange(1797) % 5 == 0
    for split, chosen in (("train", ~held_out), ("test", held_out)):
        pixels, labels = digits.read()[split]
        assert np.array_equal(pixels[..., 0], real.images[chosen])
        assert np.array_equal(labels, real.target[chosen])


def test_digits_are_normalised_by_their_training_images() -> None:
    splits = made(DataConfig())
    assert (len(splits.train), len(splits.test), splits.train.classes, splits.train.shape) == (1437, 360, 10, (1, 8, 8))
    x, y = batch(splits.train, *range(1437))
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-3
    assert y.unique().tolist() == list(range(10))


# --- CIFAR


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the official test batch of CIFAR-10, restored from the mosaics."""
    frames = real_data() / "cifar10" / "frames.zip"
    if not frames.is_file():
        pytest.skip(f"no CIFAR-10 at {frames.parent}")
    folder = tmp_path_factory.mktemp("cifar") / cifar.CIFAR10.folder
    folder.mkdir()
    body = np.concatenate([cifar_images(mosaic) for mosaic in range(20, 24)]).transpose(0, 3, 1, 2).tobytes()
    with zipfile.ZipFile(frames) as archive:
        data = archive.read("test_batch.head") + body + archive.read("test_batch.tail")
    (folder / "test_batch").write_bytes(data)
    return folder.parent


SMALL = dataclasses.replace(cifar.CIFAR10, train=cifar.CIFAR10.test)
"""CIFAR-10, were it only the test batch."""


def test_cifar_files_are_read_right(official: Path) -> None:
    pixels, labels = cifar.read(SMALL, DataConfig(dir=official))["test"]
    assert np.array_equal(pixels, np.concatenate([cifar_images(mosaic) for mosaic in range(20, 24)]))
    with (official / SMALL.folder / "test_batch").open("rb") as file:
        expected = pickle.load(file, encoding="latin-1")["labels"]
    assert labels.tolist() == expected


def test_a_damaged_file_is_refused_by_name(official: Path, tmp_path: Path) -> None:
    good = (official / SMALL.folder / "test_batch").read_bytes()
    (tmp_path / SMALL.folder).mkdir()
    path = tmp_path / SMALL.folder / "test_batch"
    for bad in (good[:-1], good[:1000] + bytes([good[1000] ^ 1]) + good[1001:]):
        path.write_bytes(bad)
        with pytest.raises(RequestError) as caught:
            cifar.read(SMALL, DataConfig(dir=tmp_path))
        for word in (str(path), SMALL.test["test_batch"], hashlib.md5(bad).hexdigest(), "remove"):
            assert word in str(caught.value)


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_nothing_in_a_pickle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps({"labels": [1, 2], "data": _Payload()}, protocol=2)
    Path("batch").write_bytes(evil)
    with pytest.raises(RequestError, match="holds 0 images and 2 labels"):
        cifar.read_batch(Path("batch"), hashlib.md5(evil).hexdigest(), "labels")
    assert not Path("executed").exists()
    pickle.loads(evil)
    assert Path("executed").exists(), "the payload would not have run anyway"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def archive(official: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cifar.Cifar]:
    """The small set, downloadable from this host."""
    path = tmp_path_factory.mktemp("site") / "cifar.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as file:
        file.add(official / SMALL.folder, SMALL.folder)
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(path.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/cifar.tar.gz"
        yield dataclasses.replace(SMALL, url=url, archive_md5=md5)
        server.shutdown()


def test_an_absent_set_is_downloaded_whole_or_not_at_all(
    archive: cifar.Cifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    target = tmp_path / "data"
    for wrong in (
        dataclasses.replace(archive, archive_md5="0" * 32),
        dataclasses.replace(archive, url=archive.url + ".not-there"),
    ):
        with pytest.raises(RequestError, match="cannot be downloaded"):
            cifar.read(wrong, DataConfig(dir=target))
        assert not target.exists()
    target.mkdir()
    with pytest.raises(RequestError, match="cannot be downloaded"):
        cifar.read(dataclasses.replace(archive, archive_md5="0" * 32), DataConfig(dir=target))
    assert list(target.iterdir()) == []
    splits = cifar.read(archive, DataConfig(dir=target))
    assert len(splits["test"][0]) == 10_000
    assert [path.name for path in target.iterdir()] == [archive.folder]
    gone = dataclasses.replace(archive, url="http://127.0.0.1:9/gone")
    cifar.read(gone, DataConfig(dir=target))  # it is there: nothing is downloaded


# --- fake


@pytest.mark.parametrize("size", [1, 3, 32])
def test_fake_images_are_functions_of_their_index(size: int) -> None:
    config = DataConfig(name="fake", image_size=size, samples=1000)
    splits = made(config)
    assert (len(splits.train), len(splits.test)) == (1000, 250)
    x, y = batch(splits.train, 5, 900, 17)
    again, labels = batch(made(config, seed=1).train, 17, 5)
    assert torch.equal(again, x[[2, 0]])
    assert torch.equal(labels, y[[2, 0]])
    held_out, _ = batch(splits.test, 5)
    assert not torch.equal(held_out[0], x[0])


def test_fake_images_show_their_class() -> None:
    splits = made(DataConfig(name="fake", image_size=16, samples=2000))
    x, y = batch(splits.train, *range(2000))
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    held_out, labels = batch(splits.test, *range(500))
    nearest = torch.cdist(held_out.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == labels).float().mean() > 0.95
    assert len(x.flatten(1).unique(dim=0)) == 2000


# --- the user's own


Tables = tuple[TensorDataset, TensorDataset]


class Photos(Dataset[tuple[Tensor, int]]):
    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 13:
            raise KeyError("no such photo")
        image = torch.full((3, 8, 8), index * 10, dtype=torch.uint8)
        return image[:, :, : 8 - (index == 15)], 7 if index == 11 else index % 3


def photos() -> tuple[Photos, Photos]:
    return Photos(), Photos()


def vectors(config: DataConfig) -> Tables:
    x = torch.arange(60, dtype=torch.float64).view(20, 3)
    return TensorDataset(x, torch.arange(20) % 4), TensorDataset(x[:4], torch.arange(4))


def byte_images() -> Tables:
    x = torch.arange(20 * 3 * 8 * 8).view(20, 3, 8, 8).to(torch.uint8)
    return TensorDataset(x, torch.arange(20) % 4), TensorDataset(x[:4], torch.arange(4))


class Labels(Dataset[tuple[Tensor, object]]):
    classes = 3

    def __init__(self, label: object) -> None:
        self.label = label

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, object]:
        return torch.zeros(2), self.label


def whole() -> tuple[Labels, Labels]:
    return Labels(2.0), Labels(np.int64(1))


def parts() -> list[Subset[tuple[Tensor, int]]]:
    return [Subset(Photos(), range(9)), Subset(Photos(), range(9, 11))]


def own(name: str, **options: Any) -> DataConfig:
    return DataConfig(name=f"{__name__}:{name}", **options)


def test_own_tensors_are_taken_as_they_are() -> None:
    splits = made(own("vectors"))
    x, y = batch(splits.train, 3, 1)
    assert x.tolist() == [[9.0, 10.0, 11.0], [3.0, 4.0, 5.0]]
    assert (x.dtype, y.tolist(), splits.train.classes, splits.train.shape) == (torch.float32, [3, 1], 4, (3,))


def test_own_byte_images_are_scaled_and_varied() -> None:
    original = byte_images()[0].tensors[0]
    x, _ = batch(made(own("byte_images")).train, 3, 1)
    torch.testing.assert_close(x, original[[3, 1]].float() / 255)
    flipped, _ = batch(made(own("byte_images", augment=("flip",))).train, *range(20))
    for index in range(20):
        whole = original[index].float() / 255
        assert any(torch.allclose(flipped[index], each) for each in (whole, whole.flip(2)))


def test_whole_numbers_of_any_kind_are_labels_and_parts_have_the_wholes_classes() -> None:
    splits = made(own("whole", workers=0))
    assert [batch(split, 0)[1].tolist() for split in (splits.train, splits.test)] == [[2], [1]]
    assert made(own("parts", workers=0)).train.classes == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_own_data_sets_are_read_in_order(workers: int) -> None:
    splits = made(own("photos", workers=workers, augment=("crop", "cutout")), channels_last=True)
    shares = [np.array([3, 1]), np.empty(0, np.int64), np.array([8])]
    for epoch in range(2):
        (x, y, _), (none, no_labels, _), (last, _, read) = splits.train.stream(shares, epoch=epoch)
        assert y.tolist() == [0, 1]
        assert float(x[1].max()) == pytest.approx(10 / 255)
        assert read.tolist() == [8]
        assert float(last.max()) == pytest.approx(80 / 255)
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert (none.shape, no_labels.shape) == ((0, 3, 8, 8), (0,))
    splits.close()


DRAWN = "tests.own_data:drawn"


def test_own_random_transforms_do_not_depend_on_batch_or_worker() -> None:
    here = made(DataConfig(name=DRAWN, workers=0))
    x, _ = batch(here.train, *range(40), epoch=3)
    held_out, _ = batch(here.test, *range(40))
    assert len(torch.cat([x, held_out]).unique()) == 2 * 40 * 4, "no two draws are alike"
    for workers in (0, 1, 2):
        random.seed(workers)  # the states that a worker would inherit
        splits = made(DataConfig(name=DRAWN, workers=workers))
        batch(splits.train, 5, 2, epoch=1)
        shares = [np.arange(start, start + 8)[::-1].copy() for start in (8, 32, 0, 24, 16)]
        for share, (again, _, read) in zip(shares, splits.train.stream(shares, epoch=3), strict=True):
            assert torch.equal(again, x[share])
            assert np.array_equal(read, share)
        assert torch.equal(batch(splits.test, 7)[0], held_out[[7]])
        splits.close()


def test_own_data_in_the_ranks_process_leaves_the_generators_alone() -> None:
    def states() -> tuple[bytes, object, bytes]:
        return (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tobytes(),
        )

    before = states()
    splits = made(DataConfig(name=DRAWN, workers=0))
    batch(splits.train, 1, 2)
    batch(made(DataConfig(name="tests.own_data:split_at_random")).train, 1)
    assert states() == before


def test_own_sets_that_are_split_at_random_are_split_by_the_seed() -> None:
    def first(seed: int) -> list[float]:
        train = made(DataConfig(name="tests.own_data:split_at_random"), seed=seed).train
        x, _ = batch(train, *range(32))
        return [float(each) for each in x.flatten()]

    assert first(0) == first(0)
    assert first(0) != first(1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("index", "kind", "sentence"),
    [
        (11, RequestError, r"train sample 11 has label 7, .* 0 to 2"),
        (13, RunError, r"train sample 13 of --data \S+:photos, at \S+\.py:\d+: KeyError: 'no such photo'"),
        (15, RequestError, r"train sample 15 is torch.uint8 \(3, 8, 7\).*must be alike"),
    ],
)
def test_a_bad_sample_of_an_own_set_is_named(
    workers: int, index: int, kind: type[LockstepError], sentence: str
) -> None:
    splits = made(own("photos", workers=workers))
    with pytest.raises(kind, match=sentence) as caught:
        batch(splits.train, 0, index)
    splits.close()
    if kind is RunError:
        assert isinstance(caught.value, RunError)
        assert "__getitem__" in caught.value.trace
