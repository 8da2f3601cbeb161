"""Finding: gradients differ. The loss is computed by a method of the inner model, which exchanges nothing."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(20, 4)

    def forward(self, x):
        return self.body(x)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)


dist.init_process_group("gloo")
x, y = torch.randn(128, 20, generator=torch.Generator().manual_seed(0)), torch.arange(128) % 4
data = TensorDataset(x, y)
torch.manual_seed(0)
model = DistributedDataParallel(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = model.module.loss(x, y)  # Right: F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
