"""Ranks that torchrun or a person has started: they meet, and one that is lost is one sentence on the others."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import hardware
from lockstep.errors import RequestError
from lockstep.launchers import stores
from lockstep.launchers.rendezvous import RollCall
from lockstep.launchers.table import launch

from .. import entries
from ..command import ROOT, gone, until
from ..ports import free_port
from ..starting import STARTED_S, claim_of, config, doors_to, noted, outcome, start_rank


def _torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]


def test_torchrun_starts_the_same_world() -> None:
    code, out, err = outcome(start_rank("total", through=_torchrun()))
    assert code == 0, err
    told = json.loads(out)
    assert told["sum"] == [2, 1]
    assert told["threads"] == [max(1, hardware.cpus() // 2)] * 2
    assert told["interface"] == "lo"


def test_torchrun_shows_the_root_cause(tmp_path: Path) -> None:
    code, _, err = outcome(start_rank("fail", through=_torchrun(), data_dir="raise", output=str(tmp_path)))
    assert code != 0
    assert "RunError: Rank 1 failed at" in err
    root_cause = err[err.index("Root Cause") :]
    assert "labels reach 10" in root_cause


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_started_by_hand_meet_and_leave_nothing(scheme: str, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    url = f"file://{meeting}" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2 if scheme == "file" else 1):  # a second run at the same place follows at once
        late = start_rank("total", init_method=url, rank=1, world_size=2)
        time.sleep(0.5)
        first = start_rank("total", init_method=url, rank=0, world_size=2)
        (code, out, err), (late_code, late_out, late_err) = outcome(first), outcome(late)
        assert (code, late_code) == (0, 0), err + late_err
        told = json.loads(out)
        assert late_out == ""
        assert told["sum"] == [2, 1]
        assert [rank[:3] for rank in told["ranks"]] == [[0, 0, 2], [1, 1, 2]]
        assert told["interface"] == "lo"
        assert not meeting.exists()


@pytest.mark.parametrize(("victim", "signal_name"), [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGSTOP")])
def test_a_rank_that_is_lost_or_stalls_is_one_sentence_on_the_others(
    victim: int, signal_name: str, tmp_path: Path
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    values: dict[str, Any] = {"init_method": url, "world_size": 2, "stall_timeout": 3, "seed": victim}
    values["output"] = str(tmp_path)
    ranks = [start_rank("lose", rank=rank, data_dir=signal_name, **values) for rank in range(2)]
    survivor = 1 - victim
    code, _, err = outcome(ranks[survivor])
    ranks[victim].kill()
    ranks[victim].communicate()
    lost = {
        "SIGKILL": rf"RankLostError: Rank {victim} \(process \d+ on \S+\) died or was cut off(, last heard "
        rf"of in its own code.*)?, and rank {survivor} waited for it in all-reduce at step 0: its own message, if it "
        r"could leave one, says why; continue with --resume auto\.\n",
        "SIGSTOP": rf"lockstep: Rank {victim} was stopped, died or was cut off [2-5] s ago, last heard of in .* "
        rf"\(step 0\); rank {survivor} waits in all-reduce at step 0; continue with --resume auto\.\n",
    }
    assert code == 1
    assert re.fullmatch(lost[signal_name], err), err
    assert signal_name == "SIGSTOP" or "Traceback" in (tmp_path / "failures" / f"rank_{survivor}.txt").read_text()


def test_a_rank_that_dies_while_the_others_are_in_no_collective_is_noticed(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    values: dict[str, Any] = {"init_method": url, "world_size": 2, "output": str(tmp_path)}
    ranks = [start_rank("read_long", rank=rank, **values) for rank in range(2)]
    code, _, err = outcome(ranks[0])  # which would read for ten minutes
    ranks[1].communicate()
    assert code == 1
    assert re.fullmatch(
        r"lockstep: Rank 1 \(process \d+ on \S+\) died, last heard of in .*: its own message, if it could leave one, "
        r"says why; continue with --resume auto\.\n",
        err,
    ), err
    assert "in read_long" in (tmp_path / "failures" / "rank_0.txt").read_text()


def test_a_rank_lost_between_the_roll_call_and_the_group_is_noticed(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'meeting'}"
    waiting = start_rank("total", init_method=url, rank=0, world_size=2)
    deserting = [sys.executable, "-c", f"from tests import entries; entries.desert({url[7:]!r}, 1, 2)"]
    assert subprocess.run(deserting, cwd=ROOT, check=False).returncode == 3
    lost_s = time.monotonic()
    code, _, err = outcome(waiting)
    assert time.monotonic() - lost_s < 30  # of --timeout 60 and --stall-timeout 600
    assert code == 1
    assert re.fullmatch(
        r"RankLostError: Rank 0: rank 1 \(process \d+ on \S+\) came, but ended before training began: "
        r"its own message says why; then start all ranks again\.\n",
        err,
    )


def test_a_rank_that_does_not_get_ready_is_waited_for_as_long_as_the_roll_call(tmp_path: Path) -> None:
    door = doors_to("file", tmp_path, [0])[0]
    waiting = start_rank("total", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=2, timeout=5)
    call = RollCall(door(), claim_of(1, 2))
    call.take(STARTED_S)
    code, _, err = outcome(waiting)  # of --stall-timeout 600
    assert code == 1
    assert "rank 1 (process" in err
    assert "did not get ready within --timeout 5 s" in err
    call.leave(clean=False)


def test_ranks_hear_that_one_was_stopped_while_it_waited(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    first = start_rank("total", init_method=url, rank=0, world_size=3)
    second = start_rank("total", init_method=url, rank=1, world_size=3)
    probe = stores.connect("127.0.0.1", int(url.rpartition(":")[2]), STARTED_S)
    until(lambda: bool(probe.store.check(["claim/0", "claim/1"])), STARTED_S)
    first.send_signal(signal.SIGINT)
    code, _, err = outcome(second)
    outcome(first)
    assert code == 2
    assert re.fullmatch(r"AbsentError: tcp\S+ rank 0 \(process \d+ on \S+\) was stopped while .*\n", err)


def test_a_file_left_by_a_killed_run_is_explained(tmp_path: Path) -> None:
    meeting, notes = tmp_path / "meeting", tmp_path / "notes"
    notes.mkdir()
    url = f"file://{meeting}"
    killed = [start_rank("stubborn", init_method=url, rank=r, world_size=2, data_dir=str(notes)) for r in range(2)]
    processes = noted(notes, 2)
    for process in killed:
        process.kill()
        process.communicate()
    for size in (2, 3):
        with pytest.raises(RequestError, match=f"left over from another run: process .* remove {meeting}"):
            launch(entries.total, config(init_method=url, rank=0, world_size=size, timeout=20), {})
    assert meeting.exists()
    until(lambda: gone(processes), 30)
    meeting.unlink()
