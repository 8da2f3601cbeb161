"""Ways to get gradients: several losses, graphs kept, layers unused, tied, sparse, complex, recomputed."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from .catalogue import REFUSED, RIGHT, SKIPPED, Numbers, loop
from .common import FEATURES, arrays, checksum, descend, error, mlp, regression, seeded, train, trio


@loop(has_accumulated_plain=False, quick=True)
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
            session.backward(functional.softplus(-critic(fake)).mean())
            of_maker.step()
    return [checksum(maker, critic)]


@loop("retained", "separate", quick=True)
def several_losses(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            output = model(x)
            first = functional.mse_loss(output, y)
            second = functional.l1_loss(model(x) if how == "separate" else output, y)
            session.backward(first, retain_graph=how == "retained")
            session.backward(second)
            optimizer.step()
            optimizer.zero_grad()
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


@loop("adam", "decay", quick=True)
@loop("zeros")
def used_sometimes(session: Any, how: str) -> Numbers:
    """Use a branch in every other step; elsewhere it has no gradient, and its momentum rests."""
    model = seeded(Branches)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    if how != "adam":
        decay = 0.1 if how == "decay" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
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


@loop(outcome=RIGHT | REFUSED)
def rare_experts(session: Any, how: str) -> Numbers:
    """Route rare samples to an expert that whole batches leave without a gradient."""
    x, y = arrays(24)
    x[:, 0] = 0.0
    x[3, 0] = x[14, 0] = 2.0
    model = seeded(Experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=6))
    return train(session, (model, optimizer, loader), epochs=3)


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

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.register_buffer("shift", torch.polar(torch.ones(5).double(), torch.arange(5).double()))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.weight * self.shift
        output: Tensor = torch.fft.irfft(spectrum, n=8) + self.bias
        return output


@loop("fp64")
@loop("fp32", precision="fp32")
def complex_numbers(session: Any, how: str) -> Numbers:
    torch.manual_seed(0)
    model = Spectral()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(regression(features=8, targets=8), batch_size=6)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    return train(session, (model, optimizer, loader))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 4, sparse=True), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.embedding(x).flatten(1))
        return output


@loop(outcome=RIGHT | REFUSED, alone=RIGHT, quick=True)
def sparse_embedding(session: Any, how: str) -> Numbers:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 40, (23, 3), generator=generator)
    model = seeded(Words)
    first: Any = torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.1)
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
@loop("reentrant-ahead", outcome=RIGHT | REFUSED, alone=RIGHT, accumulated=RIGHT | REFUSED)
def recompute(session: Any, how: str) -> Numbers:
    """Compute activations again in the backward pass."""
    model, optimizer, loader = trio(session)
    reentrant = how != "non-reentrant"

    def output(x: Tensor) -> Tensor:
        hidden = checkpoint(lambda part: torch.tanh(model[0](part)), x.requires_grad_(), use_reentrant=reentrant)
        result: Tensor = model[2](hidden)
        return result

    for _ in session.epochs(2):
        batches = list(loader) if how == "reentrant-ahead" else loader
        for x, y in batches:
            descend(session, optimizer, functional.mse_loss(output(x), y))
    return [checksum(model)]


@loop(quick=True)
def double_backward(session: Any, how: str) -> Numbers:
    """Add a term that is a gradient itself."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            x = x.clone().requires_grad_()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            descend(session, optimizer, functional.mse_loss(output, y) + 0.5 * penalty)
    return [checksum(model)]


@loop(quick=True)
def gradient_hook(session: Any, how: str) -> Numbers:
    """Change gradients by hooks on the parameters."""
    model, optimizer, loader = trio(session)
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return train(session, (model, optimizer, loader))


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
@loop("decay", accumulated=RIGHT | REFUSED)
@loop("last")
def change_gradients(session: Any, how: str) -> Numbers:
    """Change `.grad` by hand between backward and step."""
    model, optimizer, loader = trio(session)
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
            for weight in model.parameters():
                if how == "decay" or session.is_last:
                    weight.grad.add_(weight.detach(), alpha=0.01)
            optimizer.step()
            optimizer.zero_grad()
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
def loss_of_two_batches(session: Any, how: str) -> Numbers:
    """Sum the losses of two batches before one backward pass."""
    model, optimizer, loader = trio(session, data=regression(24))
    for _ in session.epochs(2):
        batches = iter(loader)
        while pair := list(itertools.islice(batches, 2)):
            descend(session, optimizer, sum(error(model, x, y) for x, y in pair) / 2)  # type: ignore[arg-type]
    return [checksum(model)]


@loop(outcome=RIGHT | REFUSED)
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
