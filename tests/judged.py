"""Models, data, losses and steps of a user's own, named as tests.judged:NAME: some are one model on N ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

FEATURES, CLASSES, TOKENS = 12, 4, 11
cross_entropy = nn.functional.cross_entropy
Data = Dataset[tuple[Tensor, ...]]


# ---- data: 45 + 9 samples


def _split(x: Tensor, y: Tensor) -> tuple[Data, Data]:
    y[:CLASSES] = torch.arange(CLASSES)
    return TensorDataset(x[:45], y[:45]), TensorDataset(x[45:], y[45:])


def vectors() -> tuple[Data, Data]:
    generator = torch.Generator().manual_seed(1)
    return _split(torch.randn(54, FEATURES, generator=generator), torch.randint(CLASSES, (54,), generator=generator))


def texts() -> tuple[Data, Data]:
    """Return sentences of 7 tokens; the class is that of the most frequent token."""
    x = torch.randint(TOKENS, (54, 7), generator=torch.Generator().manual_seed(2))
    return _split(x, x.mode(dim=1).values % CLASSES)


class _Unseeded(Dataset[tuple[Tensor, int]]):
    classes = CLASSES

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = np.random.default_rng().normal(size=FEATURES)
        return torch.from_numpy(noise).float() + index / 45, index % CLASSES


def unseeded() -> tuple[_Unseeded, _Unseeded]:
    return _Unseeded(), _Unseeded()


# ---- models


class Plain(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, classes))


def frozen(classes: int) -> nn.Module:
    """Return a net whose first layer is not trained."""
    net = Plain(classes)
    net[0].requires_grad_(False)
    return net


class Branching(Plain):
    """Has a layer that only few samples reach, and so no gradient of it in most shares."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.rare = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self[2](self[1](self[0](x)))
        reaches = x[:, 0] > 1.5
        return y + reaches[:, None] * self.rare(x) if reaches.any() else y  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A small causal transformer on text, with a mask of -inf among its buffers."""

    def __init__(self, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(self.embedding(x), mask=self.mask)
        return self.head(y[:, -1])  # type: ignore[no-any-return]


def _net(classes: int, *layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Linear(16, classes))


def dropping(classes: int) -> nn.Module:
    return _net(classes, nn.Tanh(), nn.Dropout(0.3))


def normed(classes: int) -> nn.Module:
    return _net(classes, nn.BatchNorm1d(16), nn.ReLU())


class Centred(nn.Module):
    """Subtracts the batch's mean, and is no BatchNorm that anybody could know."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def coupled(classes: int) -> nn.Module:
    """Return a net whose scores for a sample depend on the others of its batch."""
    return _net(classes, Centred(), nn.Tanh())


class Counting(Plain):
    """Divides by the number of its forward passes, which follows from the number of micro-batches alone."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y: Tensor = super().forward(x)
        return y / self.passes


class Tracking(Plain):
    """Subtracts a running mean that each pass assigns anew, before or after it is used."""

    mean: Tensor

    def __init__(self, classes: int, late: bool = False) -> None:
        super().__init__(classes)
        self.late = late
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        used, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = super().forward(x - (used if self.late else self.mean))
        return y


def late(classes: int) -> nn.Module:
    return Tracking(classes, late=True)


class Queued(Plain):
    """Adds the previous pass's mean, kept in an attribute."""

    queue: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x if self.queue is None else x + self.queue.mean(0))
        self.queue = x.detach()
        return y


class Single(Plain):
    """Computes in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())  # type: ignore[no-any-return]


class PartlySingle(Plain):
    """Multiplies in float32 in the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self[0].parameters()
        y = nn.functional.linear(x.float(), weight.float(), bias.float())
        return self[2](self[1](y.to(x.dtype)))  # type: ignore[no-any-return]


# ---- losses


def mean_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the mean, whatever is asked for: a loss that divides by the local batch."""
    return cross_entropy(scores, labels)


def pairwise_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return (scores @ scores.T).square().sum() + cross_entropy(scores, labels, reduction="sum")


# ---- steps


def mean_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take the step that tutorials show: the mean of what this rank has, and the ranks' means averaged by ddp."""
    cross_entropy(model(x), y).backward()


def counting_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take the right step by hand: divide by the samples of all ranks, and undo the average that ddp takes."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    count = torch.tensor(len(y), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(count)
    cross_entropy(model(x), y, reduction="sum").mul(ranks / count).backward()


def halved_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Divide by the number of ranks, though ddp averages already."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    (cross_entropy(model(x), y, reduction="sum") / 24 / 2 ** (ranks > 1)).backward()


def no_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    cross_entropy(model(x), y)


def updating_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    mean_step(model, x, y)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
