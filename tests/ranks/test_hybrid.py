"""Two levels: processes that drive several devices each (threads here), and exchange gradients among themselves.

That the curves are those of one process, and of as many ranks with batch statistics of their own, say the laws.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.jobs.job import assemble
from lockstep.world.shared_memory import SharedMemory
from lockstep.world.world import World

from ..command import Ended, command, end, sentence, start
from ..curves import apart, of_run
from ..pool import RankPool

DIGITS = ("train", "digits", "--model", "resnet8", "--accelerator", "cpu", "--precision", "fp64")


def _by_hand(folder: Path, *words: object, each: tuple[int, ...] = (2, 2)) -> list[Ended]:
    """Return how the ranks ended, each a command of its own as on nodes of its own, with `each` devices."""
    meet = ("--strategy", "hybrid", "--init-method", (folder / "meet").as_uri(), "--world-size", len(each))
    ranks = [
        start(folder, *DIGITS, *words, *meet, "--rank", rank, "--devices", count) for rank, count in enumerate(each)
    ]
    return [end(process) for process in ranks]


def test_nodes_that_drive_several_devices_train_what_as_many_ranks_do(tmp_path: Path) -> None:
    words = ("--batch", 50, "--max-steps", 6, "--ledger")
    hybrid, ranks = tmp_path / "hybrid", tmp_path / "ranks"
    ddp = ("--strategy", "ddp", "--devices", 4, "--batchnorm", "local")
    first, second = _by_hand(tmp_path, *words, "--output", hybrid)
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    assert "global batch 50 = 2 ranks × 2 devices × 1 micro-batch × 12 or 13" in first.out
    assert "strategy hybrid, launcher manual, 4 × cpu" in first.out
    assert "batch statistics per replica: the model depends on the number of replicas" in first.out.replace("\n", " ")
    manifest = json.loads((hybrid / "manifest.json").read_text())
    assert manifest["batch_plan"] == {"global_size": 50, "ranks": 2, "accumulation": 1, "devices": 2}
    assert (manifest["chosen"]["devices"], manifest["topology"]["size"]) == (4, 2)
    assert json.loads((hybrid / "summary.json").read_text())["proof"]["replicas"]["outcome"] == "holds"
    assert command(tmp_path, *DIGITS, *words, *ddp, "--output", ranks).code == 0
    assert apart(of_run(hybrid), of_run(ranks)) < 1e-9


def test_ranks_with_other_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    (told,) = {sentence(each) for each in _by_hand(tmp_path, "--max-steps", 1, "--output", "run", each=(2, 3))}
    assert "Rank 1 has devices 3 (rank 0 has 2)" in told
    assert "--devices or --gpus" in told
    assert not (tmp_path / "run").exists()


NET = {"data": "fake", "samples": 61, "image_size": 8, "batch": 20, "strategy": "hybrid", "devices": 2, "max_steps": 2}


def _exchanged(world: World) -> tuple[int, bool]:
    """Return how often gradients were exchanged in a step of three micro-batches, and whether all ranks hold the same.

    The exchange is one of the two levels', of one bucket.
    """
    job = assemble(override(RunConfig(), **NET, model="mlp", accumulate=3, precision="fp64"), world)
    sums: list[Tensor] = []
    summed = SharedMemory.sum_

    def counted(memory: SharedMemory, tensor: Tensor) -> None:
        sums.append(tensor)
        summed(memory, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "sum_", counted)
        job.train_step(job.plan.global_size, [micro.batch for micro in islice(job.micros(0), 3)])
    gradients = world.stack(
        torch.cat([item.grad.flatten() for item in job.model.parameters() if item.grad is not None])
    )
    job.data.close()
    return len(sums), bool((gradients == gradients[0]).all())


def test_gradients_are_exchanged_once_a_step(pool: RankPool) -> None:
    assert pool.run(2, _exchanged) == [(1, True)] * 2
