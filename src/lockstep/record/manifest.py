"""`manifest.json`: what has to be known to run the same again, written before the first step."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..batching import BatchPlan
from ..topology import Topology
from .files import write_json

_PACKAGES = ("lockstep-torch", "torchvision", "numpy", "safetensors")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that the numbers depend on; None for one that is missing."""
    # torch's own word: the package's metadata lacks the build, such as +cu130.
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: Path) -> str | None:
    """Return the commit that `folder` is at, with `-dirty` where files differ from it; None outside git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write(
    folder: Path,
    *,
    topology: Topology,
    plan: BatchPlan,
    hardware: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> None:
    """Write `manifest.json` into the run's `folder`, atomically. Raises OSError.

    `hardware` are facts about this machine's devices; `chosen` is what each `auto` came to, by option.
    """
    write_json(
        folder / "manifest.json",
        {
            "versions": versions(),
            "platform": platform.platform(),
            "command": sys.argv,
            "git_commit": git_commit(Path.cwd()),
            "hardware": dict(hardware),
            "topology": asdict(topology),
            "batch_plan": {**asdict(plan), "text": str(plan)},
            "chosen": dict(chosen),
        },
    )
