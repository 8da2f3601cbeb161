"""Finding: coupled samples. A contrastive loss compares the samples of one rank alone."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
views = torch.randn(2, 128, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(views[0], views[0] + 0.1 * views[1])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for pair in loader:
        first, second = F.normalize(model(torch.cat(pair)), dim=1).chunk(2)
        # Right: all ranks' vectors in place of `second`, by torch.distributed.nn.functional.all_gather, and the ranks'
        # targets moved along.
        loss = F.cross_entropy(first @ second.t() / 0.1, torch.arange(len(first)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
