"""Write a run's manifest.json, summary.json and proof.md: how to repeat the run, and how it ended."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ..files import legal, parse_json, read, write_json
from ..versions import version_of
from . import checks
from .base import Recorder
from .result import RunResult


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of relevant packages; None for a missing one."""
    # torch.__version__: the package's metadata lacks the build, such as +cu130.
    built_in = {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda}
    return built_in | {name: version_of(name) for name in ("lockstep-torch", "torchvision", "numpy", "safetensors")}


def git_commit(folder: Path) -> str | None:
    """Return the commit of `folder`; None without git or a repository. Run nothing that the repository configures."""
    command = ["git", "rev-parse", "--verify", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None


def command_line(argv: list[str]) -> str:
    """Return the words of a process in shell syntax."""
    program, *words = argv
    if Path(program).name == "__main__.py":  # python -m
        return shlex.join(["python", "-m", Path(program).parent.name, *words])
    return shlex.join(argv if os.access(program, os.X_OK) else ["python", *argv])


class Documents(Recorder):
    """Writes manifest.json at the start, summary.json and proof.md at the end, each atomically."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        """`facts` are the topology and the hardware, for the manifest."""
        self._folder, self._facts = folder, facts
        self._before: dict[str, Any] = {}  # the summary of an earlier start
        self._so_far: dict[str, Any] = {}  # the result so far, for a run that does not end
        self._first_step = 0

    def __str__(self) -> str:
        return "manifest.json, or summary.json,"

    def record(self, event: str, **fields: Any) -> None:
        """Write the event's files, and keep its facts for the summary."""
        result = self._so_far
        if event == "start":
            self._start(fields)
        elif event == "steps":
            result["steps"] = fields["rows"][-1]["step"]
        elif event == "epoch":
            result["epoch_s"].append(fields["epoch_s"])
        elif event == "proof":
            result["proof"] = fields["checks"]
        elif event == "eval":
            result |= {name: fields[name] for name in ("top1", "top5", "loss", "samples") if name in fields}
            if "top1" in fields:
                result["best_top1"] = max(result.get("best_top1", fields["top1"]), fields["top1"])
        elif event in ("finish", "failed"):
            self._end(fields if event == "finish" else RunResult.unfinished(result) | fields)

    def _start(self, fields: Mapping[str, Any]) -> None:
        self._first_step = fields["first_step"]
        output = fields.get("output", str(self._folder))  # as the user wrote it
        self._so_far |= {"steps": self._first_step, "epoch_s": list(fields["epoch_s"]), "output": output}
        # Overwrite one that is damaged, or nested too deeply to be encoded again.
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, RecursionError):
            self._before = legal({**parse_json(read(self._folder / checks.SUMMARY))})
        if isinstance(best := self._before.get("best_top1"), float):
            self._so_far["best_top1"] = best
        if self._before:  # the earlier outcome is void, and a killed rank writes no other
            write_json(self._folder / checks.SUMMARY, self._before | {"exit": None, "error": None})
        about = {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "host": platform.node(),
            "folder": str(Path.cwd()),
            "command": command_line(sys.argv),
            "git_commit": git_commit(Path.cwd()),
            "versions": versions(),
            "platform": platform.platform(),
        }
        decided = {"batch_plan": fields["plan"], "chosen": fields["chosen"], "first_step": self._first_step}
        write_json(self._folder / "manifest.json", about | self._facts | decided)

    def _end(self, ended: Mapping[str, Any]) -> None:
        # A continued run keeps earlier values that this process did not measure.
        summary = {key: self._before.get(key) if value is None else value for key, value in ended.items()}
        checked: dict[str, Any] = ended.get("proof") or {}
        earlier = checks.by_name(checks.from_json(self._before.get("proof")))
        if self._first_step == summary["steps"]:  # the run was complete, or this start failed in its first step
            proof = earlier | {name: check for name, check in checked.items() if check["times"] or name not in earlier}
        else:
            proof = {name: check for name, check in earlier.items() if name in checks.OF_THE_MODEL} | checked
        summary["proof"] = proof or None
        summary.setdefault("samples_per_s", summary.get("images_per_s"))
        checks.write(self._folder, summary)
