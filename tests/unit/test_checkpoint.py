"""Checkpoints: the same bits come back, no kill breaks `last`, and no damage passes."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint import Checkpoints, find, layout, load, load_good, read, write
from lockstep.checkpoint.layout import digest
from lockstep.errors import RequestError
from lockstep.state import State

from ..disks import no_file_beyond
from ..needs import need


class Ear:
    """Hears warnings and what was saved."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.saved: list[int] = []

    def open(self, folder: Path) -> Checkpoints:
        return Checkpoints(folder, warn=self.warnings.append, saved=lambda step, path: self.saved.append(step))


def state_of(step: int) -> State:
    return State(
        {"model/weight": torch.full((4, 3), float(step)), "optimizer/0/momentum": torch.full((5,), float(step))},
        {"step": step, "epoch": 0},
    )


def save_all(run: Path, *saves: tuple[int, bool]) -> Path:
    """Save (step, best) one after the other and return the folder of checkpoints."""
    ear = Ear()
    saver = ear.open(run / "checkpoints")
    for step, best in saves:
        saver.save(state_of(step), step=step, best=best)
    saver.close()
    assert ear.warnings == []
    return run / "checkpoints"


def test_whoever_may_read_the_folder_may_read_the_tensors(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        last = save_all(tmp_path, (1, False)) / "last"
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in last.iterdir()} == dict.fromkeys(
        names(last), oct(0o640)
    )
    assert "model.safetensors" in names(last)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


# --- the same comes back ---


def came_back(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> dict[str, Tensor]:
    """Save, and return the tensors that are loaded; what goes with them is the same."""
    saver = Ear().open(folder / "checkpoints")
    saver.save(State(tensors, meta), step=1, best=False)
    saver.close()
    loaded = load(folder)
    assert loaded.tensors.keys() == tensors.keys()
    assert loaded.meta == meta
    return loaded.tensors


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)


def test_every_dtype_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    for dtype in DTYPES:
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        values = bits.view(dtype)  # any bits: NaNs with payloads, subnormal numbers
        tensors = {"model/a": values.reshape(2, 3), "model/b.c": values[0], "ema/none": values[:0].reshape(0, 7)}
        loaded = came_back(tmp_path / str(dtype), tensors, {"step": 1})
        assert all(same_bits(loaded[name], tensors[name]) for name in tensors), dtype


