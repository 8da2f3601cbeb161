"""Ways to go over a loader: several passes, iterators by hand, reading ahead, skipping, counting by steps."""

from __future__ import annotations

import itertools
import queue
import threading
from ast import literal_eval
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .catalogue import REFUSED, RIGHT, SKIPPED, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, limited, mlp, regression, seeded, trio


@loop(quick=True, resumed=RIGHT | REFUSED)
def by_steps(session: Any, how: str) -> Numbers:
    """Train for a number of steps, not of epochs."""
    model, optimizer, loader = trio(session)
    while session.step < 10:
        is_empty = True
        for x, y in loader:
            is_empty = False
            descend(session, optimizer, error(model, x, y))
            if session.step == 10:
                break
        assert not is_empty, "a pass without a batch"
    return [checksum(model), session.step]


@loop(accumulated=SKIPPED, resumed=RIGHT | REFUSED, quick=True)
def overfit_kept_batch(session: Any, how: str) -> Numbers:
    """Train on one batch for several steps."""
    model, optimizer, loader = trio(session)
    x, y = next(iter(loader))
    for _ in range(6):
        descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


@loop(resumed=RIGHT | REFUSED)
def cycle(session: Any, how: str) -> Numbers:
    """Repeat the first pass's batches for ever."""
    model, optimizer, loader = trio(session)
    for x, y in limited(itertools.cycle(loader)):
        descend(session, optimizer, error(model, x, y))
        if session.step == 10:
            break
    return [checksum(model), session.step]


@loop(quick=True, resumed=RIGHT | REFUSED)
def chain(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    for x, y in itertools.chain(loader, loader):
        descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


@loop("list", quick=True)
@loop("kept", resumed=RIGHT | REFUSED)
@loop("reversed", accumulated=REFUSED, saves_by_epoch=True)
def all_at_once(session: Any, how: str) -> Numbers:
    """Read the whole epoch before training on it."""
    model, optimizer, loader = trio(session)
    kept = list(loader) if how == "kept" else []
    for _ in session.epochs(2):
        batches = kept or list(loader)
        order = [batches[at] for at in (1, 0, *range(2, len(batches)))] if how == "reversed" else batches
        for x, y in order:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


def ahead(batches: Iterable[Any], distance: int) -> Iterator[Any]:
    """Yield batches that were read `distance` batches before."""
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > distance:
            yield waiting.popleft()
    yield from waiting


@loop("one", "two", quick=True)
@loop("two-doubled", "one-flattened", outcome=RIGHT | REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED)
@loop("two-named")
def read_ahead(session: Any, how: str) -> Numbers:
    """Prefetch one batch or two, and transform them before the model."""
    distance, _, change = how.partition("-")
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in ahead(loader, ("one", "two").index(distance) + 1):
            inputs = {"doubled": x * 2, "named": x * 2, "flattened": x.flatten(1)}
            loss = error(model, inputs.get(change, x), y)
            descend(session, optimizer, loss, **({"batch": x} if change == "named" else {}))
    return [checksum(model), session.step]


@loop("plain", accumulated=SKIPPED, quick=True)
@loop("doubled", outcome=REFUSED, alone=RIGHT, accumulated=SKIPPED, quick=True)
def read_ahead_under_batchnorm(session: Any, how: str) -> Numbers:
    """Prefetch a batch, beside a last one of which some ranks have no sample, for a net with BatchNorm."""

    def make() -> nn.Module:
        normed = nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.BatchNorm1d(1), nn.Flatten())
        return nn.Sequential(normed, nn.Linear(FEATURES, 1))

    model, optimizer, loader = trio(session, make, data=regression(9), batch=8)
    for _ in session.epochs(3):
        for x, y in ahead(loader, 1):
            descend(session, optimizer, error(model, x * 2 if how == "doubled" else x, y), batch=x)
    return [checksum(model)]


@loop("outliving", "each-epoch", quick=True)
@loop("validation", saves_by_epoch=True)
def second_loader(session: Any, how: str) -> Numbers:
    """Take batches of a second loader: by an iterator that goes on over epochs, or wholly before each epoch."""
    model, optimizer, loader = trio(session, data=regression(24))
    other = session.prepare(DataLoader(regression(30), batch_size=6))
    iterator, total = iter(other), 0.0
    for _ in session.epochs(3):
        if how == "each-epoch":
            iterator = iter(other)
        if how == "validation":
            total += sum(session.sum(x.sum().item()) for x, _ in other)
        for x, y in loader:
            loss = error(model, x, y)
            if how != "validation":
                try:
                    u, _ = next(iterator)
                except StopIteration:
                    iterator = iter(other)
                    u, _ = next(iterator)
                loss = loss + 0.1 * model(u).square().mean()
            descend(session, optimizer, loss, batch=x)
    return [checksum(model), total]


