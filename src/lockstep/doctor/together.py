"""Joint findings of ranks: silent ranks, closed ports, slow sums, changed bytes.

Ranks exchange them through torch's store: a process group is useless after a rank has missed a collective. Bandwidth
is bus bandwidth, 2 (N − 1) / N × bytes ÷ time: the load of each link of a ring, independent of N
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from .._torch import PrefixStore, Store
from ..errors import RunError, ranks_in_short
from ..launchers.rank import close_soon
from ..monitor import bounded
from ..monitor.failures import RankLostError, is_echo, one_line
from ..monitor.keys import Keys
from ..world.topology import Topology
from ..world.world import World
from . import alone
from .finding import KIB, MIB, RED, UNCHECKED, Finding, conclude, look, shown

_CONNECT_S = 3.0
"""For one connection: any host on earth answers in a third of a second; a firewall that drops packets never does."""
_AT_ONCE, _MOST_PAIRS = 32, 4

_SIZES = {
    "cpu": {512: 100, 64 * KIB: 30, MIB: 9, 16 * MIB: 5, 64 * MIB: 3},
    "accelerator": {512: 50, MIB: 20, 16 * MIB: 10, 128 * MIB: 7, 512 * MIB: 5},
}
"""{bytes: runs}. The result is the mean: in training, too, messages that wake a rank late count."""
_GATHERED_BYTES, _GATHERS = 512, 100
"""Bytes per rank, as for BatchNorm's statistics of some channels, and the number of runs."""
_BESIDE = {"cpu": (MIB, 256), "accelerator": (16 * MIB, 2048)}
"""(bytes of an all-reduce, width of the square matrices multiplied meanwhile)."""
_BESIDE_RUNS = 7
_MOST_S = 1.0  # for all runs of one size; a size whose single run takes longer ends the table


class SilentRankError(RunError):
    """Ranks posted nothing in time."""


