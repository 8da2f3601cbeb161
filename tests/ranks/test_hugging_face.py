"""Data sets of Hugging Face in a loop: each sample once, in one order on any number of ranks, exactly continued."""

from __future__ import annotations

import contextlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data.share import SharedLoader
from lockstep.errors import RequestError
from lockstep.world.world import World

from .. import loops
from ..needs import need
from ..pool import RankPool
from .test_session import LAW, gap, same_bits

pytestmark = pytest.mark.slow
SAMPLES, BATCH = 301, 20
STREAMS = ("stream", "batched", "interleaved", "repeated", "shuffled")
taken: list[int] = []
"""Samples that a stream has read."""


def setup_module() -> None:
    need([name for name in ("datasets", "torchdata") if find_spec(name) is None])


def note(row: dict[str, Any]) -> dict[str, Any]:
    """Return a sample, and count it."""
    taken.append(row["number"])
    return row | {"x": [value / 2 for value in row["x"]]}


def note_all(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return some of the samples, and count them."""
    taken.extend(rows["number"])
    return {name: values[1:] for name, values in rows.items()}


def dataset(kind: str, rank: int = 0) -> Any:
    """Return a data set of (x, y, number), in memory."""
    import datasets

    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(SAMPLES, 6, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    whole = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist(), "number": [*range(SAMPLES)]})
    if kind == "map-style":
        return whole.with_format("torch")
    stream = whole.to_iterable_dataset(num_shards=4)
    if kind == "split":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(stream, rank, 2).with_format("torch")
    if kind == "interleaved":
        stream = datasets.interleave_datasets([stream, stream.map(note)], probabilities=[0.3, 0.7], seed=6)
    elif kind == "batched":
        stream = stream.map(note_all, batched=True, batch_size=7)
    elif kind == "repeated":
        stream = stream.repeat(2).map(note)
    else:
        stream = stream.map(note)
    if kind in ("shuffled", "unseeded"):
        stream = stream.shuffle(seed=6 if kind == "shuffled" else None, buffer_size=16)
    return stream.with_format("torch")


def loop(world: World, kind: str, stop_at: int | None, options: dict[str, Any]) -> tuple[loops.Learned, list[int], int]:
    """Train two epochs; return what was learned, the samples of each rank's shares, and how many were read."""
    taken.clear()
    session = loops.session(world, **options)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(kind, world.rank), batch_size=BATCH, shuffle=kind == "map-style")
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    losses, numbers = list[float](), list[int]()
    with contextlib.suppress(KeyboardInterrupt), session:
        for _ in session.epochs(2):
            for batch in loader:
                if session.step == stop_at:
                    raise KeyboardInterrupt
                loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(session.mean(loss.detach()).item())
                numbers += session.gather(batch["number"]).tolist()
    return (losses, loops.weights(model)), numbers, len(taken)


def run(world: World, kind: str, stop_at: int | None, options: dict[str, Any]) -> Any:
    return loop(world, kind, stop_at, options)


@pytest.mark.parametrize("kind", ["map-style", "stream", "shuffled"])
def test_each_sample_is_trained_once_and_in_one_order_on_any_number_of_ranks(pool: RankPool, kind: str) -> None:
    alone, order, _ = loop(World.alone(), kind, None, {})
    half = len(order) // 2
    assert sorted(order[:half]) == sorted(order[half:]) == [*range(SAMPLES)]
    assert (order[:half] == order[half:]) == (kind == "stream")
    for size in (2, 3):
        for learned, numbers, _ in pool.run(size, run, kind, None, {}):
            assert gap(alone, learned) < LAW
            assert numbers == order


@pytest.mark.parametrize(("kind", "reads"), [("map-style", 0), ("stream", 401), ("shuffled", 520)])
def test_a_run_goes_on_within_an_epoch_also_on_other_ranks(
    pool: RankPool, tmp_path: Path, kind: str, reads: int
) -> None:
    whole, order, _ = loop(World.alone(), kind, None, {})
    options = {"checkpoint_every": 4, "output": str(tmp_path / "run")}
    loop(World.alone(), kind, 21, options)  # in the second epoch, after the checkpoint of step 20
    rest, numbers, read = loop(World.alone(), kind, None, options | {"resume": "auto"})
    assert numbers == order[-len(numbers) :]
    assert len(rest[0]) == len(whole[0]) - 20
    assert same_bits((whole[0][-len(rest[0]) :], whole[1]), rest)
    assert read <= reads  # of the stream, one batch and twice 80 samples more than it trains
    options["output"] = str(tmp_path / "elsewhere")
    pool.run(2, run, kind, 21, options)
    for learned, further, read in pool.run(3, run, kind, None, options | {"resume": "auto"}):
        assert gap(rest, learned) < LAW
        assert further == numbers
        assert read <= reads


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_goes_on_from_its_state_with_the_same_samples(kind: str, workers: int) -> None:
    def shared(workers: int = workers) -> SharedLoader:
        return SharedLoader(DataLoader(dataset(kind), BATCH, num_workers=workers), World.alone(), seed=5)

    whole = shared(1 - workers)  # a worker shuffles as the rank does
    batches = [micro.batch["number"].tolist() for micro in whole.micros(1)]
    for first in range(1, len(batches) + 1, 3):
        resumed = shared()
        resumed.restore(json.loads(json.dumps(whole.place([1, 0], first))))
        taken.clear()
        assert [micro.batch["number"].tolist() for micro in resumed.micros(1, first=first)] == batches[first:]
        assert not resumed.has_changed
        if kind == "stream" and not workers and 1 < first < len(batches) - 4:
            assert len(taken) == SAMPLES - (first - 1) * BATCH + 2 * 80


def test_a_stream_that_is_shuffled_without_a_seed_is_noticed(pool: RankPool) -> None:
    whole, resumed = (SharedLoader(DataLoader(dataset("unseeded"), BATCH), World.alone(), seed=5) for _ in range(2))
    list(whole.micros(0))
    resumed.restore(whole.place([0, 0], 3))
    list(resumed.micros(0, first=3))
    assert resumed.has_changed


def refused(world: World) -> str:
    try:
        loop(world, "split", None, {})
    except RequestError as error:
        return str(error)
    return ""


def test_a_stream_that_is_split_by_node_is_refused(pool: RankPool) -> None:
    assert all("give each rank the complete stream" in sentence for sentence in pool.run(2, refused))


def test_a_stateful_loader_is_refused_with_the_loader_to_give() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    session = loops.session(World.alone())
    with session, pytest.raises(RequestError, match=r"StatefulDataLoader, .* give a torch DataLoader"):
        session.prepare(StatefulDataLoader(dataset("stream"), batch_size=BATCH))