class Slices(Dataset[Any]):
    """A data set whose batches are slices of its memory."""

    def __init__(self) -> None:
        self.x, self.y = arrays()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.x[indices[0] : indices[-1] + 1], self.y[indices[0] : indices[-1] + 1]


@loop("slices", quick=True)
@loop("replaced", "texts", outcome=RIGHT | REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED, quick=True)
def transformed_while_read(session: Any, how: str) -> Numbers:
    """Prefetch batches of which a generator has replaced one tensor or all, batches of texts, or slices."""
    texts = [repr((x.tolist(), y.tolist())) for x, y in zip(*arrays(), strict=True)]
    data: Any = Slices() if how == "slices" else texts if how == "texts" else None
    options: dict[str, Any] = {} if data is None else {"collate_fn": lambda batch: batch}
    model, optimizer, loader = trio(session, data=data, **options)

    def transformed() -> Iterator[Any]:
        for batch in loader:
            if how == "texts":
                rows = [literal_eval(text) for text in batch]
                yield [torch.tensor(part, dtype=torch.float64) for part in zip(*rows, strict=True)]
            else:
                x, y = batch
                yield x if how == "slices" else x * 2, y + 1 if how == "replaced" else y

    for _ in session.epochs(2):
        for x, y in ahead(transformed(), 1):
            descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


def background(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches that a thread reads ahead."""
    ready: queue.Queue[Any] = queue.Queue(2)
    end = object()

    def read() -> None:
        try:
            for batch in batches:
                ready.put(batch)
        finally:
            ready.put(end)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    while (batch := ready.get()) is not end:
        yield batch
    thread.join()


@loop(outcome=REFUSED)
def background_thread(session: Any, how: str) -> Numbers:
    """Read in a thread, as generators with prefetching do."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in background(loader):
            descend(session, optimizer, error(model, x, y))
    return [checksum(model), session.step]


@loop("equal", quick=True)
@loop("shorter", "longest", outcome=RIGHT | REFUSED)
def zip_two(session: Any, how: str) -> Numbers:
    """Go over two loaders together."""
    model, optimizer, first = trio(session)
    second = session.prepare(
        DataLoader(regression(23 if how == "equal" else 12), batch_size=6 if how == "equal" else 4)
    )
    for _ in session.epochs(2):
        pairs = itertools.zip_longest(first, second) if how == "longest" else zip(first, second, strict=False)
        for (x, y), other in pairs:
            loss = error(model, x, y)
            if other is not None:
                loss = loss + 0.5 * error(model, *other)
            descend(session, optimizer, loss)
    return [checksum(model), session.step]


@loop(outcome=RIGHT | REFUSED)
def labelled_and_unlabelled(session: Any, how: str) -> Numbers:
    """Repeat a short loader beside a long one, as semi-supervised training does."""
    model, optimizer, labelled = trio(session, data=regression(24))
    unlabelled = session.prepare(DataLoader(regression(12), batch_size=6))
    for _ in session.epochs(2):
        others = itertools.cycle(unlabelled)
        for x, y in labelled:
            u, _ = next(others)
            loss = error(model, x, y) + 0.1 * model(u).square().mean()
            descend(session, optimizer, loss)
    return [checksum(model), session.step]


@loop(outcome=RIGHT | REFUSED, accumulated=SKIPPED)
def alternate_loaders(session: Any, how: str) -> Numbers:
    """Train on two loaders in turn."""
    model, optimizer, first = trio(session, data=regression(24))
    second = session.prepare(DataLoader(regression(18), batch_size=6))
    for _ in session.epochs(2):
        for x, y in itertools.chain.from_iterable(zip(first, second, strict=False)):
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("value", accumulated=SKIPPED, quick=True)
@loop("third", accumulated=SKIPPED, saves_by_epoch=True, quick=True)
@loop("last", "all-of-epoch", accumulated=SKIPPED, saves_by_epoch=True)
def skip_agreed(session: Any, how: str) -> Numbers:
    """Skip the same batches on all ranks."""
    x, y = arrays(24)
    if how == "value":
        x[7] = x[16] = float("nan")
    model, optimizer, loader = trio(session, data=torch.utils.data.TensorDataset(x, y))
    for epoch in session.epochs(3):
        for at, (x, y) in enumerate(loader):
            loss = error(model, x, y)
            bad = not torch.isfinite(loss)
            skips = {"third": at % 3 == 1, "last": at == 3, "all-of-epoch": epoch == 1}
            if skips.get(how, False) or session.max(float(bad)) > 0:
                continue
            descend(session, optimizer, loss)
    return [checksum(model), session.step]


@loop("value", "rank", "rank-next", outcome=REFUSED, alone=RIGHT, accumulated=SKIPPED, quick=True)
def skip_apart(session: Any, how: str) -> Numbers:
    """Skip other batches on each rank."""
    x, y = arrays(24)
    if how == "value":
        x[7] = x[16] = float("nan")
    model, optimizer, loader = trio(session, data=torch.utils.data.TensorDataset(x, y))
    for _ in session.epochs(3):
        batches = iter(loader)
        for _ in range(session.rank if how == "rank-next" else 0):
            next(batches)
        for at, (x, y) in enumerate(batches):
            loss = error(model, x, y)
            if (how == "rank" and at == session.rank) or not torch.isfinite(loss):
                continue
            descend(session, optimizer, loss)
    return [checksum(model)]


@loop(outcome=REFUSED, alone=RIGHT, accumulated=SKIPPED)
def other_order_on_a_rank(session: Any, how: str) -> Numbers:
    """Read the epoch at once, and go over it in another order on another rank."""
    model, optimizer, loader = trio(session, data=regression(24))
    for _ in session.epochs(2):
        batches = list(loader)
        for x, y in batches[session.rank :] + batches[: session.rank]:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


@loop(has_accumulated_plain=False)
def update_bn_of_average(session: Any, how: str) -> Numbers:
    """Compute BatchNorm's statistics anew by a pass over the training loader."""
    model, optimizer, loader = trio(session, normalised)
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    update_bn(loader, model)
    return [checksum(model)]


@loop("ahead", "kept", quick=True, has_plain=False, draws="global")
@loop("evaluated", accumulated=RIGHT | REFUSED, has_plain=False, draws="global")
@loop("replaced", outcome=RIGHT | REFUSED, has_plain=False, draws="global")
@loop(
    "ahead-noise",
    outcome=REFUSED,
    alone=RIGHT,
    accumulated=RIGHT | REFUSED,
    has_plain=False,
    draws="global",
    quick=True,
)
def dropout_of_other_batches(session: Any, how: str) -> Numbers:
    """Draw dropout and noise for batches that were read before others, and after an evaluation."""
    model, optimizer, loader = trio(
        session, lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, 1)), shuffle=True
    )
    test, is_noisy = DataLoader(regression(7), batch_size=4), how not in ("ahead", "kept")
    for _ in session.epochs(2):
        batches: Iterable[Any] = ahead(loader, 1) if "ahead" in how else list(loader) if "kept" in how else loader
        if how == "replaced":
            batches = [(x + torch.randn_like(x), y.clone()) for x, y in batches]
        for x, y in batches:
            if how == "evaluated":
                for inputs, _ in session.evaluating(test):
                    model(inputs)
            descend(session, optimizer, error(model, x, y + torch.randn_like(y) if is_noisy else y))
    return [checksum(model), session.step]


