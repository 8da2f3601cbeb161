"""Train a tiny BERT of Hugging Face's transformers, with its dropout, to fill in masked numbers of sequences."""

import argparse
import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

try:
    from transformers import BertConfig, BertForMaskedLM
except ImportError:
    sys.exit("This example needs transformers: pip install 'lockstep-torch[hf]'.")

VOCABULARY, LENGTH, PAD, MASK = 32, 16, 0, 1
NONE = -100


def sequences(count: int) -> Tensor:
    """Return rows (count, LENGTH) that count up from a random number by 1 to 3, padded to one length."""
    start, stride = torch.randint(30, (count, 1)), torch.randint(1, 4, (count, 1))
    length = torch.randint(8, LENGTH + 1, (count, 1))
    place = torch.arange(LENGTH)
    return torch.where(place < length, 2 + (start + stride * place) % (VOCABULARY - 2), PAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    loader = DataLoader(TensorDataset(sequences(args.sequences)), batch_size=32, shuffle=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        losses = []
        for (ids,) in loader:
            masked = (torch.rand(ids.shape, device=ids.device) < 0.2) & (ids != PAD)
            labels = ids.masked_fill(~masked, NONE)
            loss = model(ids.masked_fill(masked, MASK), attention_mask=ids != PAD, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
