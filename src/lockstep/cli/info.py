"""`lockstep info`: facts on this installation and machine. Imports no torch."""

from __future__ import annotations

import platform

from .. import hardware
from ..config.options import recipes
from ..config.registry import KINDS, LAUNCHERS
from ..data import sets
from ..errors import RequestError
from ..launchers.devices import visible_gpus
from ..models import table as models
from ..screen import Screen
from ..versions import version_of
from . import output


def main(words: list[str]) -> int:
    """Print the facts, and return the exit code."""
    if words:
        raise RequestError(f"lockstep info takes no arguments, found {' '.join(words)}.")
    machine = hardware.survey(visible_gpus())
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in machine.gpus) or "none"
    rows = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: version_of(name) or "not installed" for name in ("torch", "torchvision", "numpy")},
        "cpu": f"{machine.cpu_name}, {machine.cpus} processors here, bf16 {hardware.bf16_units() or 'emulated'}",
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "gpus": gpus + (f", driver {machine.driver}" if machine.driver else ""),
        "recipes": ", ".join(recipes()),
        "models": ", ".join((*models.BUILTIN, "torchvision's classifiers", "timm.NAME", "module:attribute")),
        "data sets": ", ".join((*sets.DATA_SETS, "module:attribute")),
        **{f"strategy {name}": kind.phrase for name, kind in KINDS.items()},
        "launchers": ", ".join(LAUNCHERS),
    }
    with output.written():
        Screen().table(("lockstep", version_of("lockstep-torch") or "not installed"), rows.items(), texts=2)
    return 0
