"""The table of data sets: the right images under each name, and one sentence for each thing that can be wrong."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import random
import sys
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from lockstep.config.schema import DataConfig
from lockstep.data import cifar, digits
from lockstep.data.sets import build
from lockstep.data.source import Source, Splits
from lockstep.errors import RequestError, RunError
from lockstep.world.random_state import Generators
from lockstep.world.world import World

from ..real_data import cifar_images, real_data


def made(config: DataConfig, *, seed: int = 0, channels_last: bool = False) -> Splits:
    return build(config, seed=seed, world=World.alone(), dtype=torch.float32, channels_last=channels_last)


def batch(source: Source, *indices: int, epoch: int = 0) -> tuple[Tensor, Tensor]:
    ((x, y, read),) = source.stream([np.array(indices, np.int64)], epoch=epoch)
    assert read.tolist() == list(indices)
    return x, y


@pytest.mark.slow  # the import of scikit-learn takes a second
def test_digits_are_scikit_learns() -> None:
    real = pytest.importorskip("sklearn.datasets").load_digits()
    held_out = np.arange(1797) % 5 == 0
    for split, chosen in (("train", ~held_out), ("test", held_out)):
        pixels, labels = digits.read()[split]
        assert np.array_equal(pixels[..., 0], real.images[chosen])
        assert np.array_equal(labels, real.target[chosen])


def test_digits_are_normalised() -> None:
    splits = made(DataConfig())
    assert (len(splits.train), len(splits.test), splits.train.classes, splits.train.shape) == (1437, 360, 10, (1, 8, 8))
    x, _ = batch(splits.train, *range(1437))
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-3


# --- CIFAR


def test_cifar_is_downloaded_whole_or_not_at_all_read_right_and_refused_once_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = real_data() / "cifar10" / "frames.zip"
    if not frames.is_file():
        pytest.skip(f"no CIFAR-10 at {frames.parent}")
    images = np.concatenate([cifar_images(mosaic) for mosaic in range(20, 24)])
    with zipfile.ZipFile(frames) as archive:  # the official test batch, restored from the mosaics
        head, tail = (archive.read(f"test_batch.{part}") for part in ("head", "tail"))
    good, folder = head + images.transpose(0, 3, 1, 2).tobytes() + tail, cifar.CIFAR10.folder
    meta = pickle.dumps({"label_names": ["a"]})
    path, target = tmp_path / "cifar.tar.gz", tmp_path / "data"
    with tarfile.open(path, "w:gz", compresslevel=1) as file:
        for name, content in (("test_batch", good), ("batches.meta", meta)):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    official = torchvision.datasets.CIFAR10
    monkeypatch.setattr(official, "train_list", official.test_list)
    monkeypatch.setattr(official, "meta", official.meta | {"md5": hashlib.md5(meta).hexdigest()})
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    serves = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serves) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{path.name}"
        for where, found in ((url, "0" * 32), (f"{url}.tar.gz", md5), (url, md5)):
            monkeypatch.setattr(official, "url", where)
            monkeypatch.setattr(official, "tgz_md5", found)
            if (where, found) != (url, md5):
                with pytest.raises(RequestError, match="cannot be downloaded"):
                    cifar.read(cifar.CIFAR10, DataConfig(dir=target))
                assert [*target.iterdir()] == []
        pixels, labels = cifar.read(cifar.CIFAR10, DataConfig(dir=target))["test"]
        server.shutdown()
    assert np.array_equal(pixels, images)
    assert labels.tolist() == pickle.loads(good, encoding="latin-1")["labels"]
    assert [each.name for each in target.iterdir()] == [folder]

    payload = pickle.dumps(_Payload(), protocol=2)[:-1] + pickle.POP + good[2:]
    monkeypatch.chdir(tmp_path)
    for bad in (good[:-1], good[:1000] + bytes([good[1000] ^ 1]) + good[1001:], payload):
        (target / folder / "test_batch").write_bytes(bad)
        with pytest.raises(RequestError, match=rf"{target / folder} does not have the official files.*; remove "):
            cifar.read(cifar.CIFAR10, DataConfig(dir=target))
    assert not Path("executed").exists()
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where torch cannot load it
    with pytest.raises(RequestError, match="needs torchvision, which cannot be imported here"):
        cifar.read(cifar.CIFAR10, DataConfig(dir=target))


@pytest.mark.parametrize("kind", [cifar.CIFAR10, cifar.CIFAR100])
def test_cifars_names_are_torchvisions(kind: cifar.Cifar) -> None:
    assert kind.folder == getattr(torchvision.datasets, kind.name.upper()).base_folder


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


# --- the user's own


class Photos(Dataset[tuple[Tensor, int]]):
    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 13:
            raise KeyError("no such photo")
        return torch.full(
            (3, 9 if index == 15 else 8, 8), index * 10, dtype=torch.uint8
        ), 7 if index == 11 else index % 3


def photos() -> tuple[Photos, Photos]:
    return Photos(), Photos()


def _tables(x: Tensor) -> tuple[TensorDataset, TensorDataset]:
    return TensorDataset(x, torch.arange(20) % 4), TensorDataset(x[:4], torch.arange(4))


def vectors(config: DataConfig) -> tuple[TensorDataset, TensorDataset]:
    return _tables(torch.arange(60, dtype=torch.float64).view(20, 3))


def byte_images() -> tuple[TensorDataset, TensorDataset]:
    return _tables(torch.arange(20 * 3 * 8 * 8).view(20, 3, 8, 8).to(torch.uint8))


def noisy(noise: bool = False, *, scale: float = 1.0) -> tuple[TensorDataset, TensorDataset]:
    return _tables(torch.full((20, 3), float(noise) + scale))


def configured(scale: int = 3, *, config: DataConfig) -> tuple[TensorDataset, TensorDataset]:
    return _tables(torch.full((20, 3), float(scale + config.image_size)))


def own(name: str, *, seed: int = 0, **options: Any) -> Splits:
    module = "tests.own_data" if name in ("drawn", "split_at_random") else __name__
    return made(DataConfig(name=f"{module}:{name}", **options), seed=seed, channels_last=name == "photos")


def test_own_tensors_are_taken_as_they_are_and_byte_images_scaled_and_varied() -> None:
    train = own("vectors").train
    x, y = batch(train, 3, 1)
    assert (x.tolist(), y.tolist()) == ([[9.0, 10.0, 11.0], [3.0, 4.0, 5.0]], [3, 1])
    assert (x.dtype, train.classes, train.shape) == (torch.float32, 4, (3,))
    original = byte_images()[0].tensors[0].float() / 255
    torch.testing.assert_close(batch(own("byte_images").train, 3, 1)[0], original[[3, 1]])
    varied, _ = batch(own("byte_images", augment=("flip",)).train, *range(20))
    for found, whole in zip(varied, original, strict=True):
        assert torch.allclose(found, whole) or torch.allclose(found, whole.flip(2))


def test_only_a_parameter_without_default_or_named_config_is_given_the_config() -> None:
    assert batch(own("noisy").train, 0)[0].tolist() == [[1.0] * 3]
    assert batch(own("configured", image_size=8).train, 0)[0].tolist() == [[11.0] * 3]


def test_own_data_sets_are_read_in_order_and_a_bad_sample_is_named() -> None:
    shares = [np.array([3, 1]), np.array([8])]
    for workers in (0, 2):
        splits = own("photos", workers=workers, augment=("crop", "cutout"))
        for epoch in range(2):
            (x, y, _), (last, _, read) = splits.train.stream(shares, epoch=epoch)
            assert (y.tolist(), read.tolist()) == ([0, 1], [8])
            assert [float(each.max()) for each in (x[1], last)] == pytest.approx([10 / 255, 80 / 255])
            assert x.is_contiguous(memory_format=torch.channels_last)
        splits.close()
        for index, kind, sentence in (
            (11, RequestError, r"train sample 11 has label 7, .* 0 to 2"),
            (
                15,
                RequestError,
                r"train sample 15 is torch.uint8 \(3, 9, 8\), sample 0 is .* \(3, 8, 8\); all must be alike",
            ),
            (13, RunError, r"train sample 13 of --data \S+:photos, at \S+\.py:\d+: KeyError: 'no such photo'"),
        ):
            splits = own("photos", workers=workers)
            with pytest.raises(kind, match=sentence) as caught:
                batch(splits.train, 0, index)
            splits.close()
            assert "__getitem__" in getattr(caught.value, "trace", "__getitem__")


def sequences() -> tuple[TensorDataset, TensorDataset]:
    x = torch.zeros(20, 6, 3)
    return TensorDataset(x, torch.zeros(20, 6, dtype=torch.int64)), TensorDataset(x, torch.zeros(20, 6))


class _Streamed(Photos):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(6, 3), [0] * 6


def streamed_sequences() -> tuple[_Streamed, _Streamed]:
    return _Streamed(), _Streamed()


@pytest.mark.parametrize("name", ["sequences", "streamed_sequences"])
def test_labels_of_other_tasks_are_refused_with_the_flag_for_them(name: str) -> None:
    with pytest.raises(RequestError, match="index of its class, or train another task than classification by --step"):
        batch(own(name, workers=0).train, 0, 1)


def test_own_random_transforms_do_not_depend_on_batch_or_worker() -> None:
    before = Generators.now(()).as_json()
    first, again, other = (batch(own("split_at_random", seed=seed).train, *range(32))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    here = own("drawn", workers=0)
    x, _ = batch(here.train, *range(40), epoch=3)
    held_out, _ = batch(here.test, *range(40))
    assert len(torch.cat([x, held_out]).unique()) == 2 * 40 * 4, "no two draws are alike"
    assert Generators.now(()).as_json() == before
    for workers in (0, 2):
        random.seed(workers)  # the states that a worker would inherit
        splits = own("drawn", workers=workers)
        batch(splits.train, 5, 2, epoch=1)
        shares = [np.arange(start, start + 8)[::-1].copy() for start in (8, 32, 0, 24, 16)]
        for share, (found, _, read) in zip(shares, splits.train.stream(shares, epoch=3), strict=True):
            assert torch.equal(found, x[share])
            assert np.array_equal(read, share)
        assert torch.equal(batch(splits.test, 7)[0], held_out[[7]])
        splits.close()
