"""Transformers' Trainer: `hf_trainer.py KIND`."""

import sys
import tempfile
from typing import Any

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # isort: skip # searches torch

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

kind = sys.argv[1]
torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(1)
LENGTHS = torch.randint(4, 9, (96,), generator=generator)


class Texts(Dataset[Any]):
    """Made-up tokens of several lengths."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        made = torch.Generator().manual_seed(index)
        length = int(LENGTHS[index]) if "padded" in kind or "tokens" in kind else 8
        ids = torch.randint(1, 20, (length,), generator=made)
        return {"input_ids": ids, "labels": index % 2} if kind == "classifier" else {"input_ids": ids}


def collate(samples: Any) -> Any:
    """Pad to the longest of the batch."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class Net(nn.Module):
    """A language model without context."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts_loss_kwargs = kind != "tokens"
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.drop = nn.Dropout(0.3 if "dropout" in kind else 0.0)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        """Return the mean loss of tokens, or the sum over the count of all micro-batches and ranks."""
        scores = self.head(self.drop(torch.tanh(self.embed(input_ids)))).flatten(0, 1)
        if num_items_in_batch is not None:
            return {"loss": functional.cross_entropy(scores, labels.flatten(), reduction="sum") / num_items_in_batch}
        return {"loss": functional.cross_entropy(scores, labels.flatten())}


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    per_device_train_batch_size=8,
    num_train_epochs=3,
    gradient_accumulation_steps=2 if kind.startswith("accumulate") else 1,
    learning_rate=0.1,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    remove_unused_columns=False,
    average_tokens_across_devices=kind != "tokens-by-rank",
)
torch.manual_seed(7)
if kind == "classifier":  # transformers 5.24 multiplies its loss by the ranks, as if it were divided by all samples
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Texts())
else:
    trainer = Trainer(Net(), arguments, train_dataset=Texts(), data_collator=collate)
trainer.train()
