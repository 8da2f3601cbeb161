"""Train a two-layer GPT on sentences of different lengths; the loss is the mean over letters."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep

TEXT = """
The harbour wakes before the town does. Ropes creak, gulls argue, and the first boat slides out without a sound. Nobody
on the quay looks up. An old man counts crates. A boy counts the old man's mistakes. At six the bell of the customs
house rings, twice, because the second stroke has been stuck since the war.

When the fog comes in, the lighthouse keeper makes coffee for two. He has lived alone for eleven years. The second cup
stands by the window, grows cold, and is poured into the sea. He says that it keeps the ships polite. No captain has
ever complained about it.

In winter the market moves indoors. The fish lie on ice that nobody had to make. Prices are chalked on slate, wiped
with a sleeve, and chalked again. Whoever buys late buys well. Whoever buys early eats. Children learn arithmetic there
faster than at school, and forget it there too.

The ferry has three passengers on Mondays: a teacher, a dog, and somebody who is always asleep. The teacher marks
papers. The dog watches the water. Once, in spring, all three were awake at the same time, and the pilot wrote it down.
It is the shortest entry in his log. It is the only one that he reads to his guests.
"""
SENTENCES = [sentence.strip() + "." for sentence in " ".join(TEXT.split()).split(".") if sentence]
LETTERS = sorted(set(TEXT))
WIDTH, HEADS, LONGEST = 48, 4, 128
NONE = -100


def encode(sentences: list[str]) -> tuple[Tensor, Tensor]:
    """Return letters and next letters, both (batch, length); NONE marks padding."""
    ids = [torch.tensor([LETTERS.index(letter) for letter in f"\n{sentence}"]) for sentence in sentences]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=NONE)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS)))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.blocks(self.letters(ids) + self.places(places)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    session = lockstep.session(seed=args.seed)

    loader = DataLoader(SENTENCES, batch_size=args.batch, shuffle=True, collate_fn=encode)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    for epoch in session.epochs(args.epochs):
        losses = []
        for ids, following in loader:
            loss = F.cross_entropy(model(ids).flatten(0, 1), following.flatten(), ignore_index=NONE)
            optimizer.zero_grad()
            session.backward(loss, weight=(following != NONE).sum())
            optimizer.step()
            losses.append(session.mean(loss.item(), weight=(following != NONE).sum()))
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
