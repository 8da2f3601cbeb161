"""pyramidnet-110-48 on cifar10, in plain PyTorch.

    torchrun --nproc-per-node 4 train.py

Written by lockstep 0.1.0. In float64 its losses are the run's. Config 2558fb842e69:
    lockstep eject cifar10-pyramidnet --strategy ddp --devices 4 --accelerator cuda

Not carried over:
- the watchdog, restarts and resuming
- proofs: digests of replicas, counts of samples
- records: steps.jsonl, TensorBoard, checkpoints with the optimizer's state
- draws of dropout: they differ from the run's
"""

import argparse
import json
import math
import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import datasets

BATCH = 128  # samples in an optimizer step, over all ranks
EVAL_BATCH = 128  # samples that a rank evaluates at once
EPOCHS = 200
EVAL_EVERY = 1  # epochs
LOG_EVERY = 50  # optimizer steps
LR = 0.1  # the peak
SEED = 0
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # of the random numbers that follow from (seed, epoch, sample)
DTYPE = torch.float32
MEAN = (125.307, 122.95, 113.865)  # of each channel, in units of the stored bytes
STD = (62.993, 62.089, 66.705)


def initialise(model: nn.Module) -> None:
    """Draw the convolutions' weights by He's rule (arXiv 1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


STAGES, STEM_WIDTH = 3, 16


def widths(depth: int, alpha: int, *, reference: bool = False) -> list[int]:
    """Return the channels after the stem and after each block.

    Rounding takes halves to the even number. `reference` leaves out the last block of each stage, at the same pace.
    """
    blocks = (depth - 2) // (2 * STAGES)
    # Exact, so that no width depends on the rounding of floats.
    rate = Fraction(alpha, STAGES * blocks)
    return [round(STEM_WIDTH + rate * block) for block in range(STAGES * (blocks - reference) + 1)]


class Block(nn.Module):
    """BN, 3×3 convolution, BN, ReLU, 3×3 convolution, BN; plus the shortcut.

    (N, inputs, H, W) → (N, outputs, ⌈H/stride⌉, ⌈W/stride⌉), outputs ≥ inputs.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()
        self.added_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        # Zeros and an addition in place: 1.2 to 1.5 times as fast as adding into a slice (whole net on a CPU).
        out += nn.functional.pad(self.shortcut(x), (0, 0, 0, 0, 0, self.added_channels))
        return out