def test_meta_and_tied_and_strided_tensors_come_back(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tied = torch.nn.Parameter(torch.randn(3, 3))
    tensors = {"model/a": tied, "model/b": tied, "model/c": images, "model/d": images.transpose(0, 3)[::2]}
    config = {"lr": 0.1 + 0.2, "text": "é\udc80"}
    loaded = came_back(tmp_path, tensors, {"best": -float("inf"), "config": config, "rng": "AAEC", "none": None})
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_the_good_one_that_a_run_goes_on_from_stays_until_there_are_two_newer_ones(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (10, False), (20, False))
    (folder / "step-00000020" / "model.safetensors").write_bytes(b"")
    ear = Ear()
    origin = load_good(folder / "last").origin
    saver = Checkpoints(folder, warn=ear.warnings.append, origin=origin)
    kept = []
    for step in (20, 30):
        saver.save(state_of(step), step=step, best=False)
        saver.wait()
        kept.append(sorted(path.name for path in folder.glob("step-*")))
    assert ear.warnings == []
    assert kept == [
        ["step-00000010", "step-00000020", "step-00000020.2"],
        ["step-00000020.2", "step-00000030"],
    ]


def test_the_best_one_that_a_run_goes_on_from_stays_where_a_better_one_is_saved(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (10, True), (20, False))
    (folder / "step-00000020" / "model.safetensors").write_bytes(b"")
    saver = Checkpoints(folder, warn=Ear().warnings.append, origin=load(folder / "best").origin)
    saver.save(state_of(15), step=15, best=True)
    saver.close()
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000010", "step-00000015", "step-00000020"]


def test_training_goes_on_while_the_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is the state at the call, although the tensors and the dict change before it is written."""
    may_write = threading.Event()
    real = write._publish

    def slow(*args: object, **kwargs: object) -> Path:
        assert may_write.wait(10)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "_publish", slow)
    ear = Ear()
    saver = ear.open(tmp_path)
    state = state_of(1)
    saver.save(state, step=1, best=False)
    saver.poll()
    assert ear.saved == []
    for tensor in state.tensors.values():
        tensor.zero_()
    state.meta["step"] = 99
    may_write.set()
    saver.wait()
    assert ear.saved == [1]
    loaded = load(tmp_path / "last")
    assert loaded.meta["step"] == 1
    assert same_bits(loaded.tensors["model/weight"], torch.full((4, 3), 1.0))


def test_a_defect_of_ours_is_not_taken_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> Path:
        raise ZeroDivisionError

    monkeypatch.setattr(write, "_publish", broken)
    ear = Ear()
    saver = ear.open(tmp_path)
    saver.save(state_of(1), step=1, best=False)
    with pytest.raises(ZeroDivisionError):
        saver.close()
    assert ear.warnings == []
    with pytest.raises(TypeError):
        saver.save(State({}, {"step": object()}), step=2, best=False)


# --- last, best, and what is kept ---


def test_last_best_and_the_one_before_are_kept(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (1, False), (2, True), (3, False), (4, False), (5, False))
    assert names(folder) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert (folder / "last").readlink() == Path("step-00000005")
    assert load(folder / "best").meta["step"] == 2
    assert load(tmp_path).meta["step"] == load(folder).meta["step"] == load(folder / "step-00000005").meta["step"] == 5
    assert names(folder / "last") == ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def test_what_is_loaded_while_the_run_goes_on_is_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, (1, True))
    reading = layout.content
    later = iter([2])

    def content(path: Path) -> bytes:
        data = reading(path)
        for step in later if path.name == "checksums.json" else ():
            save_all(tmp_path, (step, True))  # `last` moves when its list is read, and its files are not
        return data

    monkeypatch.setattr(read, "content", content)
    state = load(tmp_path)
    assert list(later) == []
    assert state.meta["step"] == 1
    assert state.origin == tmp_path / "checkpoints" / "step-00000001"
    assert load(tmp_path).meta["step"] == 2


def test_a_copy_that_made_folders_of_the_links_can_be_continued(tmp_path: Path) -> None:
    save_all(tmp_path / "a", (1, True), (2, False))
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # follows links
    assert load(tmp_path / "b").meta["step"] == 2
    folder = save_all(tmp_path / "b", (3, False))
    assert [load(folder / name).meta["step"] for name in ("last", "best")] == [3, 1]
    assert (folder / "best").is_symlink()


def test_saving_a_step_again_replaces_it_only_once_it_is_whole(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (4, True), (4, False))
    assert [load(folder / name).meta["step"] for name in ("last", "best")] == [4, 4]
    assert (folder / "last").readlink() != (folder / "best").readlink()
    folder = save_all(tmp_path, (5, True), (6, False))
    assert names(folder) == ["best", "last", "step-00000005", "step-00000006"]


def test_leftovers_of_killed_saves_are_removed_at_the_start(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (1, True))
    (folder / ".saving-00000002-77").mkdir()
    (folder / ".saving-00000002-77" / "model.safetensors").write_bytes(b"half")
    (folder / ".deleting-step-00000000").mkdir()
    (folder / ".last-77").symlink_to("step-00000002")
    (folder / "notes.txt").write_text("mine")
    Ear().open(folder)
    assert names(folder) == ["best", "last", "notes.txt", "step-00000001"]


def test_find(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "none") is None
    Ear().open(tmp_path / "checkpoints")
    assert find(tmp_path) is None
    folder = save_all(tmp_path, (1, False), (2, False))
    assert find(tmp_path) == find(folder) == folder / "last"
    (folder / "last").unlink()  # killed between a first checkpoint's rename and its link
    assert find(tmp_path) == folder / "step-00000002"
    assert load(tmp_path).meta["step"] == 2


# --- kills ---

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.chmod"}


def _dies_before(change: int, run: Path, *saves: tuple[int, bool]) -> bool:
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


@pytest.mark.parametrize("before", [(), ((1, True), (2, False))], ids=["none", "two"])
def test_a_kill_between_any_two_changes_of_the_disk_leaves_a_whole_checkpoint(
    tmp_path: Path, before: tuple[tuple[int, bool], ...]
) -> None:
    save_all(tmp_path / "before", *before)
    for change in itertools.count(1):
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(change), symlinks=True)) / "checkpoints"
        died = _dies_before(change, folder.parent, (3, True), (4, False))
        assert find(folder) is not None or not before
        assert (folder / "best").exists() or not before
        for path in (*folder.glob("step-*"), *folder.glob("[bl]*st")):
            state = load(path)
            assert all((tensor == state.meta["step"]).all() for tensor in state.tensors.values())
        save_all(folder.parent, (5, True), (6, False))
        assert names(folder) == ["best", "last", "step-00000005", "step-00000006"]
        if not died:
            assert change > 20, "a save is that many changes at least"
            return


def test_what_is_killed_between_the_links_has_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on from `last`, comes to the best once more, and would not save it if `last` said that it has it."""
    saver = Ear().open(tmp_path)
    saver.save(state_of(1), step=1, best=True)
    saver.close()
    real = write._point

    def killed(link: Path, target: Path) -> None:
        if link.name == "last":
            raise KeyboardInterrupt
        real(link, target)

    monkeypatch.setattr(write, "_point", killed)
    saver.save(state_of(2), step=2, best=True)
    with pytest.raises(KeyboardInterrupt):
        saver.close()
    assert (load(tmp_path / "last").meta["step"], load(tmp_path / "best").meta["step"]) == (1, 2)


# --- full disks ---


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, text=True)
    need([f"the right to mount a tmpfs: {mounted.stderr.strip()}"] if mounted.returncode else [])
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("how", ["full", "limited"])  # the latter for those who may not mount
def test_a_full_disk_stops_no_training(tmp_path: Path, request: pytest.FixtureRequest, how: str) -> None:
    disk = request.getfixturevalue("tiny_disk") if how == "full" else tmp_path
    ear = Ear()
    saver = ear.open(disk)
    saver.save(state_of(1), step=1, best=True)
    saver.wait()
    before = names(disk)
    with no_file_beyond(500_000) if how == "limited" else nullcontext():
        saver.save(State({"model/w": torch.zeros(1_000_000)}, {"step": 2}), step=2, best=True)
        saver.wait()
    assert names(disk) == before
    assert load(disk / "last").meta["step"] == load(disk / "best").meta["step"] == 1
    (warning,) = ear.warnings
    reason = "No space left" if how == "full" else "File too large"
    assert all(part in warning for part in ("step 2", "training goes on", reason))
    saver.save(state_of(3), step=3, best=False)
    saver.close()
    assert load(disk / "last").meta["step"] == 3
    assert ear.saved == [1, 3]


