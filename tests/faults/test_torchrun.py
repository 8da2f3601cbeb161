"""Ranks that torchrun starts again meet anew, and come to the bits of a run that nothing happened to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ..command import CODE, Running, command, end, events, gone, losses, ranks_of, until, weights
from ..ports import free_port

RUN = (
    "train --data tests.own_data:slow --model mlp --strategy ddp --accelerator cpu --epochs 12 --checkpoint-every 30 "
    "--batch 16 --log-every 5 --workers 0 --precision fp64 --output run --stall-timeout 30"
)


def _torchrun(folder: Path, *words: object, **env: str) -> Running:
    """Start an agent with these words, which starts its ranks again at most twice."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2", *map(str, words)]
    return Running(
        [*agent, "-m", "lockstep", *RUN.split(), "--resume", "auto"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": "", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _ranks(*agents: Running) -> dict[int, psutil.Process]:
    """Return the processes of the agents' ranks, without those that the ranks have started."""
    found = [each for agent in agents for each in ranks_of(agent, "lockstep train")]
    return {int(each.environ()["RANK"]): each for each in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command(folder, *RUN.split(), "--devices", 2)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.mark.long
def test_ranks_that_torchrun_starts_again_come_to_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with _torchrun(tmp_path, "--nproc-per-node", 2) as agent:
        for number, step in ((1, 40), (0, 120)):
            until(lambda step=step: bool(made := losses(run)) and made[-1][0] >= step)  # type: ignore[misc]
            ranks = _ranks(agent)
            ranks[number].kill()
            until(lambda ranks=ranks: gone(list(ranks.values())))  # type: ignore[misc]
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert len(events(run, "start")) == 3
    assert "Stopped outside of training" not in ended.err
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)


@pytest.mark.parametrize(
    ("apart", "steps"),
    [pytest.param("0", (40, 100), marks=pytest.mark.slow), pytest.param("1", (40,), marks=pytest.mark.long)],
)
def test_ranks_under_two_agents_that_count_apart_meet_again(
    apart: str, steps: tuple[int, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """The agent whose rank is killed counts a restart; the other one may see a node that waits, and count none.

    Where torch keeps the ranks' store apart from the agents', rank 0 serves it, at an address that torch has chosen.
    """
    run = tmp_path / "run"
    meets = ("--rdzv-id", "job", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    words = ("--nnodes", 2, "--nproc-per-node", 1, *meets)
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": apart}
    with _torchrun(tmp_path, *words, **env) as one, _torchrun(tmp_path, *words, **env) as other:

        def reached(step: int) -> bool:
            assert one.poll() is None, end(one)
            assert other.poll() is None, end(other)
            made = losses(run)
            return bool(made) and made[-1][0] >= step

        for step in steps:
            until(lambda step=step: reached(step))  # type: ignore[misc]
            ranks = _ranks(one, other)
            ranks[0].kill()
            until(lambda ranks=ranks: gone(list(ranks.values())))  # type: ignore[misc]
        ended = [end(agent) for agent in (one, other)]
    assert [each.code for each in ended] == [0, 0], ended
    assert len(events(run, "start")) == len(steps) + 1
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)
