"""Models: batch statistics, buffers that forward passes change, saved state of other forms, several models."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, mlp, regression, seeded, trio


def train(session: Any, trained: Any, epochs: int = 2) -> Numbers:
    model, optimizer, loader = trained
    for _ in session.epochs(epochs):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("batch", has_accumulated_plain=False, quick=True)
@loop("batch-cumulative", "batch-frozen", "batch-2d", has_accumulated_plain=False)
@loop("layer", "group")
@loop("batch-untracked", has_plain=False, outcome=RIGHT | TOLD)
@loop("batch-eval-mode", has_accumulated_plain=False, outcome=RIGHT | TOLD)
@loop("instance", "instance-tracked", outcome=RIGHT | TOLD, has_accumulated_plain=False)
def normalisation(session: Any, how: str) -> Numbers:
    """Train a net with a normalisation layer."""
    makers: dict[str, Any] = {
        "batch": lambda: nn.BatchNorm1d(3),
        "batch-cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
        "batch-frozen": lambda: nn.BatchNorm1d(3).eval(),
        "batch-2d": lambda: nn.Sequential(nn.Unflatten(2, (2, 3)), nn.BatchNorm2d(3), nn.Flatten(2)),
        "batch-untracked": lambda: nn.BatchNorm1d(3, track_running_stats=False),
        "batch-eval-mode": lambda: nn.BatchNorm1d(3),
        "layer": lambda: nn.LayerNorm([3, 6]),
        "group": lambda: nn.GroupNorm(3, 3),
        "instance": lambda: nn.InstanceNorm1d(3, affine=True),
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
        for x, y in session.evaluating(loader if how == "batch-eval-mode" else DataLoader(regression_images(), 4)):
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

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(FEATURES, 4), nn.Linear(4, 1), how
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            mean = hidden.detach().mean(0)
            if self.how == "assigned":
                self.centre = 0.9 * self.centre + 0.1 * mean
            else:
                self.centre.mul_(0.9).add_(mean, alpha=0.1)
        output: Tensor = self.last(torch.tanh(hidden - self.centre))
        return output


@loop("in-place", outcome=RIGHT | TOLD | REFUSED, alone=RIGHT | TOLD, resumed=RIGHT | TOLD, quick=True)
@loop("assigned", outcome=RIGHT | TOLD | REFUSED, alone=RIGHT | TOLD, resumed=RIGHT | TOLD)
def running_centre(session: Any, how: str) -> Numbers:
    """Update a buffer by the share's mean in forward passes."""
    return train(session, trio(session, lambda: Centred(how)))


