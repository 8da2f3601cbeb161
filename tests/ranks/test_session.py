"""Loops of a user's own: the same model on any number of ranks, and exactly continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import RequestError
from lockstep.nn.sync_batchnorm import SyncBatchNorm
from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

LAW = 1e-9


def interrupted(world: World, stop_at: int, options: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        loops.classifier(world, stop_at, **options)


def is_standing_in(world: World, stop_at: int) -> bool:
    """Return whether BatchNorm excludes samples after a loop was interrupted within a batch, empty on ranks 1 and 2."""
    interrupted(world, stop_at, {})
    return SyncBatchNorm.stand_in


def modes_left(world: World) -> int:
    """Return the dispatch modes that are left after a loop was interrupted in its first step."""
    interrupted(world, 0, {})
    return torch._C._len_torch_dispatch_stack()


def test_a_loop_that_fails_in_its_first_step_leaves_no_dispatch_mode(pool: RankPool) -> None:
    assert pool.run(2, modes_left) == [0, 0]


def run(world: World, name: str, options: dict[str, Any]) -> loops.Learned:
    learned: loops.Learned = getattr(loops, name)(world, **options)
    return learned


def gap(one: loops.Learned, other: loops.Learned) -> float:
    assert len(one[0]) == len(other[0])
    assert one[1].keys() == other[1].keys()
    gaps = [abs(a - b) / abs(a) for a, b in zip(one[0], other[0], strict=True)]
    gaps += [float((held - other[1][name]).abs().max() / held.abs().max()) for name, held in one[1].items()]
    assert not any(each != each for each in gaps)
    return max(gaps)


def same_bits(one: loops.Learned, other: loops.Learned) -> bool:
    return one[0] == other[0] and all(torch.equal(held, other[1][name]) for name, held in one[1].items())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["classifier", "language_model", "streamed"])
def test_a_loop_learns_the_same_on_any_number_of_ranks(pool: RankPool, name: str, accumulate: int) -> None:
    options = {"accumulate": accumulate}
    alone = run(World.alone(), name, options)
    for size in (2, 3):
        for learned in pool.run(size, run, name, options):
            assert gap(alone, learned) < LAW, size


def test_a_loop_that_is_interrupted_leaves_batchnorm_as_it_was(pool: RankPool) -> None:
    assert pool.run(3, is_standing_in, 3) == [False] * 3


def test_global_draws_are_those_of_one_device(pool: RankPool) -> None:
    alone = run(World.alone(), "drawn", {})
    for size in (2, 3):
        assert all(gap(alone, learned) < LAW for learned in pool.run(size, run, "drawn", {})), size


@pytest.mark.parametrize("name", ["language_model", "streamed"])
def test_accumulation_is_no_part_of_a_model_without_batch_statistics(name: str) -> None:
    assert gap(run(World.alone(), name, {}), run(World.alone(), name, {"accumulate": 4})) < LAW


@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (3, 2)])
def test_a_loop_that_is_continued_ends_with_the_same_bits(
    pool: RankPool, tmp_path: Path, size: int, accumulate: int
) -> None:
    options = {"accumulate": accumulate, "checkpoint_every": 3}
    whole = pool.run(size, run, "classifier", options)[0]
    kept = options | {"output": str(tmp_path / "run")}
    pool.run(size, interrupted, 7, kept)  # in the second epoch, after the checkpoint of step 6
    rest = pool.run(size, run, "classifier", kept | {"resume": "auto"})[0]
    assert same_bits((whole[0][-len(rest[0]) :], whole[1]), rest)
    elsewhere = tmp_path / "other"
    pool.run(size, interrupted, 7, kept | {"output": str(elsewhere)})
    there = pool.run(size % 3 + 1, run, "classifier", options | {"output": str(elsewhere), "resume": "auto"})[0]
    assert gap(rest, there) < LAW


def weighed(world: World) -> list[list[float]]:
    """Return the mean, and maxima of ranks, of the batches [0, 1, 2] and [3, 4]: of three ranks one has no share."""
    session = loops.session(world)
    _, loader = session.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(5)), batch_size=3))
    own = (world.rank - 3, world.rank - 3.0, torch.tensor(world.rank - 3), torch.tensor(world.rank - 3.0))
    found = [
        [session.mean(x.double().mean(), weight=torch.tensor(2 * len(x))).item(), *map(float, map(session.max, own))]
        for _ in session.epochs(1)
        for (x,) in loader
    ]
    assert isinstance(session.max(world.rank), int)
    session.close()
    return found


def numbers(world: World) -> list[Any]:
    """Return what ranks hear of numbers that are whole on some of them; no model is prepared."""
    session = loops.session(world)
    loader = session.prepare(DataLoader(TensorDataset(torch.arange(5)), batch_size=4))
    found: list[Any] = []
    for _ in session.epochs(1):
        for _ in loader:  # in the last batch, rank 1 has no sample
            found.append(session.mean(3.0, weight=2.5))
    mine = 0 if world.rank else 0.75
    found += [session.sum(mine), session.max(mine), session.sum(torch.tensor([True, False])).tolist()]
    session.close()
    return found


def test_a_number_of_all_ranks_is_the_same_on_all_whatever_its_type(pool: RankPool) -> None:
    assert pool.run(2, numbers) == [[3.0, 3.0, 0.75, 0.75, [2, 0]]] * 2


def other_data(world: World, train: bool) -> str:
    """Return what a loop is told whose data, to train or to evaluate on, begin elsewhere on rank 1."""
    session = loops.session(world)
    model = torch.nn.Linear(1, 1).double()
    mine = TensorDataset(torch.arange(8).view(8, 1).double() + 1 + 10 * world.rank)
    ours = TensorDataset(torch.arange(8).view(8, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = session.prepare(model, optimizer, DataLoader(mine if train else ours, batch_size=4))
    if world.is_main:
        next(iter(loader))  # which a look at the data is, and no rank waits for another in it
    try:
        for _ in session.epochs(1):
            for (x,) in loader:
                session.backward(model(x).mean())
                optimizer.step()
            for _ in session.evaluating(DataLoader(ours if train else mine, batch_size=4)):
                pass
    except RequestError as error:
        return f"{session.step}: {error}"
    finally:
        session.close()
    return ""


def test_ranks_whose_data_differ_are_refused_in_their_first_step_and_evaluation(pool: RankPool) -> None:
    for train, step in ((True, 1), (False, 2)):
        for told in pool.run(2, other_data, train):
            assert told.startswith(f"{step}: The DataLoader is not the same on every rank: rank 1 reads other samples")


def test_a_sample_that_stands_in_has_no_part_in_a_weighed_mean_nor_in_a_maximum(pool: RankPool) -> None:
    for size in (1, 2, 3):
        whole, rest = (float(ranks - 4) for ranks in (size, min(size, 2)))
        assert pool.run(size, weighed) == [[[1.0, *[whole] * 4], [3.5, *[rest] * 4]]] * size


def grown(world: World, strategy: str) -> str:
    """Return the sentence for a model that gets a new layer, also in its optimizer, at the third step."""
    ours = loops.session(world, strategy=strategy, shard_modules=("Linear",) if strategy == "fsdp" else ())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4)
    model, optimizer, loader = ours.prepare(model, optimizer, loader)
    try:
        with ours:
            for _ in ours.epochs(2):
                for (x,) in loader:
                    if ours.step == 2:
                        model.append(torch.nn.Linear(2, 2).double())
                        optimizer.add_param_group({"params": model[2].parameters()})
                    ours.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_model_that_gets_parameters_while_it_trains_is_refused(pool: RankPool, strategy: str) -> None:
    for sentence in pool.run(2, grown, strategy):
        assert "prepare the model after the last change of its layers" in sentence
