"""Fine-tune a pretrained net on enlarged 8 × 8 digits: frozen layers, new head."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import shufflenet_v2_x0_5

from lockstep.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    images, labels = digits.read()["train"]
    x = F.interpolate(torch.tensor(images[: args.samples]).permute(0, 3, 1, 2) / 16, size=32).expand(-1, 3, -1, -1)
    loader = DataLoader(TensorDataset(x, torch.tensor(labels[: args.samples]).long()), batch_size=40, shuffle=True)

    pretrained = shufflenet_v2_x0_5(weights=None).state_dict()  # stands for a downloaded file
    model = shufflenet_v2_x0_5(weights=None)
    model.load_state_dict(pretrained)
    model.requires_grad_(False)
    model.fc = nn.Sequential(nn.BatchNorm1d(1024), nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        model.eval()  # the frozen layers keep their statistics
        model.fc.train()
        losses = []
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
