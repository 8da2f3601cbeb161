"""A training script that has never heard of lockstep, right or with one fault: `torchrun audited.py KIND`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 12, generator=generator), torch.randint(3, (96,), generator=generator)
x, y = x.to(torch.get_default_dtype()), y
if kind in ("tokens", "tokens-right"):
    y[torch.arange(96) % 5 < torch.arange(96) % 3] = -100  # labels that the loss leaves out
torch.manual_seed(7 if kind == "same-noise" else 7 + rank * (kind == "seeds"))
dropout = nn.Dropout(0.3) if kind in ("dropout", "same-noise") else nn.Identity()
norm = nn.BatchNorm1d(16) if kind in ("batchnorm", "batchnorm-eval") else nn.Identity()
body = nn.Sequential(nn.Linear(12, 16), norm, nn.ReLU(), dropout)
head = nn.Linear(16, 3)
model: Any = nn.Sequential(body) if kind == "outside" else nn.Sequential(body, head)
if kind == "frozen":
    model[0][0].weight.requires_grad_(False)
if kind not in ("same-noise", "seeds"):
    torch.manual_seed(100 + rank)

parameters = [*model.parameters(), *(head.parameters() if kind == "outside" else ())]
is_wrapped = kind not in ("unwrapped", "seeds", "by-hand", "by-hand-sum")
wrapped: Any = DistributedDataParallel(model) if is_wrapped else model
if kind == "adam":
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.01)
else:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

data = TensorDataset(x, y)
accumulate = 2 if kind.startswith("accumulate") else 1
if kind == "uneven":
    loader = DataLoader(Subset(data, range(64) if rank == 0 else range(64, 96)), batch_size=8 if rank == 0 else 4)
elif kind == "shuffled":
    loader = DataLoader(data, batch_size=16, shuffle=True)
elif kind == "same-samples":
    loader = DataLoader(data, batch_size=8)
else:
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))


def loss_of(a: torch.Tensor, b: torch.Tensor) -> Any:
    net: Any = wrapped.module if kind == "module" else wrapped
    if kind == "noise":
        a = a + 0.1 * torch.randn_like(a)
    scores = head(net(a)) if kind == "outside" else net(a)
    if kind == "contrastive":
        vectors = functional.normalize(scores, dim=1)
        return functional.cross_entropy(vectors @ vectors.t(), torch.arange(len(a)))
    if kind == "sum":
        return functional.cross_entropy(scores, b, reduction="sum")
    if kind == "tokens-right":
        count = torch.tensor(float((b != -100).sum()))
        dist.all_reduce(count)
        return functional.cross_entropy(scores, b, reduction="sum") * ranks / count
    loss = functional.cross_entropy(scores, b)
    return loss * ranks if kind == "times-ranks" else loss


for epoch in range(3):
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    if kind == "batchnorm-eval":
        wrapped.eval()
    for number, (a, b) in enumerate(zip(x.split(8), y.split(8), strict=True) if kind == "no-loader" else loader):
        is_last = (number + 1) % accumulate == 0
        syncs = is_last or kind in ("accumulate-always",)
        if kind == "accumulate-never":
            syncs = False
        if accumulate > 1 and not syncs:
            with wrapped.no_sync():
                (loss_of(a, b) / accumulate).backward()
        else:
            loss_of(a, b).div(1 if kind == "accumulate-undivided" else accumulate).backward()
        if not is_last:
            continue
        if kind.startswith("by-hand"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                if kind == "by-hand":
                    parameter.grad /= ranks
        if kind == "clip":
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and kind == "dropout":
            print("weights", repr(head.weight.detach().flatten()[0].item()), flush=True)
dist.destroy_process_group()
