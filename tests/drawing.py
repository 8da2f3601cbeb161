"""Training loops that draw random numbers, each as people write it: a loss for (x, y), of a net or of the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
WIDTH, TOKENS = 8, 5


class Case(NamedTuple):
    """A net, and its loss for x: (samples, tokens, width), y: (samples,)."""

    model: Callable[[], nn.Module]
    loss: Loss


class Net(nn.Module):
    """A net with weights for all cases, called by a function."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def score(self, x: Tensor) -> Any:
        return self.head(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)


def _classified(function: Callable[[Any, Tensor], Any]) -> Loss:
    """Return the loss of a net that is called by `function`, which returns (samples, …, width)."""

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(net.score(function(net, x)), y)

    return loss


def _dropped(net: Any, x: Tensor) -> Any:
    return functional.dropout(functional.relu(net.first(functional.dropout(x, 0.2))), 0.3)


def _flattened(net: Any, x: Tensor) -> Any:
    """Drop tokens that are flattened into the batch: (samples × tokens, width)."""
    return functional.dropout(net.first(x.flatten(0, 1)), 0.3).view_as(x)


def _joined(net: Any, x: Tensor) -> Any:
    """Drop two views of each sample, which are joined along the batch, as contrastive losses have them."""
    views = torch.cat([x, x + 0.1 * torch.randn_like(x)])
    first, second = functional.dropout(functional.dropout(net.first(views), 0.3).flatten(0, 1), 0.2).chunk(2)
    return (first * second).view_as(x)


def _attended(net: Any, x: Tensor) -> Any:
    heads = net.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).transpose(1, 2).flatten(2)


def _own_attention(net: Any, x: Tensor) -> Any:
    """Attend with batch and heads flattened: (samples × heads, tokens, tokens)."""
    heads = net.first(x).unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)
    weights = functional.dropout((heads @ heads.mT).softmax(-1), 0.3)
    return (weights @ heads).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


def _multi_head(net: Any, x: Tensor) -> Any:
    with_weights, _ = net.parts["attention"](x, x, x, need_weights=True)
    without, _ = net.parts["attention"](x, x, x, need_weights=False)
    return with_weights + without


def _sequence_first(net: Any, x: Tensor) -> Any:
    return net.parts["layer"](x.transpose(0, 1)).transpose(0, 1)


def _checkpointed(use_reentrant: bool) -> Callable[[Any, Tensor], Any]:
    def run(net: Any, x: Tensor) -> Any:
        def part(x: Tensor) -> Any:
            output = net.parts["layer"](x) + 0.1 * torch.randn_like(x)
            output = 0.7 * output + 0.3 * output[torch.randperm(len(x))]
            return net.parts["recurrent"](output)[0]

        return checkpoint(part, net.first(x), use_reentrant=use_reentrant)

    return run


def _noised(net: Any, x: Tensor) -> Any:
    """Draw by every family of operators, per sample and for all samples."""
    size, hidden = len(x), net.first(x)
    mean, deviation, rate = hidden, hidden.detach().abs() + 0.1, hidden.detach().sigmoid()
    hidden = hidden + torch.randn(x.shape) + torch.rand(size, 1, 1) + torch.rand_like(x) + torch.randn(7)[0]
    hidden = hidden + torch.randn(size, 1, WIDTH, out=torch.empty(0)) + torch.rand(size, 1, 1, out=torch.empty(0))
    hidden = hidden + torch.normal(mean.detach(), deviation) + torch.normal(0.0, deviation) + torch.normal(rate, 1.0)
    hidden = hidden + torch.normal(0.0, 1.0, (size, TOKENS, WIDTH)) + torch.empty_like(x).normal_(1, 2)
    hidden = hidden + torch.empty_like(x.transpose(1, 2)).uniform_(-1, 1).transpose(1, 2)
    hidden = hidden + torch.empty_like(x).exponential_(2.0) + torch.empty_like(x).log_normal_() * 0.1
    hidden = hidden + torch.bernoulli(rate) + torch.bernoulli(rate, 0.3) + torch.empty_like(x).bernoulli_(rate)
    hidden = hidden + torch.poisson(rate * 3) + torch.binomial(torch.full_like(rate, 4), rate)
    hidden = hidden + torch.distributions.Gamma(rate + 1, rate + 0.5).sample() * 0.1
    hidden = hidden + torch.distributions.Dirichlet(rate + 0.5).sample()
    hidden = (
        hidden + torch.multinomial(rate[:, 0], 2)[:, :1, None] + torch.multinomial(rate[:, 1], 3, True)[:, 2:, None]
    )
    hidden = hidden + torch.multinomial(torch.tensor([1.0, 2.0]), size, replacement=True)[:, None, None]
    hidden = hidden + torch.randint(0, 9, (size,))[:, None, None] + torch.randint_like(x, 4) + torch.randint(3, ())
    hidden = hidden + torch.empty(size, 1, 1, dtype=torch.long).random_(5) + torch.empty_like(x).geometric_(0.5) * 0.1
    hidden = hidden + functional.gumbel_softmax(hidden) + functional.rrelu(hidden, training=True)
    hidden = hidden + functional.alpha_dropout(hidden, 0.1, training=True)
    hidden = hidden + functional.dropout1d(hidden, 0.2) + functional.feature_alpha_dropout(hidden, 0.2, training=True)
    hidden = hidden * (torch.rand(TOKENS, 1) < 0.9) + torch.randn(7)[torch.randperm(7)[0]]
    hidden = functional.layer_norm(hidden, (WIDTH,))  # some draws are large
    return hidden + random.random() + np.random.rand() + torch.randn_like(net.head.weight)[0]


