"""Models of a user's own, for tests: named as tests.models:NAME."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.models.resnet import resnet8
from lockstep.monitor.signals import StopRequest


class Dropped(nn.Module):
    """A small net with dropout: randomness of the model's own."""

    passes = 0
    """Of training."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        self.happen()
        return self.body(x)  # type: ignore[no-any-return]

    def happen(self) -> None:
        """Do what is special about a net at each pass."""


class Busy(Dropped):
    """A net that gives its GPU work for a minute or so at the fifth pass, as one does that hangs."""

    def happen(self) -> None:
        if self.passes == 5 and self.get_parameter("body.1.weight").is_cuda:
            torch.cuda._sleep(100_000_000_000)  # cycles of its clock


class Asserting(Dropped):
    """A net that reads beyond a tensor at the fifth pass, which a GPU notices in the middle of its work."""

    def happen(self) -> None:
        weight = self.get_parameter("body.1.weight")
        if self.passes == 5 and weight.is_cuda:
            weight.index_select(0, torch.full((1,), len(weight), device=weight.device))


class Flipping(Dropped):
    """A net in which a bit of a weight flips on rank 1, at the eighth pass of training."""

    def happen(self) -> None:
        if self.training and self.passes == 8 and dist.get_rank() == 1:
            weight = self.get_parameter("body.4.weight").detach()
            weight.view(-1).view(torch.int32)[17] ^= 1 << 3


class Exploding(Dropped):
    """A net whose outputs are not numbers from the fourth training step on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (float("nan") if self.passes > 3 else 1.0)


class Wide(nn.Module):
    """A net of several megabytes, so that DistributedDataParallel has several buckets, used in no simple order."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.last = nn.Linear(500, classes)
        self.middle = nn.ModuleList(nn.Linear(500, 500) for _ in range(3))
        self.first = nn.Linear(in_channels * image_size**2, 500)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).relu()
        for layer in (self.middle[1], self.middle[2], self.middle[0]):
            x = layer(x).relu()
        return self.last(x)  # type: ignore[no-any-return]


class Failing(Dropped):
    """A net that raises on rank 1, in the fifth training step."""

    def happen(self) -> None:
        if self.passes > 5 and dist.get_rank() == 1:
            raise ValueError("out of luck")


class Slow(Dropped):
    """A net whose training step takes a minute; a file named "stepping" says that one is under way."""

    def happen(self) -> None:
        if self.training:
            Path("stepping").touch()
            time.sleep(60)


class SlowToEvaluate(Dropped):
    """A net that takes half a second for each batch of an evaluation."""

    def happen(self) -> None:
        time.sleep(0 if self.training else 0.5)


class Interrupting(Dropped):
    """A net that asks its own process to stop in the 23rd training step: the last one of an epoch of the recipe."""

    def happen(self) -> None:
        if self.passes == 23:
            os.kill(os.getpid(), signal.SIGTERM)


def signalling(classes: int, in_channels: int) -> nn.Module:
    """Return a resnet8 that sends its own command a signal: SIGNALLING holds the arguments of `_Signal`.

    A test that watches from outside may be held up until a short run has ended; this net cannot be too late.
    """
    net = resnet8(classes=classes, in_channels=in_channels)
    if asked := os.environ.get("SIGNALLING"):
        net.register_forward_pre_hook(_Signal(**json.loads(asked)))
    return net


@dataclass
class _Signal:
    """Sends `number` in the `at`-th training pass of rank 0, `pause_s` after its begin, and waits until it is heard.

    It goes to the command's process, or to all of its `group`.
    """

    number: int
    at: int
    group: bool = False
    pause_s: float = 0
    passes: int = 0

    def __call__(self, net: nn.Module, inputs: Any) -> None:
        self.passes += net.training
        if not net.training or self.passes != self.at or (dist.is_initialized() and dist.get_rank()):
            return
        time.sleep(self.pause_s)
        parent = multiprocessing.parent_process()  # of a rank that was spawned
        command = os.getpid() if parent is None else parent.pid
        assert command is not None
        (os.killpg if self.group else os.kill)(command, self.number)
        while True:  # until what hears signals in training has it; SIGKILL ends this rank with the command
            hearer = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
            if isinstance(hearer, StopRequest) and hearer.asked:
                return
            time.sleep(0.005)


class Normed(nn.Module):
    """The smallest net with batch statistics: little for a compiler to do, before them and after."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.classifier(x.mean((2, 3)))  # type: ignore[no-any-return]


class Choosing(nn.Module):
    """A net whose forward pass branches on a value: no program is the same for all batches."""

    def __init__(self, classes: int, image_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(image_size**2, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.flatten(1))
        return -logits if logits.sum() > 0 else logits


class Drifting(Choosing):
    """A net that computes something else at each call, which no export can follow."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.linear(x.flatten(1)) + self.calls  # type: ignore[no-any-return]
