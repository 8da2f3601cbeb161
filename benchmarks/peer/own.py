"""A script of one's own, as torch's tutorials have it, with what they leave out: an order that is taken up again."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from . import work

CHECKPOINT = Path("checkpoint.pt")


def main() -> None:
    """Train on this rank, from the last checkpoint if there is one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=work.TIMEOUT_S))
    torch.manual_seed(0)
    model = DistributedDataParallel(work.net())
    optimizer = work.optimizer(model)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    is_main = dist.get_rank() == 0
    sampler: DistributedSampler[work.Pair] = DistributedSampler(work.DATA)
    loader = DataLoader(work.DATA, batch_size=work.BATCH // dist.get_world_size(), sampler=sampler)
    work.begin(step, is_main=is_main)
    while step < work.STEPS:
        epoch, first = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if index < first:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            work.made(step, is_main=is_main)
            if step % work.EVERY == 0 and is_main:
                part = CHECKPOINT.with_suffix(".part")
                torch.save(
                    {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part
                )
                part.replace(CHECKPOINT)
    if is_main:
        work.leave(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
