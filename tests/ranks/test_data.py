"""Data on several ranks: one copy a host, the same samples whoever computes them, and errors that all ranks hear."""

from __future__ import annotations

import dataclasses
import gc
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.batching import BatchPlan
from lockstep.config import DataConfig
from lockstep.data.order import Order
from lockstep.data.sets import build
from lockstep.data.shared import shared
from lockstep.errors import RequestError
from lockstep.topology import Topology
from lockstep.world import World

from .. import own_data
from ..pool import RankPool
from ..real_data import photographs


def _own_node(world: World) -> World:
    """Return the world with each rank on a node of its own."""
    topology = Topology(rank=world.rank, size=world.size, node=world.rank, nodes=world.size)
    return dataclasses.replace(world, topology=topology)


def _epoch(world: World, config: DataConfig) -> tuple[list[int], dict[int, bytes]]:
    """Return the samples this rank trained on in epoch 1, in order, and each one's bytes."""
    splits = build(config, seed=3, world=world, dtype=torch.float32, channels_last=False)
    samples = len(splits.train)
    order = Order(samples, seed=3, epoch=1)
    plan = BatchPlan.solve(64, world.size, accumulation=2)
    parts = [plan.split(*plan.batch(step, samples), world.rank) for step in range(plan.steps(samples))]
    shares = [order.indices(share.start, share.stop).copy() for step in parts for share in step]
    seen: dict[int, bytes] = {}
    for share, (x, y, _) in zip(shares, splits.train.stream(shares, epoch=1), strict=True):
        assert len(x) == len(y) == len(share)
        seen |= {int(index): each.numpy().tobytes() for index, each in zip(share, x, strict=True)}
    splits.close()
    return [int(index) for share in shares for index in share], seen


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(augment=("crop", "flip", "cutout")),
        DataConfig(name="fake", image_size=8, samples=300, augment=("crop",)),
        DataConfig(name="imagefolder", image_size=32, workers=0, augment=("crop", "flip")),
        DataConfig(name="tests.own_data:drawn", workers=0),
    ],
    ids=lambda config: config.name,
)
def test_any_number_of_ranks_computes_the_same_samples_once(pool: RankPool, config: DataConfig) -> None:
    if config.name == "imagefolder":
        config = dataclasses.replace(config, dir=photographs())
    ((alone, expected),) = pool.run(1, _epoch, config)
    assert len(set(alone)) == len(alone)
    answers = pool.run(3, _epoch, config)
    together = [index for indices, _ in answers for index in indices]
    assert sorted(together) == sorted(alone)
    assert {index: data for _, seen in answers for index, data in seen.items()} == expected


_FOLDERS = ("/dev/shm", tempfile.gettempdir())
_SHARED = re.compile(rf" ({'|'.join(map(re.escape, _FOLDERS))})/lockstep-\w{{8}}( \(deleted\))?$")
"""A line of /proc/self/maps for a file that `shared` has made: mkstemp's names have eight random characters."""


def _maps(world: World) -> dict[str, Any]:
    gc.collect()  # what tests before this one have left mapped
    built = []

    def arrays() -> dict[str, Any]:
        built.append(world.rank)
        return {"a": np.arange(1_000_003, dtype=np.int64), "b": np.full((2, 3), 7, np.uint8), "c": np.array(5)}

    result = shared(world, arrays)
    world.barrier()
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5) for line in lines if _SHARED.search(line)]
    result["a"][0] = world.rank  # private: no other rank sees it
    world.barrier()
    return {
        "built": built,
        "sum": int(result["a"][1:].sum()),
        "first": int(result["a"][0]),
        "rest": [result["b"].tolist(), int(result["c"])],
        "mapped": [fields[5] for fields in mapped],
        "left": [str(path) for folder in _FOLDERS for path in Path(folder).glob("lockstep-*")],
    }


def test_a_host_holds_one_copy_and_nothing_is_left_behind(pool: RankPool) -> None:
    answers = pool.run(3, _maps)
    for rank, answer in enumerate(answers):
        assert answer["built"] == ([0] if rank == 0 else [])
        assert answer["sum"] == 1_000_002 * 1_000_003 // 2
        assert answer["first"] == rank
        assert answer["rest"] == [[[7] * 3] * 2, 5]
        assert len(answer["mapped"]) == 1, "the arrays are not mapped from one file"
        assert answer["mapped"][0].endswith(" (deleted)")
    paths = {answer["mapped"][0].removesuffix(" (deleted)") for answer in answers}
    assert len(paths) == 1
    assert not any(path in answer["left"] for path in paths for answer in answers)


def _refused(world: World, config: DataConfig, apart: bool) -> str:
    try:
        build(config, seed=0, world=_own_node(world) if apart else world, dtype=torch.float32, channels_last=False)
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("apart", [False, True], ids=["one node", "two nodes"])
def test_an_error_of_one_rank_reaches_all(pool: RankPool, tmp_path: Path, apart: bool) -> None:
    sentences = pool.run(2, _refused, DataConfig(name="cifar10", dir=tmp_path, download=False), apart)
    assert sentences[0] == sentences[1]
    assert "cifar-10-batches-py" in sentences[0]


