"""Ranks that one parent starts and watches: who fails, who hears of it, who is left."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError, RunError
from lockstep.launchers import rank
from lockstep.launchers.start import launch
from lockstep.world.topology import Topology

from .. import entries
from ..command import end
from ..starting import config, start_rank


def _children() -> set[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return {each for each in found if "resource_tracker" not in " ".join(each.cmdline())}


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raise", r"^Rank 1 failed at .*entries\.py:\d+: ValueError: labels reach 10$"),
        ("exit", r"^Rank 1 failed at .*entries\.py:\d+: it called sys\.exit\(3\)"),
        ("vanish", r"^Rank 1 exited with code 7 before it was done"),
    ],
    ids=["raise", "exit", "vanish"],
)
def test_the_first_failing_rank_is_named_and_nobody_is_left(way: str, words: str, tmp_path: Path) -> None:
    before = _children()
    with pytest.raises(RunError, match=words) as caught:
        launch(entries.fail, config(devices=2, data_dir=way, output=tmp_path), {})
    assert time.time() - float((tmp_path / "failing_since").read_text()) < 15  # others would wait for a minute
    assert _children() <= before
    if way == "raise":
        assert 'raise ValueError("labels reach 10")' in caught.value.trace
        assert "labels reach 10" in (tmp_path / "failures" / "rank_1.txt").read_text()


def test_a_rank_that_outlasts_the_others_is_named() -> None:
    before = _children()
    with pytest.raises(RunError, match=r"^Rank 1 did not end within 2 s after the others; continue with"):
        launch(entries.outlast, config(devices=2, stall_timeout=2.0), {})
    assert _children() <= before


def test_data_workers_of_a_run_that_is_stopped_leave_neither_words_nor_files() -> None:
    with tempfile.TemporaryDirectory() as left:  # a short name: workers make sockets there, whose names have a limit
        ended = end(start_rank("fed", devices=2, data_dir="stop", env={"TMPDIR": left}))
        assert (ended.code, ended.err) == (75, "Stopped: Enough.\n")
        assert list(Path(left).iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a torch that cannot use the GPUs says")
def test_gpus_that_torch_cannot_use_are_refused() -> None:
    with pytest.raises(RequestError, match=r"The driver shows GPUs, .* --accelerator cpu"):
        rank.take_device(override(RunConfig(), accelerator="cuda"), {}, Topology())


def test_what_cannot_be_sent_is_told() -> None:
    with pytest.raises(RequestError, match=r"^What rank 0 returned cannot be sent .*pickle.*; return plain values"):
        launch(entries.unpicklable, config(devices=2), {})
