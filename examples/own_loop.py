"""A training loop of your own, on any number of devices, with the same numbers on each.

    python examples/own_loop.py --strategy single
    python examples/own_loop.py --strategy ddp --devices 2
    python examples/own_loop.py --strategy ddp --devices 3
    torchrun --nproc-per-node 2 examples/own_loop.py --strategy ddp

The last line that each prints, the loss over the whole data, is the same. What makes it so: the global batch is the
number you give, each rank computes its share of it, and the summed loss is divided once, by the global count.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import lockstep
from lockstep import BatchPlan, RunConfig, World


def entry(config: RunConfig, world: World) -> float:
    """Train a linear classifier on this rank of `world`; return the final loss over all samples."""
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(1000, 20, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(20, 3, generator=generator, dtype=torch.float64)).argmax(dim=1)

    torch.manual_seed(config.seed)  # the same weights on every rank
    model = nn.Linear(20, 3, dtype=torch.float64).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    plan = BatchPlan.solve(config.batch.size, world.size)
    strategy = lockstep.build_strategy(config.parallel, world)
    replica = strategy.wrap(model)
    if world.is_main:
        print(plan)

    for epoch in range(config.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for step in range(plan.steps(len(x))):
            start, stop = plan.batch(step, len(x))
            shares = plan.split(start, stop, world.rank)
            for number, share in enumerate(shares, 1):
                rows = order[share.start : share.stop]
                with strategy.sync_on(replica, last=number == len(shares)):
                    logits = replica(x[rows].to(world.device))
                    loss = nn.functional.cross_entropy(logits, y[rows].to(world.device), reduction="sum")
                (loss * strategy.averages_over / (stop - start)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        return nn.functional.cross_entropy(model(x.to(world.device)), y.to(world.device)).item()


def main() -> int:
    """Launch `entry` on the ranks that the flags ask for, and return the exit code."""
    parser = argparse.ArgumentParser(description="A training loop of your own.", argument_default=argparse.SUPPRESS)
    parser.add_argument("--strategy", help="single, dp, ddp … (lockstep info lists them)")
    parser.add_argument("--devices", help="GPUs, or processes on a CPU")
    parser.add_argument("--batch", help="global batch: samples in one step, over all devices")
    asked = {name: int(text) if text.isdecimal() else text for name, text in vars(parser.parse_args()).items()}
    try:
        final = lockstep.launch(entry, lockstep.override(RunConfig(epochs=3), **{"batch": 100} | asked))
    except lockstep.LockstepError as error:  # its text is one sentence that says what to do
        print(f"own_loop: {error}", file=sys.stderr)
        return error.exit_code
    if final is not None:  # rank 0's; the other ranks that torchrun started have None
        print(f"loss {final:.12f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
