"""Finding: last window. The epoch ends within an accumulation, whose loss is divided as if it were whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PARTS = 4
dist.init_process_group("gloo")
x, y = torch.randn(96, 20, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 4
data = TensorDataset(x, y)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)  # 6 batches on 2 ranks: 4, and 2 are left
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader, start=1):
        model.require_backward_grad_sync = number % PARTS == 0 or number == len(loader)
        loss = F.cross_entropy(model(x), y) / PARTS  # Right: divided by the batches that this step really has
        loss.backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
