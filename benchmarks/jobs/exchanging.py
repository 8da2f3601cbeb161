"""One rank: turns of steps of ours, of plain DistributedDataParallel, of a rank alone, and of the exchange alone.

    python exchanging.py                                                        ours is a loop over a session
    python -m lockstep train --model exchanging:Net --data exchanging:splits    ours is the command's

The ranks' environment is torchrun's; beside it, ROWS says how many each has in a step, TURNS "TURNS STEPS", and FOUND
where rank 0 writes the milliseconds of the steps, as JSON. A step's time is from the end of the one before to its own,
by a hook of torch's optimizers: reading the batch, and all else that a loop does, is in it. After each turn of ours the
hook has the others take theirs, on a batch that lies ready. All are in one process.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import lockstep

WIDE, DEEP, CLASSES = 1024, 6, 10  # 25 MB of gradients
ROWS, SIZE = int(os.environ["ROWS"]), int(os.environ["WORLD_SIZE"])
TURNS, STEPS = map(int, os.environ["TURNS"].split())


class Net(nn.Sequential):
    """A perceptron."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(DEEP) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(WIDE, CLASSES))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all have."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)


def samples(count: int) -> TensorDataset:
    """Return images and labels, the same each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 32, 32, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


def splits() -> tuple[TensorDataset, TensorDataset]:
    """Return the data as `lockstep train --data` takes them, with a small test set. Some steps are left over."""
    return samples(ROWS * SIZE * (TURNS * (STEPS + 1) + 2)), samples(2)


class Turns:
    """Counts steps of ours, and times them."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {"ours": [], "ddp": [], "alone": [], "exchange": []}
        self._others: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self._batch: tuple[Tensor, ...] = ()
        self._step = -2  # of the turn; the first one of all lays out buckets, and learns
        self._end_s = 0.0

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        if any(optimizer is theirs for _, theirs in self._others.values()) or len(self.found["ours"]) == TURNS * STEPS:
            return
        self._step += 1
        if self._step > 0:
            self.found["ours"].append(self._since())
        if self._step == STEPS:
            self._take_others()
            self._step = -1
        self._end_s = time.perf_counter()

    def _since(self) -> float:
        return 1e3 * (time.perf_counter() - self._end_s)

    def _take_others(self) -> None:
        if not self._others:
            torch.manual_seed(0)
            plain, alone = DistributedDataParallel(Net()), Net()
            self._others = {"ddp": (plain, sgd(plain)), "alone": (alone, sgd(alone))}
            self._batch = samples(ROWS).tensors
        for name, (model, optimizer) in self._others.items():
            dist.barrier()
            for step in range(-1, STEPS):  # the first finds another's data in the caches
                self._end_s = time.perf_counter()
                cross_entropy(model(self._batch[0]), self._batch[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= 0:
                    self.found[name].append(self._since())
        flat = torch.zeros(sum(each.numel() for each in self._others["alone"][0].parameters()))
        for _ in range(STEPS):
            dist.barrier()
            self._end_s = time.perf_counter()
            dist.all_reduce(flat)
            self.found["exchange"].append(self._since())
        dist.barrier()
        if len(self.found["ours"]) == TURNS * STEPS and dist.get_rank() == 0:
            Path(os.environ["FOUND"]).write_text(json.dumps(self.found), encoding="utf-8")


register_optimizer_step_post_hook(Turns())


def main() -> None:
    """Train by a session."""
    session = lockstep.session()
    model = Net()
    loader = DataLoader(splits()[0], batch_size=ROWS * SIZE, shuffle=True)
    model, optimizer, loader = session.prepare(model, sgd(model), loader)
    for _ in session.epochs(1):
        for x, y in loader:
            session.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
