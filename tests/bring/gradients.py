"""Ways to get gradients: several losses, graphs kept, layers unused, tied, sparse, complex, recomputed."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, mlp, regression, seeded, trio


@loop(has_accumulated_plain=False, quick=True)
@loop("frozen-critic", has_accumulated_plain=False)
def gan(session: Any, how: str) -> Numbers:
    """Train two nets against each other, with three backward passes a batch."""
    maker, critic = seeded(lambda: mlp(targets=FEATURES)), seeded(mlp)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
    loader = DataLoader(regression(), batch_size=6)
    maker, critic, of_maker, of_critic, loader = session.prepare(maker, critic, of_maker, of_critic, loader)
    for _ in session.epochs(3):
        for x, _ in loader:
            of_critic.zero_grad()
            session.backward(functional.softplus(-critic(x)).mean())
            fake = maker(x.flip(1))
            session.backward(functional.softplus(critic(fake.detach())).mean())
            of_critic.step()
            of_maker.zero_grad()
            if how == "frozen-critic":
                critic.requires_grad_(False)
            session.backward(functional.softplus(-critic(fake)).mean())
            critic.requires_grad_(True)
            of_maker.step()
    return [checksum(maker, critic)]


@loop(accumulated=SKIPPED, saves_by_epoch=True)
def critic_steps(session: Any, how: str) -> Numbers:
    """Step the generator in each third batch only."""
    maker, critic = seeded(lambda: mlp(targets=FEATURES)), seeded(mlp)
    of_maker, of_critic = (torch.optim.RMSprop(net.parameters(), lr=0.01) for net in (maker, critic))
    loader = DataLoader(regression(), batch_size=6)
    maker, critic, of_maker, of_critic, loader = session.prepare(maker, critic, of_maker, of_critic, loader)
    for _ in session.epochs(3):
        for at, (x, _) in enumerate(loader):
            fake = maker(x.flip(1))
            descend(session, of_critic, critic(fake.detach()).mean() - critic(x).mean())
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-0.3, 0.3)
            if at % 3 == 2:
                of_maker.zero_grad()
                session.backward(-critic(fake).mean())
                of_maker.step()
                of_critic.zero_grad()
    return [checksum(maker, critic)]


@loop("retained", "separate", "summed", "weighted", quick=True)
def several_losses(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            output = model(x)
            first = functional.mse_loss(output, y)
            second = functional.l1_loss(model(x) if how == "separate" else output, y)
            if how == "summed":
                session.backward(first + second)
            elif how == "weighted":
                session.backward(0.3 * first + second)
            else:
                session.backward(first, **({} if how == "separate" else {"retain_graph": True}))
                session.backward(second)
            optimizer.step()
            optimizer.zero_grad()
    return [checksum(model)]


@loop("groups", "requires-grad")
@loop("added-later", resumed=RIGHT | REFUSED)
def unfreeze(session: Any, how: str) -> Numbers:
    """Train the head first, and all layers from the second epoch."""
    model = seeded(mlp)
    body, head = model[0], model[2]
    body.requires_grad_(False)
    groups = [{"params": list(head.parameters())}]
    if how == "groups":
        groups.append({"params": list(body.parameters()), "lr": 0.02})  # type: ignore[dict-item]
    parameters: Any = model.parameters() if how == "requires-grad" else groups
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    for epoch in session.epochs(3):
        if epoch >= 1:
            body.requires_grad_(True)
            if how == "added-later" and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.02})
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


class Branches(nn.Module):
    """A stem, a branch that only some steps use, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, *, uses_branch: bool) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        output: Tensor = self.head(torch.tanh(self.branch(hidden)) if uses_branch else hidden)
        return output


@loop("sgd", "adam", "decay", quick=True)
@loop("zeros")
def used_sometimes(session: Any, how: str) -> Numbers:
    """Use a branch in every other step; elsewhere it has no gradient, and its momentum rests."""
    model = seeded(Branches)
    makers: dict[str, Any] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
    settings = {"decay": {"weight_decay": 0.1, "momentum": 0.9}, "sgd": {"momentum": 0.9}, "zeros": {"momentum": 0.9}}
    optimizer = makers.get(how, torch.optim.SGD)(model.parameters(), lr=0.05, **settings.get(how, {}))
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    for _ in session.epochs(3):
        for x, y in loader:
            loss = functional.mse_loss(model(x, uses_branch=session.step % 2 == 1), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=how != "zeros")
    return [checksum(model)]


