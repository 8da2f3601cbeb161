"""`lockstep doctor` among ranks: it ends in bounded time, leaves nothing, and names the rank that is at fault."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lockstep._torch import FileStore
from lockstep.cli.main import main
from lockstep.doctor.examine import Examination, Report
from lockstep.doctor.finding import Finding
from lockstep.doctor.together import SilentRankError
from lockstep.world.world import World

from ..command import refusal
from ..pool import RankPool
from ..starting import config

STALL_S = 2.0
PATIENT_S = 30.0  # where nobody stalls: a busy machine takes its time
SEND = dist.all_to_all_single


def _changed(received: Tensor, sent: Tensor, **options: Any) -> None:
    SEND(received, sent, **options)
    received[0] ^= 1


def _examine(world: World, folder: Path, fault: str) -> tuple[Finding, ...]:
    """Examine this rank with the other one; rank 1 is silent, or receives other bits."""
    world.close()  # an examination forms its own
    if world.rank == 1 and fault == "silent":
        return ()
    store, reports = FileStore(str(folder / "store"), 2), list[Report]()
    examination = Examination(folder / "runs", None, False, reports.append)
    stall_s = STALL_S if fault == "silent" else PATIENT_S
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SilentRankError):
        if world.rank == 1:
            patch.setattr(dist, "all_to_all_single", _changed)
        reports.append(examination.before_world(config(stall_timeout=stall_s), world.topology, world.device, store))
    return reports[0].findings


@pytest.mark.parametrize(
    ("fault", "name", "told"),
    [
        ("silent", "ranks", "rank 1 fell silent at host"),
        ("bits", "bytes sent", "rank 0 to rank 1"),
    ],
)
def test_a_rank_at_fault_is_named_in_bounded_time(
    pool: RankPool, tmp_path: Path, fault: str, name: str, told: str
) -> None:
    pool.run(2, str)  # processes that start are not counted
    begun_s = time.monotonic()
    findings, _ = pool.run(2, _examine, tmp_path, fault, collectives="gloo")
    assert time.monotonic() - begun_s < 6 * (STALL_S if fault == "silent" else PATIENT_S)
    red = [each for each in findings if each.state == "red"]
    assert {each.name.partition(" ")[0] for each in red} == {name.partition(" ")[0]}
    assert told in next(each.words for each in red if each.name == name)
    assert all(other not in each.words for each in red for other in ("on rank 0", "to rank 0", "rank 0 fell"))
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


def test_one_rank_is_enough_and_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--accelerator", "cpu", "--json", "--output", f"{tmp_path}/runs"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 1
    assert "--devices 2" in next(each["words"] for each in told["findings"] if each["name"] == "all-reduce")
    assert not [*tmp_path.iterdir()]

    (tmp_path / "file").write_text("")
    assert "(output)" in refusal(capsys, "doctor", "--accelerator", "cpu", "--output", tmp_path / "file", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