class Board:
    """The ranks' posts by topic, in the same order on every rank."""

    def __init__(self, store: Store, rank: int, size: int, patience_s: float) -> None:
        """A joint probe fails after `patience_s`; a rank without a post fails after twice that."""
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self._keys = Keys(store, "board", limit_s=patience_s)

    def all(self, topic: str, post: Any) -> list[Any]:
        """Post `post`; return the posts of all ranks under `topic` (*collective*).

        Raises `SilentRankError` for ranks without a post, and `RankLostError` if the store is gone.
        """
        places = [f"{topic}/{rank}" for rank in range(self.size)]
        try:
            self._keys.write(places[self.rank], json.dumps(post))
            posts = self._keys.await_all(places, 2 * self.patience_s)
            silent = [] if posts else [rank for rank, place in enumerate(places) if not self._keys.check([place])]
        except RuntimeError as error:
            gone = "rank 0, or the agent that serves the store, ended or was stopped"
            raise RankLostError(f"Rank {self.rank}: {gone} during {topic}: its own message says why.") from error
        if not posts:
            waited = f"within {2 * self.patience_s:g} s"
            raise SilentRankError(f"{ranks_in_short(silent)} fell silent at {topic}: no answer {waited}.")
        return [json.loads(post) for post in posts]

    def findings(self, topic: str, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings of all ranks, with their ranks (*collective*)."""
        posts = self.all(topic, [asdict(finding) for finding in findings])
        return [Finding(**{**fields, "ranks": (rank,)}) for rank, post in enumerate(posts) for fields in post]


def reach(address: str, board: Board, names: Sequence[str]) -> Finding:
    """Return whether ranks reach one another; `address` is this rank's (*collective*)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN) as server:
        places = board.all("ports", server.getsockname()[:2])
        peers = [rank for rank in range(board.size) if rank != board.rank]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            obstacles = [*pool.map(lambda rank: visit(*places[rank]), peers)]
        rows = board.all("visits", [*zip(peers, obstacles, strict=True)])
    visits = {(start, end): obstacle for start, row in enumerate(rows) for end, obstacle in row}
    return judge_visits(visits, [host for host, _ in places], names)


def visit(address: str, port: int, limit_s: float = _CONNECT_S) -> str:
    """Connect to another rank; return the obstacle, or ""."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()
    return ""


def judge_visits(visits: Mapping[tuple[int, int], str], addresses: Sequence[str], names: Sequence[str]) -> Finding:
    """Return the finding on the visits {(from rank, to rank): trouble}."""
    if not visits:
        return Finding("network", "ports", UNCHECKED, "one rank: no other to reach")
    blocked = [
        f"rank {start} ({names[start]}) does not reach rank {end} ({names[end]}) at {addresses[end]}: {trouble}"
        for (start, end), trouble in visits.items()
        if trouble
    ]
    if not blocked:
        return conclude("network", "ports", "each pair of ranks connects in both directions")
    overflow = f"; and {len(blocked) - _MOST_PAIRS} pairs more" if blocked[_MOST_PAIRS:] else ""
    start, end = next(pair for pair, trouble in visits.items() if trouble)
    rule = f"iptables -I INPUT -s {addresses[start]} -p tcp -j ACCEPT"
    fix = f"let TCP from {addresses[start]} into {names[end]}, all ports above 1023: {rule}"
    return conclude("network", "ports", "; ".join(blocked[:_MOST_PAIRS]) + overflow, fix, bad=RED)


def compute(topology: Topology, device: torch.device, store: Store, board: Board, collectives: str) -> list[Any]:
    """Return each rank's results of joint computations, for `judge` (*collective*).

    `collectives` selects the exchange of CPU tensors.
    """
    worlds: list[World] = []
    limit_s, group = board.patience_s, PrefixStore("group", store)

    def work() -> dict[str, Any]:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # the current device is per thread
        # torch's limit, which on a GPU ends the process, must come after ours.
        worlds.append(world := World.join(topology, device, group, timeout_s=2 * limit_s, collectives=collectives))
        way = f"by gloo: {world.shared_memory_reason}" if world.memory is None else "through shared memory"
        few = torch.zeros(_GATHERED_BYTES, dtype=torch.uint8, device=device)
        return {  # collectives, in the same order on each rank
            "way": way if device.type == "cpu" else f"by {dist.get_default_backend_for_device(device).upper()}",
            "rows": _measure(world),
            "gather_s": _slowest_s(world, lambda: world.stack(few), _GATHERS),
            "beside": _beside(world),
            "changed": _find_corrupted(world),
        }

    try:
        result = bounded.within(limit_s, work, "all-reduce")
    except Exception as error:  # a rank that waits for another, or lost it, knows less than the other
        result = {"error": one_line(error), "is_echo": isinstance(error, bounded.Late) or is_echo(error)}
    results = board.all("all-reduce", result)
    for world in worlds:
        close_soon(world)
    return results


def _kind(world: World) -> str:
    return "cpu" if world.device.type == "cpu" else "accelerator"


def _measure(world: World) -> list[tuple[int, float]]:
    """Return (bytes, slowest rank's mean s of an all-reduce) by size (*collective*)."""
    measured: list[tuple[int, float]] = []
    for size_bytes, runs in _SIZES[_kind(world)].items():
        if size_bytes > MIB:
            runs = min(runs, int(_MOST_S / (measured[-1][1] * size_bytes / measured[-1][0])))
        if not runs:
            break
        tensor = torch.zeros(size_bytes // 4, device=world.device)
        world.sum_(tensor)
        measured.append((size_bytes, _slowest_s(world, partial(world.sum_, tensor), runs)))
    return measured


def _beside(world: World) -> float | None:
    """Return the cost of overlapping computation with an all-reduce, 0 to 1 (*collective*).

    0: both run at full speed. 1: overlap saves no time, as if both need the same processor. None: ranks that exchange
    through shared memory do not compute meanwhile.
    """
    if world.device.type == "cpu" and world.memory is not None:
        return None
    size_bytes, width = _BESIDE[_kind(world)]
    tensor = torch.zeros(size_bytes // 4, device=world.device)
    matrix = torch.zeros(width, width, device=world.device)

    def compute(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    def both(times: int) -> None:
        work = dist.all_reduce(tensor, group=world.group, async_op=True)
        compute(times)
        work.wait()

    measured_s = partial(_slowest_s, world, runs=_BESIDE_RUNS)
    both(1)
    exchange_s, once_s = measured_s(lambda: both(0)), measured_s(lambda: compute(1))
    times = max(1, round(exchange_s / once_s))
    compute_s, both_s = measured_s(lambda: compute(times)), measured_s(lambda: both(times))
    return min(1.0, max(0.0, both_s - max(exchange_s, compute_s)) / min(exchange_s, compute_s))


def _find_corrupted(world: World) -> list[int]:
    """Return the ranks whose bytes arrived here corrupted (*collective*)."""
    count = min(16 * MIB, 512 * MIB // world.size)  # per rank, and in total

    def sent_by(rank: int) -> torch.Tensor:
        values = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
        return values.to(world.device)

    sent = sent_by(world.rank).repeat(world.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=world.group)
    return [rank for rank, chunk in enumerate(received.view(world.size, -1)) if not torch.equal(chunk, sent_by(rank))]


def _slowest_s(world: World, work: Callable[[], object], runs: int) -> float:
    """Return the slowest rank's mean seconds of `work` (*collective*)."""
    times = []
    for _ in range(runs):
        since_s = time.perf_counter()
        work()
        if world.device.type != "cpu":
            torch.accelerator.synchronize(world.device)
        times.append(time.perf_counter() - since_s)
    return float(world.max(torch.tensor(fmean(times), device=world.device)))


def judge(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[Finding]:
    """Yield findings on the ranks' `results` of `compute`; `names` are their hosts."""
    failures = {rank: result for rank, result in enumerate(results) if "error" in result}
    causes = {rank: result for rank, result in failures.items() if not result["is_echo"]} or failures
    for rank, result in causes.items():
        fix = "see what that rank printed; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL make it say more"
        yield conclude("collectives", "all-reduce", f"rank {rank} ({names[rank]}): {result['error']}", fix, bad=RED)
    if failures:
        return
    yield conclude("collectives", "all-reduce", results[0]["way"])
    for size_bytes, time_s in results[0]["rows"]:
        rate = 2 * (len(results) - 1) / len(results) * size_bytes / time_s
        words = shown(time_s, "s") + (f", bus {shown(rate, 'bytes/s')}" if size_bytes >= KIB else "")
        yield conclude("collectives", f"all-reduce {shown(size_bytes, 'bytes')}", words, value=time_s, unit="s")
    name, gather_s = f"all-gather {shown(_GATHERED_BYTES, 'bytes')}", results[0]["gather_s"]
    yield conclude("collectives", name, shown(gather_s, "s"), value=gather_s, unit="s")
    if (beside := results[0]["beside"]) is not None:
        words = f"{1 - beside:.0%} of the shorter one's time is gained"
        yield conclude("collectives", "computation beside all-reduce", words, value=beside, unit="s/s")
    pairs = ", ".join(
        f"rank {source} to rank {rank} ({names[rank]})"
        for rank, result in enumerate(results)
        for source in result["changed"]
    )
    fix = "let no job run there: dmesg (Xid) and nvidia-smi -q show a faulty card, slot or IOMMU (PCIe ACS)"
    words = f"changed on arrival: {pairs}" if pairs else "arrive unchanged at each rank"
    yield conclude("collectives", "bytes sent", words, fix if pairs else "", bad=RED)


def folder(path: Path, board: Board, limit_s: float) -> list[Finding]:
    """Return findings on the output folder, of rank 0 and others (*collective*)."""
    name = board.all("name", f".lockstep-doctor-{secrets.token_hex(8)}")[0]
    findings = look("disk", "output", lambda: alone.output(path, name), limit_s, RED) if board.rank == 0 else []
    is_red = any(finding.state == RED for finding in findings)
    try:
        if board.all("output", is_red)[0] or board.size == 1:
            return findings
        return findings + board.findings("shared", look("disk", "shared", lambda: alone.shared(path, name), limit_s))
    finally:
        if board.rank == 0 and not is_red:
            with contextlib.suppress(OSError):
                (alone.existing(path) / name).unlink()
