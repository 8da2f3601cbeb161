"""The loop over a session."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import job
import lockstep


def main() -> None:
    session = lockstep.session(seed=0)
    model = job.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    loader = DataLoader(job.data(), batch_size=job.BATCH, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            session.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
