"""A session of lockstep: `of_session.py KIND`."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lockstep

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
session = lockstep.session(seed=7)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 12, generator=generator), torch.randint(3, (96,), generator=generator)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3 * (kind == "dropout")), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for _epoch in session.epochs(3):
    for a, b in loader:
        scores = model(a)
        loss = functional.cross_entropy(scores, b)
        if kind == "contrastive":
            vectors = functional.normalize(scores, dim=1)
            loss = functional.cross_entropy(vectors @ vectors.t(), torch.arange(len(a)))
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
