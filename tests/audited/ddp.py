"""Plain DistributedDataParallel, by torchrun or by spawned ranks: `ddp.py KIND [--spawn N]`."""

import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

kind = sys.argv[1]
COUNT = 97 if kind == "padded" else 96


class Noisy(Dataset[Any]):
    """Samples with an augmentation of their own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(self.x.shape[1]), self.y[index]


class Flipped(Noisy):
    """Samples with an augmentation by `random`, beside a noise of each sample's own."""

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(12, generator=torch.Generator().manual_seed(index))
        return (self.x[index] + 0.1 * noise) * random.choice((-1, 1)), self.y[index]


class Padded(Noisy):
    """Token sequences of several lengths."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index, : 4 + index % 9], self.y[index]


class Unusual(dict[str, Any]):
    """A batch that no other can be made of."""

    def __init__(self) -> None:
        super().__init__()


class Embedding(nn.Module):
    """Means of the tokens' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Linear(1, 12), nn.Dropout(0.3)

    def forward(self, batch: Any) -> torch.Tensor:
        """Return a vector for each sequence."""
        mask = batch["attention_mask"][..., None]
        return (self.dropout(self.tokens(batch["x"][..., None])) * mask).sum(1) / mask.sum(1)


def collate(samples: Any) -> Any:
    """Return a batch with sequences of one length, padded as its kind says, and their classes."""
    if kind == "lengths-unusual":
        return Unusual()
    longest = max(len(x) for x, _ in samples)

    def pad(x: torch.Tensor) -> torch.Tensor:
        width = longest - len(x)
        return functional.pad(x, (width, 0) if kind == "lengths-left" else (0, width))

    tokens, mask = ([pad(x) for x in rows] for rows in zip(*((x, torch.ones_like(x)) for x, _ in samples), strict=True))
    return {"x": torch.stack(tokens), "attention_mask": torch.stack(mask), "y": torch.stack([y for _, y in samples])}


