"""Two levels: processes that drive several devices each (threads here), and exchange gradients among themselves.

That the curves are those of one process, and of as many ranks with batch statistics of their own, say the laws.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.config import RunConfig
from lockstep.engine import train_step
from lockstep.job import assemble
from lockstep.options import override
from lockstep.world import World

from ..command import Ended, command, end, refusal, sentence, start
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
    words = ("--batch", 50, "--max-steps", 12, "--ledger")
    hybrid, ranks = tmp_path / "hybrid", tmp_path / "ranks"
    ddp = ("--strategy", "ddp", "--devices", 4, "--batchnorm", "local")
    first, second = _by_hand(tmp_path, *words, "--output", hybrid)
    assert (first.code, second.code, second.out) == (0, 0, ""), first.err + second.err
    assert "global batch 50 = 2 ranks × 2 devices × 1 micro-batch × 12 or 13" in first.out
    assert "strategy hybrid, launcher manual, 4 × cpu" in first.out
    assert "batch statistics of each replica" in first.out
    manifest = json.loads((hybrid / "manifest.json").read_text())
    assert manifest["batch_plan"] == {"global_size": 50, "ranks": 2, "accumulation": 1, "devices": 2}
    assert (manifest["chosen"]["devices"], manifest["topology"]["size"]) == (4, 2)
    assert json.loads((hybrid / "summary.json").read_text())["proof"]["replicas"]["outcome"] == "holds"
    assert command(tmp_path, *DIGITS, *words, *ddp, "--output", ranks).code == 0
    assert apart(of_run(hybrid), of_run(ranks)) < 1e-9

    # The ledger's shares are those of the plan, which knows how many devices each rank has.
    judged = command(tmp_path, "verify", "run", hybrid)
    assert (judged.code, "9 claims hold, 1 is measured" in judged.out) == (0, True), judged

    # What was begun on four ranks with statistics of their own goes on under hybrid, and back.
    more = ("--batch", 50, "--max-steps", 20, "--resume", "auto")
    assert [each.code for each in _by_hand(tmp_path, *more, "--output", ranks)] == [0, 0]
    assert command(tmp_path, *DIGITS, *more, *ddp, "--output", hybrid).code == 0
    assert max(of_run(hybrid)[0]) == 20
    assert apart(of_run(hybrid), of_run(ranks)) < 1e-9


def test_ranks_with_other_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    (told,) = {sentence(each) for each in _by_hand(tmp_path, "--max-steps", 1, "--output", "run", each=(2, 3))}
    assert "Rank 1 drives 3 devices and rank 0 2" in told
    assert "--devices or --gpus" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag", ["--batchnorm sync", "--compile"])
def test_what_hybrid_cannot_do_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    words = ("--strategy", "hybrid", "--devices", 2, "--max-steps", 1, "--output", tmp_path / "run", *flag.split())
    told = refusal(capsys, *DIGITS, *words)
    assert f"{flag} cannot work under --strategy hybrid" in told
    assert "--strategy ddp" in told


NET = {"data": "fake", "samples": 61, "image_size": 8, "batch": 20, "strategy": "hybrid", "devices": 2, "max_steps": 2}


def _hooked(world: World, accumulate: int) -> tuple[list[int], int, bool]:
    """Return how often each gradient was accumulated and exchanged, and whether all ranks hold the same one."""
    job = assemble(override(RunConfig(), **NET, model="mlp", accumulate=accumulate, precision="fp64"), world)
    parameters = list(job.model.parameters())
    counts = [0 for _ in parameters]

    def count(place: int) -> None:
        counts[place] += 1

    for place, item in enumerate(parameters):
        item.register_post_accumulate_grad_hook(lambda _, place=place: count(place))
    sums, summed = 0, World.sum_

    def counted(world: World, tensor: Tensor) -> Tensor:
        nonlocal sums
        sums += 1
        return summed(world, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "sum_", counted)
        train_step(job, next(iter(job.batches(0))))
    same = world.stack(torch.cat([item.grad.flatten() for item in parameters if item.grad is not None]))
    job.data.close()
    return counts, sums, bool((same == same[0]).all())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_gradient_comes_once_a_pass_and_is_exchanged_once(pool: RankPool, accumulate: int) -> None:
    for counts, sums, same in pool.run(2, _hooked, accumulate):
        assert set(counts) == {accumulate}
        assert sums == 1, "one bucket, after the last micro-batch"
        assert same
