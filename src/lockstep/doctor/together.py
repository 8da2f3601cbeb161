"""Joint findings of ranks: absent ranks, closed ports, wrong or slow sums.

Ranks exchange them through torch's store: a process group is of no use after one rank has stayed away from a
collective. Bandwidth is that of the bus, 2 (N − 1) / N × bytes ÷ time: the load of each link of a ring, which does not
depend on N (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
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
from ..errors import RunError
from ..launchers.rank import close_soon
from ..monitor import bounded
from ..monitor.failures import RankLostError, is_echo, one_line
from ..monitor.keys import Keys
from ..world.topology import Topology
from ..world.world import World
from . import alone
from .finding import KIB, MIB, RED, UNCHECKED, Finding, found, look, shown

_LOOK_S = 0.02
_CONNECT_S = 3.0
"""For one connection: a network of the whole earth answers in a third of a second, a firewall that drops, never."""
_AT_ONCE, _NAMED = 32, 4

_SIZES = {
    "cpu": {512: 100, 64 * KIB: 30, MIB: 9, 16 * MIB: 5, 64 * MIB: 3},
    "cuda": {512: 50, MIB: 20, 16 * MIB: 10, 128 * MIB: 7, 512 * MIB: 5},
}
"""{bytes: how often}; of the times the mean is taken: in a training, too, some messages wake a rank late, and count."""
_GATHERED_BYTES, _GATHERS = 512, 100
"""Of each rank, as BatchNorm's statistics of some channels, and how often."""
_BESIDE = {"cpu": (MIB, 256), "cuda": (16 * MIB, 2048)}
"""(bytes, size of square matrices) of an all-reduce and of the computation beside it."""
_BESIDE_RUNS = 7
_MOST_S = 1.0  # for one size: as often as that allows; where once would be too long, it and those above are left out
_PATTERN, _WEIGHTS = 127, 64  # small enough that the sum over 4,000 ranks is a whole number that float32 holds


class Board:
    """The ranks' posts, topic by topic, in the same order on each."""

    def __init__(self, store: Store, rank: int, size: int, patience_s: float) -> None:
        """After `patience_s` the others go on without a rank."""
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self.absent: dict[int, Finding] = {}
        """Ranks that fell silent, each with its finding."""
        self._hears_s = 2 * patience_s + 1  # rank 0 may itself have waited for a rank
        self._keys = Keys(store, "board", limit_s=self._hears_s)

    def all(self, topic: str, mine: Any) -> dict[int, Any]:
        """Post `mine`; return the posts of all present ranks under `topic` (*collective*).

        Raises `RunError` on a rank that the others have given up, or that rank 0 has left alone.
        """
        try:
            self._keys.write(f"{topic}/{self.rank}", json.dumps(mine))
            if self.rank == 0:  # which alone decides who is absent
                deadline = time.monotonic() + self.patience_s
                came = [each for each in range(self.size) if each not in self.absent]
                came = [each for each in came if self._comes(f"{topic}/{each}", deadline)]
                told = [(each, json.loads(self._keys.read(f"{topic}/{each}"))) for each in came]
                self._keys.write(f"{topic}/all", json.dumps(told))
            elif not self._comes(f"{topic}/all", time.monotonic() + self._hears_s):
                raise TimeoutError
            everyone: dict[int, Any] = dict(json.loads(self._keys.read(f"{topic}/all")))
        except (RuntimeError, TimeoutError) as error:  # the store's own: its server has gone, or rank 0
            gone = "rank 0, or the agent that serves the store, ended or was stopped"
            raise RankLostError(f"Rank {self.rank}: {gone} during {topic}: its own message says why.") from error
        for silent in set(range(self.size)) - everyone.keys() - self.absent.keys():
            words = f"rank {silent} fell silent at {topic}, and was waited for {self.patience_s:g} s"
            fix = "see whether it was stopped, and what its host is busy with; end it before a job starts"
            self.absent[silent] = found("collectives", "ranks", words, fix, bad=RED)
        if self.rank in self.absent:
            raise RunError(
                f"Rank {self.rank} came to {topic} more than {self.patience_s:g} s late, and the others went on "
                "without it: it was stopped, or its host is overloaded."
            )
        return everyone

    def findings(self, topic: str, mine: Iterable[Finding]) -> list[Finding]:
        """Return the findings of all ranks, each as that rank's (*collective*)."""
        told = self.all(topic, [asdict(each) for each in mine])
        return [Finding(**{**each, "ranks": (rank,)}) for rank, theirs in told.items() for each in theirs]

    def _comes(self, key: str, deadline: float) -> bool:
        while not (has_come := self._keys.check([key])) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return has_come


