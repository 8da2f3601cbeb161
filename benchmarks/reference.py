"""A training loop in the plain manner of public single-GPU examples, for comparison.

Image by image transforms in DataLoader workers, float32, contiguous memory, loss and accuracy printed at every batch.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR10

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class PlainLoop:
    """Trains `model` on the CIFAR-10 in `folder`, `steps` steps at a time."""

    def __init__(self, model: nn.Module, folder: Path, *, batch: int, workers: int = 4) -> None:
        varied = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )
        self.model = model
        self.loader = DataLoader(
            CIFAR10(folder, train=True, transform=varied),
            batch_size=batch,
            shuffle=True,
            num_workers=workers,
            # As in a script; a child process that was spawned would spawn its workers too, and they import torch.
            multiprocessing_context="fork",
        )
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.printed = io.StringIO()

    def run(self, steps: int) -> float:
        """Return the mean seconds of a step; the workers start before, and one step more warms up."""
        self.model.train()
        total_loss, correct, seen = 0.0, 0, 0
        begin_s = 0.0
        for number, (images, labels) in enumerate(self.loader):
            outputs = self.model(images)
            loss = self.criterion(outputs, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total_loss += loss.item()
            correct += outputs.argmax(1).eq(labels).sum().item()
            seen += len(labels)
            print(f"batch {number}: loss {total_loss / (number + 1):.3f} acc {correct / seen:.3%}", file=self.printed)
            if number == 0:
                begin_s = time.perf_counter()
            if number == steps:
                break
        return (time.perf_counter() - begin_s) / steps
