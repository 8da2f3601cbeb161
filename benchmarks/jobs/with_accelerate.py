"""The loop with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import job


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = job.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    loader = DataLoader(job.data(), batch_size=job.BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(1):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