def reach(address: str, board: Board, names: Sequence[str]) -> Finding:
    """Return whether ranks reach one another; this one is at `address` (*collective*)."""
    with listening(address) as place:
        told = board.all("ports", place)
        others = [rank for rank in told if rank != board.rank]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            troubles = [*pool.map(lambda rank: visit(*told[rank]), others)]
        rows = board.all("visits", [*zip(others, troubles, strict=True)])
    visits = {(start, end): trouble for start, row in rows.items() for end, trouble in row}
    return judge_visits(visits, {rank: where for rank, (where, _) in told.items()}, names)


@contextlib.contextmanager
def listening(address: str) -> Iterator[tuple[str, int]]:
    """Accept connections at `address` within the block; yield address and port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN) as server:

        def answer() -> None:  # a host's own limit of the backlog may be below the number of ranks
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=answer, daemon=True).start()
        try:
            yield server.getsockname()[:2]
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends accept, which closing does not


def visit(address: str, port: int, limit_s: float = _CONNECT_S) -> str:
    """Connect to another rank; return the obstacle, or ""."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()
    return ""


def judge_visits(visits: Mapping[tuple[int, int], str], addresses: Mapping[int, str], names: Sequence[str]) -> Finding:
    """Return the finding on the visits {(from rank, to rank): trouble}."""
    if not visits:
        return Finding("network", "ports", UNCHECKED, "one rank: nobody to reach")
    blocked = [
        f"rank {start} ({names[start]}) does not reach rank {end} ({names[end]}) at {addresses[end]}: {trouble}"
        for (start, end), trouble in visits.items()
        if trouble
    ]
    if not blocked:
        return found("network", "ports", "each two ranks connect, both ways")
    more = f"; and {len(blocked) - _NAMED} pairs more" if blocked[_NAMED:] else ""
    start, end = next(pair for pair, trouble in visits.items() if trouble)
    rule = f"iptables -I INPUT -s {addresses[start]} -p tcp -j ACCEPT"
    fix = f"let TCP from {addresses[start]} into {names[end]}, all ports above 1023: {rule}"
    return found("network", "ports", "; ".join(blocked[:_NAMED]) + more, fix, bad=RED)


def compute(topology: Topology, device: torch.device, store: Store, board: Board, collectives: str) -> dict[int, Any]:
    """Return each rank's results of computing together, for `judge` (*collective*).

    `collectives` says how CPU tensors are to be exchanged.
    """
    worlds: list[World] = []
    limit_s, group = board.patience_s, PrefixStore("group", store)

    def work() -> dict[str, Any]:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has its own of
        # torch's own limit, which on a GPU ends the process, comes after ours.
        worlds.append(world := World.join(topology, device, group, timeout_s=2 * limit_s, collectives=collectives))
        way = f"by gloo: {world.shared_memory_reason}" if world.memory is None else "through shared memory"
        few = torch.zeros(_GATHERED_BYTES, dtype=torch.uint8, device=device)
        return {  # collectives, in the same order on each rank
            "way": "by NCCL" if device.type == "cuda" else way,
            "rows": _measure(world),
            "gather_s": _slowest_s(world, lambda: world.stack(few), _GATHERS),
            "beside": _beside(world),
            "changed": _changed(world),
        }

    try:
        mine = bounded.within(limit_s, work, "all-reduce")
    except Exception as error:  # a rank that waits for another, or has lost it, knows less than that one
        mine = {"error": one_line(error), "is_echo": isinstance(error, bounded.Late) or is_echo(error)}
    told = board.all("all-reduce", mine)
    for world in worlds:
        close_soon(world)
    return told