class Experts(nn.Module):
    """A net that sends each sample to one of three experts, by its first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(FEATURES, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        route = torch.bucketize(x[:, 0], torch.tensor([-0.5, 0.5], dtype=x.dtype))
        output = x.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            if (route == number).any():
                output = output.index_add(0, (route == number).nonzero()[:, 0], expert(x[route == number]))
        return output


@loop()
def experts(session: Any, how: str) -> Numbers:
    """Route samples to experts; a rank whose share has none for one computes no gradient of it."""
    model, optimizer, loader = trio(session, Experts, momentum=0.0)
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("adam", "momentum", outcome=RIGHT | REFUSED)
def rare_experts(session: Any, how: str) -> Numbers:
    """Route rare samples to an expert that whole batches leave without a gradient."""
    x, y = arrays(24)
    x[:, 0] = 0.0
    x[3, 0] = x[14, 0] = 2.0
    model = seeded(Experts)
    made: Any = {
        "adam": torch.optim.Adam(model.parameters(), lr=0.05),
        "momentum": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    }[how]
    model, optimizer, loader = session.prepare(model, made, DataLoader(TensorDataset(x, y), batch_size=6))
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder transposed."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        if is_shared:
            self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.decoder(torch.tanh(self.encoder(x)))
        return output


@loop("weight", "module-twice", quick=True)
def tied(session: Any, how: str) -> Numbers:
    """Share a weight between two layers, or use one layer twice."""

    def twice() -> nn.Module:
        layer = nn.Linear(FEATURES, FEATURES)
        return nn.Sequential(layer, nn.Tanh(), layer)

    model, optimizer, loader = trio(session, (lambda: Tied(is_shared=True)) if how == "weight" else twice)
    for _ in session.epochs(2):
        for x, _ in loader:
            descend(session, optimizer, error(model, x, x.flip(1)))
    return [checksum(model)]


class Spectral(nn.Module):
    """A layer in the Fourier domain, with a complex parameter and a complex buffer."""

    shift: Tensor

    def __init__(self, *, has_buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.has_buffer = has_buffer
        if has_buffer:
            self.register_buffer("shift", torch.polar(torch.ones(5).double(), torch.arange(5).double()))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.weight
        spectrum = spectrum * self.shift if self.has_buffer else spectrum
        output: Tensor = torch.fft.irfft(spectrum, n=8) + self.bias
        return output


@loop("parameter", "buffer")
@loop("parameter-fp32", "buffer-fp32", precision="fp32")
def complex_numbers(session: Any, how: str) -> Numbers:
    torch.manual_seed(0)
    model = Spectral(has_buffer=how.startswith("buffer"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(regression(features=8, targets=8), batch_size=6)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 4, sparse=True), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.embedding(x).flatten(1))
        return output


@loop("sgd", outcome=RIGHT | REFUSED, alone=RIGHT, quick=True)
@loop("sparse-adam", "adagrad", outcome=RIGHT | REFUSED, alone=RIGHT)
def sparse_embedding(session: Any, how: str) -> Numbers:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 40, (23, 3), generator=generator)
    model = seeded(Words)
    makers: dict[str, Any] = {"sgd": torch.optim.SGD, "sparse-adam": torch.optim.SparseAdam}
    first = makers.get(how, torch.optim.Adagrad)(list(model.embedding.parameters()), lr=0.1)
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(words, arrays()[1]), batch_size=6)
    model, first, second, loader = session.prepare(model, first, second, loader)
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    return [checksum(model)]


@loop("reentrant", "non-reentrant", quick=True)
@loop("reentrant-twice")
@loop("reentrant-ahead", outcome=RIGHT | REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED)
def recompute(session: Any, how: str) -> Numbers:
    """Compute activations again in the backward pass."""
    model, optimizer, loader = trio(session)
    reentrant = how != "non-reentrant"

    def output(x: Tensor) -> Tensor:
        hidden = checkpoint(lambda part: torch.tanh(model[0](part)), x.requires_grad_(), use_reentrant=reentrant)
        if how == "reentrant-twice":
            hidden = checkpoint(torch.tanh, hidden, use_reentrant=True)
        result: Tensor = model[2](hidden)
        return result

    for _ in session.epochs(2):
        batches = list(loader) if how == "reentrant-ahead" else loader
        for x, y in batches:
            descend(session, optimizer, functional.mse_loss(output(x), y))
    return [checksum(model)]


@loop("penalty", "gradient-of-input", quick=True)
@loop("norm")
def double_backward(session: Any, how: str) -> Numbers:
    """Add a term that is a gradient itself."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            x = x.clone().requires_grad_()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean() if how == "penalty" else slope.square().mean()
            loss = penalty if how == "norm" else functional.mse_loss(output, y) + 0.5 * penalty
            if how == "norm":
                loss = loss + functional.mse_loss(output, y)
            descend(session, optimizer, loss)
    return [checksum(model)]


