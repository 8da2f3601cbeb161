"""Two models and two optimizers: `gan.py KIND`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank = dist.get_rank()
LATENT, BATCH = 8, 8
points = torch.randn(96, 2, generator=torch.Generator().manual_seed(1))
torch.manual_seed(7)


def net(inputs: int, outputs: int) -> Any:
    """Return a model of its own ranks' exchange."""
    return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs))


maker, judge = DistributedDataParallel(net(LATENT, 2)), net(2, 1)
if kind != "unwrapped":
    judge = DistributedDataParallel(judge, broadcast_buffers=False)
maker_opt = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
judge_opt = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
torch.manual_seed(7 if kind.startswith("same") else 100 + rank)
sampler = DistributedSampler(TensorDataset(points))
loader = DataLoader(TensorDataset(points), batch_size=BATCH, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        fake = maker(torch.randn(BATCH if kind.endswith("constant") else len(real), LATENT))
        judge_opt.zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        if kind == "lazy" and not judge_opt.state:  # a penalty now and then
            inputs = real.clone().requires_grad_()
            (slope,) = torch.autograd.grad(judge(inputs).sum(), inputs, create_graph=True)
            loss = loss + slope.square().sum(1).mean()
        (loss * 2 if kind == "twice" else loss).backward()
        judge_opt.step()
        maker_opt.zero_grad()
        loss = F.softplus(-judge(fake)).mean()
        (loss.sum() * dist.get_world_size() if kind == "times-ranks" else loss).backward()
        maker_opt.step()