class Stream(IterableDataset[Any]):
    """Samples without a length, of which each rank has its own part."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, rank: int, ranks: int) -> None:
        self.x, self.y, self.part = x, y, slice(rank, None, ranks)

    def __iter__(self) -> Any:
        return zip(self.x[self.part], self.y[self.part], strict=True)


def main(rank: int, ranks: int) -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(COUNT, 12, generator=generator), torch.randint(3, (COUNT,), generator=generator)
    if kind.startswith("tokens"):
        y[torch.arange(96) % 5 < torch.arange(96) % 3] = -100  # labels that the loss leaves out
    torch.manual_seed(7 + rank * (kind == "seeds"))
    dropout = nn.Dropout(0.3) if kind in ("dropout", "same-dropout") else nn.Identity()
    norm = nn.BatchNorm1d(16) if kind.startswith(("batchnorm", "buffers")) else nn.Identity()
    body = nn.Sequential(nn.Linear(12, 16), norm, nn.ReLU(), dropout)
    head = nn.Linear(16, 3)
    model: Any = nn.Sequential(body) if kind == "outside" else nn.Sequential(body, head)
    if kind.startswith("lengths"):
        model = nn.Sequential(Embedding(), body, head)
    if kind == "frozen":
        model[0][0].weight.requires_grad_(False)
    if kind not in ("same-dropout", "same-noise", "seeds") and not kind.startswith("same-aug"):
        torch.manual_seed(100 + rank)
    random.seed(rank * (kind in ("own-numpy", "flips")))
    np.random.seed(rank * (kind in ("own-numpy", "same-flips")))

    parameters = [*model.parameters(), *(head.parameters() if kind == "outside" else ())]
    is_wrapped = kind not in (
        "unwrapped",
        "seeds",
        "by-hand",
        "by-hand-sum",
        "by-hand-clip",
        "by-hand-weights",
        "buffers-by-hand",
    )
    wrapped: Any = model
    if is_wrapped:
        wrapped = DistributedDataParallel(model, broadcast_buffers=kind != "buffers")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "adam":
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler")

    data: Any = Noisy(x, y) if "augmentation" in kind else TensorDataset(x, y)
    if "flips" in kind:
        data = Flipped(x, y)
    if kind.startswith("lengths"):
        data = Padded(x, y)
    if kind == "other-loader" and ranks == 1:
        DataLoader(data)
    accumulate = 2 if kind.startswith("accumulate") or kind.endswith("-accumulate") else 1
    if kind.startswith("last-window"):
        accumulate = 4
    size = 16 if kind == "shared-noise" else 8
    if kind == "uneven":
        size = 8 if rank == 0 else 4
        loader: Any = DataLoader(Subset(data, range(64) if rank == 0 else range(64, 96)), batch_size=size)
    elif kind == "shuffled":
        loader = DataLoader(data, batch_size=16, shuffle=True)
    elif kind == "same-samples":
        loader = DataLoader(data, batch_size=8)
    elif kind == "overlap":
        loader = DataLoader(Subset(data, range(40 * rank, 40 * rank + 56)), batch_size=8)
    elif kind == "divided-data":
        part = Subset(data, range(rank, len(data), ranks))
        loader = DataLoader(part, batch_size=8, sampler=DistributedSampler(part))
    elif kind in ("stream", "same-stream"):
        part = (rank, ranks) if kind == "stream" else (0, 1)
        loader = DataLoader(Stream(x, y, *part), batch_size=8)
    else:
        workers = 2 if kind == "same-augmentation-of-workers" else 0
        pads = collate if kind.startswith("lengths") else None
        loader = DataLoader(
            data, batch_size=size, sampler=DistributedSampler(data), num_workers=workers, collate_fn=pads
        )
    loops = len(loader) if kind.startswith("schedule") else 0
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if kind.startswith("schedule"):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * loops)

    valid_x, valid_y = x[:65], y[:65]
    valid: Any = TensorDataset(valid_x, valid_y)
    if kind == "evaluation-split":
        data, valid = random_split(data, [64, 32], generator=torch.Generator().manual_seed(2))
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    sampler = DistributedSampler(valid, shuffle=False, drop_last=kind == "evaluation-drops")
    shares = DataLoader(valid, batch_size=16, sampler=sampler)
    if kind in ("evaluation-right", "evaluation-means"):
        shares = DataLoader(Subset(valid, range(rank, len(valid), ranks)), batch_size=16)

    def evaluated() -> float:
        hits, count = torch.zeros(()), torch.zeros(())
        means, seen = [], 0
        wrapped.eval()
        with torch.no_grad():
            for a, b in shares:
                right = (wrapped(a).argmax(1) == b).double()
                if kind == "evaluation-masked":  # where the sampler pads
                    mask = (seen + torch.arange(len(b))) * ranks + rank < len(valid)
                    seen, right, b = seen + len(b), right[mask], b[mask]
                    a = a[mask]
                hits, count = hits + right.sum(), count + len(b)
                means.append(functional.cross_entropy(wrapped(a), b))
        wrapped.train()
        if kind == "evaluation-means":
            mean = torch.stack(means).mean()
            dist.all_reduce(mean)
            return float(mean / ranks)
        if kind != "evaluation-part":
            dist.all_reduce(hits)
            dist.all_reduce(count)
        return float(hits / count)

    def loss_of(a: torch.Tensor, b: torch.Tensor) -> Any:
        net: Any = wrapped.module if kind == "module" else wrapped
        if kind in ("noise", "same-noise"):
            a = a + 0.1 * torch.randn_like(a)
        for _ in range(12 if kind == "drop-path" else 0):  # two ranks often draw the same few values
            a = a * torch.empty(len(a), 1).bernoulli_(0.9)
        if kind in ("numpy", "own-numpy"):
            a = a * np.random.uniform(0.9, 1.1)
        scores = head(net(a)) if kind == "outside" else net(a)
        if kind.startswith("contrastive"):
            vectors = functional.normalize(scores, dim=1)
            return functional.cross_entropy(vectors @ vectors.t(), torch.arange(len(a)))
        if kind.startswith("gathered"):
            vectors = functional.normalize(scores, dim=1)
            if kind == "gathered-right":
                from torch.distributed.nn.functional import all_gather

                every = torch.cat([*all_gather(vectors)])
            else:
                parts = [torch.zeros_like(vectors) for _ in range(ranks)]
                dist.all_gather(parts, vectors)
                if kind == "gathered-own":
                    parts[rank] = vectors
                every = torch.cat(parts) if ranks > 1 else vectors
            target = torch.arange(len(a)) + rank * len(a)
            return functional.cross_entropy(vectors @ every.t(), target)
        if kind == "sum":
            return functional.cross_entropy(scores, b, reduction="sum")
        if kind.startswith("tokens-right"):
            count = (b != -100).sum().double()
            dist.all_reduce(count)
            return functional.cross_entropy(scores, b, reduction="sum") * ranks / count
        loss = functional.cross_entropy(scores, b)
        return loss * ranks if kind.endswith("times-ranks") else loss / ranks if kind == "divided-twice" else loss

    for epoch in range(3):
        if isinstance(loader.sampler, DistributedSampler) and kind != "same-order":
            loader.sampler.set_epoch(epoch)
        if kind == "batchnorm-eval":
            wrapped.eval()
        batches: Any = [*zip(x.split(8), y.split(8), strict=True)] if kind.startswith("no-loader") else loader
        for number, batch in enumerate(batches):
            a, b = (batch, batch["y"]) if kind.startswith("lengths") else batch
            is_over = kind == "last-window" and number + 1 == len(batches)
            is_last = (number + 1) % accumulate == 0 or is_over
            syncs = (is_last or kind in ("accumulate-always",)) and kind != "accumulate-never"
            if kind == "skips" and rank == 1 and number == 1:
                continue
            if accumulate > 1 and not syncs:
                with wrapped.no_sync():
                    (loss_of(a, b) / accumulate).backward()
            else:
                scaler.scale(loss_of(a, b) / accumulate).backward()
            if not is_last:
                continue
            if kind == "by-hand-clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if kind.startswith(("by-hand", "buffers-by")):
                for parameter in model.parameters():
                    if kind == "by-hand-weights":
                        continue
                    dist.all_reduce(parameter.grad)
                    if kind != "by-hand-sum":
                        parameter.grad /= ranks
            if kind.startswith("clip"):
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            if kind == "shared-noise":  # one tensor has as many rows as a batch has samples
                shared = torch.Generator().manual_seed(epoch * 100 + number)
                for parameter in model.parameters():
                    parameter.grad += 0.01 * torch.randn(parameter.shape, generator=shared)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if kind == "by-hand-weights":  # in place of the gradients
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= ranks
            for _ in range(ranks if kind == "schedule-ranks" else 1):
                schedule.step()
            if rank == 0 and kind == "dropout":
                print("weights", repr(head.weight.detach().flatten()[0].item()), flush=True)
        if kind == "fails-later":
            raise ValueError("the end of the epoch")
        if kind.startswith("evaluation"):
            print(f"accuracy {evaluated():.4f}")
        if rank == 0 or kind == "checkpoint-by-all":
            torch.save(model.state_dict(), f"{kind}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--spawn" in sys.argv:
        import torch.multiprocessing as mp

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[-1]}
        mp.spawn(main, args=(2,), nprocs=2)
    else:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
