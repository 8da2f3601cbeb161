"""The program from which ejected files are cut: `cut.py` resolves `IS`, and removes what is then unused."""

# ruff: noqa: RET505, SIM108
# mypy: ignore-errors
from __future__ import annotations

import argparse
import copy
import json
import math
import os
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torchvision import datasets
from torchvision.transforms import v2

from .cut import IS

BATCH = IS.batch  # samples in an optimizer step, over all ranks
EVAL_BATCH = IS.eval_batch  # samples that a rank evaluates at once
ACCUMULATE = IS.accumulate  # micro-batches in an optimizer step
EPOCHS = IS.epochs
EVAL_EVERY = IS.eval_every  # epochs
LOG_EVERY = IS.log_every  # optimizer steps
MAX_STEPS = IS.max_steps
LR = IS.lr  # the peak
SEED = IS.seed
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # of the random numbers that follow from (seed, epoch, sample)
DTYPE = torch.float64 if IS.double else torch.float32
MEAN = IS.mean  # of each channel, in units of the stored bytes
STD = IS.std
BLOCKS = IS.blocks  # classes of the modules whose weights are gathered one at a time


def right(x: Tensor, shift: int) -> Tensor:
    """Shift int64 to the right, as unsigned integers."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def bits(key: Tensor, indices: Tensor) -> Tensor:
    """Return 64 random bits for each index (n,): a counter, hashed by SplitMix64's finalizer."""
    x = key + (indices + 1) * GOLDEN
    x = (x ^ right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ right(x, 31)


def key_of(*words: int) -> Tensor:
    """Return a key of 64 bits for some integers."""
    key = torch.tensor(len(words))
    for word in words:
        key = bits(key * GOLDEN + word, torch.tensor(0))
    return key


def permutation(samples: int, epoch: int) -> Tensor:
    """Return an epoch's order (samples,): a Feistel network enciphers positions, again if the result is no sample."""
    width = (samples - 1).bit_length()
    keys, sizes = bits(key_of(SEED, epoch, samples), torch.arange(10)), (width // 2, width - width // 2)
    order = torch.arange(samples)
    outside = order >= 0
    while outside.any():
        halves = [order[outside] & ((1 << sizes[0]) - 1), order[outside] >> sizes[0]]
        for number, key in enumerate(keys):
            x = (halves[1 - number % 2] + key) * -0x2917014799A6026D
            halves[number % 2] ^= right((x ^ right(x, 32)) * GOLDEN, 64 - sizes[number % 2])
        order[outside] = halves[1] << sizes[0] | halves[0]
        outside = order >= samples
    return order


def augment(x: Tensor, indices: Tensor, epoch: int) -> Tensor:
    """Return bytes x (n, C, H, W), normalised and varied. Sample `indices` (n,) decide each variation."""
    height, width = x.shape[2:]
    if IS.varies:
        draws = [right(bits(key, indices), 32) for key in bits(key_of(SEED, epoch), torch.arange(5))]
    if IS.moves:
        rows, columns = torch.arange(height).repeat(len(x), 1), torch.arange(width).repeat(len(x), 1)
        border_y, border_x = height // 8, width // 8
        if IS.flips:
            columns = torch.where((draws[2] * 2 >> 32 == 1)[:, None], width - 1 - columns, columns)
        if IS.crops:  # of the image in a frame of black pixels
            rows = rows + (draws[0] * (2 * border_y + 1) >> 32)[:, None]
            columns = columns + (draws[1] * (2 * border_x + 1) >> 32)[:, None]
            x = F.pad(x, (border_x, border_x, border_y, border_y))
        x = x[torch.arange(len(x))[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if not IS.cuts:
        return normalise(x)
    else:  # without a square of half the side around a random pixel
        inside = []
        for draw, side in ((draws[3], height), (draws[4], width)):
            offset = torch.arange(side) - (draw * side >> 32)[:, None] + side // 4
            inside.append((offset >= 0) & (offset < side // 2))
        return normalise(x).masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


def normalise(x: Tensor) -> Tensor:
    """Return bytes (n, C, H, W) with mean 0 and variance 1 over the training set."""
    mean, std = (torch.tensor(values, dtype=DTYPE, device=x.device)[:, None, None] for values in (MEAN, STD))
    return (x.to(DTYPE) - mean) / std


def read_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (N, C, H, W) uint8 and labels (N,) for training, and the same for testing."""
    if IS.digits:
        # Optical Recognition of Handwritten Digits: E. Alpaydin, C. Kaynak, 1998, UCI, CC BY 4.0.
        arrays = []
        with zipfile.ZipFile(IS.data_path) as archive:
            for name in ("images.npy", "labels.npy"):
                data = bytearray(archive.read(name))
                arrays.append(torch.frombuffer(data[10 + int.from_bytes(data[8:10], "little") :], dtype=torch.uint8))
        images, labels = arrays[0].view(-1, 1, 8, 8), arrays[1].long()
        is_test = torch.arange(len(labels)) % 5 == 0
        return images[~is_test], labels[~is_test], images[is_test], labels[is_test]
    else:
        train, test = (IS.reader(IS.data_path, train=is_train, download=True) for is_train in (True, False))
        images, test_images = (torch.from_numpy(data.data).permute(0, 3, 1, 2) for data in (train, test))
        return images, torch.tensor(train.targets), test_images, torch.tensor(test.targets)


class Photographs(datasets.ImageFolder):  # type: ignore[misc]
    """Images whose augmentation follows from (seed, epoch, sample), in whichever process decodes them."""

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = item
        key = bits(key_of(SEED, epoch, 3), torch.tensor(0))
        torch.manual_seed(int(bits(key, torch.tensor(index))) % 2**64)
        return super().__getitem__(index)  # type: ignore[no-any-return]


def photographs() -> tuple[Photographs, datasets.ImageFolder]:
    """Return the training and the test set, whose samples are (3, size, size) uint8."""
    centre = [v2.Resize(IS.image_size * 256 // 224), v2.CenterCrop(IS.image_size)]
    varied: list[nn.Module] = [v2.RandomResizedCrop(IS.image_size)] if IS.crops else [*centre]
    if IS.flips:
        varied.append(v2.RandomHorizontalFlip())
    train = Photographs(Path(IS.data_path, "train"), v2.Compose([v2.PILToTensor(), *varied]))
    return train, datasets.ImageFolder(Path(IS.data_path, "val"), v2.Compose([v2.PILToTensor(), *centre]))


def batches(images: Any, labels: Any, epoch: int, rank: int, world: int) -> Iterator[tuple[Any, int]]:
    """Yield this process's part of each batch, without padding, and the number of samples in the whole batch."""
    order = permutation(len(images), epoch)
    if IS.drops_last:
        order = order[: len(order) // BATCH * BATCH]
    if IS.folder:
        if IS.splits:
            parts = [part_of(batch, rank, world) for batch in order.split(BATCH)]
        else:
            parts = order.split(BATCH)
        items = [[(epoch, index) for index in (torch.cat(part) if IS.accumulates else part).tolist()] for part in parts]
        loader = DataLoader(images, batch_sampler=items, num_workers=IS.workers)
        if IS.varies or IS.accumulates:
            for (x, y), part, batch in zip(loader, parts, order.split(BATCH), strict=True):
                x = augment(x, torch.cat(part) if IS.accumulates else part, epoch) if IS.varies else normalise(x)
                if IS.accumulates:
                    sizes = [len(micro_batch) for micro_batch in part]
                    yield list(zip(x.split(sizes), y.split(sizes), strict=True)), len(batch)
                else:
                    yield (x, y), len(batch)
        else:
            for (x, y), batch in zip(loader, order.split(BATCH), strict=True):
                yield (normalise(x), y), len(batch)
    else:
        for batch in order.split(BATCH):
            if IS.accumulates:
                part = part_of(batch, rank, world)
                indices, sizes = torch.cat(part), [len(micro_batch) for micro_batch in part]
                x = augment(images[indices], indices, epoch) if IS.varies else normalise(images[indices])
                yield list(zip(x.split(sizes), labels[indices].split(sizes), strict=True)), len(batch)
            else:
                part = part_of(batch, rank, world) if IS.splits else batch
                x = augment(images[part], part, epoch) if IS.varies else normalise(images[part])
                yield (x, labels[part]), len(batch)


def part_of(batch: Tensor, rank: int, world: int) -> Any:
    """Return this process's part of a batch's samples (n,). The ranks' parts differ by one sample at most."""
    if IS.accumulates and IS.ranks:
        micro_batches = batch.tensor_split(math.ceil(len(batch) * ACCUMULATE / BATCH))
    if IS.ranks and len(micro_batches[-1] if IS.accumulates else batch) < world:
        raise SystemExit(f"A batch of {len(batch)} samples is too small for {world} ranks.")
    if IS.accumulates and IS.ranks:
        return [micro_batch.tensor_split(world)[rank] for micro_batch in micro_batches]
    elif IS.accumulates:
        return batch.tensor_split(math.ceil(len(batch) * ACCUMULATE / BATCH))
    else:
        return batch.tensor_split(world)[rank]


class AllReduce(torch.autograd.Function):
    """The sum over all ranks; so is its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the samples of all ranks, on CPUs. torch.nn.SyncBatchNorm needs GPUs."""

    def _check_input_dim(self, x: Tensor) -> None:
        pass  # of any dimension

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        dtype, x = x.dtype, x.to(self.weight.dtype)  # more than half precision
        axes = (0, *range(2, x.dim()))
        local_sums = torch.cat([x.sum(axes), x.new_tensor([x.numel() // x.shape[1]])])
        total = AllReduce.apply(local_sums)
        count = total[-1]
        mean, shape = total[:-1] / count, (-1, *[1] * (x.dim() - 2))
        x = x - mean.view(shape)
        variance = AllReduce.apply(x.square().sum(axes)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight / (variance + self.eps).sqrt()
        return (x * scale.view(shape) + self.bias.view(shape)).to(dtype)


def synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with BatchNorm layers whose statistics are those of all ranks."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            if module.weight is None or module.running_mean is None or module.momentum is None:
                raise SystemExit("BatchNorm on CPUs needs weights, running statistics and a momentum here.")
            module.__class__ = SyncBatchNorm
    return model


def learning_rate(step: int, steps_per_epoch: int) -> float:
    """Return the rate at an optimizer step."""
    if IS.spans:
        total = EPOCHS * steps_per_epoch
    if IS.warms_up:
        warmup = round(IS.warmup * steps_per_epoch)
        if not IS.onecycle and step < warmup:
            return LR * (step + 1) / warmup
    if IS.step:
        return LR * IS.gamma ** (step // max(1, round(IS.milestones[0] * steps_per_epoch)))
    elif IS.multistep:
        return LR * IS.gamma ** sum(step >= round(epoch * steps_per_epoch) for epoch in IS.milestones)
    elif IS.cosine:
        share = (step - warmup) / max(1, total - warmup) if IS.warms_up else step / max(1, total)
        return LR * 0.5 * (1 + math.cos(math.pi * min(1, share)))
    elif IS.onecycle:
        peak = max(1, warmup if IS.warms_up else round(0.3 * total)) - 1
        lowest, share = 1 / 25, 1 - step / max(1, peak)
        if step > peak:
            lowest, share = 1 / 250_000, (step - peak) / max(1, total - 1 - peak)
        return LR * (lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * min(1, share))))
    else:
        return LR


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the losses of images x (n, C, H, W) with labels y (n,)."""
    with torch.autocast(x.device.type, dtype=IS.dtype):
        return IS.loss  # type: ignore[no-any-return]


@torch.no_grad()
def evaluate(model: nn.Module, images: Any, labels: Any, device: torch.device, rank: int, world: int) -> list[float]:
    """Return (accuracy, mean loss). Each sample counts once: sums are added up over the ranks, and divided once."""
    model.eval()
    if IS.folder:
        part = Subset(images, range(rank, len(images), world)) if IS.ranks else images
        pairs = DataLoader(part, EVAL_BATCH, num_workers=IS.workers)
    elif IS.fsdp:  # each rank calls the model as often, perhaps without a sample
        rank_images, rank_labels = images[rank::world], labels[rank::world]
        starts = range(0, math.ceil(len(images) / world), EVAL_BATCH)
        pairs = ((rank_images[start : start + EVAL_BATCH], rank_labels[start : start + EVAL_BATCH]) for start in starts)
    elif IS.ranks:
        pairs = zip(images[rank::world].split(EVAL_BATCH), labels[rank::world].split(EVAL_BATCH), strict=True)
    else:
        pairs = zip(images.split(EVAL_BATCH), labels.split(EVAL_BATCH), strict=True)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in pairs:
        x, y = normalise(x).to(device), y.to(device)
        if IS.half:
            with torch.autocast(device.type, dtype=IS.dtype):
                scores = model(x).float()
        else:
            scores = model(x)
        sums += torch.stack([(scores.argmax(1) == y).sum(), IS.test_loss])
    model.train()
    if IS.ranks:
        dist.all_reduce(sums)
    return (sums / len(images)).tolist()


def load_weights(model: nn.Module, path: str) -> None:
    """Load the weights of a run, such as runs/NAME/checkpoints/best/model.safetensors."""
    data = bytearray(Path(path).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes, tensors = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64}, {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in about["data_offsets"])
            tensors[name] = torch.frombuffer(data[first:last], dtype=dtypes[about["dtype"]]).view(about["shape"])
    model.load_state_dict(tensors)


def main(options: argparse.Namespace) -> None:
    """Train."""
    if IS.on_cpu:
        device = torch.device("cpu")
    elif IS.ddp:
        if IS.by_hand:
            local_rank = options.rank % max(1, torch.cuda.device_count())  # a host's ranks are adjacent
        else:
            local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if IS.ranks:
        if not IS.on_cpu and IS.ddp and device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if IS.on_cpu else "nccl" if device.type == "cuda" else "gloo"
        if IS.by_hand:
            url, rank, world = options.init_method, options.rank, options.world_size
            dist.init_process_group(backend, init_method=url, rank=rank, world_size=world)
        else:  # as RANK of WORLD_SIZE, at MASTER_ADDR:MASTER_PORT
            dist.init_process_group(backend)
            rank, world = dist.get_rank(), dist.get_world_size()
    if IS.tf32:
        torch.set_float32_matmul_precision("high")
    if not IS.on_cpu:
        torch.backends.cudnn.allow_tf32 = IS.allows_tf32
    if IS.ranks and IS.cifar:
        if rank == 0:  # downloads, if need be, before the others read
            read_data()
        dist.barrier()

    if IS.folder:
        images, test_images = photographs()
    else:
        images, labels, test_images, test_labels = read_data()
    steps_per_epoch = len(images) // BATCH if IS.drops_last else math.ceil(len(images) / BATCH)
    torch.manual_seed(SEED)  # the same initial weights on every rank
    model = IS.model
    if IS.syncs:
        model = synchronised(model, device)
    model.to(device, DTYPE)
    if IS.channels_last:
        model.to(memory_format=torch.channels_last)
    if options.weights:
        load_weights(model, options.weights)
    if IS.ranks:
        torch.manual_seed(SEED + rank)  # dropout differs between ranks
    if IS.averages:
        average = copy.deepcopy(model).requires_grad_(False)
    if IS.compiled:
        model.compile()
    if IS.fsdp:
        mesh = init_device_mesh(device.type, (world,))
        for module in [*model.modules()][1:]:
            if type(module).__name__ in BLOCKS:
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        net = model
    elif IS.ddp:
        net = DistributedDataParallel(model)
    elif IS.drives_all:
        net = nn.DataParallel(model, IS.device_ids)
    if IS.sgd:
        decay, momentum, nesterov = IS.weight_decay, IS.momentum, IS.nesterov
        if IS.zero1:  # each rank has a part of the optimizer's state
            settings = {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR, **settings)
        else:
            optimizer = torch.optim.SGD(model.parameters(), LR, momentum, weight_decay=decay, nesterov=nesterov)
    elif IS.zero1:  # each rank has a part of the optimizer's state
        settings = {"weight_decay": IS.weight_decay}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=IS.weight_decay)
    if IS.scales:
        scaler = torch.amp.GradScaler(device.type)

    step, loss_sum = 0, torch.zeros((), dtype=torch.float64, device=device)
    for epoch in range(EPOCHS):
        for batch, total in batches(images, labels, epoch, rank, world):
            if IS.accumulates and IS.fsdp:
                for number, (x, y) in enumerate(batch, start=1):
                    x, y = x.to(device), y.to(device)
                    # Gradients are exchanged in the backward pass of the last micro-batch.
                    model.set_requires_gradient_sync(number == len(batch))
                    loss = loss_of(net, x, y) if IS.half else IS.loss
                    mean = loss * world / total  # FSDP divides by the number of ranks
                    (scaler.scale(mean) if IS.scales else mean).backward()
                    loss_sum += loss.detach() / total
            elif IS.accumulates and IS.ddp:
                for number, (x, y) in enumerate(batch, start=1):
                    x, y = x.to(device), y.to(device)
                    # Gradients are exchanged in the backward pass of the last micro-batch.
                    with nullcontext() if number == len(batch) else net.no_sync():
                        loss = loss_of(net, x, y) if IS.half else IS.loss
                        mean = loss * world / total  # DDP divides by the number of ranks
                        (scaler.scale(mean) if IS.scales else mean).backward()
                    loss_sum += loss.detach() / total
            elif IS.accumulates:
                for x, y in batch:
                    x, y = x.to(device), y.to(device)
                    loss = loss_of(net if IS.wraps else model, x, y) if IS.half else IS.loss
                    (scaler.scale(loss / total) if IS.scales else loss / total).backward()
                    loss_sum += loss.detach() / total
            else:
                x, y = (part.to(device) for part in batch)
                loss = loss_of(net if IS.wraps else model, x, y) if IS.half else IS.loss
                if IS.fsdp:
                    mean = loss * world / total  # FSDP divides by the number of ranks
                    (scaler.scale(mean) if IS.scales else mean).backward()
                elif IS.ddp:
                    mean = loss * world / total  # DDP divides by the number of ranks
                    (scaler.scale(mean) if IS.scales else mean).backward()
                else:
                    (scaler.scale(loss / total) if IS.scales else loss / total).backward()
                loss_sum += loss.detach() / total
            if IS.hybrid:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps_per_epoch)
            if IS.clips:
                if IS.scales:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), IS.clip)
            if IS.scales:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            if IS.averages:
                with torch.no_grad():
                    for mean_weight, weight in zip(average.parameters(), model.parameters(), strict=True):
                        mean_weight.lerp_(weight, 1 - IS.ema)
                    for copied, buffer in zip(average.buffers(), model.buffers(), strict=True):
                        copied.copy_(buffer)
            step += 1
            if step % LOG_EVERY == 0:
                if IS.ranks:
                    dist.all_reduce(loss_sum)
                if not IS.ranks or rank == 0:
                    print(f"step {step}  loss {loss_sum.item():.12g}", flush=True)
            loss_sum.zero_()
            if IS.ends_early and step == MAX_STEPS:
                break
        is_end = epoch + 1 == EPOCHS or step == MAX_STEPS if IS.ends_early else epoch + 1 == EPOCHS
        if (epoch + 1) % EVAL_EVERY == 0 or is_end:
            judged = average if IS.averages else model
            accuracy, loss = evaluate(judged, test_images, test_labels, device, rank, world)
            if IS.fsdp:  # all ranks gather the weights
                state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if not IS.ranks or rank == 0:
                print(f"epoch {epoch + 1}  accuracy {accuracy:.2%}  loss {loss:.4f}", flush=True)
                if IS.fsdp:
                    torch.save(state, "model.pt")
                else:
                    torch.save(judged.state_dict(), "model.pt")
        if IS.ends_early and is_end:
            break
    if IS.ranks:
        dist.destroy_process_group()


def run_rank(local_rank: int, options: argparse.Namespace) -> None:
    """Run one of this host's ranks."""
    os.environ |= {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(IS.devices)}
    main(options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="", help="a run's model.safetensors to begin with")
    if IS.by_hand:
        parser.add_argument("--rank", type=int, required=True)
        parser.add_argument("--world-size", type=int, default=IS.world_size)
        parser.add_argument("--init-method", default=IS.init_method)
    if IS.spawn:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        mp.spawn(run_rank, args=(parser.parse_args(),), nprocs=IS.devices)
    elif IS.slurm:
        of_slurm = {name: os.environ[f"SLURM_{name}"] for name in ("PROCID", "NTASKS", "LOCALID", "JOB_ID")}
        show = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        hosts = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
        os.environ |= {"RANK": of_slurm["PROCID"], "WORLD_SIZE": of_slurm["NTASKS"], "LOCAL_RANK": of_slurm["LOCALID"]}
        os.environ.setdefault("MASTER_ADDR", hosts[0])
        os.environ.setdefault("MASTER_PORT", str(20_000 + int(of_slurm["JOB_ID"]) % 10_000))
        main(parser.parse_args())
    else:
        main(parser.parse_args())
