"""Train a diffusion model on 8 × 8 digits: a net predicts the noise that was added at a random timestep."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import digits

STEPS = 100


class Denoiser(nn.Module):
    """Predicts the noise (batch, 64) in `x` (batch, 64) at timesteps `t` (batch,)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(STEPS, 64)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Dropout(0.1), nn.Linear(128, 64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x + self.time(t))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    session = lockstep.session(seed=args.seed, draws="global")

    images, _ = digits.read()["train"]
    loader = DataLoader(TensorDataset(torch.tensor(images).flatten(1) / 8 - 1), batch_size=args.batch, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    levels = torch.linspace(0.999, 0.01, STEPS)  # of the image at each timestep; the rest is noise

    for epoch in session.epochs(args.epochs):
        losses = []
        for (x,) in loader:
            t, noise = torch.randint(STEPS, (len(x),), device=x.device), torch.randn_like(x)
            level = levels.to(x)[t, None]
            loss = F.mse_loss(model(level.sqrt() * x + (1 - level).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            session.backward(loss)
            optimizer.step()
            losses.append(session.mean(loss.item()))
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
