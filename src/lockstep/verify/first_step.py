"""The gradients with which a session's optimizers make their first step: what `verify gradients` compares of loops.

The session is watched from outside, in the process of a rank, so that what is measured is what trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.schema import RunConfig
from ..errors import RunError
from ..files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from ..world.world import World

FILE = "gradients.safetensors"
"""In the run's folder; its tensors have the parameters' names, with that of the model where there are several."""


@dataclass(frozen=True)
class FirstStep:
    """An entry for the launchers: runs `entry`, of which rank 0 keeps the first gradients in the run's folder."""

    entry: Callable[[RunConfig, World], Any]

    def __call__(self, config: RunConfig, world: World) -> Any:
        """Return what `entry` returns, and raise what it raises; `RunError` where the gradients cannot be written."""
        from safetensors.torch import save

        with kept() as found:
            result = self.entry(config, world)
        if world.is_main and config.record.output is not None:
            path = config.record.output / FILE
            try:
                write_whole(path, save({name: held.cpu().contiguous() for name, held in found.items()}))
            except OSError as error:
                raise RunError(f"{path} cannot be written: {error.strerror}.") from error
        return result


@contextlib.contextmanager
def kept() -> Iterator[dict[str, Tensor]]:
    """Yield what will hold, by parameter, the gradients of each optimizer's first step within the block."""
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ..sessions.session import Session

    models: list[nn.Module] = []
    stepped: list[Optimizer] = []
    found: dict[str, Tensor] = {}
    prepare: Any = Session.prepare

    def prepared(session: Session, *parts: Any) -> Any:
        ready = prepare(session, *parts)
        models.extend(each for each in (ready if len(parts) > 1 else (ready,)) if isinstance(each, nn.Module))
        return ready

    def note(optimizer: Optimizer, given: Any, named: Any) -> None:
        if optimizer in stepped:
            return
        stepped.append(optimizer)
        own = {each for group in optimizer.param_groups for each in group["params"]}
        for number, model in enumerate(models, start=1):
            before = "" if len(models) == 1 else "model/" if number == 1 else f"model_{number}/"
            for name, each in model.named_parameters():
                if each in own and each.grad is not None:
                    found[before + name] = each.grad.detach().clone()

    hook = register_optimizer_step_pre_hook(note)
    Session.prepare = prepared  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Session.prepare = prepare  # type: ignore[method-assign]
        hook.remove()


def read(folder: Path) -> dict[str, Tensor]:
    """Return the gradients by parameter that the run in `folder` has left; raises `RunError` where there are none."""
    from ..checkpoint import foreign

    path = folder / FILE
    if not path.exists():
        raise RunError(f"{folder} has no {FILE}: its run made no optimizer step in a session.")
    return {name.partition("/")[2]: held for name, held in foreign.read(path).items()}
