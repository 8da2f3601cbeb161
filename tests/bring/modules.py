"""Models: batch statistics, buffers that forward passes change, saved state of other forms, several models."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from .catalogue import REFUSED, RIGHT, TOLD, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, mlp, regression, seeded, train, trio


@loop("batch", has_accumulated_plain=False, quick=True)
@loop("batch-cumulative", "batch-frozen", "batch-2d", has_accumulated_plain=False)
@loop("group")
@loop("batch-untracked", has_plain=False, outcome=RIGHT | TOLD)
@loop("instance-tracked", outcome=RIGHT | TOLD, has_accumulated_plain=False)
def normalisation(session: Any, how: str) -> Numbers:
    """Train a net with a normalisation layer."""
    makers: dict[str, Any] = {
        "batch": lambda: nn.BatchNorm1d(3),
        "batch-cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
        "batch-frozen": lambda: nn.BatchNorm1d(3).eval(),
        "batch-2d": lambda: nn.Sequential(nn.Unflatten(2, (2, 3)), nn.BatchNorm2d(3), nn.Flatten(2)),
        "batch-untracked": lambda: nn.BatchNorm1d(3, track_running_stats=False),
        "group": lambda: nn.GroupNorm(3, 3),
        "instance-tracked": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    }
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, 3, 6, generator=generator, dtype=torch.float64)
    make = makers[how]
    net = seeded(lambda: nn.Sequential(make(), nn.Flatten(), nn.Linear(18, 1)))
    if how == "batch-frozen":
        net[0].eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, arrays()[1]), batch_size=6)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    total = 0.0
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(net, x, y))
        if how == "batch-frozen":
            continue
        net.eval()
        for x, y in session.evaluating(DataLoader(regression_images(), 4)):
            total += session.sum(functional.mse_loss(net(x), y, reduction="sum").item())
        net.train()
    return [checksum(net), total]


def regression_images() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(11, 3, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(11, 1, generator=generator, dtype=torch.float64))


class Centred(nn.Module):
    """A net that subtracts a running centre of its features, as vector quantisers and distillation do."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            mean = hidden.detach().mean(0)
            self.centre.mul_(0.9).add_(mean, alpha=0.1)
        output: Tensor = self.last(torch.tanh(hidden - self.centre))
        return output


@loop(outcome=RIGHT | TOLD | REFUSED, alone=RIGHT | TOLD, resumed=RIGHT | TOLD, quick=True)
def running_centre(session: Any, how: str) -> Numbers:
    """Update a buffer by the share's mean in forward passes."""
    return train(session, trio(session, Centred))


class Transposed(nn.Linear):
    """A layer that saves its weight transposed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_state_dict_post_hook(self._swap)
        self.register_load_state_dict_pre_hook(self._swap_back)

    @staticmethod
    def _swap(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()

    @staticmethod
    def _swap_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()


class Copies(nn.Module):
    """A net whose `state_dict` gives copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.first(x)))
        return output

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return copies."""
        state = super().state_dict(*arguments, **options)
        return OrderedDict((name, tensor.detach().clone()) for name, tensor in state.items())


class Renamed(Copies):
    """A net that saves under other names, and leaves a part out."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the tensors under a prefix."""
        return OrderedDict((f"net.{name}", tensor) for name, tensor in super().state_dict().items())

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load tensors under the prefix."""
        plain = {name.removeprefix("net."): tensor for name, tensor in state_dict.items()}
        return super().load_state_dict(plain, strict, assign)


@loop("hook", "copies", quick=True)
@loop("renamed")
def saved_in_another_form(session: Any, how: str) -> Numbers:
    """Train a model whose saved state has another form than its tensors."""

    makers: dict[str, Any] = {
        "hook": lambda: nn.Sequential(Transposed(FEATURES, 4), nn.Tanh(), Transposed(4, 1)),
        "copies": Copies,
        "renamed": Renamed,
    }
    return train(session, trio(session, makers[how]), epochs=3)


class Task(nn.Module):
    """A net with a training step of its own, as modules of trainers have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return functional.mse_loss(self.net(x), y)

    def __call__(self, *inputs: Any) -> Any:
        return super().__call__(*inputs)


@loop("training-step", "submodule", "net", quick=True)
@loop("training-step-ahead", outcome=RIGHT | REFUSED)
def other_methods(session: Any, how: str) -> Numbers:
    """Call the model by other methods than `forward`."""
    model, optimizer, loader = trio(session, Task)
    for _ in session.epochs(2):
        batches = list(loader) if how.endswith("ahead") else loader
        for x, y in batches:
            if how.startswith("training-step"):
                loss = model.training_step(x, y)
            elif how == "net":
                loss = error(model.net, x, y)
            else:
                loss = functional.mse_loss(model.net[2](model.net[1](model.net[0](x))), y)
            descend(session, optimizer, loss)
    return [checksum(model)]


@loop("two", "one-optimizer", quick=True)
@loop("alternating")
def several_models(session: Any, how: str) -> Numbers:
    """Train an encoder and a decoder that are prepared apart."""
    encoder, decoder = seeded(lambda: nn.Linear(FEATURES, 3)), seeded(lambda: nn.Linear(3, FEATURES))
    encoder, decoder = session.prepare(encoder, decoder)
    if how == "one-optimizer":
        optimizers = [torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)]
    else:
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (encoder, decoder)]
    optimizers = [session.prepare(optimizer) for optimizer in optimizers]
    loader = session.prepare(DataLoader(regression(), batch_size=6))
    for epoch in session.epochs(2):
        for x, _ in loader:
            session.backward(functional.mse_loss(decoder(torch.tanh(encoder(x))), x))
            for number, optimizer in enumerate(optimizers):
                if how != "alternating" or (number + epoch) % 2 == 0:
                    optimizer.step()
                optimizer.zero_grad()
    return [checksum(encoder, decoder)]


class Late(nn.Module):
    """A net that registers a buffer in its first forward pass."""

    low: Tensor

    def __init__(self, *, is_awaited: bool) -> None:
        super().__init__()
        self.body = mlp()
        if is_awaited:
            self.register_buffer("low", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "low", None) is None:
            low = torch.full((x.shape[1],), 0.5, dtype=x.dtype)
            if hasattr(self, "low"):
                self.low = low
            else:
                self.register_buffer("low", low)
        output: Tensor = self.body(x - self.low)
        return output


@loop("new", "awaited", quick=True)
def late_buffer(session: Any, how: str) -> Numbers:
    """Register a buffer while training, and change it."""
    model, optimizer, loader = trio(session, lambda: Late(is_awaited=how == "awaited"))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if session.is_last:
                model.low.mul_(0.9)
    return [checksum(model)]