@loop("twice", accumulated=SKIPPED)
def same_batch_again(session: Any, how: str) -> Numbers:
    """Make two steps on each batch, as policy-gradient loops do."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            for _ in range(2):
                descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("even", accumulated=SKIPPED, saves_by_epoch=True)
@loop("uneven", outcome=REFUSED, alone=RIGHT, accumulated=SKIPPED)
@loop("weighed", accumulated=SKIPPED, saves_by_epoch=True)
def with_the_batch_before(session: Any, how: str) -> Numbers:
    """Train on each batch together with the one before, from a small replay buffer."""
    model, optimizer, loader = trio(session, data=regression(24 if how == "even" else 23))
    for _ in session.epochs(2):
        before: tuple[Tensor, Tensor] | None = None
        for x, y in loader:
            joined = (x, y) if before is None else (torch.cat([before[0], x]), torch.cat([before[1], y]))
            # A stand-in of an empty share counts nothing: an earlier batch's rows would.
            options = {"weight": len(joined[0])} if how == "weighed" else {}
            descend(session, optimizer, error(model, *joined), **options)
            before = x, y
    return [checksum(model)]


@loop(outcome=RIGHT | REFUSED)
def epochs_again(session: Any, how: str) -> Numbers:
    """Train in two phases, each with epochs of its own."""
    model, optimizer, loader = trio(session)
    for _ in range(2):
        for _ in session.epochs(2):
            for x, y in loader:
                descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop(resumed=SKIPPED)
def loader_of_each_epoch(session: Any, how: str) -> Numbers:
    """Prepare a new loader in each epoch, as over the samples of a rollout."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    for epoch in session.epochs(3):
        x, y = arrays()
        loader = session.prepare(DataLoader(TensorDataset(x + epoch, y), batch_size=6))
        for batch in loader:
            descend(session, optimizer, error(model, *batch))
    return [checksum(model), session.step]
