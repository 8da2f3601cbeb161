"""Chapter 4: the ranks of a two-rank job find one another, or wait for ranks that are dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from .chapter import Chapter, Words

SCRIPT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, url, size, pause=0):
    place = {} if rank is None else {"rank": rank, "world_size": size}
    print("ready", flush=True)
    dist.init_process_group("gloo", init_method=url, timeout=timedelta(seconds=5), **place)
    dist.all_reduce(torch.ones(1))
    print("met", flush=True)
    time.sleep(pause)
    dist.destroy_process_group()

if __name__ == "__main__":
    how, url, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if how == "launched":
        main(None, url, None)
    elif how == "spawn":
        mp.spawn(main, args=(url, 2), nprocs=2)
    else:
        main(int(how), url, 2, pause)
"""
RANKS = 2
READY_S = 60.0
"""Limit on the imports of both ranks."""
LIMIT_S = 10.0
"""Limit from then on; torch itself is given five seconds."""


def free_port() -> int:
    """Return a free port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Job:
    """The processes of a two-rank job, and what they print."""

    def __init__(self, folder: Path, *commands: Sequence[str]) -> None:
        self.outputs = [Path(mkstemp(dir=folder)[1]) for _ in commands]
        self.processes = []
        for command, output in zip(commands, self.outputs, strict=True):
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=folder,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                        stdout=file,
                        stderr=file,
                    )
                )

    def until(self, word: str, limit_s: float) -> float:
        """Return the seconds until both ranks have printed `word`, all have ended, or the time is over."""
        begin = time.perf_counter()
        while (seconds := time.perf_counter() - begin) < limit_s:
            has_ended = all(process.poll() is not None for process in self.processes)
            if self.count(word) == RANKS or has_ended:
                break
            time.sleep(0.01)
        return seconds

    def count(self, word: str) -> int:
        """Return how many lines of all outputs equal `word`."""
        return sum(output.read_text().splitlines().count(word) for output in self.outputs)

    def kill(self) -> None:
        """Kill all processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def result(self) -> dict[str, Any]:
        """Return how the ranks meet, and the seconds that they take once both are ready."""
        self.until("ready", READY_S)
        seconds = self.until("met", LIMIT_S)
        if self.count("met") == RANKS:
            self.until("never", LIMIT_S)  # they end by themselves
            return {"met": True, "seconds": round(seconds, 2)}
        ends = ["waits" if process.poll() is None else "failed" for process in self.processes]
        self.kill()
        lines = [line for output in self.outputs for line in output.read_text().splitlines() if "Error:" in line]
        return {"met": False, "seconds": round(seconds, 2), "ranks": ends, "message": next(iter(lines), "")}


def by_hand(folder: Path, url: str, pause: float = 0) -> Job:
    """Start both ranks as two shells would."""
    return Job(folder, *(["meet.py", str(rank), url, str(pause)] for rank in range(RANKS)))


def measure() -> dict[str, Any]:
    """Return how two ranks meet, by the way of their start."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "meet.py").write_text(SCRIPT)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        starts = {
            "torchrun, env://": Job(folder, [*launcher, "meet.py", "launched", "env://", "0"]).result(),
            "mp.spawn, tcp://": Job(folder, ["meet.py", "spawn", f"tcp://127.0.0.1:{free_port()}", "0"]).result(),
            "by hand, tcp://": by_hand(folder, f"tcp://127.0.0.1:{free_port()}").result(),
            "by hand, file://": by_hand(folder, f"file://{folder}/fresh").result(),
        }
        is_removed = not (folder / "fresh").exists()
        stale = f"file://{folder}/stale"
        killed = by_hand(folder, stale, pause=60)
        killed.until("met", READY_S)
        killed.kill()
        starts["by hand, file:// of a killed job"] = by_hand(folder, stale).result()
    return {"starts": starts, "a clean end removes the file": is_removed}


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the seconds of each start; red for ranks that did not join."""
    axes = figure.subplots()
    starts = numbers["starts"]
    has_met = [result["met"] for result in starts.values()]
    bars = axes.barh(
        [words(name) for name in starts],
        [result["seconds"] for result in starts.values()],
        color=["#2980b9" if met else "#c0392b" for met in has_met],
    )
    axes.bar_label(
        bars,
        [f"{result['seconds']:.2f}" if result["met"] else words("not met") for result in starts.values()],
        padding=4,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(result["seconds"] for result in starts.values()))
    axes.set_xlabel(words("seconds, once both have imported torch"))
    axes.set_title(words("Two ranks meet"))


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the rank of local rank 1 on node 2, for nodes with 4, 2 and 4 processes."""
    return int(answer) == 4 + 2 + 1


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "torchrun, env://": "torchrun，env://",
        "mp.spawn, tcp://": "mp.spawn，tcp://",
        "by hand, tcp://": "手动，tcp://",
        "by hand, file://": "手动，file://",
        "by hand, file:// of a killed job": "手动，被杀作业留下的 file://",
        "not met": "未会合",
        "seconds, once both have imported torch": "两个 rank 都导入 torch 之后的秒数",
        "Two ranks meet": "两个 rank 会合",
    },
)
