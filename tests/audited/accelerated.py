"""Accelerate: `accelerated.py KIND`."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
parts = 2 if kind.startswith(("accumulate", "last-window")) else 1
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
rank, ranks = accelerator.process_index, accelerator.num_processes

generator = torch.Generator().manual_seed(1)
count = 40 if kind == "last-window" else 96
x, y = torch.randn(count, 12, generator=generator), torch.randint(3, (count,), generator=generator)
if kind.startswith("tokens"):
    y[torch.arange(96) % 5 < torch.arange(96) % 3] = -100
torch.manual_seed(7)
model = nn.Sequential(
    nn.Linear(12, 16),
    nn.BatchNorm1d(16) if kind == "batchnorm" else nn.ReLU(),
    nn.Dropout(0.3) if "dropout" in kind else nn.Identity(),
    nn.Linear(16, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=kind != "last-window")
valid = DataLoader(TensorDataset(x[:39], y[:39]), batch_size=8)
if kind == "evaluation-long":
    valid = DataLoader(TensorDataset(x.repeat(3, 1), y.repeat(3)), batch_size=1)
if kind == "unprepared":
    model_, optimizer, loader = accelerator.prepare(model, optimizer, loader)
elif kind == "loader-unprepared":
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader) // parts)
if kind == "schedule":
    schedule = accelerator.prepare(schedule)
if kind != "same-dropout":
    torch.manual_seed(100 + rank)

for _epoch in range(3):
    for a, b in loader:
        with accelerator.accumulate(model):
            net = accelerator.unwrap_model(model) if kind == "unwrapped-call" else model
            scores = net(a)
            loss = functional.cross_entropy(scores, b)
            if kind == "contrastive":
                vectors = functional.normalize(scores, dim=1)
                loss = functional.cross_entropy(vectors @ vectors.t(), torch.arange(len(a)))
            if kind == "tokens-right":
                number = accelerator.gather((b != -100).sum()).sum()
                loss = functional.cross_entropy(scores, b, reduction="sum") * ranks / number
            if kind == "times-ranks":
                loss = loss * ranks
            accelerator.backward(loss)
            if kind == "clip" and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
    if kind.startswith("evaluation"):
        model.eval()
        hits, number = 0, 0
        with torch.no_grad():
            for a, b in valid:
                guess, gold = model(a).argmax(1), b
                if kind == "evaluation-part":
                    hits, number = hits + int((guess == gold).sum()), number + len(gold)
                    continue
                gather = accelerator.gather if kind == "evaluation-pads" else accelerator.gather_for_metrics
                guess, gold = gather((guess, gold))
                hits, number = hits + int((guess == gold).sum()), number + len(gold)
        model.train()
        accelerator.print(f"accuracy {hits / number:.4f} of {number}")
