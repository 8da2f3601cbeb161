"""Accelerate, with its own way to save and to take a run up again."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

from . import work


def main() -> None:
    """Train on this rank, from the last checkpoint if there is one."""
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=work.TIMEOUT_S))],
        project_config=ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(0)
    model = work.net()
    loader = DataLoader(work.DATA, batch_size=work.BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, work.optimizer(model), loader)
    count = Count()
    accelerator.register_for_checkpointing(count)
    if Path("checkpoints").exists() and any(Path("checkpoints").iterdir()):
        accelerator.load_state()
        accelerator.project_configuration.iteration = count.step // work.EVERY
    is_main = accelerator.is_main_process
    work.begin(count.step, is_main=is_main)
    while count.step < work.STEPS:
        epoch, first = divmod(count.step, len(loader))
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, first) if first else loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            count.step += 1
            work.made(count.step, is_main=is_main)
            if count.step % work.EVERY == 0:
                accelerator.save_state()
    if is_main:
        work.leave(accelerator.unwrap_model(model))
    accelerator.end_training()


class Count:
    """The steps made, as Accelerate saves them."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return what is saved."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was saved."""
        self.step = state["step"]


if __name__ == "__main__":
    main()
