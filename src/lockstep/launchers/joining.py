"""Be one rank in a process whose own code goes on: a script that torchrun, srun, mpirun or a person has started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..config import RunConfig
from ..errors import RequestError
from . import table
from .environment import EnvironmentLauncher
from .inline import InlineLauncher
from .manual import ManualLauncher
from .spawn import SpawnLauncher

if TYPE_CHECKING:
    from ..world import World

_Joining = EnvironmentLauncher | ManualLauncher | InlineLauncher
"""The launchers that start no process."""


@contextlib.contextmanager
def joined(config: RunConfig, env: Mapping[str, str] | None = None) -> Iterator[tuple[RunConfig, World]]:
    """Be the rank that flags or the environment name, or the only one, while the block runs (*collective*).

    Gives the resolved config and the world. Raises what `launchers.table.launch` does, and `RequestError` where the
    config asks for processes that somebody has yet to start; errors of the block come out as they do there.
    """
    env = os.environ if env is None else env
    config, launcher = _found(config, env)
    with launcher.seat(config, env) as seat, seat.world() as world:
        yield config, world


def _found(asked: RunConfig, env: Mapping[str, str]) -> tuple[RunConfig, _Joining]:
    """Return the resolved config and the launcher by which this process is a rank."""
    config = table.resolve(asked, env)
    launcher = table.choose(config, env)
    parallel = asked.parallel
    if isinstance(launcher, SpawnLauncher) and parallel.devices is None and not parallel.gpus:
        # `python train.py` on a machine with several GPUs: nobody has asked for more processes than there are.
        one = dataclasses.replace(asked, parallel=dataclasses.replace(parallel, devices=1))
        config = table.resolve(one, env)
        launcher = table.choose(config, env)
    if not isinstance(launcher, _Joining):
        raise RequestError(
            f"--launcher {launcher.name} would start processes, and this script runs in one already: start it with "
            "lockstep run [flags] SCRIPT."
        )
    found = dataclasses.replace(config.parallel, launcher=launcher.name)
    return dataclasses.replace(config, parallel=found), launcher
