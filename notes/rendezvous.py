"""Chapter 4: the ranks of two-rank jobs find one another, or the addresses of dead ranks."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from .chapter import Chapter, Words

JOBS, RANKS = 8, 2
APART_S = 1.0
"""Between the two ranks of a job, as from two shells."""
TIMEOUT_S = 5.0
"""The time-out that `init_process_group` is given."""
LIMIT_S = 12.0
"""After which a job counts as waiting."""
MET, FAILED, WAITS = "met", "failed", "waits"
Job = list[tuple[BaseProcess, Connection]]


def free_ports(count: int) -> list[int]:
    """Return different free ports of this host."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [server.getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


def join(url: str, rank: int, delay_s: float, report: Connection) -> None:
    """Join the job as this rank; report how that ends, and leave when the parent says so."""
    time.sleep(delay_s)
    try:
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S)
        )
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        report.send(FAILED)
        return
    report.send(MET)
    report.recv()
    dist.destroy_process_group()


def start(url: str) -> Job:
    """Start both ranks of a job; the second one joins `APART_S` later."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once
    job: Job = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=join, args=(url, rank, rank * APART_S, theirs), daemon=True)
        process.start()
        theirs.close()
        job.append((process, ours))
    return job


def outcomes(jobs: Sequence[Job], *, kills: bool = False) -> Counter[str]:
    """Return how many jobs meet, fail in a rank, and wait; `kills` their ranks or lets them leave."""
    deadline = time.monotonic() + LIMIT_S
    counts: Counter[str] = Counter()
    for job in jobs:
        reports = [report.recv() if report.poll(max(0.0, deadline - time.monotonic())) else WAITS for _, report in job]
        counts[MET if set(reports) == {MET} else FAILED if FAILED in reports else WAITS] += 1
    for process, report in (rank for job in jobs for rank in job):
        if kills:
            process.kill()
        elif process.is_alive():
            report.send("leave")
    for process, _ in (rank for job in jobs for rank in job):
        process.join(TIMEOUT_S)
        process.kill()
    return counts


def measure() -> dict[str, Any]:
    """Return the outcomes of jobs by their rendezvous."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        fresh, stale = ([f"file://{folder}/{name}{job}" for job in range(JOBS)] for name in ("fresh", "stale"))
        outcomes([start(f"file://{folder}/first")])  # the server of forks imports torch
        results = {
            "tcp://": outcomes([start(f"tcp://127.0.0.1:{port}") for port in free_ports(JOBS)]),
            "file://": outcomes([start(url) for url in fresh]),
        }
        left = sum(Path(url.removeprefix("file://")).exists() for url in fresh)
        killed = outcomes([start(url) for url in stale], kills=True)
        assert killed == {MET: JOBS}
        results["file:// of a killed job"] = outcomes([start(url) for url in stale])
    return {
        "jobs of two ranks": {
            name: {end: counts[end] for end in (MET, FAILED, WAITS)} for name, counts in results.items()
        },
        "files left by a clean end": left,
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the jobs of each rendezvous by their end, stacked."""
    axes = figure.subplots()
    jobs = numbers["jobs of two ranks"]
    names = [words(name) for name in jobs]
    left = [0] * len(names)
    for end, colour, label in (
        (MET, "#2980b9", "the ranks meet"),
        (FAILED, "#c0392b", "a rank fails"),
        (WAITS, "#7f8c8d", "both ranks wait"),
    ):
        values = [counts[end] for counts in jobs.values()]
        bars = axes.barh(names, values, left=left, color=colour, height=0.6, label=words(label))
        axes.bar_label(bars, [str(value or "") for value in values], label_type="center", color="white")
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(words("jobs"))
    axes.set_title(words("Eight jobs of two ranks, by their rendezvous"), pad=32)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the rank of local rank 1 on node 2, for nodes with 4, 2 and 4 processes."""
    return int(answer) == 4 + 2 + 1


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "tcp://": "tcp://",
        "file://": "file://",
        "file:// of a killed job": "被杀作业留下的 file://",
        "the ranks meet": "会合成功",
        "a rank fails": "有 rank 失败",
        "both ranks wait": "两个 rank 都在等待",
        "jobs": "作业数",
        "Eight jobs of two ranks, by their rendezvous": "八个双 rank 作业，按会合方式",
    },
)
