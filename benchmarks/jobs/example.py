"""The loop as torch's own examples have it: meters, and a line each ten steps."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import job


class Meter:
    def __init__(self, name: str) -> None:
        self.name, self.last, self.sum, self.count = name, 0.0, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.last = value
        self.sum += value * n
        self.count += n

    def __str__(self) -> str:
        return f"{self.name} {self.last:.3f} ({self.sum / self.count:.3f})"


def accuracy(logits: Tensor, labels: Tensor, top: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        _, best = logits.topk(max(top), 1)
        hits = best.t().eq(labels.expand(max(top), -1))
        return [hits[:k].float().sum().item() * 100 / len(labels) for k in top]


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model: nn.Module = job.Net()
    dataset = job.data()
    sampler: DistributedSampler[Any] | None = None
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(dataset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    loader = DataLoader(dataset, batch_size=job.BATCH // world, shuffle=sampler is None, sampler=sampler)
    for epoch in range(1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        meters = [Meter(name) for name in ("time", "data", "loss", "top1", "top5")]
        model.train()
        end = time.time()
        for step, (x, y) in enumerate(loader):
            waited = time.time() - end
            logits = model(x)
            loss = cross_entropy(logits, y)
            top1, top5 = accuracy(logits, y, top=(1, 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values = (time.time() - end, waited, loss.item(), top1, top5)
            end = time.time()
            for meter, value in zip(meters, values, strict=True):
                meter.update(value, len(x))
            if step % 10 == 0:
                print(f"epoch {epoch} [{step}/{len(loader)}]", *meters, sep="  ")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
