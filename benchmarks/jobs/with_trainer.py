"""The job in Lightning's Trainer."""

import os

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import job


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = job.Net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)


def main() -> None:
    devices = int(os.environ["DEVICES"])
    seed_everything(0)
    loader = DataLoader(job.data(), batch_size=job.BATCH // devices, shuffle=True)
    bar = TQDMProgressBar()  # its default, but for where somebody else has brought rich, whose bar is slower
    trainer = Trainer(accelerator="cpu", devices=devices, max_epochs=1, callbacks=[bar])
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    main()
