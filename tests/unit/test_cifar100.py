"""CIFAR-100 is read from files of the official format: pickles of Python 2, of which nothing is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lockstep.config import DataConfig
from lockstep.data import cifar
from lockstep.errors import RequestError

SAMPLES = 20


class _Python2(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its strings."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def _string(self: Any, value: str | bytes) -> None:
        data = value.encode("latin-1") if isinstance(value, str) else value
        short = len(data) < 256
        head = pickle.SHORT_BINSTRING + bytes([len(data)]) if short else pickle.BINSTRING + struct.pack("<i", len(data))
        self.write(head + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = _string


def _written(path: Path, held: dict[str, Any]) -> str:
    """Write the official file of these contents; return its md5."""
    file = io.BytesIO()
    _Python2(file, protocol=2).dump(held)
    path.write_bytes(file.getvalue())
    assert pickle.loads(file.getvalue(), encoding="latin-1").keys() == held.keys()
    return hashlib.md5(file.getvalue()).hexdigest()


@pytest.mark.parametrize("turned", [False, True], ids=["in their order", "the other way round"])
def test_files_of_the_official_format_are_read(tmp_path: Path, turned: bool) -> None:
    draw = np.random.default_rng(0)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    sums, expected = {}, {}
    for split in ("train", "test"):
        images = draw.integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8)
        fine = draw.permutation(100)[:SAMPLES]
        held = {
            "filenames": [f"some_{number:06}.png" for number in range(SAMPLES)],
            "batch_label": f"{split}ing batch 1 of 1",
            "fine_labels": fine.tolist(),
            "coarse_labels": (fine // 5).tolist(),
            "data": images.transpose(0, 3, 1, 2).reshape(SAMPLES, -1),
        }
        sums[split] = _written(folder / split, dict(reversed(held.items())) if turned else held)
        expected[split] = images, fine
    official = dataclasses.replace(cifar.CIFAR100, train={"train": sums["train"]}, test={"test": sums["test"]})
    config = DataConfig(name="cifar100", dir=tmp_path, download=False)
    for split, (images, labels) in cifar.read(official, config).items():
        assert np.array_equal(images, expected[split][0])
        assert np.array_equal(labels, expected[split][1])
    assert (official.classes, official.folder) == (100, folder.name)
    (folder / "test").write_bytes((folder / "test").read_bytes()[:-1])
    with pytest.raises(RequestError, match=f"{folder}/test is not the official file.*{sums['test']}"):
        cifar.read(official, config)
