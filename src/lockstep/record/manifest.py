"""`manifest.json`: what has to be known to run the same again; `summary.json`: how the run ended."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ..files import parse_json, read, write_json, write_whole
from ..versions import version_of
from ..world.topology import Topology
from . import checks
from .result import RunResult

_PACKAGES = ("lockstep-torch", "torchvision", "numpy", "safetensors")


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that the numbers depend on; None for one that is missing."""
    # torch's own word: the package's metadata lacks the build, such as +cu130.
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    return found | {name: version_of(name) for name in _PACKAGES}


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit that `folder` is at, and whether tracked files differ from it; None where git does not tell.

    Git would run the monitor, the hooks and the filters that somebody else's folder configures. So files are compared
    from a folder of git's that is made for this moment and has no configuration, but that folder's index and objects.
    Without filters, files that are stored otherwise than they lie there (LFS, line ends) may count as changed.
    """
    asked = ("rev-parse", "HEAD", "--show-toplevel", "--git-path", "index", "--git-path", "objects")
    told = _git(folder, *asked)
    lines = told.stdout.splitlines() if told and told.returncode == 0 else []
    if len(lines) != 4:
        return {"git_commit": None, "git_dirty": None}
    commit, top, index, objects = lines
    with tempfile.TemporaryDirectory() as bare:
        own = {"GIT_DIR": bare, "GIT_WORK_TREE": top, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
        _git(folder, "init", "--quiet", "--template=", **own)
        there = {"GIT_INDEX_FILE": str(folder / index), "GIT_OBJECT_DIRECTORY": str(folder / objects)}
        found = _git(Path(top), "diff-index", "--quiet", "--ignore-submodules", commit, **own, **there)
    return {"git_commit": commit, "git_dirty": {0: False, 1: True}.get(found.returncode) if found else None}


def _git(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str] | None:
    command = ["env", *(f"{name}={value}" for name, value in env.items()), "git", "-c", "core.fsmonitor=false", *words]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None


def command_line(argv: list[str]) -> str:
    """Return the words of a process as a shell would take them."""
    program, *words = argv
    if Path(program).name == "__main__.py":  # python -m
        return shlex.join(["python", "-m", Path(program).parent.name, *words])
    return shlex.join(argv if os.access(program, os.X_OK) else ["python", *argv])


class Manifest:
    """Writes `manifest.json` when the run starts: versions and hardware, and what the `start` event decided."""

    def __init__(self, folder: Path, *, topology: Topology, hardware: Mapping[str, Any]) -> None:
        self._folder = folder
        self._facts = {"topology": asdict(topology), "hardware": dict(hardware)}

    def __str__(self) -> str:
        return "manifest.json"

    def record(self, event: str, **fields: Any) -> None:
        """Write the manifest at `start`, atomically; other events are none of its business."""
        if event == "start":
            decided = {"batch_plan": fields["plan"], "chosen": fields["chosen"], "first_step": fields["first_step"]}
            about = {
                "date": datetime.now().astimezone().isoformat(timespec="seconds"),
                "host": platform.node(),
                "folder": str(Path.cwd()),
                "command": command_line(sys.argv),
                "versions": versions(),
                "platform": platform.platform(),
            }
            write_json(self._folder / "manifest.json", about | git_state(Path.cwd()) | self._facts | decided)

    def close(self) -> None:
        """Do nothing."""


class Summary:
    """Writes `summary.json` and `proof.md` when the run ends: the result; or how far it came, and the sentence."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._so_far: dict[str, Any] = {"output": str(folder)}
        self._first_step: int | None = None

    def __str__(self) -> str:
        return "summary.json"

    def record(self, event: str, **fields: Any) -> None:
        """Write the summary at `finish` or `failed`, atomically; at `start`, that an earlier one's end is none."""
        self._note(event, fields)
        if event == "start" and (before := self._before()):  # a rank that is killed will not say how it ended
            write_json(self._folder / checks.SUMMARY, before | {"exit": None, "error": None})
        if event in ("finish", "failed"):
            ended = fields if event == "finish" else RunResult.unfinished(self._so_far) | fields
            # What this process did not measure, since it took up a run that others had begun, stays as it was.
            before = self._before()
            told = {key: before.get(key) if value is None else value for key, value in ended.items()}
            told["proof"] = self._proof(told, before) or None
            told.setdefault("samples_per_s", told.get("images_per_s"))
            write_json(self._folder / checks.SUMMARY, told)
            write_whole(self._folder / checks.SHEET, checks.page(self._folder, told.get("proof")))

    def _proof(self, told: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this start has proved, and what stays of what was proved before."""
        others = checks.by_name(checks.from_json(before.get("proof")))
        ours: dict[str, Any] = told.get("proof") or {}
        if self._first_step == told["steps"]:  # a complete run was taken up, or this start failed in its first step
            return others | {name: each for name, each in ours.items() if each["times"] or name not in others}
        return {name: each for name, each in others.items() if name in checks.OF_THE_MODEL} | ours

    def _note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Keep what a run that does not end will have come to."""
        known = self._so_far
        if event == "start":
            known["output"] = fields.get("output", known["output"])  # as people write it
            known |= {"steps": fields["first_step"], "epoch_s": list(fields["epoch_s"])}
            self._first_step = fields["first_step"]
        elif event == "steps":
            known["steps"] = fields["rows"][-1]["step"]
        elif event == "epoch":
            known["epoch_s"].append(fields["epoch_s"])
        elif event == "proof":
            known["proof"] = fields["checks"]
        elif event == "eval":
            known |= {name: fields[name] for name in ("top1", "top5", "loss", "samples")}
            best = known.get("best_top1", self._before().get("best_top1"))
            known["best_top1"] = fields["top1"] if best is None else max(best, fields["top1"])

    def _before(self) -> dict[str, Any]:
        path = self._folder / checks.SUMMARY
        try:
            found = parse_json(read(path))
        except (FileNotFoundError, ValueError):  # one that is damaged is written anew
            found = {}
        found = found if isinstance(found, dict) else {}
        if "best_top1" in found and not isinstance(found["best_top1"], float):
            found["best_top1"] = None
        return found

    def close(self) -> None:
        """Do nothing."""