class PyramidNet(nn.Module):
    """The net of `depth` and widening α.

    (N, in_channels, H, W) → logits (N, classes).
    Depth 110 and α 270 have 28,485,477 parameters for 10 classes. `reference` is a variant that is widely trained
    under the same name, without the last block of each stage: 24,253,410.
    """

    def __init__(self, depth: int, alpha: int, *, classes: int, in_channels: int = 3, reference: bool = False) -> None:
        super().__init__()
        channels = widths(depth, alpha, reference=reference)
        per_stage = (len(channels) - 1) // STAGES
        first = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(channels[0]))
        self.blocks = nn.Sequential()
        for index, (inputs, outputs) in enumerate(pairwise(channels)):
            self.blocks.append(Block(inputs, outputs, 2 if index > 0 and index % per_stage == 0 else 1))
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels[-1]), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        )
        self.classifier = nn.Linear(channels[-1], classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(x))))


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
    draws = [right(bits(key, indices), 32) for key in bits(key_of(SEED, epoch), torch.arange(5))]
    rows, columns = torch.arange(height).repeat(len(x), 1), torch.arange(width).repeat(len(x), 1)
    border_y, border_x = height // 8, width // 8
    columns = torch.where((draws[2] * 2 >> 32 == 1)[:, None], width - 1 - columns, columns)
    rows = rows + (draws[0] * (2 * border_y + 1) >> 32)[:, None]
    columns = columns + (draws[1] * (2 * border_x + 1) >> 32)[:, None]
    x = F.pad(x, (border_x, border_x, border_y, border_y))
    x = x[torch.arange(len(x))[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return normalise(x)


def normalise(x: Tensor) -> Tensor:
    """Return bytes (n, C, H, W) with mean 0 and variance 1 over the training set."""
    mean, std = (torch.tensor(values, dtype=DTYPE, device=x.device)[:, None, None] for values in (MEAN, STD))
    return (x.to(DTYPE) - mean) / std


def read_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (N, C, H, W) uint8 and labels (N,) for training, and the same for testing."""
    train, test = (datasets.CIFAR10("data", train=is_train, download=True) for is_train in (True, False))
    images, test_images = (torch.from_numpy(data.data).permute(0, 3, 1, 2) for data in (train, test))
    return images, torch.tensor(train.targets), test_images, torch.tensor(test.targets)


def batches(images: Any, labels: Any, epoch: int, rank: int, world: int) -> Iterator[tuple[Any, int]]:
    """Yield this process's part of each batch, without padding, and the number of samples in the whole batch."""
    order = permutation(len(images), epoch)
    for batch in order.split(BATCH):
        part = part_of(batch, rank, world)
        x = augment(images[part], part, epoch)
        yield (x, labels[part]), len(batch)


def part_of(batch: Tensor, rank: int, world: int) -> Any:
    """Return this process's part of a batch's samples (n,). The ranks' parts differ by one sample at most."""
    if len(batch) < world:
        raise SystemExit(f"A batch of {len(batch)} samples is too small for {world} ranks.")
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
    return LR * 0.1 ** sum(step >= round(epoch * steps_per_epoch) for epoch in (100.0, 150.0))


@torch.no_grad()
def evaluate(model: nn.Module, images: Any, labels: Any, device: torch.device, rank: int, world: int) -> list[float]:
    """Return (accuracy, mean loss). Each sample counts once: sums are added up over the ranks, and divided once."""
    model.eval()
    pairs = zip(images[rank::world].split(EVAL_BATCH), labels[rank::world].split(EVAL_BATCH), strict=True)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in pairs:
        x, y = normalise(x).to(device), y.to(device)
        scores = model(x)
        sums += torch.stack([(scores.argmax(1) == y).sum(), F.cross_entropy(scores, y, reduction="sum")])
    model.train()
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
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.backends.cudnn.allow_tf32 = False
    if rank == 0:  # downloads, if need be, before the others read
        read_data()
    dist.barrier()

    images, labels, test_images, test_labels = read_data()
    steps_per_epoch = math.ceil(len(images) / BATCH)
    torch.manual_seed(SEED)  # the same initial weights on every rank
    model = PyramidNet(depth=110, alpha=48, reference=False, classes=10, in_channels=3)
    model = synchronised(model, device)
    model.to(device, DTYPE)
    model.to(memory_format=torch.channels_last)
    if options.weights:
        load_weights(model, options.weights)
    torch.manual_seed(SEED + rank)  # dropout differs between ranks
    net = DistributedDataParallel(model)
    decay, momentum, nesterov = 0.0001, 0.9, False
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum, weight_decay=decay, nesterov=nesterov)

    step, loss_sum = 0, torch.zeros((), dtype=torch.float64, device=device)
    for epoch in range(EPOCHS):
        for batch, total in batches(images, labels, epoch, rank, world):
            x, y = (part.to(device) for part in batch)
            loss = F.cross_entropy(net(x), y, reduction="sum")
            mean = loss * world / total  # DDP divides by the number of ranks
            mean.backward()
            loss_sum += loss.detach() / total
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps_per_epoch)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY == 0:
                dist.all_reduce(loss_sum)
                if rank == 0:
                    print(f"step {step}  loss {loss_sum.item():.12g}", flush=True)
            loss_sum.zero_()
        is_end = epoch + 1 == EPOCHS
        if (epoch + 1) % EVAL_EVERY == 0 or is_end:
            accuracy, loss = evaluate(model, test_images, test_labels, device, rank, world)
            if rank == 0:
                print(f"epoch {epoch + 1}  accuracy {accuracy:.2%}  loss {loss:.4f}", flush=True)
                torch.save(model.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="", help="a run's model.safetensors to begin with")
    main(parser.parse_args())
