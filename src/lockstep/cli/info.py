"""`lockstep info`: what this installation and this machine have. Imports no torch."""

from __future__ import annotations

import platform

from rich.table import Table

from .. import hardware
from ..config.options import recipes
from ..config.registry import KINDS
from ..data import sets
from ..errors import RequestError
from ..launchers import table as launchers
from ..models import table as models
from ..screen import Screen
from ..versions import version_of
from . import output

_USAGE = """\
usage: lockstep info

Prints the versions of the packages that matter, this machine's hardware, and the recipes, models, data sets,
strategies and launchers there are.
"""
_PACKAGES = ("lockstep-torch", "torch", "torchvision", "numpy")


def main(given: list[str]) -> int:
    """Print what there is, and return the exit code."""
    if output.helped(given, _USAGE):
        return 0
    if given:
        raise RequestError(f"lockstep info takes no arguments, found {' '.join(given)}.")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows():
        table.add_row(name, text)
    with output.written():
        Screen().print(table)
    return 0


def _rows() -> list[tuple[str, str]]:
    # CUDA_VISIBLE_DEVICES decides what "this machine" means to a process, so it is asked for here too.
    found = hardware.survey(launchers.visible_gpus())
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in found.gpus) or "none"
    bf16 = "with" if found.has_bf16_units else "without"
    return [
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        *[(name, version_of(name) or "not installed") for name in _PACKAGES],
        ("cpu", f"{found.cpu_name}, {found.cpus} processors here, {bf16} bf16 units"),
        ("memory", f"{found.memory_bytes / 2**30:.1f} GiB"),
        ("gpus", gpus + (f", driver {found.driver}" if found.driver else "")),
        ("recipes", ", ".join(recipes())),
        ("models", ", ".join(models.names()) + ", torchvision's classifiers, module:attribute"),
        ("data sets", ", ".join(sets.names()) + ", module:attribute"),
        ("strategies", "\n".join(f"{name}: {kind.phrase}" for name, kind in KINDS.items())),
        ("launchers", ", ".join(launchers.names())),
    ]
