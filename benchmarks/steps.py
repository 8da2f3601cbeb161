"""One training step of a network in several ways: plain torch, DistributedDataParallel, a session of ours.

All ways take the same batch, which is on the device, in bfloat16 by autocast, with a fused optimizer.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lockstep import RequestError, RunConfig, World, override
from lockstep.jobs.job import assemble
from lockstep.models import table as models
from lockstep.record.base import Nothing
from lockstep.runs.opened import OpenRun
from lockstep.sessions.session import Session

from .harness import Series
from .loops import configured, repeated, stepper

Step = Callable[[], object]
_BATCHES = 100_000  # of an epoch, more than any measurement takes


class Transformer(nn.Module):
    """A GPT-2 of the given size; its embedding is its last layer, too."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return functional.linear(self.layers(self.embedding(tokens), mask, is_causal=True), self.embedding.weight)


@dataclass(frozen=True)
class Network:
    """A network, its batch on one device, and its optimizer."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    """Of an image (3, side, side), or of a text (tokens,)."""
    classes: int = 10
    recipe: str = ""
    """Its name for `lockstep train`, if that can train it."""

    @property
    def is_image(self) -> bool:
        """Whether samples are images."""
        return len(self.shape) == 3

    def model(self, device: torch.device) -> nn.Module:
        """Return the network on `device`, in the memory order that is fastest there."""
        model = self.build().to(device)
        return model.to(memory_format=torch.channels_last) if self.is_image else model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum for images, AdamW for texts."""
        if self.is_image:
            return torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=True)
        return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a batch: images and labels, or tokens and the next tokens."""
        if self.is_image:
            x = torch.randn(self.batch, *self.shape, device=device).to(memory_format=torch.channels_last)
            return x, torch.randint(self.classes, (self.batch,), device=device)
        tokens = torch.randint(self.classes, (self.batch, self.shape[0] + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _image(name: str, title: str, batch: int, side: int, classes: int = 10) -> Network:
    shape = (3, side, side)
    build = partial(models.build_for, name, classes=classes, shape=shape)
    return Network(f"{title}, {batch} × {side}²", build, batch, shape, classes, name)


def _text(vocabulary: int, width: int, layers: int, heads: int, *, batch: int, tokens: int) -> Network:
    build = partial(Transformer, vocabulary, width, layers, heads)
    return Network(f"GPT-2 small, {batch} × {tokens}", build, batch, (tokens,), vocabulary)


NETWORKS = (
    _text(50304, 768, 12, 12, batch=16, tokens=1024),
    _image("torchvision.resnet50", "ResNet-50", 32, 224, 1000),
    _image("resnet18", "ResNet-18", 128, 32),
    _image("pyramidnet-110-48", "PyramidNet-110", 128, 32),
)
REHEARSED = (
    _text(64, 16, 2, 2, batch=2, tokens=8),
    _image("torchvision.resnet18", "ResNet-50", 2, 64),
    _image("resnet8", "ResNet-18", 4, 16),
    _image("pyramidnet-20-48", "PyramidNet-110", 4, 16),
)
"""The same with tiny sizes."""


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of scores (…, classes) for labels (…)."""
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())


