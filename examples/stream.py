"""Train a small ResNet on a stream of unknown length: squares and discs, without faint ones."""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep

SIDE = 12


class Shapes(IterableDataset[tuple[Tensor, int]]):
    """Noisy images (1, SIDE, SIDE) of a square (0) or a disc (1), redrawn in each epoch."""

    def __init__(self, draws: int) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        x = torch.arange(SIDE)
        for _ in range(self.draws):
            kind, radius, brightness = int(torch.randint(2, ())), 2 + 2 * torch.rand(()), torch.rand(())
            if brightness < 0.3:
                continue
            dx, dy = (x - SIDE * (0.3 + 0.4 * torch.rand(2, 1))).abs()
            away = torch.hypot(dx[:, None], dy) if kind else torch.maximum(dx[:, None], dy)
            yield (brightness * (away < radius) + 0.1 * torch.randn(SIDE, SIDE))[None], kind


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.skip(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    session = lockstep.session(seed=args.seed)

    loader = DataLoader(Shapes(args.draws), batch_size=32)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), Block(8, 8, 1), Block(8, 16, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    for epoch in session.epochs(args.epochs):
        losses = []
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(session.mean(loss.item()))
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}  batches {len(losses)}")


if __name__ == "__main__":
    main()
