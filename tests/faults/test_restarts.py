"""Ranks that are lost are started again: the run ends with the bits of one that nothing happened to."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.interrupts import INSIST, STOPPING

from ..command import (
    Running,
    at,
    command,
    end,
    events,
    gate,
    gone,
    losses,
    processes,
    ranks_of,
    sentence,
    start,
    until,
    weights,
)
from ..ports import free_port

STEPS = 60
RUN = (
    "train --data tests.own_data:gated --model mlp --strategy ddp --accelerator cpu --epochs 6 --checkpoint-every 6 "
    "--batch 16 --log-every 1 --workers 0 --precision fp64 --output run"
)
OPEN = 10**9


def _starts(folder: Path) -> int:
    return len(events(folder / "run", "start"))


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command(folder, *RUN.split(), "--devices", 2)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture
def same(undisturbed: Path, tmp_path: Path) -> Callable[[], None]:
    """Return what fails where the run of this test has not ended with the bits of the undisturbed one."""

    def check() -> None:
        assert losses(tmp_path / "run") == losses(undisturbed)
        assert weights(tmp_path / "run") == weights(undisturbed)

    return check


def test_ranks_that_are_lost_come_back_to_the_very_same_bits(tmp_path: Path, same: Callable[[], None]) -> None:
    gate(tmp_path, 15)
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 3, "--stall-timeout", 3) as agent:
        at(tmp_path, 15)
        ranks_of(agent)[0].kill()
        gate(tmp_path, 27)
        at(tmp_path, 27)
        ranks_of(agent)[1].suspend()
        gate(tmp_path, 39)
        at(tmp_path, 39)

        last = tmp_path / "run" / "checkpoints" / "step-00000036"
        until(lambda: last.samefile(last.with_name("last")) if last.exists() else False)
        before = sorted(last.parent.glob("step-*"))[-2]
        flipped = bytearray((last / "model.safetensors").read_bytes())
        flipped[-1] ^= 1
        (last / "model.safetensors").write_bytes(flipped)
        ranks_of(agent)[0].kill()
        gate(tmp_path, OPEN)
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert "Rank 0 was killed by SIGKILL (out of memory?); the ranks start again (restart 1 of 3)." in ended.err
    assert "Rank 1 was stopped, died or was cut off " in ended.err
    assert "(restart 3 of 3)" in ended.err
    assert "is damaged (model.safetensors does not match its checksum" in ended.out
    assert f"the run goes on from {before}\n" in ended.out
    same()


def test_a_run_taken_up_at_an_older_checkpoint_is_so_again_after_a_restart(
    undisturbed: Path, tmp_path: Path, same: Callable[[], None]
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "run", symlinks=True))
    older = sorted((run / "checkpoints").glob("step-*"))[0]
    first = int(older.name.removeprefix("step-"))
    # Before its next checkpoint: the last one in the folder is of the run that was left, at the last step.
    gate(tmp_path, first + 1, below=STEPS)
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 1, "--resume", older) as agent:
        until(lambda: _starts(tmp_path) == 2)
        at(tmp_path, first + 1)
        ranks_of(agent)[1].kill()
        gate(tmp_path, OPEN)
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert ended.out.count(f"continuing at step {first} of ") == 2
    same()


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ("breaking", 1, ("The data set failed at train sample 23", "disk on fire")),
        ("leaving", 1, ("exited with code 0 before it was done",)),
        ("beyond_the_classes", 2, ("train sample 41 has label 3",)),
    ],
    ids=["breaking", "leaving", "beyond_the_classes"],
)
def test_what_comes_back_is_told_and_what_is_refused_not_tried_again(
    data: str, code: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = f"train --data tests.own_data:{data} --model mlp --batch 8 --accelerator cpu --strategy ddp --devices 2"
    ended = command(tmp_path, *run.split(), "--max-restarts", 1, "--workers", 0, "--output", "run")
    told = sentence(ended, code=code)
    assert [each for each in words if each not in told] == [], told
    assert ended.err.count("(restart 1 of 1)") == (code == 1)


def test_the_nodes_that_are_left_go_on_and_one_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    port = free_port()
    words = [*RUN.split(), "--epochs", 1000, "--devices", 1, "--nodes", "1:2", "--max-restarts", 2]
    words += ["--init-method", f"tcp://127.0.0.1:{port}"]
    gate(tmp_path, 10)
    with start(tmp_path, *words) as first:
        until(lambda: _listens(port))  # so that it is the first which serves the store
        second = start(tmp_path, *words)
        at(tmp_path, 10)
        lost = processes(second)
        begun = _starts(tmp_path)
        second.kill()  # and its rank with it, as where a machine loses its power
        second.communicate()
        until(lambda: gone(lost), 5)
        gate(tmp_path, 20)
        at(tmp_path, 20)
        with start(tmp_path, *words) as again:
            first.says("Another node has come")
            gate(tmp_path, 40)
            at(tmp_path, 40)
            first.send_signal(signal.SIGTERM)
            gate(tmp_path, OPEN)
            ended, other = end(first), end(again)
    assert (ended.code, other.code) == (75, 75), (ended.err, other.err)
    assert f"{STOPPING}{INSIST}" in ended.err
    found = events(tmp_path / "run", "start")
    assert [row["plan"]["ranks"] for row in found[begun - 1 :]] == [2, 1, 2]
    made = losses(tmp_path / "run")
    assert [step for step, _ in made] == list(range(1, len(made) + 1))


def test_agents_of_different_jobs_and_ranks_by_hand_do_not_mix(tmp_path: Path) -> None:
    words = [*RUN.split(), "--nodes", "1:2", "--devices", 1, "--max-restarts", 1]
    for first, other, told in (
        (words, (*words, "--batch", 32), "the agents of another job meet there, or of this one with other flags"),
        ([*RUN.split(), "--world-size", 2, "--rank", 0], words, "the ranks of another job, which were started by hand"),
    ):
        port = free_port()
        meets = ("--init-method", f"tcp://127.0.0.1:{port}")
        gate(tmp_path, 1)
        with start(tmp_path, *first, *meets):
            until(lambda port=port: _listens(port))  # type: ignore[misc]
            assert told in sentence(command(tmp_path, *other, *meets))


# ---- torchrun


def _torchrun(folder: Path, *words: object, **env: str) -> Running:
    """Start an agent with these words, which starts its ranks again at most twice."""
    agent = ("-m", "torch.distributed.run", "--max-restarts", "2", *map(str, words))
    return start(folder, *RUN.split(), "--resume", "auto", through=agent, **env)


@pytest.mark.parametrize(
    ("agents", "apart", "victims"),
    [
        pytest.param(1, "1", (1, 0), marks=pytest.mark.long),
        pytest.param(2, "1", (0,), marks=pytest.mark.long),
        pytest.param(2, "0", (0, 0), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_torchrun_starts_again_come_to_the_same_bits(
    agents: int, apart: str, victims: tuple[int, ...], tmp_path: Path, same: Callable[[], None]
) -> None:
    """Of two agents, that whose rank is killed counts a restart; the other one may see a node that waits, and none.

    Where torch keeps the ranks' store apart from the agents', rank 0 serves it, at an address that torch has chosen.
    """
    meets = ("--rdzv-id", "job", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    words = ("--nnodes", agents, "--nproc-per-node", 2 // agents, *meets)
    gate(tmp_path, 10)
    running = [_torchrun(tmp_path, *words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=apart) for _ in range(agents)]
    try:
        for number, victim in enumerate(victims, 1):
            until(lambda number=number: len(losses(tmp_path / "run")) >= 10 * number or _any_ended(running))  # type: ignore[misc]
            ranks = {
                int(each.environ()["RANK"]): each for agent in running for each in ranks_of(agent, "lockstep train")
            }
            ranks[victim].kill()
            gate(tmp_path, 10 * number + 10 if number < len(victims) else OPEN)
        ended = [end(agent) for agent in running]
    finally:
        for agent in running:
            agent.kill()
    assert [each.code for each in ended] == [0] * agents, ended
    assert _starts(tmp_path) == len(victims) + 1
    same()


def _any_ended(agents: list[Running]) -> bool:
    return any(agent.poll() is not None for agent in agents)
