"""Lightning's Trainer: `lightning_trainer.py KIND`."""

import os
import sys
from typing import Any

import lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
RANKS = int(os.environ["WORLD_SIZE"]) if kind == "evaluation-auto" else 2


class Net(pl.LightningModule):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 16),
            nn.BatchNorm1d(16) if kind == "batchnorm" else nn.ReLU(),
            nn.Dropout(0.3) if "dropout" in kind else nn.Identity(),
            nn.Linear(16, 3),
        )

    def on_train_start(self) -> None:
        """Give each rank its own draws."""
        if kind != "same-dropout":
            torch.manual_seed(100 + self.global_rank)

    def training_step(self, batch: Any, number: int) -> Any:
        """Return the loss of a batch."""
        scores = self.net(batch[0])
        if kind == "contrastive":
            vectors = functional.normalize(scores, dim=1)
            return functional.cross_entropy(vectors @ vectors.t(), torch.arange(len(scores)))
        loss = functional.cross_entropy(scores, batch[1])
        return loss * self.trainer.world_size if kind == "times-ranks" else loss

    def validation_step(self, batch: Any, number: int) -> None:
        """Log the loss of a batch."""
        self.log("loss", functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pl.seed_everything(7)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 12, generator=generator).double(), torch.randint(3, (96,), generator=generator)
if kind == "tokens":
    y[torch.arange(96) % 5 < torch.arange(96) % 3] = -100
data = TensorDataset(x, y)
valid = TensorDataset(x[: 61 if kind == "evaluation-pads" else 64], y[: 61 if kind == "evaluation-pads" else 64])
trainer = pl.Trainer(
    accelerator="cpu",
    devices=RANKS,
    strategy="ddp" if RANKS > 1 else "auto",
    precision="64-true",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accumulate_grad_batches=2 if kind.startswith("accumulate") else 1,
    gradient_clip_val=0.1 if kind == "clip" else None,
    use_distributed_sampler=kind != "loader-unprepared",
)
checked = [DataLoader(valid, batch_size=8)] if kind.startswith("evaluation") else []
trainer.fit(Net(), DataLoader(data, batch_size=8, shuffle=True), *checked)
