"""Train a small net with gradient accumulation, gradient clipping and a schedule per batch."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import digits


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the mean loss over all images."""
    logits = model(images.to(next(model.parameters())))
    return F.cross_entropy(logits.cpu(), labels).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per batch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    images, labels = digits.read()["train"]
    images, labels = torch.tensor(images[:1408]).flatten(1) / 16, torch.tensor(labels[:1408]).long()
    loader = DataLoader(TensorDataset(images, labels), batch_size=args.batch // args.accumulate, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)

    parts = 0
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            (loss / args.accumulate).backward()
            parts += 1
            if parts % args.accumulate:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        loss_now, lr = evaluate(model, images, labels), schedule.get_last_lr()[0]
        print(f"epoch {epoch}  loss {loss_now:.12f}  learning rate {lr:.12f}")


if __name__ == "__main__":
    main()
