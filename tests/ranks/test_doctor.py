"""`lockstep doctor` among ranks: it ends in bounded time, leaves nothing, and names the rank that is at fault."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from lockstep.cli.main import main
from lockstep.doctor import collectives, copies, examine, software
from lockstep.doctor.finding import Finding
from lockstep.world import World

from ..command import refusal
from ..pool import RankPool
from ..starting import config

STALL_S = 5.0


def _broken(patch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[collectives.Measured]:
        raise ValueError("no buffer space")

    patch.setattr(collectives, "all_reduces", broken)


def _of_another_torch(patch: pytest.MonkeyPatch) -> None:
    ours = software.versions("") | {"torch": "2.11.0+other"}
    patch.setattr(software, "versions", lambda driver: ours)


def _silent(patch: pytest.MonkeyPatch) -> None:
    raise TimeoutError


def _examine(world: World, folder: Path, spoil: Callable[[pytest.MonkeyPatch], None]) -> tuple[Finding, ...]:
    """Examine this rank with the other one; rank 1 is spoilt before."""
    world.close()  # an examination forms its own
    store = FileStore(str(folder / "store"), 2)
    asked = examine.Asked(folder / "runs", None, chosen_cpu=False)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            try:
                spoil(patch)
            except TimeoutError:
                return ()
        return examine.examine(config(stall_timeout=STALL_S), world.topology, world.device, store, asked).findings


@pytest.mark.parametrize(
    ("spoil", "name", "said"),
    [
        (_silent, "ranks", "fell silent at host"),
        (_broken, "all-reduce", "ValueError: no buffer space"),
        (_of_another_torch, "torch versions", "2.11.0+other on rank 1"),
    ],
)
def test_a_rank_at_fault_is_named_in_bounded_time(
    pool: RankPool, tmp_path: Path, spoil: Callable[[pytest.MonkeyPatch], None], name: str, said: str
) -> None:
    pool.run(2, copies.between_ranks, 1)  # processes that start are not counted
    since_s = time.monotonic()
    findings, _ = pool.run(2, _examine, tmp_path, spoil, collectives="gloo")
    assert time.monotonic() - since_s < 6 * STALL_S
    found = {each.name: each for each in findings}
    assert [each.name for each in findings if each.state == "red"] == [name]
    assert said in found[name].words
    assert found[name].ranks in ((1,), ())
    assert found["write speed"].state in ("green", "yellow"), "the examination goes on"
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


def test_one_rank_is_enough_and_low_limits_and_a_folder_that_cannot_be_written_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> dict[str, Any]:
        main(["doctor", "--accelerator", "cpu", "--json", *words])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report | {each["name"]: each for each in report["findings"]}

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        fine = told("--output", f"{tmp_path}/runs")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (fine["verdict"], fine["ranks"]) == ("yellow", 1)
    assert fine["open files"]["state"] == "yellow"
    assert "ulimit -n 1024" in fine["open files"]["fix"]
    assert "--devices 2" in fine["all-reduce"]["words"]
    assert not [*tmp_path.iterdir()]

    (tmp_path / "file").write_text("")
    assert "(output)" in refusal(capsys, "doctor", "--accelerator", "cpu", "--output", tmp_path / "file", code=1)
    assert told("--output", f"{tmp_path}/file")["processors"]["state"] in ("green", "yellow")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _wrong_sums(world: World, faulty: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == faulty:
            total = World.sum

            def flip(self: World, tensor: Tensor) -> Tensor:
                found = total(self, tensor)
                found[-1] += 1
                return found

            patch.setattr(World, "sum", flip)
        return [each.wrong for each in collectives.all_reduces(world, 60)]


def test_a_wrong_sum_is_seen_on_its_rank(pool: RankPool) -> None:
    one, two, three = pool.run(3, _wrong_sums, 1)
    assert set(one) == set(three) == {0}
    assert set(two) == {1}


def _changed_on_the_way(world: World, faulty: int) -> list[int]:
    """Send as rank `faulty` would over a network that flips one bit."""
    plan = dist.P2POp

    def spoiled(operation: Callable[..., Any], tensor: Tensor, *where: Any, **how: Any) -> Any:
        if operation is dist.isend:
            tensor[tensor.numel() // 2] ^= 4
        return plan(operation, tensor, *where, **how)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == faulty:
            patch.setattr(dist, "P2POp", spoiled)
        return copies.between_ranks(world, 1)


def test_a_flipped_bit_is_seen_by_every_receiver(pool: RankPool) -> None:
    assert pool.run(3, _changed_on_the_way, 2) == [[2], [2], []]
    assert pool.run(3, copies.between_ranks, 1) == [[], [], []]