def _diffused(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Predict the noise at random timesteps."""
    noise, steps = torch.randn_like(x), torch.randint(0, 1000, (x.shape[0],))
    share = (steps / 1000)[:, None, None].to(x.dtype)
    return functional.mse_loss(net.first(functional.dropout((1 - share) * x + share * noise, 0.1)), noise)


def _mixed(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Mix inputs, cut some of their tokens, and mix features, with gradients through both."""
    weight, perm = np.random.beta(0.4, 0.4), torch.randperm(x.size(0))
    x = weight * x + (1 - weight) * x[perm, :]
    cut = torch.randperm(len(x))
    x = x.clone()
    x[:, 1:3] = x[cut, 1:3]
    hidden = torch.tanh(net.first(x))
    hidden = weight * hidden + (1 - weight) * hidden.index_select(0, perm) + torch.index_select(hidden, 0, cut) ** 2
    scores, other = net.score(hidden), y[perm]
    return weight * functional.cross_entropy(scores, y) + (1 - weight) * functional.cross_entropy(scores, other)


def _own_generator(net: Any, x: Tensor, y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    perm, hidden = torch.randperm(len(x), generator=generator), net.first(x + torch.randn(x.shape, generator=generator))
    hidden = hidden + torch.empty_like(x).uniform_(generator=generator) * torch.rand(1, generator=generator)
    hidden = hidden + torch.normal(0.0, hidden.detach().abs(), generator=generator)
    return functional.cross_entropy(net.score(hidden + hidden[perm]), y)


def _attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)


def _layer(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=batch_first)


def _recurrent() -> nn.Module:
    return nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)


def _checkpointed_net() -> Net:
    return Net(layer=_layer(), recurrent=_recurrent())


CASES: dict[str, Case] = {
    "dropout": Case(Net, _classified(_dropped)),
    "flattened": Case(Net, _classified(_flattened)),
    "joined": Case(Net, _classified(_joined)),
    "attention": Case(Net, _classified(_attended)),
    "own attention": Case(Net, _classified(_own_attention)),
    "multi-head": Case(lambda: Net(attention=_attention()), _classified(_multi_head)),
    "transformer": Case(lambda: Net(layer=_layer()), _classified(lambda net, x: net.parts["layer"](x))),
    "sequence first": Case(lambda: Net(layer=_layer(batch_first=False)), _classified(_sequence_first)),
    "recurrent": Case(lambda: Net(layer=_recurrent()), _classified(lambda net, x: net.parts["layer"](x)[0])),
    "noise": Case(Net, _classified(_noised)),
    "diffusion": Case(Net, _diffused),
    "mixup": Case(Net, _mixed),
    "own generator": Case(Net, _own_generator),
    "checkpoint": Case(_checkpointed_net, _classified(_checkpointed(False))),
    "reentrant checkpoint": Case(_checkpointed_net, _classified(_checkpointed(True))),
}
