"""How many devices a proof compares with one."""

from __future__ import annotations

from ... import hardware
from ...config import RunConfig
from ...errors import RequestError
from ...launchers import table as launchers

_ON_A_CPU = 2
"""Where nobody says how many: the least that can be compared."""


def gpus(config: RunConfig) -> int:
    """Return the number of GPUs that the config may use here."""
    return 0 if config.parallel.accelerator == "cpu" else len(hardware.gpus(launchers.visible_gpus()))


def several(config: RunConfig) -> int:
    """Return the number of devices asked for, else of all GPUs, else two processes.

    Raises `RequestError` where that leaves nothing to compare with one.
    """
    asked = config.parallel
    count = asked.devices or len(asked.gpu_indices) or gpus(config) or _ON_A_CPU
    if count < 2:
        where = f"--devices {asked.devices}" if asked.devices else "one GPU"
        raise RequestError(
            f"{where[0].upper()}{where[1:]} leaves nothing to compare: give --devices 2 or more, with --accelerator "
            "cpu where there are not as many GPUs."
        )
    return count
