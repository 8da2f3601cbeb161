"""Data on several ranks: one copy a host, the same samples whoever computes them, and errors that all ranks hear."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.batching import BatchPlan
from lockstep.config.schema import DataConfig
from lockstep.data.order import Order
from lockstep.data.ranks import shared
from lockstep.data.sets import build
from lockstep.data.source import Splits
from lockstep.errors import RequestError
from lockstep.world.topology import Topology
from lockstep.world.world import World

from .. import own_data
from ..command import CODE
from ..curves import apart, curve
from ..pool import RankPool
from ..real_data import photographs
from ..tars import shards


def _built(world: World, config: DataConfig) -> Splits:
    return build(config, seed=3, world=world, dtype=torch.float32, channels_last=False)


def _epoch(world: World, config: DataConfig) -> list[tuple[int, bytes]]:
    """Return the samples that this rank trains on in epoch 1, and each one's bytes."""
    splits = _built(world, config)
    samples = len(splits.train)
    order, plan = Order(samples, seed=3, epoch=1), BatchPlan.solve(64, world.size, accumulation=2)
    shares = [order.indices(start, stop).copy() for start, stop, *_ in plan.shares(samples, world.rank)]
    stream = splits.train.stream(shares, epoch=1)
    seen = [(int(index), each.numpy().tobytes()) for x, _, read in stream for index, each in zip(read, x, strict=True)]
    assert [index for index, _ in seen] == np.concatenate(shares).tolist()
    splits.close()
    return seen


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(augment=("crop", "flip", "cutout")),
        DataConfig(name="fake", image_size=8, samples=300, augment=("crop",)),
        DataConfig(name="imagefolder", image_size=32, workers=0, augment=("crop", "flip")),
        DataConfig(name="webdataset", image_size=8, workers=0, augment=("crop", "flip")),
        DataConfig(name="tests.own_data:drawn", workers=0),
    ],
    ids=lambda config: config.name,
)
def test_any_number_of_ranks_computes_the_same_samples_once(pool: RankPool, config: DataConfig, tmp_path: Path) -> None:
    if config.name == "imagefolder":
        config = dataclasses.replace(config, dir=photographs())
    if config.name == "webdataset":
        config = dataclasses.replace(config, dir=shards(tmp_path, train=150))
    (alone,) = pool.run(1, _epoch, config)
    assert len(dict(alone)) == len(alone)
    assert sorted(chain(*pool.run(3, _epoch, config))) == sorted(alone)


def test_a_run_on_shards_resumes_within_an_epoch_on_other_ranks(pool: RankPool, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"data": "webdataset", "data_dir": shards(tmp_path), "image_size": 8, "workers": 0}
    asked |= {"model": "mlp", "batch": 12, "accelerator": "cpu", "ledger": True}
    asked["augment"] = ("crop", "flip", "randaugment", "random-erasing", "mixup", "cutmix")
    whole = curve(pool, tmp_path / "whole", 1, **asked, max_steps=6)  # an epoch has 4
    begun, _ = curve(pool, tmp_path / "run", 2, **asked, max_steps=2)
    rest, weights = curve(pool, tmp_path / "run", 3, **asked, max_steps=6, resume="auto")
    assert apart((begun | rest, weights), whole) < 1e-9


