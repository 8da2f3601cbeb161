"""Train a net with dropout on 8 × 8 digits that MixUp mixes in pairs."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    images, labels = digits.read()["train"]
    data = TensorDataset(torch.tensor(images).flatten(1) / 16, torch.tensor(labels).long())
    loader = DataLoader(data, batch_size=args.batch, shuffle=True)
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        losses = []
        for x, y in loader:
            part, partner = np.random.beta(0.4, 0.4), torch.randperm(len(x), device=x.device)
            logits = model(part * x + (1 - part) * x[partner])
            loss = part * F.cross_entropy(logits, y) + (1 - part) * F.cross_entropy(logits, y[partner])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
