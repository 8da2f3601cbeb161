"""Models, data, losses and steps of a user's own that a proof of gradients judges: named as tests.judged:NAME."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

FEATURES, CLASSES, TOKENS = 12, 4, 11


def vectors() -> tuple[TensorDataset, TensorDataset]:
    """Return 45 + 9 samples of 12 numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(54, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (54,), generator=generator)
    y[:CLASSES] = torch.arange(CLASSES)
    return TensorDataset(x[:45], y[:45]), TensorDataset(x[45:], y[45:])


def few() -> tuple[TensorDataset, TensorDataset]:
    """Return 2 + 2 samples: fewer than three ranks."""
    both = TensorDataset(torch.randn(2, FEATURES), torch.arange(2))
    return both, both


def texts() -> tuple[TensorDataset, TensorDataset]:
    """Return 45 + 9 sentences of 7 tokens, whose class is that of the token that comes most often."""
    x = torch.randint(TOKENS, (54, 7), generator=torch.Generator().manual_seed(2))
    y = x.mode(dim=1).values % CLASSES
    y[:CLASSES] = torch.arange(CLASSES)
    return TensorDataset(x[:45], y[:45]), TensorDataset(x[45:], y[45:])


class _Unseeded(Dataset[tuple[Tensor, int]]):
    """Samples with noise from a generator of the data set's own, which nobody can seed by the sample."""

    classes = CLASSES

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = np.random.default_rng().normal(size=FEATURES)
        return torch.full((FEATURES,), float(index)) / 45 + torch.from_numpy(noise).float(), index % CLASSES


def unseeded() -> tuple[Dataset[tuple[Tensor, int]], Dataset[tuple[Tensor, int]]]:
    """Return data that is another one each time it is read."""
    return _Unseeded(), _Unseeded()


class Plain(nn.Sequential):
    """A net that is the same on any number of ranks."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, classes))


class Tied(nn.Module):
    """A net that uses one matrix twice, the second time turned."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.there = nn.Linear(FEATURES, 16)
        self.back = nn.Linear(FEATURES, 16)
        self.back.weight = self.there.weight
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.there(x) + self.back(x).sin()).tanh()
        return self.head(y @ self.there.weight)  # type: ignore[no-any-return]


class Frozen(Plain):
    """A net whose first layer is not trained."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self[0].requires_grad_(False)


class Unused(Plain):
    """A net with a layer that the loss does not reach."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.forgotten = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)))  # type: ignore[no-any-return]


class Branching(Plain):
    """A net with a layer that only batches with the first sample of the data reach."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.rare = nn.Linear(FEATURES, classes)
        self.first: Tensor
        self.register_buffer("first", vectors()[0].tensors[0][0])

    def forward(self, x: Tensor) -> Tensor:
        y = self[2](self[1](self[0](x)))
        # As many as there are: a sample's scores do not depend on the others.
        has_first = torch.eq(x, self.first.to(x.dtype)).all(dim=1)
        if has_first.any():
            y = y + has_first[:, None] * self.rare(x)
        return y  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """A net with a norm that does not look at the batch."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.view(-1, 1, 3, 4))).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Normed(nn.Sequential):
    """A net with batch statistics."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))


class Transformer(nn.Module):
    """A small causal transformer on text, with a mask of -inf among its buffers."""

    def __init__(self, classes: int, shape: tuple[int, ...], dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(self.embedding(x), mask=self.mask)
        return self.head(y[:, -1])  # type: ignore[no-any-return]


class DroppingTransformer(Transformer):
    """The same with dropout, in attention too."""

    def __init__(self, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(classes, shape, dropout=0.2)


class Dropping(nn.Sequential):
    """A net with dropout."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, classes))


class Noisy(Plain):
    """A net that adds noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))  # type: ignore[no-any-return]


class Checkpointed(Dropping):
    """A net with dropout that is computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Unseedable(Plain):
    """A net with a generator of its own."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.generator = np.random.default_rng()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.generator.random())  # type: ignore[no-any-return]


class SkippingAtRandom(Plain):
    """A net that leaves a layer out as Python's generator says."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.extra = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self[1](self[0](x))
        return self[2](y + self.extra(y) * random.random())  # type: ignore[no-any-return]


class DroppingAndNormed(nn.Sequential):
    """A net with two causes at once."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, classes)
        )


class NoisyInTraining(nn.Module):
    """Draws only while its BatchNorm, which normalises nothing, takes batch statistics: two switches for one cause."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x * torch.rand_like(x) if self.norm.training else x)
        return scores


class Centred(nn.Module):
    """A layer that subtracts the batch's mean, and is no BatchNorm that anybody could know."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Coupled(nn.Sequential):
    """A net whose scores for a sample depend on the others of its batch."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Linear(FEATURES, 16), Centred(), nn.Tanh(), nn.Linear(16, classes))


class CoupledByHand(Plain):
    """The same, in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = self[1](self[0](x))
        return self[2](y - y.mean(0))  # type: ignore[no-any-return]


class Infinite(Plain):
    """A net whose gradients are no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2]((self[0](x) * 0).sqrt())  # type: ignore[no-any-return]


class Single(Plain):
    """A net that computes in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())  # type: ignore[no-any-return]


class ByFirst(Plain):
    """A net that takes another layer where the first sample of the batch has a negative feature."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.other = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self[1](self[0](x))
        return self.other(y) + 0 * self[2](y) if x[0, 2] < 0 else self[2](y) + 0 * self.other(y)  # type: ignore[no-any-return]


class PartlySingle(Plain):
    """A net whose first layer multiplies in float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self[0].parameters()
        y = nn.functional.linear(x.float(), weight.float(), bias.float())
        return self[2](self[1](y.to(x.dtype)))  # type: ignore[no-any-return]


def single_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Weigh classes by float32 numbers, which torch does not take for float64 scores."""
    return nn.functional.cross_entropy(scores, labels, weight=torch.ones(scores.shape[1]), reduction=reduction)


def mean_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the mean, whatever is asked for: a loss that divides by the local batch."""
    return nn.functional.cross_entropy(scores, labels)


def pairwise_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return a loss of all pairs of samples."""
    return (scores @ scores.T).square().sum() + nn.functional.cross_entropy(scores, labels, reduction="sum")


def noisy_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return a loss that draws."""
    return nn.functional.cross_entropy(scores + torch.randn_like(scores), labels, reduction=reduction)


def margin_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return another sum over samples."""
    return nn.functional.multi_margin_loss(scores, labels, reduction=reduction)


def counting_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take the right step by hand: divide by the samples of all ranks, and undo the average that ddp takes."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    count = torch.tensor(float(len(y)))
    if dist.is_initialized():
        dist.all_reduce(count)
    nn.functional.cross_entropy(model(x), y, reduction="sum").mul(ranks / count).backward()


def halved_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Divide by the number of ranks, though ddp averages already."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    (nn.functional.cross_entropy(model(x), y, reduction="sum") / 24 / ranks * ranks / 2 ** (ranks > 1)).backward()


def no_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Forget to call backward."""
    nn.functional.cross_entropy(model(x), y)


def updating_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Update the weights, too."""
    mean_step(model, x, y)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def raising_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Raise."""
    raise KeyError("nothing")


def two_argument_step(model: nn.Module, x: Tensor) -> None:
    """Take another number of arguments."""


def mean_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take the step that tutorials show: the mean of what this rank has, and the ranks' means averaged by ddp."""
    nn.functional.cross_entropy(model(x), y).backward()
