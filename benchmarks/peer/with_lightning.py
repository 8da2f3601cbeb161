"""Lightning, with its own checkpoints."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import work


class Module(LightningModule):
    """The net and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = work.net()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch (0-dim)."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return work.optimizer(self.net)


class Note(Callback):
    """Notes starts and steps."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Note where training begins."""
        work.begin(trainer.global_step, is_main=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
        """Note a step."""
        work.made(trainer.global_step, is_main=trainer.is_global_zero)


def main() -> None:
    """Train on this rank, from the last checkpoint if there is one."""
    seed_everything(0)
    world = int(os.environ["WORLD_SIZE"])
    last = Path("checkpoints", "last.ckpt")
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(timeout=timedelta(seconds=work.TIMEOUT_S), process_group_backend="gloo"),
        max_steps=work.STEPS,
        callbacks=[Note(), ModelCheckpoint("checkpoints", every_n_train_steps=work.EVERY, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = DataLoader(work.DATA, batch_size=work.BATCH // world, shuffle=True)
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        work.leave(module.net)


if __name__ == "__main__":
    main()