@loop()
def physics_informed(session: Any, how: str) -> Numbers:
    """Fit a differential equation: second derivatives of the net by its input."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            x = x.clone().requires_grad_()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            residual = curve[:, 0:1] + slope[:, 1:2] - y
            descend(session, optimizer, residual.square().mean() + functional.mse_loss(output, y))
    return [checksum(model)]


@loop("scale", "mask")
@loop("clamp", quick=True)
def gradient_hook(session: Any, how: str) -> Numbers:
    """Change gradients by hooks on the parameters."""
    model, optimizer, loader = trio(session)
    for weight in model.parameters():
        if how == "scale":
            weight.register_hook(lambda gradient: gradient * 0.5)
        elif how == "mask":
            weight.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))
        else:
            weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop(quick=True)
def step_within_backward(session: Any, how: str) -> Numbers:
    """Step an optimizer a parameter in a hook after its gradient, and free that."""
    model = seeded(mlp)
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
    model, *optimizers, loader = session.prepare(model, *optimizers, DataLoader(regression(), batch_size=6))
    for weight, optimizer in zip(model.parameters(), optimizers, strict=True):

        def step(weight: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
    return [checksum(model)]


# Gradients are None before a global batch's last micro-batch: the user's own line fails, with a note.
@loop("decay", "sign", "centre", accumulated=RIGHT | REFUSED)
@loop("last", "noise")
def change_gradients(session: Any, how: str) -> Numbers:
    """Change `.grad` by hand between backward and step."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
            for weight in model.parameters():
                if how == "decay":
                    weight.grad.add_(weight.detach(), alpha=0.01)
                elif how == "sign":
                    weight.grad = 0.1 * weight.grad.sign()
                elif how == "centre":
                    weight.grad.sub_(weight.grad.mean())
                elif session.is_last:
                    scale = torch.arange(1.0, weight.numel() + 1, dtype=weight.dtype).view_as(weight)
                    weight.grad.mul_(1 + 0.1 * torch.cos(scale)) if how == "noise" else weight.grad.add_(0.01 * weight)
            optimizer.step()
            optimizer.zero_grad()
    return [checksum(model)]


@loop(outcome=REFUSED)
def loss_backward(session: Any, how: str) -> Numbers:
    """Call `loss.backward()` in place of `session.backward(loss)`."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            error(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [checksum(model)]


@loop("vector", "detached", "number", outcome=REFUSED, has_plain=False)
def no_loss(session: Any, how: str) -> Numbers:
    """Give something that is no loss."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            loss: Any = (model(x) - y).square()
            loss = {"vector": loss, "detached": loss.detach().mean(), "number": loss.mean().item()}[how]
            descend(session, optimizer, loss)
    return [checksum(model)]


@loop("orthogonal", "weight-norm")
@loop("spectral-norm", accumulated=RIGHT | TOLD, has_accumulated_plain=False)
def parametrized(session: Any, how: str) -> Numbers:
    """Train a layer whose weight is computed from other parameters."""

    def make() -> nn.Module:
        layer = nn.Linear(FEATURES, FEATURES)
        parametrize: Any = {
            "orthogonal": parametrizations.orthogonal,
            "weight-norm": parametrizations.weight_norm,
            "spectral-norm": parametrizations.spectral_norm,
        }[how]
        return nn.Sequential(parametrize(layer), nn.Tanh(), nn.Linear(FEATURES, 1))

    model, optimizer, loader = trio(session, make)
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop()
def truncated_bptt(session: Any, how: str) -> Numbers:
    """Carry a recurrent state over pieces of a sequence, with a step after each piece."""
    generator = torch.Generator().manual_seed(1)
    series = torch.randn(23, 6, 2, generator=generator, dtype=torch.float64)
    model = seeded(lambda: nn.GRU(2, 2, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(series), batch_size=6))
    for _ in session.epochs(2):
        for (x,) in loader:
            state, losses = None, []
            for piece in x.split(2, dim=1):
                output, state = model(piece, state)
                state = state.detach()
                losses.append(output.square().mean())
            descend(session, optimizer, torch.stack(losses).sum())
    return [checksum(model)]


@loop(outcome=RIGHT | REFUSED, accumulated=SKIPPED)
@loop("islice", outcome=RIGHT | REFUSED, accumulated=SKIPPED)
def loss_of_two_batches(session: Any, how: str) -> Numbers:
    """Sum the losses of two batches before one backward pass."""
    model, optimizer, loader = trio(session, data=regression(24))
    for _ in session.epochs(2):
        batches = iter(loader)
        if how == "islice":
            while pair := list(itertools.islice(batches, 2)):
                descend(session, optimizer, sum(error(model, x, y) for x, y in pair) / 2)  # type: ignore[arg-type]
        else:
            pending: Any = None
            for at, (x, y) in enumerate(batches):
                loss = error(model, x, y)
                pending = loss if pending is None else pending + loss
                if at % 2:
                    descend(session, optimizer, pending)
                    pending = None
    return [checksum(model)]


@loop("kept", outcome=RIGHT | REFUSED)
def backward_of_the_batch_before(session: Any, how: str) -> Numbers:
    """Run a batch's backward pass after the next batch's forward pass, to overlap them."""
    model, optimizer, loader = trio(session, data=regression(24), momentum=0.0)
    for _ in session.epochs(2):
        before: Any = None
        for x, y in loader:
            loss = error(model, x, y)
            if before is not None:
                session.backward(before)
            before = loss
        session.backward(before)
        optimizer.step()
        optimizer.zero_grad()
    return [checksum(model)]
