"""Finding: same draws. All ranks are seeded alike, so that each adds the same noise to its own samples."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(128, 20, generator=torch.Generator().manual_seed(0)))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 20)))
# Right: torch.manual_seed(dist.get_rank()) here, after the model is made.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        noise = torch.randn_like(x)
        loss = F.mse_loss(model(x + noise), noise)  # a denoising model
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