class Counting(nn.Module):
    """A net whose output depends on how often it was called."""

    calls_so_far: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.calls, self.how = nn.Linear(FEATURES, 1), 0, how
        self.register_buffer("calls_so_far", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.calls_so_far += 1
        count = self.calls_so_far.item() if self.how == "buffer" else self.calls
        output: Tensor = self.layer(x) * (1 - 0.5**count)
        return output


@loop("buffer", has_accumulated_plain=False)
@loop("attribute", has_accumulated_plain=False, resumed=SKIPPED)
def forward_counter(session: Any, how: str) -> Numbers:
    """Anneal by the number of forward passes."""
    return train(session, trio(session, lambda: Counting(how)))


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


class Growing(Copies):
    """A net with a buffer that takes its shape from the first batch."""

    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if not self.low.numel():
            self.low = torch.full((4,), 0.1, dtype=hidden.dtype)
        output: Tensor = self.last(torch.tanh(hidden) + self.low)
        return output

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.low = torch.zeros_like(state[prefix + "low"])
        super()._load_from_state_dict(state, prefix, *rest)


@loop("hook", "copies", quick=True)
@loop("renamed", "grows")
@loop("non-persistent", has_accumulated_plain=False, resumed=RIGHT | TOLD | REFUSED)
def saved_in_another_form(session: Any, how: str) -> Numbers:
    """Train a model whose saved state has another form than its tensors."""

    def temporary() -> nn.Module:
        model = Counting("buffer")
        model.register_buffer("calls_so_far", torch.zeros((), dtype=torch.long), persistent=False)
        return model

    makers: dict[str, Any] = {
        "hook": lambda: nn.Sequential(Transposed(FEATURES, 4), nn.Tanh(), Transposed(4, 1)),
        "copies": Copies,
        "renamed": Renamed,
        "grows": Growing,
        "non-persistent": temporary,
    }
    return train(session, trio(session, makers[how]), epochs=3)


class Scaled(nn.Linear):
    """A layer that keeps a number beside its tensors."""

    def __init__(self, inputs: int, outputs: int, how: str) -> None:
        super().__init__(inputs, outputs)
        self.scale, self.how = 1.0, how

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = 0.9 * self.scale + 0.2
        return super().forward(x) * self.scale

    def get_extra_state(self) -> Any:
        """Return the number in one of several forms."""
        return {
            "dict": {"scale": self.scale},
            "tensor": torch.tensor(self.scale, dtype=torch.float64),
            "float": self.scale,
        }[self.how]

    def set_extra_state(self, state: Any) -> None:
        """Take the number back."""
        self.scale = state["scale"] if self.how == "dict" else float(state)


@loop("dict", "tensor", "float", has_accumulated_plain=False)
def extra_state(session: Any, how: str) -> Numbers:
    """Save state by `get_extra_state`."""
    trained = trio(session, lambda: nn.Sequential(Scaled(FEATURES, 4, how=how), nn.Tanh(), nn.Linear(4, 1)))
    return [*train(session, trained, epochs=3), trained[0][0].scale]


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
@loop("container")
@loop("kept-apart")
def several_models(session: Any, how: str) -> Numbers:
    """Train an encoder and a decoder that are prepared apart."""
    encoder, decoder = seeded(lambda: nn.Linear(FEATURES, 3)), seeded(lambda: nn.Linear(3, FEATURES))
    if how == "container":
        both = session.prepare(nn.ModuleDict({"encoder": encoder, "decoder": decoder}))
        encoder, decoder = both["encoder"], both["decoder"]
        optimizers = [torch.optim.SGD(both.parameters(), lr=0.1)]
    else:
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
                if how != "kept-apart" or (number + epoch) % 2 == 0:
                    optimizer.step()
                optimizer.zero_grad()
    return [checksum(encoder, decoder)]


@dataclass
class Output:
    prediction: Tensor
    hidden: Tensor


class Outputs(nn.Module):
    """A net with an output of several parts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(FEATURES, 4), nn.Linear(4, 1), how

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        prediction = self.last(hidden)
        parts = {"dict": {"prediction": prediction, "hidden": hidden}, "list": [prediction, hidden]}
        return parts.get(self.how, Output(prediction, hidden))


@loop("list", "dict", "dataclass")
@loop("list-ahead", "dict-ahead")
def output_of_parts(session: Any, how: str) -> Numbers:
    kind, _, reads_ahead = how.partition("-")
    model, optimizer, loader = trio(session, lambda: Outputs(kind))
    for _ in session.epochs(2):
        for x, y in list(loader) if reads_ahead else loader:
            output = model(x)
            if kind == "list":
                prediction, hidden = output
            elif kind == "dict":
                prediction, hidden = output["prediction"], output["hidden"]
            else:
                prediction, hidden = output.prediction, output.hidden
            descend(session, optimizer, functional.mse_loss(prediction, y) + 0.1 * hidden.square().mean())
    return [checksum(model)]


@loop("features", "keywords", "keywords-ahead")
def forward_hooks(session: Any, how: str) -> Numbers:
    """Take features by a forward hook, or give inputs by keyword."""
    model, optimizer, loader = trio(session)
    features: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda _module, _inputs, output: features.append(output))
    for _ in session.epochs(2):
        for x, y in list(loader) if how.endswith("ahead") else loader:
            features.clear()
            output = model(input=x) if how.startswith("keywords") else model(x)
            descend(session, optimizer, functional.mse_loss(output, y) + 0.1 * features[0].square().mean())
    handle.remove()
    return [checksum(model)]


@loop("materialised")
@loop("prepared-empty", has_plain=False, outcome=REFUSED)
def lazy_layers(session: Any, how: str) -> Numbers:
    """Train layers that take their shape from the first batch."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)).double()
    if how == "materialised":
        model(arrays()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    return train(session, (model, optimizer, loader))


@loop("functional-call", "vmap", "jit")
def functional_model(session: Any, how: str) -> Numbers:
    """Call the model by `torch.func`, or traced."""
    model, optimizer, loader = trio(session)
    traced: Any = torch.jit.trace(model, arrays()[0]) if how == "jit" else None
    for _ in session.epochs(2):
        for x, y in loader:
            weights = dict(model.named_parameters())
            if how == "functional-call":
                output = torch.func.functional_call(model, weights, (x,))
            elif how == "vmap":
                call = partial(torch.func.functional_call, model, weights)
                output = torch.func.vmap(lambda row, call=call: call((row,)))(x)
            else:
                output = traced(x)
            descend(session, optimizer, functional.mse_loss(output, y))
    return [checksum(model)]


@loop("buffers", has_accumulated_plain=False)
def average_of_buffers(session: Any, how: str) -> Numbers:
    """Average BatchNorm's statistics beside the weights."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    model, optimizer, loader = trio(session, make)
    average = session.prepare(AveragedModel(model, use_buffers=True))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            average.update_parameters(model)
    return [checksum(model, average), int(average.n_averaged)]


@loop("reset", "pruned", saves_by_epoch=True)
@loop("replaced-layer", outcome=RIGHT | REFUSED, alone=RIGHT | REFUSED, resumed=SKIPPED)
def change_model_midway(session: Any, how: str) -> Numbers:
    """Change weights or layers between epochs."""
    model, optimizer, loader = trio(session, momentum=0.0)
    for epoch in session.epochs(3):
        if epoch == 1:
            with torch.no_grad():
                if how == "reset":
                    model[2].weight.copy_(torch.linspace(-1, 1, 4).double()[None])
                elif how == "pruned":
                    model[0].weight[model[0].weight.abs() < 0.2] = 0
            if how == "replaced-layer":
                model[2] = seeded(lambda: nn.Linear(4, 1))
                optimizer.add_param_group({"params": list(model[2].parameters())})
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("copy", "state")
def checkpoint_by_hand(session: Any, how: str) -> Numbers:
    """Copy the model, or save and load its state, between epochs."""
    model, optimizer, loader = trio(session)
    total = 0.0
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        if how == "copy":
            total += checksum(copy.deepcopy(model))
        else:
            fresh = mlp().double()
            fresh.load_state_dict(model.state_dict())
            total += checksum(fresh)
    return [checksum(model), total]


@loop("no-parameters", outcome=REFUSED, alone=REFUSED | RIGHT)
@loop("missing-model", outcome=REFUSED, alone=REFUSED | RIGHT)
@loop("other-model", outcome=REFUSED)
def unprepared_model(session: Any, how: str) -> Numbers:
    """Train a model that was not prepared."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(regression(), batch_size=6)
    if how == "missing-model":
        optimizer, loader = session.prepare(optimizer, loader)
    elif how == "no-parameters":
        _, loader = session.prepare(nn.Flatten(), loader)
    else:
        _, optimizer, loader = session.prepare(seeded(mlp), optimizer, loader)
    return train(session, (model, optimizer, loader))


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
