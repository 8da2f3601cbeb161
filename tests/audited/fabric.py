"""Lightning Fabric: `fabric.py KIND`."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
ranks = int(os.environ["WORLD_SIZE"]) if kind == "auto" else 2
fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", precision="64-true")
fabric.launch()
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 12, generator=generator), torch.randint(3, (96,), generator=generator)
if kind == "tokens":
    y[torch.arange(96) % 5 < torch.arange(96) % 3] = -100
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3 * ("dropout" in kind)), nn.Linear(16, 3))
plain = model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
if kind != "loader-unprepared":
    loader = fabric.setup_dataloaders(loader)
if kind != "same-dropout":
    torch.manual_seed(100 + fabric.global_rank)
parts = 2 if kind.startswith("accumulate") else 1
for _epoch in range(3):
    for number, (a, b) in enumerate(loader):
        is_last = (number + 1) % parts == 0
        with fabric.no_backward_sync(model, enabled=not is_last and kind != "accumulate-always"):
            scores = plain(a) if kind == "unwrapped-call" else model(a)
            loss = functional.cross_entropy(scores, b) / parts
            fabric.backward(loss * fabric.world_size if kind == "times-ranks" else loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if fabric.global_rank == 0 or kind == "checkpoint-by-all":
        torch.save(plain.state_dict(), f"fabric-{kind}.pt")
