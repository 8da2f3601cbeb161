"""One rank: steps of a session and of plain DistributedDataParallel in turns. Prints their milliseconds as JSON.

python exchanging.py ROWS TURNS STEPS; the environment is torchrun's.
"""

from __future__ import annotations

import copy
import json
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep

WIDE, DEEP = 1024, 6  # 25 MB of gradients


def main() -> None:
    """Run the turns."""
    rows, turns, steps = map(int, sys.argv[1:4])
    session = lockstep.session()
    model = nn.Sequential(*(layer for _ in range(DEEP) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())))
    plain = DistributedDataParallel(copy.deepcopy(model))
    alone = copy.deepcopy(model)
    optimizer, of_plain, of_alone = (torch.optim.SGD(each.parameters(), 1e-3) for each in (model, plain, alone))
    size = session.world.size
    data = TensorDataset(torch.randn(rows * size * turns * (steps + 1), WIDE))
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=rows * size))
    x = torch.randn(rows, WIDE)
    found: dict[str, list[float]] = {"session": [], "ddp": [], "alone": []}

    def by_hand(module: nn.Module, stepping: torch.optim.Optimizer) -> None:
        module(x).square().mean().backward()
        stepping.step()
        stepping.zero_grad()

    batches = iter(loader)
    for _ in range(turns):
        for name in found:
            for step in range(steps + 1):  # the first finds another's data in the caches
                session.world.barrier()
                begun = time.perf_counter()
                if name == "session":
                    (share,) = next(batches)
                    session.backward(model(share).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    by_hand(*((plain, of_plain) if name == "ddp" else (alone, of_alone)))
                if step:
                    found[name].append(1e3 * (time.perf_counter() - begun))
    if session.is_main:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
