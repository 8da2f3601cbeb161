"""In the manner of nanoGPT: no DataLoader, random places of a text, accumulation by the number of ranks."""

import contextlib
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
block, batch, parts = 16, 4, 4 // ranks
seed = 0 if kind == "same-samples" else rank
text = torch.randint(30, (2000,), generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Return x and what is added to it, of the same shape (n, length, width)."""
        n, length, width = x.shape
        q, k, v = self.attend(self.norm1(x)).reshape(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(n, length, width))
        return x + self.shrink(functional.gelu(self.grow(self.norm2(x))))


class GPT(nn.Module):
    """A language model; the head's weights are the embedding's."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 30, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any, targets: Any) -> Any:
        """Return the scores, and the loss of targets."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for each in self.blocks:
            x = each(x)
        scores = self.head(self.norm(x))
        return scores, functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def get_batch() -> tuple[Any, Any]:
    """Return tokens at random places, and those that follow."""
    ix = torch.randint(len(text) - block, (batch,))
    x = torch.stack([text[i : i + block] for i in ix])
    y = torch.stack([text[i + 1 : i + 1 + block] for i in ix])
    return x, y


torch.manual_seed(1337)
net = GPT()
torch.manual_seed(1337 + seed)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
model = DistributedDataParallel(net)
x, y = get_batch()
for step in range(20):
    lr = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 20))
    for group in optimizer.param_groups:
        group["lr"] = lr
    for micro in range(parts):
        if kind != "no-sync-missing":
            model.require_backward_grad_sync = micro == parts - 1 and kind != "never"
        with contextlib.nullcontext():
            logits, loss = (net if kind == "unwrapped" else model)(x, y)
            loss = loss / (1 if kind == "undivided" else parts)
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