@contextlib.contextmanager
def plain(
    network: Network, world: World, wrap: Callable[[Any, Tensor], Any] = lambda model, x: model, *, caches: bool = True
) -> Iterator[Step]:
    """Give a step of torch alone; `wrap` makes the module that is called. Autocast `caches` weights, or does not."""
    device, model = world.device, network.model(world.device)
    optimizer, (x, y) = network.optimizer(model), network.draw(device)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=caches)
    with autocast():
        called = wrap(model, x)

    def step() -> None:
        with autocast():
            loss = loss_of(called(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield step


def ddp(model: nn.Module, x: Tensor) -> nn.Module:
    """Return torch's DistributedDataParallel over the default process group, whose gradients are views of buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def graphed(model: nn.Module, x: Tensor) -> Any:
    """Return a model whose passes over batches like `x` are CUDA graphs."""
    return torch.cuda.make_graphed_callables(model, (x,))


@contextlib.contextmanager
def session(network: Network, world: World, *, compiled: bool = False, **options: Any) -> Iterator[Step]:
    """Give a step of a loop over a session in `world`. Raises `RequestError` for options that it cannot honour."""
    config = override(RunConfig(), precision="bf16", **options)
    with Session(config, world, nullcontext(OpenRun(config, Nothing(), None))) as opened:
        model: Any = network.model(world.device)
        optimizer: Any = network.optimizer(model)
        if compiled:
            model.compile()
        x, y = network.draw(world.device)

        def collate(numbers: list[int]) -> tuple[Tensor, Tensor]:
            return x[: len(numbers)], y[: len(numbers)]

        batch = network.batch * world.size
        loader: Any = DataLoader(range(batch * _BATCHES), batch, collate_fn=collate)  # type: ignore[arg-type]
        model, optimizer, loader = opened.prepare(model, optimizer, loader)
        batches = iter(loader)

        def step() -> None:
            x, y = next(batches)
            opened.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

        yield step
        opened.abandon_batch()


@contextlib.contextmanager
def trained(network: Network, world: World, **options: Any) -> Iterator[Step]:
    """Give a step of `lockstep train` in one process. Raises `RequestError` for what it cannot train."""
    if not network.recipe:
        raise RequestError("lockstep train takes images here")
    data = {"data": "fake", "image_size": network.shape[1], "samples": 4 * network.batch}
    values = {"model": network.recipe, "classes": network.classes, "batch": network.batch, "lr": 0.01}
    job = assemble(configured(**values, **data, precision="bf16", **options), World.alone(world.device))
    try:
        yield stepper(job, repeated(job), steps=1)
    finally:
        job.data.close()


Way = Callable[[Network, World], contextlib.AbstractContextManager[Step]]
PLAIN, DDP, SESSION, IN_GROUP, GRAPHS = "plain", "plain DDP", "session", "session, ddp", "train, graphs"
EAGER: Mapping[str, Way] = {
    PLAIN: plain,
    DDP: partial(plain, wrap=ddp),
    SESSION: lambda network, world: session(network, World.alone(world.device)),
    IN_GROUP: lambda network, world: session(network, world, batchnorm="local"),
    "train": trained,
    GRAPHS: partial(trained, cuda_graphs="on"),
    "plain, graphs": partial(plain, wrap=graphed, caches=False),
}
COMPILED: Mapping[str, Way] = {
    "plain, compiled": partial(plain, wrap=lambda model, x: torch.compile(model)),
    "session, compiled": lambda network, world: session(network, World.alone(world.device), compiled=True),
}


@dataclass(frozen=True)
class Cost:
    """What a step costs."""

    step_ms: Series
    host_ms: float
    """Time until the host has queued a step on an idle device."""
    memory_bytes: int
    operations: int
    """Kernels, copies and fills that the device runs; on a CPU, operators."""
    launches: int
    """Calls of the host that start them; a graph of many is one."""
    first_s: float
    """Of the first step, compilation included."""


class Measured:
    """A way's step and its persistent memory."""

    def __init__(self, way: Way, network: Network, world: World, stack: contextlib.ExitStack) -> None:
        self._device = world.device
        before_bytes = self._allocated()
        self.step = stack.enter_context(way(network, world))
        begin_s = time.perf_counter()
        self.step()
        self._wait()
        self.first_s = time.perf_counter() - begin_s
        self._own_bytes = self._allocated() - before_bytes

    def round(self, steps: int) -> float:
        """Return the mean milliseconds of so many steps."""
        self._wait()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return 1e3 * (time.perf_counter() - begin_s) / steps

    def cost(self, step_ms: Series, steps: int) -> Cost:
        """Return the cost of a step whose time is known."""
        host_s = []
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        others_bytes = self._allocated() - self._own_bytes
        for _ in range(steps):
            self._wait()
            begin_s = time.perf_counter()
            self.step()
            host_s.append(time.perf_counter() - begin_s)
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        self._wait()
        operations, launches = self._count()
        host_ms = 1e3 * statistics.median(host_s)
        return Cost(step_ms, host_ms, max(0, peak - others_bytes), operations, launches, self.first_s)

    def _count(self) -> tuple[int, int]:
        on_gpu = self._device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as seen:
            self.step()
            self._wait()
        if not on_gpu:
            operators = sum(event.count for event in seen.key_averages() if event.key.startswith("aten::"))
            return operators, operators
        events = seen.key_averages()
        work = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        calls = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
        return (
            sum(event.count for event in work if event.self_device_time_total > 0),
            sum(event.count for event in events if event.key.startswith(calls)),
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def name_of(device: torch.device) -> str:
    """Return the device's name, for titles."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (rehearsal)"