def _fails_on_the_second_node(world: World) -> str:
    def arrays() -> dict[str, Any]:
        if world.rank == 1:
            raise OSError("disk gone")
        return {"a": np.zeros(3)}

    try:
        shared(_own_node(world), arrays)
    except RequestError as error:
        return str(error)
    return ""


def test_an_error_of_another_node_reaches_all(pool: RankPool) -> None:
    assert pool.run(2, _fails_on_the_second_node) == ["disk gone"] * 2


def _uneven_nodes(world: World) -> int:
    node, local = ((0, 0), (0, 1), (1, 0))[world.rank]
    topology = Topology(rank=world.rank, size=3, node=node, nodes=2, local_rank=local, local_size=(2, 1)[node])
    uneven = dataclasses.replace(world, topology=topology)
    return int(shared(uneven, lambda: {"a": np.full(3, world.rank)})["a"].sum()) + len(world.gather(0))


def test_nodes_may_have_different_numbers_of_ranks(pool: RankPool) -> None:
    assert pool.run(3, _uneven_nodes) == [3, 3, 9]


def _copy(folder: Path) -> Path:
    """Return a copy of the photographs that may be changed."""
    shutil.copytree(photographs(), folder / "copy", copy_function=shutil.copyfile)
    for path in (folder / "copy").rglob("*/"):
        path.chmod(0o755)
    return folder / "copy"


def _differing(world: World, folders: list[str]) -> str:
    config = DataConfig(name="imagefolder", dir=Path(folders[world.rank]), image_size=16, workers=0)
    return _refused(world, config, True)


def test_hosts_with_different_files_are_refused(pool: RankPool, tmp_path: Path) -> None:
    copy = _copy(tmp_path)
    folders = [str(photographs()), str(copy)]
    assert pool.run(2, _differing, folders) == ["", ""]
    next((copy / "train" / "ants").iterdir()).unlink()
    first, second = pool.run(2, _differing, folders)
    for sentence in (first, second):
        assert "rank 1 has train images 119 (rank 0 has 120), train names of digest" in sentence


_DIFFERENT = {"fewer": "train samples", "relabelled": "train labels", "classes": "classes", "gone": "raised OSError"}


def _own_differing(world: World) -> list[str]:
    """Return the sentence for each way in which rank 1's own data set may differ."""
    sentences = []
    for way in _DIFFERENT:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(own_data, "WAY", way if world.rank == 1 else "")
            sentences.append(_refused(world, DataConfig(name="tests.own_data:differing", workers=0), False))
    return sentences


def test_ranks_with_different_own_data_are_refused(pool: RankPool) -> None:
    first, *others = pool.run(3, _own_differing)
    assert others == [first, first]
    for words, sentence in zip(_DIFFERENT.values(), first, strict=True):
        assert words in sentence
        assert "\n" not in sentence


_MODULE = """
import torch

class Mine(torch.utils.data.Dataset):
    classes = 2
    def __len__(self): return 6
    def __getitem__(self, index): return torch.tensor([float(index)]), index % 2

def mine(): return Mine(), Mine()
"""


_SPAWNS = """
import multiprocessing, numpy, torch
from lockstep.config import DataConfig
from lockstep.data.sets import build
from lockstep.world import World

multiprocessing.set_start_method("spawn")  # as it is in a rank that was spawned
config = DataConfig(name="mine_in_a_folder:mine", workers=1)
splits = build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=False)
((x, _, _),) = splits.train.stream([numpy.arange(6)], epoch=0)
splits.close()
print(x.flatten().tolist())
"""


def test_workers_that_are_spawned_find_a_module_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine_in_a_folder.py").write_text(_MODULE)
    command = [sys.executable, "-P", "-c", _SPAWNS]  # -P: the current folder is not importable by itself
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split("\n")[0] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]", done.stderr


def _skipping(world: World, folder: str) -> tuple[tuple[str, ...], int]:
    config = DataConfig(name="imagefolder", dir=Path(folder), image_size=16, workers=0, skip_corrupt=True)
    splits = build(config, seed=0, world=world, dtype=torch.float32, channels_last=False)
    return splits.train.skipped, len(splits.train)


def test_corrupt_files_are_found_by_all_ranks_together(pool: RankPool, tmp_path: Path) -> None:
    copy = _copy(tmp_path)
    ants = sorted((copy / "train" / "ants").iterdir())
    for index in (1, 2, 6):
        ants[index].write_bytes(ants[index].read_bytes()[:500])
    expected = (tuple(str(ants[index]) for index in (1, 2, 6)), 117)
    assert pool.run(3, _skipping, str(copy)) == [expected] * 3
