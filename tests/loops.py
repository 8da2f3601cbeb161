"""Loops of a user's own, each as people write it, run on the ranks that a test has: (losses, weights) of each.

They are plain but for the lines that speak of `session`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.record.base import Nothing
from lockstep.record.console import Notices
from lockstep.runs.opened import OpenRun, open_run
from lockstep.sessions.session import Session
from lockstep.world.world import World

Learned = tuple[list[float], dict[str, Tensor]]


def session(world: World, **options: Any) -> Session:
    """Return a session in float64, with a run's folder where `options` name one."""
    config = override(RunConfig(), **{"precision": "fp64", "channels_last": "off"} | options)
    if "output" in options:
        return Session(config, world, open_run(config, world, keys=("seed",), console=Notices()))
    return Session(config, world, nullcontext(OpenRun(config, Nothing(), None)))


def weights(*models: nn.Module) -> dict[str, Tensor]:
    return {f"{at}.{name}": held.clone() for at, each in enumerate(models) for name, held in each.state_dict().items()}


def images(count: int = 61) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 6, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def classifier(world: World, stop_at: int | None = None, **options: Any) -> Learned:
    """Train a net with BatchNorm, clipped and on a schedule; the fourth batch is one sample, and shares are empty."""
    ours = session(world, **options)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    loader = DataLoader(images(), batch_size=20, shuffle=True)
    model, optimizer, loader, schedule = ours.prepare(model, optimizer, loader, schedule)
    losses = []
    with ours:
        for _ in ours.epochs(3):
            for x, y in loader:
                if ours.step == stop_at:
                    raise KeyboardInterrupt
                loss = functional.cross_entropy(model(x), y)
                ours.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(ours.mean(loss.detach()).item())
    return losses, weights(model)


def texts(count: int = 47) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [torch.randint(0, 11, (length,), generator=generator) for length in lengths]


def padded(batch: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
    return {"ids": ids.clamp(min=0)[:, :-1], "labels": ids[:, 1:]}


def language_model(world: World, **options: Any) -> Learned:
    """Train on texts of different lengths: a mean over tokens, of which each share has another number."""
    ours = session(world, **options)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(texts(), batch_size=10, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    model, optimizer, loader = ours.prepare(model, optimizer, loader)
    for _ in ours.epochs(2):
        for batch in loader:
            optimizer.zero_grad()
            logits = model(batch["ids"])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            ours.backward(loss, weight=int((batch["labels"] != -100).sum()))
            optimizer.step()
    ours.close()
    return [], weights(model)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream whose length nobody tells."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*images(45).tensors, strict=True))


def streamed(world: World, **options: Any) -> Learned:
    """Train on a stream, with a sum for a loss and a layer that only every other batch goes through."""
    ours = session(world, **options)
    first, second, last = nn.Linear(108, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    model = nn.ModuleList([first, second, last])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = ours.prepare(model, optimizer, DataLoader(Stream(), batch_size=10))
    for _ in ours.epochs(2):
        for x, y in loader:
            held = first(x.flatten(1)).relu()
            held = second(held).relu() if ours.step % 2 else held
            ours.backward(functional.cross_entropy(last(held), y, reduction="sum"), reduction="sum")
            optimizer.step()
            optimizer.zero_grad()
    ours.close()
    return [], weights(model)


def drawn(world: World, **options: Any) -> Learned:
    """Train with dropout, attention's too, with noise at drawn times, and with mixed samples."""
    ours = session(world, draws="global", **options)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(23, 4, 8, generator=generator), torch.randn(23, 1, generator=generator))
    layer, last = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), nn.Linear(8, 1)
    model = nn.ModuleList([layer, last])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = ours.prepare(model, optimizer, DataLoader(data, batch_size=7, shuffle=True))
    for _ in ours.epochs(2):
        for x, y in loader:
            part, other = torch.rand(()).item(), torch.randperm(len(x))
            x, y = part * x + (1 - part) * x[other], part * y + (1 - part) * y[other]
            x = x + 0.01 * torch.randint(0, 9, (len(x), 1, 1)) * torch.randn_like(x)
            ours.backward(functional.mse_loss(last(layer(x).mean(1)), y))
            optimizer.step()
            optimizer.zero_grad()
    ours.close()
    return [], weights(model)
