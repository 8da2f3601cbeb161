"""Finding: evaluation pads. The sampler repeats samples, so that all ranks have as many."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x, y = torch.randn(165, 20, generator=torch.Generator().manual_seed(0)), torch.arange(165) % 4
data, test = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
test_loader = DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False))  # 38 of 37
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)  # Right sums; right data: range(rank, len(test), ranks) of it, without a sampler
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {counts[0] / counts[1]:.3f} of {counts[1]:.0f} samples")