def _measure(world: World) -> list[tuple[int, float, int]]:
    """Return (bytes, slowest rank's mean s, wrong elements here) by size (*collective*)."""
    measured: list[tuple[int, float, int]] = []
    weight = sum(rank % _WEIGHTS + 1 for rank in range(world.size))
    for size_bytes, runs in _SIZES[world.device.type].items():
        if size_bytes > MIB:
            runs = min(runs, int(_MOST_S / (measured[-1][1] * size_bytes / measured[-1][0])))
        if not runs:
            break
        pattern = torch.arange(size_bytes // 4, dtype=torch.float32, device=world.device) % _PATTERN + 1
        total = world.sum(pattern * (world.rank % _WEIGHTS + 1))
        wrong = int((total != pattern * weight).sum())
        total.zero_()
        measured.append((size_bytes, _slowest_s(world, partial(world.sum_, total), runs), wrong))
    return measured


def _beside(world: World) -> float | None:
    """Return the cost of a second of computation beside an all-reduce (*collective*).

    0 where each runs as if alone; 1 where nothing is gained, as where both need the same processor. None where ranks
    share memory, and do not compute meanwhile.
    """
    if world.device.type == "cpu" and world.memory is not None:
        return None
    size_bytes, width = _BESIDE[world.device.type]
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


def _changed(world: World) -> list[int]:
    """Return the ranks whose bytes arrived here changed (*collective*)."""
    count = min(16 * MIB, 512 * MIB // world.size)  # to each, and to all together

    def sent_by(rank: int) -> torch.Tensor:
        drawn = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
        return drawn.to(world.device)

    mine = sent_by(world.rank).repeat(world.size)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=world.group)
    return [rank for rank, each in enumerate(theirs.view(world.size, -1)) if not torch.equal(each, sent_by(rank))]


def _slowest_s(world: World, work: Callable[[], object], runs: int) -> float:
    """Return the slowest rank's mean seconds of `work` (*collective*)."""
    times = []
    for _ in range(runs):
        since_s = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - since_s)
    return float(world.max(torch.tensor(fmean(times), device=world.device)))


def judge(told: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> Iterator[Finding]:
    """Yield findings on `told`, from `compute`; `names` are the ranks' hosts."""
    failures = {at: each for at, each in told.items() if "error" in each}
    causes = {at: each for at, each in failures.items() if not each["is_echo"]} or failures
    for at, each in causes.items():
        fix = "see what that rank printed; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL make it say more"
        yield found("collectives", "all-reduce", f"rank {at} ({names[at]}): {each['error']}", fix, bad=RED)
    if failures:
        return
    yield found("collectives", "all-reduce", told[0]["way"])
    for index, (size_bytes, time_s, _) in enumerate(told[0]["rows"]):
        words, fix = shown(time_s, "s"), ""
        if size_bytes >= KIB:
            words += f", bus {shown(2 * (len(told) - 1) / len(told) * size_bytes / time_s, 'bytes/s')}"
        if wrong := {at: each["rows"][index][2] for at, each in told.items() if each["rows"][index][2]}:
            named = ", ".join(f"{count:,} on rank {at} ({names[at]})" for at, count in wrong.items())
            words = f"elements of the sum are wrong: {named}"
            fix = "let no job run with these: test the hosts' memory and network cards, GPUs by nvidia-smi -q -d ECC"
        name = f"all-reduce {shown(size_bytes, 'bytes')}"
        yield found("collectives", name, words, fix, bad=RED, value=time_s, unit="s")
    name, gather_s = f"all-gather {shown(_GATHERED_BYTES, 'bytes')}", told[0]["gather_s"]
    yield found("collectives", name, shown(gather_s, "s"), value=gather_s, unit="s")
    if (beside := told[0]["beside"]) is not None:
        words = f"{1 - beside:.0%} of the shorter one's time is gained"
        yield found("collectives", "computation beside all-reduce", words, value=beside, unit="s/s")
    arrived = ((at, source) for at, each in told.items() for source in each["changed"])
    pairs = ", ".join(f"rank {source} to rank {at} ({names[at]})" for at, source in arrived)
    fix = "let no job run there: dmesg (Xid) and nvidia-smi -q tell more of a faulty card, seat or IOMMU (PCIe ACS)"
    words = f"they arrive with other bits: {pairs}" if pairs else "they arrive unchanged at each rank"
    yield found("collectives", "bytes sent", words, fix if pairs else "", bad=RED)


def folder(path: Path, board: Board, limit_s: float) -> list[Finding]:
    """Return findings on the output folder, of rank 0 and others (*collective*)."""
    left: list[Path] = []
    try:
        findings = look("disk", "output", lambda: alone.output(path, left), limit_s, RED) if board.rank == 0 else []
        is_red = any(each.state == RED for each in findings)
        written = board.all("output", None if is_red or not left else str(left[0]))[0]
        if written is None or board.size == 1:
            return findings
        seen = look("disk", "shared", lambda: alone.shared(Path(written)), limit_s)
        return findings + board.findings("shared", seen)
    finally:
        with contextlib.suppress(OSError):
            for each in left:
                each.unlink()