def _shared(world: World) -> tuple[bool, bool, list[int], int]:
    """Return whether this rank made the arrays and their file has no name; what it reads, on 2 + 1 nodes too."""
    made = []

    def arrays() -> dict[str, Any]:
        made.append(world.rank)
        return {"a": np.arange(1_000_003, dtype=np.int64), "b": np.full((2, 3), 7, np.uint8), "c": np.empty(0, "S")}

    held = shared(world, arrays)
    world.barrier()
    files = re.findall(r"/lockstep-\w{8}/\w+\.npy( .*)?$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    held["a"][0] = world.rank  # private: no other rank sees it
    world.barrier()
    node, local = ((0, 0), (0, 1), (1, 0))[world.rank]
    topology = Topology(rank=world.rank, size=3, node=node, nodes=2, local_rank=local, local_size=(2, 1)[node])
    uneven = shared(dataclasses.replace(world, topology=topology), lambda: {"a": np.full(3, world.rank)})
    read = [int(held["a"][0]), int(held["a"].sum()), int(held["b"].sum()), len(held["c"])]
    return bool(made), {*files} == {" (deleted)"}, read, int(uneven["a"][0])


def test_the_ranks_of_a_host_share_one_copy_and_leave_nothing(pool: RankPool) -> None:
    whole = 1_000_002 * 1_000_003 // 2
    assert pool.run(3, _shared) == [
        (rank == 0, True, [rank, whole + rank, 42, 0], first) for rank, first in enumerate((0, 0, 2))
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the photographs that may be changed."""
    shutil.copytree(photographs(), tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (tmp_path / "copy").rglob("*/"):
        path.chmod(0o755)
    return tmp_path / "copy"


def _unseen(path: Path, **options: Any) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _refusal(world: World, folders: list[Path], splits_nodes: bool, difference: str) -> str:
    """Return the refusal or the warnings of images, or without folders of own data, which on rank 1 has a difference.

    With `splits_nodes`, each rank is on a node of its own.
    """
    if splits_nodes:
        topology = Topology(rank=world.rank, size=world.size, node=world.rank, nodes=world.size)
        world = dataclasses.replace(world, topology=topology)
    own = DataConfig(name="tests.own_data:differing", workers=0)
    folder = folders and DataConfig(name="imagefolder", dir=folders[world.rank], image_size=16, workers=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_data, "WAY", difference if world.rank == 1 else "")
        if difference == "unseen" and world.rank == 1:
            patch.setattr(np, "load", _unseen)
        try:
            return "".join(_built(world, folder or own).cautions)
        except RequestError as error:
            return str(error)


def _check(pool: RankPool, words: str, *folders: Path, splits_nodes: bool = False, difference: str = "") -> None:
    refusals = pool.run(2, _refusal, [*folders], splits_nodes, difference)
    assert all(words in text if words else not text for text in refusals), refusals


def test_folders_that_differ_on_one_rank_are_refused_by_all(pool: RankPool, copy: Path, tmp_path: Path) -> None:
    _check(pool, "absent/train is not there", copy, tmp_path / "absent", splits_nodes=True)
    _check(pool, "", photographs(), copy, splits_nodes=True)
    next((copy / "train" / "ants").iterdir()).unlink()
    _check(pool, "rank 1 has train images 119 (rank 0 has 120)", photographs(), copy, splits_nodes=True)
    _check(pool, "Ranks of one node must see the same /", photographs(), photographs(), difference="unseen")


def test_a_data_set_that_differs_on_one_rank_is_refused_by_all(pool: RankPool) -> None:
    for words, difference in (
        ("", ""),
        ("rank 1 has train labels", "relabelled"),
        ("rank 1 has splits ['train', 'validation', 'test'] (rank 0 has ['train', 'test'])", "three sets"),
        ("its train data: samples differ between two readings", "own generator"),
        ("its train data is not the same on every rank: rank 1 reads other samples", "other samples"),
        ("raised OSError", "gone"),
    ):
        _check(pool, words, difference=difference)


_OWN = """
from tests.own_data import _Samples

class Mine(_Samples): ...

def mine(): return Mine(8), Mine(8)
"""
_SPAWNS = """
import multiprocessing, numpy, torch
from lockstep.config.schema import DataConfig
from lockstep.data.sets import build
from lockstep.world.world import World

multiprocessing.set_start_method("spawn")  # as it is in a rank that was spawned
config = DataConfig(name="mine_in_a_folder:mine", workers=1)
splits = build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)
((_, y, _),) = splits.train.stream([numpy.arange(6)], epoch=0)
splits.close()
print(y.tolist())
"""


def test_workers_that_are_spawned_find_a_module_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine_in_a_folder.py").write_text(_OWN)
    words, env = [sys.executable, "-P", "-c", _SPAWNS], {**os.environ, "PYTHONPATH": CODE}  # -P: not the folder itself
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1, 2, 3, 0, 1]\n", done.stderr
