"""In the manner of the ImageNet example: BatchNorm, an evaluation with a rest, a schedule, a checkpoint."""

import argparse
import shutil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class AverageMeter:
    """A mean over samples."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        """Add the mean of n samples."""
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self) -> None:
        """Sum over the ranks."""
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()

    @property
    def avg(self) -> float:
        """The mean."""
        return self.sum / self.count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("-b", "--batch-size", default=16, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = args.batch_size // world_size

    made = torch.Generator().manual_seed(1)
    images, labels = torch.randn(101, 3, 8, 8, generator=made), torch.randint(5, (101,), generator=made)
    train_dataset, val_dataset = TensorDataset(images[:64], labels[:64]), TensorDataset(images[64:], labels[64:])
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 5),
    )
    if args.kind == "right":
        net = nn.Sequential(*(each if not isinstance(each, nn.BatchNorm2d) else nn.GroupNorm(2, 8) for each in net))
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=args.kind != "evaluation-pads")
    train_loader = DataLoader(train_dataset, batch_size=batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=batch_size, sampler=val_sampler)
    best_acc1 = 0.0
    for epoch in range(args.epochs):
        if args.kind != "same-order":
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        acc1 = validate(val_loader, val_dataset, model, batch_size, args.kind)
        for _ in range(world_size if args.kind == "schedule" else 1):
            scheduler.step()
        is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
        if rank == 0 or args.kind == "checkpoint-by-all":
            torch.save({"epoch": epoch, "model": model.state_dict(), "best_acc1": best_acc1}, "checkpoint.pth.tar")
            if is_best and rank == 0:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")


def train(loader: Any, model: Any, criterion: Any, optimizer: Any) -> None:
    """Train an epoch."""
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader: Any, dataset: Any, model: Any, batch_size: int, kind: str) -> float:
    """Return the accuracy."""
    top1 = AverageMeter()

    def run(batches: Any) -> None:
        with torch.no_grad():
            for images, target in batches:
                top1.update(float((model(images).argmax(1) == target).double().mean()), len(target))

    model.eval()
    run(loader)
    if kind != "evaluation-part":
        top1.all_reduce()
    covered = len(loader.sampler) * dist.get_world_size()
    if covered < len(dataset) and kind != "evaluation-drops":
        run(DataLoader(Subset(dataset, range(covered, len(dataset))), batch_size=batch_size))
    return top1.avg


if __name__ == "__main__":
    main()
