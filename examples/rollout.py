"""Train a policy by PPO: points with inertia learn to rest at 0; each epoch trains on one rollout of 64 points."""

import argparse

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

import lockstep

POINTS, LENGTH, DEVIATION = 64, 16, 0.3


@torch.no_grad()
def play(policy: nn.Module, seed: int) -> tuple[TensorDataset, float]:
    """Return (state, action, its log probability, advantage) of all moves, and the mean return."""
    generator = torch.Generator().manual_seed(seed)
    device = next(policy.parameters()).device
    place, speed = torch.randn(2, POINTS, generator=generator).to(device)
    moves, rewards = [], []
    for _ in range(LENGTH):
        state = torch.stack([place, speed], dim=1)
        mean = policy(state.to(next(policy.parameters()))).squeeze(1)
        action = mean + DEVIATION * torch.randn(POINTS, generator=generator).to(mean)
        speed = 0.9 * speed + 0.3 * action
        place = place + 0.3 * speed
        moves.append((state, action, Normal(mean, DEVIATION).log_prob(action)))
        rewards.append(-place.square() - 0.1 * action.square())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)  # (LENGTH, POINTS)
    advantages = (returns - returns.mean(1, keepdim=True)) / returns.std()
    states, actions, log_probs = (torch.cat(parts).cpu() for parts in zip(*moves, strict=True))
    return TensorDataset(states, actions, log_probs, advantages.flatten().cpu()), returns[0].mean().item()


def clipped(policy: nn.Module, state: Tensor, action: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return PPO's loss, a mean over moves."""
    ratio = (Normal(policy(state).squeeze(1), DEVIATION).log_prob(action) - log_prob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    session = lockstep.session(seed=args.seed)

    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    policy, optimizer = session.prepare(policy, optimizer)

    for epoch in session.epochs(args.epochs):
        moves, mean_return = play(policy, seed=epoch)
        loader = session.prepare(DataLoader(moves, batch_size=args.batch, shuffle=True))
        for batch in loader:
            loss = clipped(policy, *batch)
            optimizer.zero_grad()
            session.backward(loss)
            optimizer.step()
        print(f"epoch {epoch}  return {mean_return:.12f}")


if __name__ == "__main__":
    main()
