"""A user's DataLoader, shared out: the ranks' shares put together are the batches of one rank, whatever reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, TensorDataset

from lockstep.batching import BatchPlan
from lockstep.data.order import Order
from lockstep.data.ranks import signature
from lockstep.data.share import Micro, SharedLoader
from lockstep.data.transfer import moved
from lockstep.errors import RequestError, RunError
from lockstep.world.random_state import Generators
from lockstep.world.topology import Topology
from lockstep.world.world import World


def _shared(dataset: Any, batch: int, rank: int = 0, ranks: int = 1, **options: Any) -> SharedLoader:
    own = {name: options.pop(name) for name in ("accumulate", "dtype", "evaluates") if name in options}
    world = World(Topology(rank=rank, size=ranks, local_rank=rank, local_size=ranks), torch.device("cpu"))
    return SharedLoader(DataLoader(dataset, batch, **options), world, seed=5, **own)


def _ranks(dataset: Any, batch: int, ranks: int, **options: Any) -> list[SharedLoader]:
    return [_shared(dataset, batch, rank, ranks, **options) for rank in range(ranks)]


def _joined(streams: list[Iterator[Micro]]) -> list[tuple[list[Any], list[int], int, bool]]:
    """Return (samples, indices, total, last) of each global micro-batch: all ranks' shares put together."""
    joined = []
    for parts in zip(*streams, strict=True):
        assert len({(part.share.total, part.share.last) for part in parts}) == 1
        assert all(part.size == len(part.indices) for part in parts)
        batches = [part.batch[0] if isinstance(part.batch, list) else part.batch for part in parts]
        samples = [row for batch, part in zip(batches, parts, strict=True) for row in batch.tolist()[: part.size]]
        indices = np.concatenate([part.indices for part in parts]).tolist()
        joined.append((samples, indices, parts[0].share.total, parts[0].share.last))
    return joined


def _samples(streams: list[Iterator[Micro]]) -> list[Any]:
    return [sample for samples, *_ in _joined(streams) for sample in samples]


@dataclasses.dataclass
class Drawing(data.Dataset[Tensor]):
    """Samples that draw from all three generators."""

    samples: int = 23

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.random()], dtype=torch.float64)


