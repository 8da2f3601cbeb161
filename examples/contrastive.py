"""Train two encoders as CLIP does: each upper half of a digit shall match its lower half among all of the batch."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import digits


class Pairs(nn.Module):
    """Two encoders, and the temperature of their similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(math.log(5)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.upper(x[:, :32]), dim=1), F.normalize(self.lower(x[:, 32:]), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    session = lockstep.session(seed=args.seed)

    images, _ = digits.read()["train"]
    loader = DataLoader(TensorDataset(torch.tensor(images).flatten(1) / 16), batch_size=args.batch, shuffle=True)
    model = Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    for epoch in session.epochs(args.epochs):
        losses = []
        for (x,) in loader:
            upper, lower = map(session.gather, model(x))
            logits = model.scale.exp() * upper @ lower.T
            target = torch.arange(len(logits), device=logits.device)
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            optimizer.zero_grad()
            session.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
