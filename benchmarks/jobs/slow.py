"""One rank of `benchmarks.slow`: train a net until it knows enough of the test images; print the seconds and steps.

lockstep run [--exchange diloco …] slow.py
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from lockstep.data import digits

GOAL, COPIES, EPOCHS = 0.97, 4, 20
"""Share of the 360 test images; passes over the 1,437 training images in an epoch, each with other noise."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """The training images, several times over, with noise that depends on the seed and the sample's number."""

    def __init__(self, images: TensorDataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return COPIES * len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.images[index % len(self.images)]
        return x + 0.5 * torch.randn_like(x), y


def main() -> None:
    """Train and evaluate after each epoch."""
    session = lockstep.session(seed=0, verify_every=0)
    train, test = (
        TensorDataset(
            (torch.from_numpy(images).float().flatten(1) - digits.MEAN) / digits.STD, torch.from_numpy(labels).long()
        )
        for images, labels in digits.read().values()
    )
    wide = [layer for _ in range(2) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), *wide, nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(Noisy(train), 32, shuffle=True))
    begun_s, spent_s = time.perf_counter(), 0.0
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            session.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        hits = sum(
            float(session.sum((model(x).argmax(1) == y).sum())) for x, y in session.evaluating(DataLoader(test, 180))
        )
        spent_s = time.perf_counter() - begun_s
        session.print("REACHED", hits / len(test), session.step, spent_s, flush=True)
        if session.max(float(hits >= GOAL * len(test))):
            break


main()
