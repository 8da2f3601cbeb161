"""Loaders: data sets that grow, samplers, streams, collate functions, forms of a batch, sizes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, limited, mlp, regression, seeded, train, trio

Pair = tuple[Tensor, Tensor]


class Pool(Dataset[Pair]):
    """A data set of changing length."""

    def __init__(self, count: int) -> None:
        self.count, self.arrays = count, arrays(24)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pair:
        if index >= self.count:
            raise IndexError(index)
        return self.arrays[0][index], self.arrays[1][index]


@loop("grow", resumed=RIGHT | REFUSED, quick=True)
@loop("shrink", outcome=RIGHT | TOLD, alone=RIGHT | TOLD, resumed=RIGHT | REFUSED)
def changing_length(session: Any, how: str) -> Numbers:
    """Add samples after each epoch, or take some away."""
    pool = Pool(24 if how == "shrink" else 12)
    model, optimizer, loader = trio(session, data=pool)
    for epoch in session.epochs(3):
        pool.count = 24 - 6 * epoch if how == "shrink" else 12 + 6 * epoch  # as a resumed run sets it, too
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


class Rotating(Sampler[int]):
    """A sampler that begins elsewhere in each epoch, by its own count."""

    def __init__(self, data: Sized, *, is_set: bool) -> None:
        self.data, self.is_set, self.epoch = data, is_set, 0

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        start = 3 * self.epoch
        if not self.is_set:
            self.epoch += 1
        return iter([(start + at) % len(self) for at in range(len(self))])


class Counting(Rotating):
    """The same, without `set_epoch`."""

    set_epoch = None  # type: ignore[assignment]


@loop("weighted", "generator", has_plain=False, quick=True)
@loop("set-epoch")
@loop("own-count", resumed=RIGHT | TOLD | REFUSED)
@loop("distributed", outcome=REFUSED)
def samplers(session: Any, how: str) -> Numbers:
    """Draw samples by a sampler."""
    data = regression()
    makers: dict[str, Any] = {
        "weighted": lambda: WeightedRandomSampler([1.0 + at % 3 for at in range(23)], 23),
        "generator": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(3)),
        "set-epoch": lambda: Rotating(data, is_set=True),
        "own-count": lambda: Counting(data, is_set=False),
        "distributed": lambda: DistributedSampler(data, num_replicas=1, rank=0),
    }
    sampler = makers[how]()
    model, optimizer, loader = trio(session, data=data, sampler=sampler)
    for epoch in session.epochs(3):
        if how == "set-epoch":
            sampler.set_epoch(epoch)
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


class Buckets(Sampler[list[int]]):
    """Batches of neighbours, the last one first."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, min(23, start + 6))) for start in (18, 12, 6, 0)])


@loop("buckets", "unbatched", outcome=RIGHT | REFUSED)
def batch_samplers(session: Any, how: str) -> Numbers:
    """Choose whole batches by a sampler, or give the loader batches that are ready."""
    data: Any = regression()
    options: dict[str, Any] = {"batch_sampler": Buckets()}
    if how == "unbatched":
        x, y = arrays(24)
        data, options = [*zip(x.split(6), y.split(6), strict=True)], {"batch_size": None}
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, **options))
    return train(session, (model, optimizer, loader))


class Stream(IterableDataset[Pair]):
    """A stream, whose order may change with an epoch that it counts itself."""

    def __init__(self, how: str) -> None:
        self.how, self.epoch, self.arrays = how, 0, arrays(23)

    def __iter__(self) -> Iterator[Pair]:
        pairs = [*zip(*self.arrays, strict=True)]
        start = 0
        if self.how == "counted":
            start = 3 * self.epoch
            self.epoch += 1
        endless = self.how == "endless"
        while True:
            yield from pairs[start:]
            yield from pairs[:start]
            if not endless:
                return


@loop("plain", quick=True)
@loop("endless", resumed=RIGHT | REFUSED)
@loop("counted", resumed=RIGHT | TOLD | REFUSED)
@loop("worker", outcome=RIGHT | REFUSED, needs_processes=True)
def streams(session: Any, how: str) -> Numbers:
    """Read a stream, which may count its own epochs or never end."""
    model, optimizer, loader = trio(session, data=Stream(how), num_workers=int(how == "worker"))
    if how == "endless":
        for x, y in limited(loader):
            descend(session, optimizer, error(model, x, y))
            if session.step == 9:
                break
        return [checksum(model), session.step]
    return [*train(session, (model, optimizer, loader), epochs=3), session.step]


