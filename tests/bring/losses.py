"""Losses: over tokens, as sums, of several tasks, over pairs of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, mlp, regression, seeded, trio


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 9, (23,), generator=generator).tolist()
    return [torch.randint(0, 11, (length,), generator=generator) for length in lengths]


def padded(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
    return ids.clamp(min=0)[:, :-1], ids[:, 1:]


@loop("number", "tensor", quick=True)
@loop("sum-normalised", "ignored-all")
def tokens(session: Any, how: str) -> Numbers:
    """Train on texts of different lengths by a mean, or a sum, over tokens."""
    data: Any = texts()
    if how == "ignored-all":  # a sample without a token that counts
        data[2] = data[3] = data[2][:1].repeat(2)
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=6, collate_fn=padded))
    for _ in session.epochs(2):
        for ids, labels in loader:
            if how == "ignored-all":
                labels = labels.masked_fill(ids == ids[:, :1], -100)
            logits = model(ids).flatten(0, 1)
            counted = (labels != -100).sum()
            if how == "sum-normalised":
                loss = functional.cross_entropy(logits, labels.flatten(), reduction="sum")
                if session.world.size == 1 and not hasattr(session, "close"):  # the plain twin divides by itself
                    loss = loss / counted
                descend(session, optimizer, loss, weight=counted, reduction="sum")
            else:
                loss = functional.cross_entropy(logits, labels.flatten())
                descend(session, optimizer, loss, weight=int(counted) if how == "number" else counted)
    return [checksum(model)]


@loop(quick=True)
def sum_over_samples(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session, lr=0.02)
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, (model(x) - y).square().sum(), reduction="sum")
    return [checksum(model)]


@loop("within", "outside")
def regulariser(session: Any, how: str) -> Numbers:
    """Add a term of the weights alone."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            loss = error(model, x, y)
            norms = torch.stack([weight.norm() for weight in model.parameters()])
            if how == "outside":
                session.backward(loss)
                session.backward(0.01 * norms.sum())
                optimizer.step()
                optimizer.zero_grad()
            else:
                descend(session, optimizer, loss + 0.01 * norms.sum())
    return [checksum(model)]


@loop("summed", "two-calls", "uncertainty", quick=True)
def multi_task(session: Any, how: str) -> Numbers:
    """Train two heads on one stem."""
    model = seeded(
        lambda: nn.ModuleDict({"stem": nn.Linear(FEATURES, 4), "one": nn.Linear(4, 1), "two": nn.Linear(4, 1)})
    )
    model.register_parameter("weights", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(regression(targets=2), batch_size=6)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(2):
        for x, y in loader:
            hidden = torch.tanh(model["stem"](x))
            one = functional.mse_loss(model["one"](hidden)[:, 0], y[:, 0])
            hidden = torch.tanh(model["stem"](x)) if how == "two-calls" else hidden
            two = functional.l1_loss(model["two"](hidden)[:, 0], y[:, 1])
            if how == "two-calls":
                session.backward(one)
                session.backward(0.5 * two)
                optimizer.step()
                optimizer.zero_grad()
            elif how == "uncertainty":
                scales = torch.exp(-model.weights)
                descend(session, optimizer, scales[0] * one + scales[1] * two + model.weights.sum())
            else:
                descend(session, optimizer, one + 0.5 * two)
    return [checksum(model)]


@loop(outcome=RIGHT | REFUSED)
def partial_labels(session: Any, how: str) -> Numbers:
    """Train a task on the labelled samples alone, with their number as the weight."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            has_label = x[:, 1] > 1.2  # rare: not in every batch
            output = model(x)
            session.backward(output.square().mean(), retain_graph=True)
            count = int(has_label.sum())
            total = functional.mse_loss(output[has_label], y[has_label], reduction="sum")
            if session.sum(count):
                is_plain = not hasattr(session, "close")
                session.backward(total / count if is_plain else total, weight=count, reduction="sum")
            optimizer.step()
            optimizer.zero_grad()
    return [checksum(model)]


@loop(quick=True)
def sum_beside_a_count(session: Any, how: str) -> Numbers:
    """Divide a sum over all samples by the number of some: a rank may have a loss and no count."""
    model, optimizer, loader = trio(session, lr=0.01)
    for _ in session.epochs(2):
        for x, y in loader:
            count = int((x[:, 1] > 0).sum())
            total = functional.mse_loss(model(x), y, reduction="sum")
            is_plain = not hasattr(session, "close")
            descend(session, optimizer, total / count if is_plain else total, weight=count, reduction="sum")
    return [checksum(model)]


@loop(quick=True)
def weighted_classes(session: Any, how: str) -> Numbers:
    """Weigh classes: the mean is over weights, not over samples."""
    y = (torch.arange(23) * 7) % 3
    data = TensorDataset(arrays()[0], y)
    model, optimizer, loader = trio(session, lambda: mlp(targets=3), data=data)
    weights = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
    for _ in session.epochs(2):
        for x, y in loader:
            loss = functional.cross_entropy(model(x), y, weight=weights)
            descend(session, optimizer, loss, weight=weights[y].sum())
    return [checksum(model)]


@loop(outcome=RIGHT | REFUSED, accumulated=SKIPPED, quick=True)
def contrastive(session: Any, how: str) -> Numbers:
    """Compare each sample with all samples of the global batch."""
    model, optimizer, loader = trio(session, lambda: nn.Linear(FEATURES, 3), data=regression(24))
    for _ in session.epochs(2):
        for x, _ in loader:
            one = functional.normalize(model(x), dim=1)
            two = functional.normalize(model(x.flip(1)), dim=1)
            others = session.gather(two)
            start = session.rank * len(one)
            labels = torch.arange(start, start + len(one))
            descend(session, optimizer, functional.cross_entropy(one @ others.t() / 0.5, labels))
    return [checksum(model)]


@loop("unweighted", outcome=TOLD | REFUSED, alone=RIGHT, accumulated=TOLD | REFUSED, quick=True)
@loop("weighted")
def ignored_labels(session: Any, how: str) -> Numbers:
    """Take a mean over labels, of which padded ones are left out."""
    x, _ = arrays()
    labels = torch.tensor([-100 if at % 3 == 0 or at % 5 == 1 else at % 4 for at in range(len(x))])
    model = seeded(lambda: nn.Linear(x.shape[1], 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(x, labels), batch_size=6))
    for _ in session.epochs(2):
        for inputs, targets in loader:
            count = (targets != -100).sum()
            loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / count.clamp(min=1)
            if how == "unweighted":
                loss = functional.cross_entropy(model(inputs), targets)
            session.backward(loss, **({"weight": count} if how == "weighted" else {}))
            optimizer.step()
            optimizer.zero_grad()
    return [checksum(model)]


@loop("model", outcome=REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED, quick=True)
@loop("optimizer", resumed=TOLD, accumulated=SKIPPED)
def unprepared_part(session: Any, how: str) -> Numbers:
    """Leave a criterion with parameters, or one of two optimizers, out of session.prepare."""
    model, scale = seeded(mlp), seeded(lambda: nn.Linear(1, 1))
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.Adam(scale.parameters(), lr=0.1)
    prepared = [model, scale, one] if how == "optimizer" else [model, one]
    loader = session.prepare(*prepared, DataLoader(TensorDataset(*arrays()), batch_size=6))[-1]
    for _ in session.epochs(3):
        for x, y in loader:
            session.backward(functional.mse_loss(scale(model(x)), y))
            for optimizer in (other, one):
                optimizer.step()
                optimizer.zero_grad()
    return [checksum(model, scale)]
