"""In the manner of the MNIST example, on several ranks: dropout, a negative log-likelihood, a test of sums."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        """Return log-probabilities."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--gamma", type=float, default=0.7)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(128, 1, 8, 8, generator=made), torch.randint(10, (128,), generator=made)
    data, test_data = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    torch.manual_seed(1)
    model = Net()
    torch.manual_seed(1 if args.kind == "same-dropout" else 1 + rank)
    wrapped = model if args.kind == "unwrapped" else DistributedDataParallel(model)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, batch_size=args.batch_size)  # on every rank
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        wrapped.train()
        for a, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(wrapped(a), target, reduction="sum" if args.kind == "sum" else "mean")
            loss.backward()
            optimizer.step()
        wrapped.eval()
        loss_sum, hits = 0.0, 0
        with torch.no_grad():
            for a, target in test_loader:
                output = model(a)
                loss_sum += F.nll_loss(output, target, reduction="sum").item()
                hits += int((output.argmax(dim=1) == target).sum())
        if rank == 0:
            print(f"loss {loss_sum / len(test_data):.4f}, {hits} of {len(test_data)}")
        scheduler.step()
        if rank == 0 or args.kind == "checkpoint-by-all":
            torch.save(model.state_dict(), "mnist.pt")
    dist.barrier()
    assert ranks


if __name__ == "__main__":
    main()
