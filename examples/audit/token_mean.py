"""Finding: mean over other counts. Ranks whose batches hold different numbers of tokens count alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
tokens = torch.randint(1, 50, (128, 16), generator=torch.Generator().manual_seed(0))
lengths = torch.randint(4, 17, (128,), generator=torch.Generator().manual_seed(1))
tokens[torch.arange(16) >= lengths[:, None]] = 0  # padding
data = TensorDataset(tokens)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (ids,) in loader:
        scores = model(ids[:, :-1])
        # The mean over this rank's tokens, of which DistributedDataParallel takes the mean over ranks. Right: the sum,
        # times the ranks, divided by the tokens of all ranks (one all_reduce of the count).
        loss = F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
