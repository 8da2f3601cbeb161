"""Ranks that torchrun starts again meet anew, and come to the bits of a run that nothing happened to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from ..command import ROOT, Running, command, end, events, gone, losses, processes, until, weights

RUN = (
    "train --data tests.own_data:slow --model mlp --strategy ddp --accelerator cpu --epochs 12 --checkpoint-every 30 "
    "--batch 16 --log-every 5 --workers 0 --precision fp64 --output run --stall-timeout 30"
)


def _torchrun(folder: Path) -> Running:
    """Start two ranks, which the agent starts again at most twice."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    return Running(
        [*agent, "-m", "lockstep", *RUN.split(), "--resume", "auto"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _rank(agent: Running, rank: int) -> psutil.Process:
    (found,) = [each for each in processes(agent)[1:] if each.environ().get("RANK") == str(rank)]
    return found


def test_ranks_that_torchrun_starts_again_come_to_the_same_bits(tmp_path: Path) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    undisturbed.mkdir()
    ended = command(undisturbed, *RUN.split(), "--devices", 2)
    assert ended.code == 0, ended.err
    with _torchrun(tmp_path) as agent:
        for number, step in ((1, 40), (0, 120)):
            until(lambda step=step: bool(made := losses(run)) and made[-1][0] >= step)  # type: ignore[misc]
            ranks = [_rank(agent, rank) for rank in (0, 1)]
            ranks[number].kill()
            until(lambda ranks=ranks: gone(ranks))  # type: ignore[misc]
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert len(events(run, "start")) == 3
    assert "stopped before training began" not in ended.err
    assert losses(run) == losses(undisturbed / "run")
    assert weights(run) == weights(undisturbed / "run")
