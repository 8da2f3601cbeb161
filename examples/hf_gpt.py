"""Train a small GPT-2 of Hugging Face's transformers to add, on their data sets and byte tokenizer."""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import lockstep

try:
    from datasets import Dataset
    from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("This example needs datasets and transformers: pip install 'lockstep-torch[hf]'.")

LENGTH, NONE = 16, -100


def sums(count: int) -> Dataset:
    """Return count² sums: input_ids (LENGTH,), their attention_mask, and labels, the next bytes; NONE marks padding."""
    tokenizer = ByT5Tokenizer()

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = tokenizer(rows["text"], padding="max_length", max_length=LENGTH)
        labels = [[token or NONE for token in (*row[1:], 0)] for row in tokens["input_ids"]]
        return {**tokens, "labels": labels}

    texts = [f"{a} + {b} = {a + b}" for a in range(count) for b in range(count)]
    return Dataset.from_dict({"text": texts}).map(encode, batched=True, remove_columns="text").with_format("torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--largest", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    session = lockstep.session(seed=args.seed, draws="global")

    loader = DataLoader(sums(args.largest), batch_size=32, shuffle=True)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=384, bos_token_id=1, eos_token_id=1, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    for epoch in session.epochs(args.epochs):
        losses = []
        for batch in loader:
            logits, labels = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NONE)
            optimizer.zero_grad()
            session.backward(loss, weight=(labels != NONE).sum())
            optimizer.step()
            losses.append(session.mean(loss.item(), weight=(labels != NONE).sum()))
        print(f"epoch {epoch}  loss {sum(losses) / len(losses):.12f}")


if __name__ == "__main__":
    main()