class DrawingBatches(Drawing):
    """The same, which reads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        assert type(indices) is list
        return [self[index] for index in indices]


@dataclasses.dataclass
class Counting(data.IterableDataset[Tensor]):
    """A stream of 0, 1, … with the epoch and two numbers drawn."""

    samples: int = 23
    epoch: int = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.samples):
            yield torch.tensor([number, self.epoch, random.random(), torch.rand(()).item()], dtype=torch.float64)


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.booleans()).filter(
    lambda shape: shape[1] >= shape[2] * shape[3]
)


@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream"])
@given(shape=SHAPES)
def test_the_shares_of_all_ranks_are_the_batches_of_one(shape: tuple[int, int, int, int, bool], kind: str) -> None:
    samples, batch, ranks, accumulate, drop_last = shape
    order = Order(samples, seed=5, epoch=2).indices(0, samples).tolist() if kind == "shuffled" else range(samples)
    dataset = Counting(samples) if kind == "stream" else data.ConcatDataset([TensorDataset(torch.arange(samples))])
    options = {"shuffle": kind == "shuffled", "drop_last": drop_last, "accumulate": accumulate}
    shared = _ranks(dataset, batch, ranks, **options)
    expected: list[list[tuple[list[int], int, bool]]] = []
    for start in range(0, samples // batch * batch if drop_last else samples, batch):
        stop = min(start + batch, samples)
        cuts = BatchPlan.solve(batch, 1, accumulation=accumulate).split(start, stop, 0)
        expected.append([(list(order[cut.start : cut.stop]), stop - start, cut is cuts[-1]) for cut in cuts])
    for first in (0, len(expected) // 2):
        found = [list(each.micros(2, first=first)) for each in shared]
        joined = _joined([iter(each) for each in found])
        rows = [[row[0] if kind == "stream" else row for row in rows] for rows, *_ in joined]
        wanted = [micro for micros in expected[first:] for micro in micros]
        assert [(row, *rest) for row, (_, _, *rest) in zip(rows, joined, strict=True)] == wanted
        assert rows == [indices for _, indices, *_ in joined]
    stand_in = {int(micro.batch[0].flatten()[0]) for each in found for micro in each if not micro.size}
    assert stand_in <= {micros[0][0][0] for micros in expected[-1:]}  # the last batch's first sample
    if kind != "stream":
        assert (shared[0].samples, shared[0].steps()) == (samples, len(expected))


@pytest.mark.parametrize("stream", [False, True])
@given(shape=SHAPES)
def test_evaluation_takes_each_sample_once_in_order(shape: tuple[int, int, int, int, bool], stream: bool) -> None:
    samples, batch, ranks, _, drop_last = shape
    dataset = Counting(samples) if stream else TensorDataset(torch.arange(samples))
    shared = _ranks(dataset, batch, ranks, shuffle=not stream, drop_last=drop_last, evaluates=True)
    found = [list(each.shares()) for each in shared]
    joined = _joined([iter(each) for each in found])
    rows = [row[0] if stream else row for samples, *_ in joined for row in samples]
    assert rows == [index for _, indices, *_ in joined for index in indices] == list(range(samples))
    assert sum(total for *_, total, _ in joined) == samples
    assert min(micro.size for each in found for micro in each) > 0 or samples < ranks
    assert max(micro.size for each in found for micro in each) <= -(-batch // ranks) + 1


def _drawing_collate(samples: list[Any]) -> Tensor:
    return torch.rand(()) + len(samples)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [DrawingBatches(), data.Subset(Drawing(30), range(1, 24)), Counting()])
def test_what_is_drawn_depends_on_neither_workers_nor_ranks(dataset: Any, workers: int) -> None:
    torch.manual_seed(workers)
    before = Generators.now(()).as_json()

    def read(ranks: int, epoch: int, first: int = 0, **options: Any) -> list[Any]:
        shared = _ranks(dataset, 6, ranks, shuffle=not isinstance(dataset, Counting), **options)
        for number in (epoch - 1, epoch):
            found = _samples([each.micros(number, first=first) for each in shared])
        for each in shared:
            each.close()
        return found

    alone = read(1, 3)
    assert read(2, 3, num_workers=workers, persistent_workers=workers > 0) == alone
    assert read(3, 3, first=2, num_workers=workers) == alone[12:]
    assert len({number for row in alone for number in row[2:]}) == 2 * len(alone) == 46
    assert not isinstance(dataset, Counting) or {row[1] for row in alone} == {3}
    assert {row[2] for row in alone}.isdisjoint(row[2] for row in read(1, 4))
    evaluated = [_samples([each.shares() for each in _ranks(dataset, 6, ranks, evaluates=True)]) for ranks in (1, 3)]
    assert evaluated[0] == evaluated[1]
    # What a collate function draws follows from its share, and differs from rank to rank.
    drawn = [
        [micro.batch.item() % 1 for micro in _shared(dataset, 6, collate_fn=_drawing_collate, num_workers=n).micros(1)]
        for n in (0, min(workers, 1))
    ]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0]}) == 4
    pair = _ranks(dataset, 6, 2, collate_fn=_drawing_collate)
    assert len({micro.batch.item() % 1 for each in pair for micro in each.micros(1)}) == 8
    assert Generators.now(()).as_json() == before  # the process's own go on as if nothing had been read


@pytest.mark.parametrize(
    "sampler",
    [
        data.WeightedRandomSampler([1.0] * 20, 9),
        data.SubsetRandomSampler(range(3, 12), generator=torch.Generator().manual_seed(1)),
        data.RandomSampler(range(9), replacement=True),
    ],
)
def test_a_sampler_is_drawn_from_seed_and_epoch(sampler: Any) -> None:
    def read(ranks: int, epoch: int) -> list[int]:
        shared = _ranks(TensorDataset(torch.arange(20)), 4, ranks, sampler=sampler)
        assert [(each.samples, each.steps()) for each in shared] == [(9, 3)] * ranks
        return _samples([each.micros(epoch) for each in shared])

    own = getattr(sampler, "generator", None) or torch.Generator()
    before = own.get_state()
    drawn = read(1, 4)
    assert torch.equal(own.get_state(), before)
    torch.rand(1)
    assert read(3, 4) == drawn
    assert sorted(drawn) != list(range(9))
    assert read(1, 5) != drawn
    evaluated = _shared(TensorDataset(torch.arange(20)), 4, sampler=sampler, evaluates=True)
    assert _samples([evaluated.shares()]) == sorted(read(1, 0))


@pytest.mark.parametrize("sampler", [None, data.SubsetRandomSampler(range(3, 20))])
def test_a_further_pass_over_an_epoch_has_an_order_and_draws_of_its_own(sampler: Any) -> None:
    options = {"sampler": sampler} if sampler else {"shuffle": True}
    found = []
    for ranks in (1, 3):
        shared = _ranks(Drawing(), 6, ranks, **options)
        found.append([_samples([each.micros(1, again=again) for each in shared]) for again in (0, 1, 2)])
    assert found[0] == found[1]
    first, *others = ([tuple(row) for row in rows] for rows in found[0])
    for rows in others:
        assert [index for index, *_ in rows] != [index for index, *_ in first]
        assert sorted(index for index, *_ in rows) == sorted(index for index, *_ in first)
        assert {row[1:] for row in rows}.isdisjoint(row[1:] for row in first)


def test_what_cannot_be_shared_out_is_refused() -> None:
    four, growing = TensorDataset(torch.arange(4)), [0, 1]
    world = World(Topology(rank=0, size=2, local_size=2), torch.device("cpu"))
    for loader, sentence in (
        ([1, 2], "A list cannot be shared out; give a torch DataLoader"),
        (DataLoader(four, 2, sampler=data.DistributedSampler(four, 2, 0)), "leave it out"),
        (DataLoader(four, batch_sampler=[[0, 1]]), "has a batch_sampler; give the global batch as batch_size"),
        (DataLoader(four, 2, sampler=iter(())), "a tuple_iterator, has no length"),
        (DataLoader(four, 1), "Global batch 1 does not split into 1 micro-batch on 2 devices"),
    ):
        with pytest.raises(RequestError, match=re.escape(sentence)):
            SharedLoader(loader, world, seed=5)  # type: ignore[arg-type]
    uneven = _shared(four, 2, sampler=growing)
    growing.append(2)
    with pytest.raises(RequestError, match="a list, yields 3 samples in epoch 7, and 2 in epoch 0"):
        next(uneven.micros(7))


class Words(data.Dataset[dict[str, Any]]):
    """Texts of unlike lengths, of which one cannot be read."""

    opened: int | None = None

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            raise self.error("no such text")
        return {"ids": torch.full((index + 1,), index), "from": self.opened}


def _pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True, padding_value=-1)
    return {"ids": ids, "from": [sample["from"] for sample in samples]}


def _open(worker: int) -> None:
    info: Any = data.get_worker_info()
    info.dataset.opened = info.seed - worker


@pytest.mark.parametrize(("workers", "stay"), [(0, False), (2, False), (2, True)])
def test_batches_are_the_users_own_and_so_are_failures_and_workers(workers: int, stay: bool) -> None:
    options = {"collate_fn": _pad, "num_workers": workers, "persistent_workers": stay, "worker_init_fn": _open}
    shared, stopping = (_shared(Words(error), 4, 1, 2, **options) for error in (ValueError, StopIteration))
    before = set(multiprocessing.active_children())
    seen = []
    for epoch in range(2):
        with contextlib.closing(shared.micros(epoch)) as micros:
            micro = next(micros)
            seen.append(set(multiprocessing.active_children()) - before)
        assert micro.batch["ids"].tolist() == [[2, 2, 2, -1], [3, 3, 3, 3]]  # padded to its own share's longest
        assert (micro.batch["from"][0] is None) == (workers == 0)
    assert [len(each) for each in seen] == [workers] * 2
    assert (seen[0] == seen[1]) == (stay or not workers)
    with pytest.raises(ValueError, match="no such text") as raised:
        list(shared.micros(0))
    told = str(raised.value) if workers else str(raised.traceback[-1])
    assert "test_share.py" in told
    assert "__getitem__" in told
    assert stay or set(multiprocessing.active_children()) == before  # though the trace is held
    with pytest.raises(RuntimeError, match="StopIteration"):  # which would end the epoch without a word
        list(stopping.micros(0))
    shared.close()
    stopping.close()
    assert set(multiprocessing.active_children()) == before


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Labelled:
    x: Tensor
    y: Tensor


class Encoding(dict[str, Any]):
    """Like Hugging Face's: a mapping that moves itself."""

    def to(self, device: torch.device) -> Encoding:
        self["moved"] = str(device)
        return self


