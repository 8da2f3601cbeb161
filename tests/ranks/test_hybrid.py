"""Two levels: processes that drive several devices each (threads here), and exchange gradients among themselves.

That the curves are those of one process, and of as many ranks with batch statistics of their own, say the laws.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import RunConfig
from lockstep.engine import train, train_step
from lockstep.errors import RequestError
from lockstep.job import assemble
from lockstep.options import override
from lockstep.record.base import Nothing
from lockstep.world import World

from ..command import Ended, command, end, losses, refusal, sentence, start
from ..curves import apart, curve, of_run
from ..pool import RankPool

DIGITS = ("train", "digits", "--model", "resnet8", "--accelerator", "cpu", "--precision", "fp64")


def _by_hand(folder: Path, *words: object, each: tuple[int, ...] = (2, 2)) -> list[Ended]:
    """Return how the ranks ended, each a command of its own as on nodes of its own, with `each` devices."""
    meet = ("--strategy", "hybrid", "--init-method", (folder / "meet").as_uri(), "--world-size", len(each))
    started = [
        start(folder, *DIGITS, *words, *meet, "--rank", rank, "--devices", count) for rank, count in enumerate(each)
    ]
    return [end(process) for process in started]


def test_nodes_that_drive_several_devices_train_what_as_many_ranks_do(tmp_path: Path) -> None:
    words = ("--batch", 50, "--max-steps", 12, "--ledger")
    first, second = _by_hand(tmp_path, *words, "--output", tmp_path / "hybrid")
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "global batch 50 = 2 ranks × 2 devices × 1 micro-batch × 12 or 13" in first.out
    assert "strategy hybrid, launcher manual, 4 × cpu" in first.out
    assert "batch statistics of each replica" in first.out
    assert second.out == ""

    run = tmp_path / "hybrid"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["batch_plan"] == {"global_size": 50, "ranks": 2, "accumulation": 1, "devices": 2}
    assert (manifest["chosen"]["devices"], manifest["topology"]["size"]) == (4, 2)
    assert json.loads((run / "summary.json").read_text())["proof"]["replicas"]["outcome"] == "holds"

    ranks = ("--strategy", "ddp", "--devices", 4, "--batchnorm", "local", "--output", tmp_path / "ddp")
    assert command(tmp_path, *DIGITS, *words, *ranks).code == 0
    for (step, ours), (other, theirs) in zip(losses(run), losses(tmp_path / "ddp"), strict=True):
        assert step == other
        assert abs(ours - theirs) <= 1e-9 * abs(theirs)

    # The ledger's shares are those of the plan, which knows how many devices each rank has.
    judged = command(tmp_path, "verify", "run", run)
    assert "9 claims hold, 1 is measured" in judged.out, judged.out + judged.err
    assert judged.code == 0

    # Killed or not: what was begun on four ranks with statistics of their own goes on under hybrid, and back.
    more = ("--batch", 50, "--max-steps", 20, "--resume", "auto")
    ended = [*_by_hand(tmp_path, *more, "--output", tmp_path / "ddp")]
    assert [each.code for each in ended] == [0, 0], ended[0].err
    back = (*ranks[:-2], "--output", run)
    assert command(tmp_path, *DIGITS, *more, *back).code == 0
    assert max(of_run(run)[0]) == 20
    assert apart(of_run(run), of_run(tmp_path / "ddp")) < 1e-9


def test_ranks_with_other_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    told = {sentence(each) for each in _by_hand(tmp_path, "--max-steps", 1, "--output", "run", each=(2, 3))}
    assert told == {
        "Rank 1 drives 3 devices and rank 0 2, and a batch is shared out evenly: give every rank as many devices, by "
        "--devices or --gpus."
    }
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--batchnorm", "sync"), "--batchnorm sync cannot work under --strategy hybrid, .* or --strategy ddp.$"),
        (("--compile",), "--compile cannot work under --strategy hybrid on 2 devices.* or use --strategy ddp.$"),
        (("--devices", "2", "--launcher", "inline", "--nodes", "2"), "--launcher inline is one process"),
    ],
)
def test_what_hybrid_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    import re

    given = (*DIGITS, "--strategy", "hybrid", "--devices", "2", "--max-steps", "1", "--output", tmp_path / "run")
    assert re.search(told, refusal(capsys, *given, *words))


NET = {"model": "mlp", "data": "fake", "samples": 61, "image_size": 8, "lr": 0.05, "max_steps": 20}


def test_ranks_without_a_sample_take_part(pool: RankPool, tmp_path: Path) -> None:
    # 61 samples in batches of 20: the fourth batch is one sample, and two of three ranks have none.
    alone = curve(pool, tmp_path / "alone", 1, **NET, batch=20)
    found = curve(pool, tmp_path / "hybrid", 3, **NET, batch=20, strategy="hybrid", devices=2)
    assert apart(found, alone) < 1e-9


def _hooked(world: World, accumulate: int) -> tuple[list[int], int, bool]:
    """Return how often each gradient was accumulated and exchanged, and whether all ranks hold the same one."""
    values = NET | {"strategy": "hybrid", "devices": 2, "batch": 20, "accumulate": accumulate, "precision": "fp64"}
    job = assemble(override(RunConfig(), **values), world)
    counts = [0 for _ in job.model.parameters()]

    def count(place: int, item: Tensor) -> None:
        counts[place] += 1

    for place, item in enumerate(job.model.parameters()):
        item.register_post_accumulate_grad_hook(lambda item, place=place: count(place, item))
    sums, summed = 0, World.sum_

    def counted(world: World, tensor: Tensor) -> Tensor:
        nonlocal sums
        sums += 1
        return summed(world, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "sum_", counted)
        train_step(job, next(iter(job.batches(0))))
    gradients = torch.cat([item.grad.flatten() for item in job.model.parameters() if item.grad is not None])
    same = world.stack(gradients)
    job.data.close()
    return counts, sums, bool((same == same[0]).all())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_gradient_comes_once_a_pass_and_is_exchanged_once(pool: RankPool, accumulate: int) -> None:
    for counts, sums, same in pool.run(2, _hooked, accumulate):
        assert set(counts) == {accumulate}
        assert sums == 1, "one bucket, after the last micro-batch"
        assert same


def _unused(world: World, options: dict[str, Any]) -> str:
    values = NET | {"model": "tests.models:Unused", "strategy": "hybrid", "devices": 2, "batch": 20, "max_steps": 2}
    try:
        train(override(RunConfig(), **values | options), world, Nothing())
    except RequestError as error:
        return str(error)
    return "trained"


def test_parameters_that_the_loss_does_not_reach(pool: RankPool) -> None:
    (told,) = set(pool.run(2, _unused, {}))
    assert told.startswith("The loss does not reach the parameters ")
    assert pool.run(2, _unused, {"find_unused": True}) == ["trained"] * 2
