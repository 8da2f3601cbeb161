"""`manifest.json`: what has to be known to run the same again; `summary.json`: how the run ended."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import proof
from ..files import write_json, write_whole
from ..result import RunResult
from ..topology import Topology
from ..versions import version_of

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


def git_commit(folder: Path) -> str | None:
    """Return the commit that `folder` is at, with `-dirty` where files differ from it; None outside git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


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
            about = {"versions": versions(), "platform": platform.platform(), "command": sys.argv}
            commit = {"git_commit": git_commit(Path.cwd())}
            write_json(self._folder / "manifest.json", about | commit | self._facts | decided)

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
            write_json(self._folder / proof.SUMMARY, before | {"exit": None, "error": None})
        if event in ("finish", "failed"):
            ended = fields if event == "finish" else RunResult.unfinished(self._so_far) | fields
            # What this process did not measure, since it took up a run that others had begun, stays as it was.
            before = self._before()
            told = {key: before.get(key) if value is None else value for key, value in ended.items()}
            told["proof"] = self._proof(told, before) or None
            write_json(self._folder / proof.SUMMARY, told)
            write_whole(self._folder / proof.SHEET, proof.page(self._folder, told.get("proof")))

    def _proof(self, told: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this start has proved, and what stays of what was proved before."""
        try:
            others = proof.by_name(proof.from_json(before.get("proof")))
        except (TypeError, AttributeError):  # somebody has edited it
            others = {}
        ours: dict[str, Any] = told.get("proof") or {}
        if self._first_step == told["steps"]:  # a complete run was taken up, or this start failed in its first step
            return others | {name: each for name, each in ours.items() if each["times"] or name not in others}
        return {name: each for name, each in others.items() if name in proof.OF_THE_MODEL} | ours

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
        path = self._folder / proof.SUMMARY
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # one that is damaged is written anew
            found = {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Do nothing."""
