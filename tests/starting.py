"""Ranks as processes that a test starts, each with one function of `entries.py` to run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.launchers import stores
from lockstep.launchers.rollcall import Member

from .command import ROOT, Running, start
from .ports import free_port


def config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


def start_rank(
    entry: str, *, through: Sequence[str] = (), env: Mapping[str, str] | None = None, **values: Any
) -> Running:
    options = json.dumps({"accelerator": "cpu", **values})
    return start(ROOT, entry, options, through=through, module="tests.run_entry", **(env or {}))


def member_of(rank: int, size: int, **values: Any) -> Member:
    return Member(**{"rank": rank, "size": size, "accelerator": "cpu", **values})


def openers_at(scheme: str, folder: Path, ranks: Sequence[int]) -> list[Callable[[], stores.Rendezvous]]:
    port, path = free_port(), folder / "meeting"

    def endpoint(rank: int) -> stores.Rendezvous:
        if scheme == "file":
            return stores.at_file(path, is_main=not rank, timeout_s=20)
        return stores.connect("127.0.0.1", port, 20) if rank else stores.serve("127.0.0.1", port)

    return [functools.partial(endpoint, rank) for rank in ranks]
