"""Ranks as processes that a test starts, each with one function of `entries.py` to run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from lockstep.config import RunConfig
from lockstep.launchers import stores
from lockstep.launchers.claims import Claim
from lockstep.options import override

from .command import ROOT, start, until
from .ports import free_port

STARTED_S = 60.0  # torch may take long to import on a busy machine


def config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


def start_rank(
    entry: str, *, through: Sequence[str] = (), env: Mapping[str, str] | None = None, **values: Any
) -> subprocess.Popen[str]:
    options = json.dumps({"accelerator": "cpu", **values})
    return start(ROOT, entry, options, through=through, module="tests.run_entry", **(env or {}))


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=STARTED_S)
    finally:
        process.kill()
    return process.returncode, out, err


def noted(folder: Path, size: int) -> list[psutil.Process]:
    """Return the processes of the ranks, and of their data workers, once all have said that they run."""
    notes = [folder / f"rank_{rank}" for rank in range(size)]
    until(lambda: all(note.exists() and note.read_text() for note in notes), STARTED_S)
    ranks = [psutil.Process(int(note.read_text())) for note in notes]
    return [process for rank in ranks for process in (rank, *rank.children(recursive=True))]


def claim_of(rank: int, size: int, **values: Any) -> Claim:
    return Claim(**{"rank": rank, "size": size, "accelerator": "cpu", **values})


def doors_to(scheme: str, folder: Path, ranks: Sequence[int]) -> list[Callable[[], stores.Meeting]]:
    if scheme == "file":
        return [lambda: stores.open_file(folder / "meeting") for _ in ranks]
    port = free_port()
    return [
        lambda rank=rank: (stores.connect if rank else stores.serve)("127.0.0.1", port, 20)  # type: ignore[misc]
        for rank in ranks
    ]
