"""Train a GAN: a generator draws points on a ring of eight clusters, a discriminator detects them."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LATENT = 8


class Ring(Dataset[tuple[Tensor, Tensor]]):
    """Points near eight places on a circle, each with the noise for one generated point."""

    def __init__(self, count: int) -> None:
        angles = torch.randint(8, (count,)) * math.pi / 4
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], torch.randn(LATENT)


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--points", type=int, default=2001)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    loader = DataLoader(Ring(args.points), batch_size=100, shuffle=True)
    maker, judge = net(LATENT, 2), net(2, 1)
    maker_opt = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judge_opt = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def improve(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for epoch in range(args.epochs):
        losses = []
        for real, noise in loader:
            fake = maker(noise)
            judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            judge_loss = improve(judge_opt, judged)
            maker_loss = improve(maker_opt, F.softplus(-judge(fake)).mean())
            losses.append((judge_loss, maker_loss))
        judge_loss, maker_loss = torch.tensor(losses).mean(dim=0)
        print(f"epoch {epoch}  judge's loss {judge_loss:.12f}  maker's loss {maker_loss:.12f}")


if __name__ == "__main__":
    main()
