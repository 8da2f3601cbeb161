"""Parts that every chapter has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from torch import distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

Words = Callable[[str], str]
"""Translates a figure's English words into the language of the page."""


class Chapter(NamedTuple):
    """One chapter: the measurement, its figure, the answer to the exercise."""

    measure: Callable[[], dict[str, Any]]
    """Returns the numbers that the chapter quotes, as JSON values."""
    draw: Callable[[dict[str, Any], Any, Words], None]
    """Draws the numbers on a matplotlib figure."""
    check: Callable[[str, dict[str, Any]], bool]
    """Returns whether an answer to the exercise is right. Raises ValueError for an answer of the wrong form."""
    chinese: Mapping[str, str]
    """The figure's words in Simplified Chinese."""


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Return `function(*arguments)` of each rank of a gloo group on this host. `function` must be a module's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    results: dict[int, Any] = elastic_launch(config, _in_group)(function, *arguments)
    return [results[rank] for rank in range(ranks)]


def _in_group(function: Callable[..., Any], *arguments: Any) -> Any:
    dist.init_process_group("gloo")
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def data_file(number: int) -> Path:
    """Return the file of a chapter's numbers."""
    return Path(__file__).parent / "data" / f"{number:02}.json"
