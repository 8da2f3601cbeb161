"""Ranks that one parent starts and watches: who fails, who hears of it, who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep import hardware
from lockstep.config import RunConfig
from lockstep.errors import LockstepError, ProofError, RequestError, RunError
from lockstep.launchers import rank, spawn
from lockstep.launchers.supervise import Supervisor
from lockstep.launchers.table import launch
from lockstep.options import override
from lockstep.topology import Topology

from .. import entries
from ..command import PATIENCE_S, ROOT, Running, gone, losses, until
from ..starting import STARTED_S, config, noted, outcome, start_rank


@pytest.mark.parametrize("size", [2, 3])
def test_spawned_ranks_form_one_world(size: int) -> None:
    told = launch(entries.total, config(devices=size, seed=7), {})
    assert told is not None
    assert told["sum"] == [size, sum(range(size))]
    assert [rank[:3] for rank in told["ranks"]] == [[rank, rank, size] for rank in range(size)]
    assert len({os.getpid(), *(rank[3] for rank in told["ranks"])}) == size + 1
    assert told["threads"] == [max(1, hardware.cpus() // size)] * size
    assert told["interface"] == "lo"
    assert told["seed"] == 7
    assert not any(psutil.pid_exists(rank[3]) for rank in told["ranks"])


@pytest.mark.parametrize(
    ("way", "kind", "words"),
    [
        ("raise", RunError, r"^Rank 1 failed at .*entries\.py:\d+: ValueError: labels reach 10$"),
        ("exit", RunError, r"^Rank 1 failed at .*entries\.py:\d+: it called sys\.exit\(3\)"),
        ("vanish", RunError, r"^Rank 1 exited with code 7 before it was done"),
        ("killed", RunError, r"^Rank 1 was killed by SIGKILL \(out of memory\?\); continue with --resume auto\.$"),
        ("refuse", RequestError, r"^The data set has no image\.$"),
        ("disprove", ProofError, r"^Rank 1 differs in fc\.weight\.$"),
    ],
)
def test_the_first_failing_rank_is_named_and_nobody_is_left(
    way: str, kind: type[LockstepError], words: str, tmp_path: Path
) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(kind, match=words) as caught:
        launch(entries.fail, config(devices=2, data_dir=way, output=tmp_path), {})
    over_s, failed_s = time.time(), float((tmp_path / "failing_since").read_text())
    assert over_s - failed_s < PATIENCE_S  # the others would wait for a minute
    ranks = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [child for child in ranks if "resource_tracker" not in " ".join(child.cmdline())]
    if way == "raise":
        assert isinstance(caught.value, RunError)
        assert 'raise ValueError("labels reach 10")' in caught.value.trace
        assert "labels reach 10" in (tmp_path / "failures" / "rank_1.txt").read_text()


def test_a_value_that_cannot_be_read_is_said_to_be_that() -> None:
    with pytest.raises(RunError, match=r"^The ranks are done, but what rank 0 returned cannot be read here \(ValueEr"):
        launch(entries.unreadable, config(devices=2), {})


_STALLED = (
    r"^Rank {} was stopped, died or was cut off \d+ s ago, last heard of in .* \(step \d+\); {} at step \d+; "
    r"start the same command again\.$"
)


def test_a_spawned_rank_that_stalls_is_named_and_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RunError, match=_STALLED.format("1", "rank 0 waits in all-reduce")):
        launch(entries.lose, config(devices=2, data_dir="SIGSTOP", seed=1, stall_timeout=2), {})
    ranks = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [child for child in ranks if "resource_tracker" not in " ".join(child.cmdline())]


def test_a_rank_that_aborts_since_another_one_hangs_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def supervisor(again: str, **_: object) -> Supervisor:
        return Supervisor(again, stall_timeout_s=60, aborts_when_alone=True)

    monkeypatch.setattr(spawn, "Supervisor", supervisor)
    with pytest.raises(RunError, match=r"^Rank 1 did not come to a collective in which the others waited"):
        launch(entries.abort, config(devices=2), {})


def test_ranks_that_are_left_are_not_asked_to_save() -> None:
    code, _, err = outcome(start_rank("busy", devices=2))
    assert (code, err) == (1, "RunError: Rank 1 was killed by SIGKILL (out of memory?); continue with --resume auto.\n")


def test_a_stop_reaches_every_rank_and_comes_back_as_one(tmp_path: Path) -> None:
    command = start_rank("stoppable", devices=2, data_dir=str(tmp_path))
    ranks = noted(tmp_path, 2)
    assert {os.getsid(rank.pid) for rank in ranks}.isdisjoint({os.getsid(command.pid)})
    command.send_signal(signal.SIGINT)
    code, _, err = outcome(command)
    assert (code, err.strip()) == (75, "Stopped: Stopped after step 3; resume with --resume auto.")
    assert gone(ranks)


def test_one_signal_from_two_senders_is_one_request(tmp_path: Path) -> None:
    """When a terminal is closed, its kernel and its shell both send SIGHUP."""
    run = tmp_path / "run"
    # However late the second is heard here, it comes soon enough; what soon means, tests/unit/test_interrupts.py says.
    patient = (
        "import sys, lockstep.interrupts as it; it._ECHO_S = 600; from lockstep.__main__ import main; sys.exit(main())"
    )
    words = ("--strategy", "ddp", "--devices", "2", "--epochs", "1000", "--output", str(run))
    with Running(
        [sys.executable, "-c", patient, "train", "digits", *words],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        until(lambda: bool(losses(run)) or command.poll() is not None, STARTED_S)
        ranks = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGHUP)
        time.sleep(0.02)
        command.send_signal(signal.SIGHUP)
        code, _, err = outcome(command)
    assert code == 75, err
    assert "and saved" in err
    assert list((run / "checkpoints").iterdir())
    until(lambda: gone(ranks), 10)  # among them is multiprocessing's tracker, which outlives its parent a bit


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    command = start_rank("stubborn", devices=2, data_dir=str(tmp_path))
    processes = noted(tmp_path, 2)
    assert len(processes) == 4
    command.terminate()
    until(lambda: all((tmp_path / f"asked_{rank}").exists() for rank in range(2)), STARTED_S)
    time.sleep(1.5)  # for half a second it would be the first one once more
    assert all(process.is_running() for process in processes)
    command.terminate()
    code, _, err = outcome(command)
    assert (code, "second signal" in err) == (1, True), err
    until(lambda: gone(processes), 5)


def test_no_orphan_outlives_a_killed_parent(tmp_path: Path) -> None:
    command = start_rank("stubborn", devices=2, data_dir=str(tmp_path))
    processes = noted(tmp_path, 2)
    command.kill()
    command.communicate()
    until(lambda: gone(processes), 30)  # data workers look for their parent every 5 s


@pytest.mark.parametrize("way", ["", "stop", "raise"])
def test_data_workers_leave_nothing_behind(way: str) -> None:
    """Neither a word on stderr nor a file, however the rank ends."""
    with tempfile.TemporaryDirectory() as left:  # a short name: workers make sockets there, whose names have a limit
        command = start_rank("fed", devices=2, data_dir=way or "done", env={"TMPDIR": left})
        code, _, err = outcome(command)
        kept = list(Path(left).iterdir())
    told = {"": "", "stop": "Stopped: Enough.\n", "raise": "RequestError: The data set has no image.\n"}[way]
    assert (code, err) == ({"": 0, "stop": 75, "raise": 2}[way], told)
    assert kept == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a torch that cannot use the GPUs says")
def test_gpus_that_torch_cannot_use_are_refused_in_words_that_hold_for_auto_too() -> None:
    resolved = override(RunConfig(), accelerator="cuda")
    with pytest.raises(RequestError, match=r"^The driver shows GPUs, .* \(auto takes it too\), .* --accelerator cpu"):
        rank.take_device(resolved, {}, Topology())


@pytest.mark.parametrize("entry", [5, "digits", None])
def test_what_cannot_be_called_is_refused_at_once(entry: Any) -> None:
    with pytest.raises(RequestError, match=r"launch takes a function of .* found "):
        launch(entry, config(devices=2, strategy="ddp"), {})


def test_a_value_that_cannot_be_sent_is_said_to_be_that() -> None:
    with pytest.raises(RequestError, match=r"^The ranks are done, but what rank 0 returned cannot be sent to the proc"):
        launch(entries.unpicklable, config(devices=2), {})