class Unreadable(Dataset[Any]):
    """A data set with samples that cannot be read."""

    def __init__(self, missing: tuple[int, ...]) -> None:
        self.missing, self.arrays = missing, arrays(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Pair | None:
        return None if index in self.missing else (self.arrays[0][index], self.arrays[1][index])


def kept(batch: list[Pair | None]) -> Pair:
    pairs = [pair for pair in batch if pair is not None]
    if not pairs:
        return torch.zeros(0, FEATURES).double(), torch.zeros(0, 1).double()
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


@loop("dropped", quick=True)
@loop("weighted")
@loop("emptied", outcome=RIGHT | REFUSED)
def unreadable_samples(session: Any, how: str) -> Numbers:
    """Drop samples in the collate function."""
    missing = (2, 3, 4, 5) if how == "emptied" else (1, 2, 7, 20)
    model, optimizer, loader = trio(session, data=Unreadable(missing), collate_fn=kept)
    for _ in session.epochs(2):
        for x, y in loader:
            loss = functional.mse_loss(model(x), y, reduction="sum") / max(1, len(y))
            descend(session, optimizer, loss, **({"weight": len(y)} if how == "weighted" else {}))
    return [checksum(model)]


def mixed(batch: list[Pair]) -> Pair:
    """Mix neighbours."""
    assert len(batch) % 2 == 0, f"a batch of {len(batch)}"
    x, y = (torch.stack([pair[part] for pair in batch]) for part in (0, 1))
    return (x[::2] + x[1::2]) / 2, (y[::2] + y[1::2]) / 2


def rolled(batch: list[Pair]) -> Pair:
    """Mix each sample with the next one of the batch."""
    x, y = (torch.stack([pair[part] for pair in batch]) for part in (0, 1))
    return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * y + 0.3 * y.roll(1, 0)


def squeezed(batch: list[Pair]) -> Pair:
    """Drop dimensions of one element, that of a single sample too."""
    x, y = (torch.stack([pair[part] for pair in batch]) for part in (0, 1))
    return x[:, :1].squeeze(), y


@loop(accumulated=SKIPPED, quick=True)
def squeezed_samples(session: Any, how: str) -> Numbers:
    """Squeeze the batches of a data set of three samples."""
    model, optimizer, loader = trio(session, data=regression(3), batch=3, collate_fn=squeezed)
    for _ in session.epochs(4):
        for x, y in loader:
            descend(session, optimizer, error(model, x.reshape(-1, 1).expand(-1, FEATURES), y), batch=y)
    return [checksum(model)]


@loop("pairs", outcome=RIGHT | REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED)
@loop("rolled", outcome=TOLD, alone=RIGHT, accumulated=TOLD, quick=True)
def mixed_samples(session: Any, how: str) -> Numbers:
    """Mix samples of a batch in the collate function."""
    collate = mixed if how == "pairs" else rolled
    model, optimizer, loader = trio(session, data=regression(24), batch=8, collate_fn=collate)
    return train(session, (model, optimizer, loader))


def packed(batch: list[Tensor]) -> dict[str, Any]:
    """Join texts to one row."""
    return {"ids": torch.cat(batch), "lengths": [len(text) for text in batch]}


@loop("weighted", quick=True)
@loop("unweighted", outcome=TOLD, alone=RIGHT, accumulated=TOLD, quick=True)
def packed_tokens(session: Any, how: str) -> Numbers:
    """Join the texts of a batch to one row of tokens."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 9, (23,), generator=generator).tolist()
    data: Any = [torch.randint(0, 11, (length,), generator=generator) for length in lengths]
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=6, collate_fn=packed))
    for _ in session.epochs(2):
        for batch in loader:
            loss = functional.cross_entropy(model(batch["ids"]), batch["ids"].flip(0) * 0 + 3)
            weight = {"weight": len(batch["ids"])} if how == "weighted" else {}
            descend(session, optimizer, loss, **weight)
    return [checksum(model)]


Named = namedtuple("Named", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = ""


class Encoding(dict[str, Any]):
    """A dict with attributes, as tokenizers give."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Forms(Dataset[Any]):
    """A data set whose samples have a form."""

    def __init__(self, how: str) -> None:
        self.how, self.arrays = how, arrays()

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        x, y = self.arrays[0][index], self.arrays[1][index]
        forms: dict[str, Any] = {
            "nested": {"inputs": {"x": x}, "targets": [y]},
            "namedtuple": Named(x, y),
            "numpy": (x.numpy(), y.numpy()),
        }
        return forms.get(self.how, Sample(x, y, str(index)))


def collate(how: str) -> Any:
    """Return the collate function of a form."""

    def collected(samples: list[Sample]) -> Any:
        x, y = torch.stack([sample.x for sample in samples]), torch.stack([sample.y for sample in samples])
        names = [sample.name for sample in samples]
        forms: dict[str, Any] = {
            "dataclass": Sample(x, y),
            "encoding": Encoding(x=x, y=y, names=names),
            "strings": (names, y),
            "list-of-samples": samples,
            "list-of-tensors": list(torch.cat([x, y], 1)),
        }
        return forms[how]

    return collected


def unpacked(how: str, batch: Any) -> Pair:
    """Return inputs and targets of a batch of any form."""
    if how == "nested":
        return batch["inputs"]["x"], batch["targets"][0]
    if how in ("dataclass", "encoding", "namedtuple"):
        return batch.x, batch.y
    if how == "strings":
        return arrays()[0][[int(name) for name in batch[0]]], batch[1]
    if how == "list-of-samples":
        return torch.stack([sample.x for sample in batch]), torch.stack([sample.y for sample in batch])
    if how == "list-of-tensors":
        rows = torch.stack(batch)
        return rows[:, :-1], rows[:, -1:]
    return batch[0], batch[1]


COLLATED = ("dataclass", "encoding", "strings", "list-of-samples", "list-of-tensors")


@loop("nested", "dataclass", "strings", quick=True)
@loop("namedtuple", "numpy", "encoding", "list-of-samples")
@loop("list-of-tensors", outcome=RIGHT | REFUSED)
def forms(session: Any, how: str) -> Numbers:
    """Train on batches of another form than a pair of tensors."""
    options = {"collate_fn": collate(how)} if how in COLLATED else {}
    model, optimizer, loader = trio(session, data=Forms(how), **options)
    for _ in session.epochs(2):
        for batch in loader:
            x, y = unpacked(how, batch)
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("last-of-one", "single-sample", "drop-last", quick=True)
@loop("smaller-than-batch")
@loop("batch-of-one", "empty", outcome=RIGHT | REFUSED, accumulated=RIGHT | REFUSED)
def sizes(session: Any, how: str) -> Numbers:
    """Train on few samples, or on batches smaller than the number of ranks."""
    count = {"last-of-one": 13, "single-sample": 1, "smaller-than-batch": 4, "empty": 0}.get(how, 11)
    batch = 1 if how == "batch-of-one" else 6
    model, optimizer, loader = trio(session, data=regression(count), batch=batch, drop_last=how == "drop-last")
    return [*train(session, (model, optimizer, loader), epochs=3), len(loader)]


class Augmented(Dataset[Pair]):
    """A data set that adds noise."""

    def __init__(self) -> None:
        self.arrays = arrays()

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Pair:
        return self.arrays[0][index] + 0.1 * torch.randn(FEATURES).double(), self.arrays[1][index]


@loop("shuffled", has_plain=False, quick=True)
@loop("worker", "persistent", has_plain=False, needs_processes=True)
def augmentation(session: Any, how: str) -> Numbers:
    """Draw noise for each sample, here or in data workers."""
    options: Any = {} if how == "shuffled" else {"num_workers": 1, "persistent_workers": how == "persistent"}
    model, optimizer, loader = trio(session, data=Augmented(), shuffle=how == "shuffled", **options)
    return train(session, (model, optimizer, loader))


class Scaled(DataLoader[Any]):
    """A DataLoader that changes its batches."""

    def __iter__(self) -> Any:
        yield from ((x / 2, y, at) for x, y, at in super().__iter__())


@loop("own-iterator", outcome=REFUSED, quick=True)
@loop("mined", outcome=REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED, has_plain=False, quick=True)
def loader_that_acts(session: Any, how: str) -> Numbers:
    """Change batches in the DataLoader's own iterator, or draw samples by the losses that the loop has seen."""
    x, y = arrays()
    data = TensorDataset(x, y, torch.arange(len(x)))
    sampler = WeightedRandomSampler([1.0] * len(x), len(x))
    kind = Scaled if how == "own-iterator" else DataLoader
    model, optimizer, loader = session.prepare(*parts_of(), kind(data, batch_size=6, sampler=sampler))
    for _ in session.epochs(3):
        for inputs, targets, indices in loader:
            losses = functional.mse_loss(model(inputs), targets, reduction="none").mean(1)
            sampler.weights[indices] = losses.detach() + 1e-3
            descend(session, optimizer, losses.mean())
    return [checksum(model)]


def parts_of() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(mlp)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
