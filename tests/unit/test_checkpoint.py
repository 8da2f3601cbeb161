"""Checkpoints: the same bits come back, no kill breaks `last`, and no damage passes."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep.checkpoint import Checkpoints, find, load, write
from lockstep.checkpoint.layout import digest
from lockstep.checkpoint.state import State
from lockstep.errors import RequestError

Save = tuple[int, bool]
"""A step, and whether it is the best one so far."""


def state_of(step: int) -> State:
    tensors = {"model/weight": torch.full((4, 3), float(step)), "optimizer/0/momentum": torch.full((5,), float(step))}
    return State(tensors, {"step": step, "epoch": 0})


def save_all(run: Path, *saves: Save, **options: Any) -> Path:
    """Save one after the other and return the folder of checkpoints."""
    saver = Checkpoints(run / "checkpoints", warn=pytest.fail, **options)
    for step, best in saves:
        saver.save(state_of(step), step=step, best=best)
    saver.wait()
    return run / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(folder: Path) -> None:
    (folder / "state.json").write_bytes(b"{}")


def test_a_devices_tensors_come_through_one_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(None))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)  # as if these were a device's
    tensors = [
        *(torch.randn(7, 5), torch.tensor(3.0), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        *(torch.arange(300), torch.zeros(0), torch.tensor([True, False]), torch.randn(2, 1).expand(2, 3)),
        *(torch.randn(6, 4).t()[:, ::2], torch.randn(3, dtype=torch.complex128), torch.randn(9)[4:]),
    ]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    write.stage([*zip(copies, tensors, strict=True)], torch.empty(256, dtype=torch.uint8))
    assert all(map(torch.equal, copies, tensors))
    assert sum(copy.nbytes for copy in copies) / 256 <= len(waits) <= 16


def test_tensors_of_every_kind_and_meta_come_back_with_the_same_bits(tmp_path: Path) -> None:
    tensors = {"ema/none": torch.zeros(0, 7), "model/tied": torch.randn(3, 3)}
    tensors["model/tied too"] = tensors["model/tied"]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors[f"model/{dtype}"] = bits.view(dtype).reshape(2, 3)  # any bits: NaNs with payloads, subnormal numbers
    tensors |= {f"model/{dtype}": torch.randn(2, 3, dtype=dtype) for dtype in (torch.complex64, torch.complex128)}
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors |= {"model/images": images, "model/strided": images.transpose(0, 3)[::2]}
    meta = {"best": -float("inf"), "config": {"lr": 0.1 + 0.2, "text": "é\udc80"}, "rng": "AAEC", "none": None}
    saver = Checkpoints(tmp_path / "checkpoints", warn=pytest.fail)
    saver.save(State(tensors, meta), step=1, best=False)
    saver.wait()
    loaded = load(tmp_path)
    assert (loaded.tensors.keys(), loaded.meta) == (tensors.keys(), meta)
    for name, tensor in tensors.items():
        found = loaded.tensors[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (found, tensor))), name


@pytest.mark.parametrize("name_length", range(1, 9))
def test_complex128_is_aligned_to_its_size(tmp_path: Path, name_length: int) -> None:
    saver = Checkpoints(tmp_path / "checkpoints", warn=pytest.fail)
    tensors = {f"model/{'w' * name_length}": torch.randn(3, dtype=torch.complex128), "model/mask": torch.ones(1).bool()}
    saver.save(State(tensors, {}), step=1, best=False)
    saver.wait()
    for tensor in load(tmp_path).tensors.values():
        assert not tensor.is_complex() or tensor.data_ptr() % 16 == 0  # else torch's copy from it crashes


def test_what_is_saved_is_the_state_at_the_call_and_written_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, saved = threading.Event(), list[int]()

    def slow(*args: Any, **how: Any) -> None:
        assert may_write.wait(10)
        save_file(*args, **how)

    monkeypatch.setattr(write, "save_file", slow)
    saver = Checkpoints(tmp_path, warn=pytest.fail, saved=lambda step, path: saved.append(step))
    state = state_of(1)
    saver.save(state, step=1, best=False)
    saver.poll()
    assert saved == []
    for tensor in state.tensors.values():
        tensor.zero_()
    state.meta["step"] = 99
    may_write.set()
    saver.wait()
    assert saved == [1]
    loaded = load(tmp_path / "last")
    assert loaded.meta["step"] == 1
    assert torch.equal(loaded.tensors["model/weight"], torch.ones(4, 3))


def test_ranks_of_a_host_share_the_memory_of_a_checkpoint_and_change_it_for_themselves_alone(tmp_path: Path) -> None:
    save_all(tmp_path, (1, False))
    tensor = load(tmp_path).tensors["model/weight"]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in words[0].split("-")] for words in maps]
    (held,) = [words for words, (begin, end) in zip(maps, ranges, strict=True) if begin <= tensor.data_ptr() < end]
    assert held[-1].endswith("step-00000001/model.safetensors")
    tensor.zero_()
    assert torch.equal(load(tmp_path).tensors["model/weight"], torch.ones(4, 3))


def test_whoever_may_read_the_folder_may_read_the_tensors(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        last = save_all(tmp_path, (1, False)) / "last"
    finally:
        os.umask(before)
    assert names(last) == ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert {path.stat().st_mode & 0o777 for path in last.iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("saves", "steps", "best"),
    [
        ([(1, False), (2, True), (3, False), (4, False), (5, False)], ["02", "04", "05"], 2),
        ([(4, True), (4, False)], ["04", "04.2"], 4),  # a step that is saved again
    ],
)
def test_last_best_and_the_one_before_are_kept(tmp_path: Path, saves: list[Save], steps: list[str], best: int) -> None:
    assert find(tmp_path) is None
    folder = save_all(tmp_path, *saves)
    assert [name.removeprefix("step-000000") for name in names(folder)] == ["best", "last", *steps]
    assert (folder / "last").readlink() == Path(f"step-000000{steps[-1]}")
    assert load(folder / "best").meta["step"] == best
    for path in (tmp_path, folder, folder / "last", (folder / "last").resolve()):
        assert load(path).meta["step"] == saves[-1][0]
    (folder / "last").unlink()  # killed between a first checkpoint's rename and its link
    assert load(tmp_path).meta["step"] == saves[-1][0]


@pytest.mark.parametrize(
    ("keep", "begun", "resumed"),
    [(1, [3], [4]), (2, [2, 3], [2, 4]), (3, [1, 2, 3], [1, 2, 4]), (9, [1, 2, 3], [1, 2, 4])],
)
def test_the_last_ones_are_kept_that_the_run_goes_on_from(
    tmp_path: Path, keep: int, begun: list[int], resumed: list[int]
) -> None:
    """Those of a branch that it has left are no longer needed."""
    folder = save_all(tmp_path, (1, False), (2, False), (3, False), keep=keep)

    def steps() -> list[int]:
        return [int(name.removeprefix("step-")) for name in names(folder) if name.startswith("step")]

    assert steps() == begun
    save_all(tmp_path, (4, False), origin=folder / f"step-0000000{begun[-2:][0]}", keep=keep)
    assert steps() == resumed


def test_a_copy_that_made_folders_of_the_links_can_be_continued(tmp_path: Path) -> None:
    save_all(tmp_path / "a", (1, True), (2, False))
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # follows links
    assert load(tmp_path / "b").meta["step"] == 2
    folder = save_all(tmp_path / "b", (3, False), origin=tmp_path / "b" / "checkpoints" / "last")
    assert [load(folder / name).meta["step"] for name in ("last", "best")] == [3, 1]
    assert load(folder / "step-00000002.2").meta["step"] == 2, "the one before the last is kept"


_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod"}


def _dies_before(change: int, run: Path, *saves: Save) -> bool:
    """Save in a child that dies before it changes the disk for the time `change`; return whether it came to that."""
    child = os.fork()
    if child == 0:
        left, code = itertools.count(change - 1, -1), 1

        def look(event: str, given: tuple[Any, ...]) -> None:
            writes = event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR)
            if (writes or event in _CHANGES) and next(left) == 0:
                os._exit(9)

        try:
            sys.addaudithook(look)
            save_all(run, *saves)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_a_kill_between_any_two_changes_of_the_disk_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    (save_all(tmp_path / "before", (1, True), (2, False)) / "notes.txt").write_text("the user's")
    for change in itertools.count(1):
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(change), symlinks=True)) / "checkpoints"
        died = _dies_before(change, folder.parent, (3, True), (4, False))
        assert find(folder) is not None
        for path in (*folder.glob("step-*"), *folder.glob("[bl]*st")):
            state = load(path)
            assert all((tensor == state.meta["step"]).all() for tensor in state.tensors.values())
        last, best = (load(folder / link).meta["step"] for link in ("last", "best"))
        assert best == (3 if last > 2 else best)  # a run that goes on would not save again the best that it has seen
        save_all(folder.parent, (5, True), (6, False))
        assert names(folder) == ["best", "last", "notes.txt", "step-00000005", "step-00000006"]
        if not died:
            assert change > 20, "a save is that many changes at least"
            return


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "checksums.json"])
def test_no_flipped_bit_passes(tmp_path: Path, name: str) -> None:
    path = save_all(tmp_path, (1, False)) / "last" / name
    whole = path.read_bytes()
    # Every byte of the small files, with one of its bits; a fresh choice each time the test runs.
    for offset in range(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(RequestError):
            load(tmp_path)
    path.write_bytes(whole)
    assert load(tmp_path).meta["step"] == 1


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("optimizer.safetensors", Path.unlink),
        ("state.json", lambda path: path.write_bytes(b"")),
        ("../step-00000003", shutil.rmtree),
    ],
    ids=["gone", "empty", "a link to nothing"],
)
def test_damage_is_named_with_the_newest_good_checkpoint(
    tmp_path: Path, name: str, harm: Callable[[Path], object]
) -> None:
    folder = save_all(tmp_path, (1, True), (2, False), (3, False))
    harm(folder / "step-00000003" / name)
    with pytest.raises(RequestError, match=Path(name).name):
        load(tmp_path)
    # With the one that is offered damaged too, the next is offered; with none left, it says so.
    for good in (2, 1):
        with pytest.raises(RequestError, match=f"the last intact one is {folder}/step-0000000{good}:"):
            load(folder / "last")
        assert load(folder / "last", fall_back=True).meta["step"] == good
        damage(folder / f"step-0000000{good}")
    with pytest.raises(RequestError, match="no other intact one"):
        load(folder / "last", fall_back=True)


def test_a_damaged_one_is_passed_over_for_one_before_it_not_for_what_was_left_behind(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (10, False), (30, False))
    left = shutil.copytree(folder / "step-00000030", tmp_path / "left")
    save_all(tmp_path, (20, False), origin=folder / "step-00000010")  # taken up at 10
    assert names(folder) == ["last", "step-00000010", "step-00000020"]
    shutil.copytree(left, folder / "step-00000030")
    damage(folder / "step-00000020")
    assert load(folder / "last", fall_back=True).meta["step"] == 10


def test_foreign_things_and_newer_formats_are_refused(tmp_path: Path) -> None:
    state, sums = (save_all(tmp_path / "new", (1, False)) / "last" / name for name in ("state.json", "checksums.json"))
    state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 9}))
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"state.json": digest(state)}))
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.pth")
    (tmp_path / "state.json").write_text('{"who": "someone else"}')
    for name, told in {
        "nowhere": "nowhere",
        "": "no lockstep checkpoint",
        "model.pth": r"\.pth",
        "new": r"version 9.*update lockstep-torch",
    }.items():
        with pytest.raises(RequestError, match=told):
            load(tmp_path / name)