# --- damage ---

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums.json")


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_passes(tmp_path: Path, name: str) -> None:
    folder = save_all(tmp_path, (1, False), (2, False))
    path = folder / "step-00000002" / name
    whole = path.read_bytes()
    # Every byte of the small files, with one of its bits; a fresh choice each time the test runs.
    for offset in range(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(RequestError) as refusal:
            load(tmp_path)
        assert "Traceback" not in str(refusal.value)
    path.write_bytes(whole)
    assert load(tmp_path).meta["step"] == 2


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "deep", "pipe"])
def test_damage_names_the_file_and_the_newest_good_checkpoint(tmp_path: Path, name: str, damage: str) -> None:
    folder = save_all(tmp_path, (1, True), (2, False), (3, False))
    path = folder / "step-00000003" / name
    if damage in ("gone", "pipe"):
        path.unlink()
        if damage == "pipe":
            os.mkfifo(path)  # which nobody writes to
    elif damage == "deep":
        path.write_bytes(b"[" * 100_000)
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "cut" else b"")
    with pytest.raises(RequestError, match=name) as refusal:
        load(folder / "last")
    good = folder / "step-00000002"
    assert str(refusal.value).endswith(f"the last good one is {good}: give that one instead.")
    assert load(good).meta["step"] == 2
    # With that one damaged too, the next is offered; with none left, it says so.
    for other, offer in ((2, f"{folder}/step-00000001:"), (1, "no other good one")):
        (folder / f"step-0000000{other}" / "state.json").write_bytes(b"{}")
        with pytest.raises(RequestError, match=offer):
            load(folder / "last")


def test_a_link_to_nothing_offers_what_is_there(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (1, False), (2, False))
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(RequestError, match=r"points to step-00000002, which is not there; the last good one is .*0001"):
        load(tmp_path)
    with pytest.raises(RequestError, match="the last good one is"):
        load(folder / "last")
    (folder / "last").unlink()
    (folder / "last").symlink_to("last")
    with pytest.raises(RequestError, match=r"points to last, which is not there; the last good one is .*0001"):
        load(tmp_path)


def test_a_damaged_one_is_passed_over_for_one_before_it_not_for_what_was_left_behind(tmp_path: Path) -> None:
    folder = save_all(tmp_path, (10, False), (30, False))
    saver = Checkpoints(folder, warn=Ear().warnings.append, origin=folder / "step-00000010")
    saver.save(state_of(20), step=20, best=False)  # taken up at 10
    saver.close()
    (folder / "step-00000020" / "state.json").write_bytes(b"{}")
    assert load_good(folder / "last").meta["step"] == 10
    shutil.rmtree(folder / "step-00000010")
    assert load_good(folder / "last").meta["step"] == 30


def test_a_newer_format_is_refused_by_its_version(tmp_path: Path) -> None:
    path = save_all(tmp_path, (1, False)) / "last"
    state = json.loads((path / "state.json").read_bytes()) | {"version": 9}
    (path / "state.json").write_text(json.dumps(state))
    sums = json.loads((path / "checksums.json").read_bytes())
    (path / "checksums.json").write_text(json.dumps(sums | {"state.json": digest(path / "state.json")}))
    with pytest.raises(RequestError, match=r"format version 9.*update lockstep-torch"):
        load(tmp_path)


def test_foreign_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"There is no checkpoint at .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="holds no lockstep checkpoint"):
        load(tmp_path)
    pickled = tmp_path / "model.pth"
    torch.save({"a": torch.zeros(1)}, pickled)
    with pytest.raises(RequestError, match=r"\.pth are never loaded"):
        load(pickled)
    (tmp_path / "state.json").write_text('{"who": "someone else"}')
    with pytest.raises(RequestError, match=r"holds no lockstep checkpoint"):
        load(tmp_path)
