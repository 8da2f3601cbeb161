"""The loop with Lightning Fabric."""

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import job


def main() -> None:
    fabric = Fabric()
    fabric.seed_everything(0)
    model = job.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    loader = DataLoader(job.data(), batch_size=job.BATCH // fabric.world_size, shuffle=True)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(1):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
