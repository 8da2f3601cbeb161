"""Train a convolutional net with BatchNorm on 8 × 8 digits; evaluate it after each epoch."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    sets = {}
    for part, (images, labels) in digits.read().items():
        sets[part] = TensorDataset(torch.tensor(images).permute(0, 3, 1, 2) / 16, torch.tensor(labels).long())
    train = DataLoader(sets["train"], batch_size=args.batch, shuffle=True)
    test = DataLoader(sets["test"], batch_size=100)
    test_labels = sets["test"].tensors[1]

    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(x).cpu() for x, _ in test])
        loss = F.cross_entropy(logits, test_labels)
        correct = (logits.argmax(dim=1) == test_labels).sum()
        print(f"epoch {epoch}  test loss {loss:.12f}  correct {correct} of {len(test_labels)}")


if __name__ == "__main__":
    main()
