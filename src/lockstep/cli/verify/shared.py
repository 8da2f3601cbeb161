"""Shared by the proofs: number of devices, and where results are written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ... import hardware
from ...config.schema import RunConfig
from ...errors import RequestError
from ...launchers import table as launchers
from ...record import checks as proof
from ...record.checks import Check


def gpus(config: RunConfig) -> int:
    """Return the number of GPUs that the config may use here."""
    return 0 if config.parallel.accelerator == "cpu" else len(hardware.gpus(launchers.visible_gpus()))


def several(config: RunConfig) -> int:
    """Return the number of devices: as asked, all GPUs, or two processes.

    Raises `RequestError` where that leaves nothing to compare with one.
    """
    asked = config.parallel
    count = asked.devices or len(asked.gpu_indices) or gpus(config) or 2
    if count < 2:
        raise RequestError(
            f"{f'--devices {asked.devices}' if asked.devices else 'One GPU'} leaves nothing to compare: give --devices "
            "2 or more, with --accelerator cpu where there are not as many GPUs."
        )
    return count


def unwritten(folder: Path, checks: Iterable[Check]) -> str:
    """Add the checks to the folder's files. Returns why that failed, "" if written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        proof.add(folder, checks)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # not writable, or not what we have written
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return f"{proof.SHEET} and {proof.SUMMARY} in {folder} could not be written ({why}); the verdict stands."
    return ""