def test_a_batch_is_moved_and_cast_whatever_its_shape() -> None:
    x, y = torch.zeros(2), torch.ones(2, dtype=torch.int64)
    batch: list[Any] = [Point(x, y), Labelled(x, y), {"a": (x, "name", None)}, Encoding(x=x)]
    batch.append(torch.nn.utils.rnn.pack_sequence([x]))
    point, labelled, mapping, encoding, packed = moved(batch, torch.device("meta"), torch.float64, False)
    assert all(part.is_meta for part in (point.x, point.y, mapping["a"][0], encoding["x"], packed.data))
    for each, kind in ((point, Point), (labelled, Labelled)):
        assert (type(each), each.x.dtype, each.y.dtype) == (kind, torch.float64, torch.int64)
    assert not batch[1].x.is_meta
    assert signature(Labelled(x, y)) == signature(Point(x, y))
    assert mapping["a"][1:] == ("name", None)
    assert (type(encoding), encoding["moved"], packed.batch_sizes.is_meta) == (Encoding, "meta", False)
    cast = _shared(TensorDataset(x, y), 2, dtype=torch.float64)
    assert [part.dtype for part in next(cast.micros(0)).batch] == [torch.float64, torch.int64]


class Unsendable(data.Dataset[Any]):
    """Samples that a worker cannot send to its rank."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1), (lambda: index) if index > 1 else index


def test_a_batch_that_a_worker_cannot_send_is_an_error_at_once() -> None:
    shared = _shared(Unsendable(), 2, collate_fn=list, num_workers=1)
    words = r"could not send its batch to the rank: AttributeError: .*lambda"
    with contextlib.closing(shared.micros(0)) as micros, pytest.raises(RunError, match=words):
        list(micros)


class Stateful(data.Dataset[Tensor]):
    """Draws from its own generator, and has a state."""

    def __init__(self) -> None:
        self.noise = torch.Generator()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(2, generator=self.noise)

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_state_that_no_checkpoint_holds_is_told_at_the_start() -> None:
    assert _shared(TensorDataset(torch.zeros(4, 1)), 2).cautions == []
    for dataset in (Stateful(), data.Subset(Stateful(), [0, 1])):
        drawn, *state = _shared(dataset, 2).cautions
        assert "a separate random generator (noise)" in drawn
        assert [each.startswith("the data set's state_dict is not used") for each in state] == [True] * len(state)
        assert len(state) == isinstance(dataset, Stateful)


class Resumable(Counting):
    """A stream that continues from its state, a list of positions that were read, but for a buffer of `lost` samples.

    `offset` is added to its numbers.
    """

    def __init__(self, lost: int = 0, offset: int = 0) -> None:
        super().__init__(samples=200)
        self.start, self.read, self.lost, self.offset, self.taken = 0, 0, lost, offset, list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        start, self.start = self.start, 0
        for number in range(start, self.samples):
            self.taken.append(number)
            self.read = number + 1
            yield torch.tensor([number + self.offset, self.epoch, random.random()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read + self.lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["read"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Resumable:
        same = Resumable(self.lost, self.offset)
        same.taken = self.taken
        return same


@pytest.mark.parametrize(
    ("resumed", "reads", "is_same", "workers"),
    [
        (Resumable(), 5 + 65 + 65 + 185, True, 0),
        (Resumable(lost=3), 5 + 65 + 65 + 200, True, 0),
        (Counting(), 0, True, 0),
        (Resumable(offset=1), 5 + 65 + 65 + 200, False, 0),
        (Resumable(), 0, True, 1),
    ],
)
def test_a_resumed_stream_goes_on_from_its_state_or_reads_the_batches_before_again(
    resumed: Any, reads: int, is_same: bool, workers: int
) -> None:
    kind = Counting() if type(resumed) is Counting else Resumable(getattr(resumed, "lost", 0))
    whole = _shared(kind, 5, accumulate=2, num_workers=workers)
    batches = [micro.batch.tolist() for micro in whole.micros(1, again=2)]
    place = json.loads(json.dumps(whole.place([1, 2], 3)))
    assert place[:2] == [[1, 2], 3]
    assert whole.place([1, 1], 3) == whole.place([1, 2], 41) == []
    shared = _shared(resumed, 5, accumulate=2, num_workers=workers)
    shared.restore(place)
    rest = [micro.batch.tolist() for micro in shared.micros(1, first=3, again=2)]
    assert (rest == batches[6:]) == is_same
    assert shared.has_changed == (not is_same)
    assert shared.place([1, 2], 3) == whole.place([1, 2], 3) or not is_same
    if reads:
        assert len(resumed.taken) == reads
    assert [micro.batch.tolist() for micro in shared.micros(1, again=2)][: len(batches)] == batches or not is_same
