"""What a host gives a rank besides its device: processors, memory, shared memory, and the limits of its processes."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from .. import hardware
from ..errors import counted
from .finding import GREEN, YELLOW, Finding, Subject
from .units import GIB, size

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

WORKERS_HOLD_BYTES = 4 * 2 * 32 * 3 * 224 * 224 * 4
"""What the data workers of a rank hold in shared memory: 4 (the default's most) with 2 batches each (torch's
prefetch_factor) of 32 images of 224 × 224 as float32."""
_LEAST_FILES = 1024
"""The soft limit that Linux distributions give; data workers pass tensors as open files."""
_FILES_OF_A_PEER = 8
_LEAST_THREADS = 256
_LEAST_MEMORY_BYTES = GIB


@dataclass(frozen=True)
class Sharers:
    """With whom a rank shares its host."""

    local_size: int
    """Ranks on this host."""
    size: int
    """Ranks in all."""
    on_cpu: bool
    """Whether ranks compute on the processors."""


def processors(sharers: Sharers) -> Iterator[Finding]:
    """Yield what this rank may compute on."""
    seen = len(hardware.processors())
    quota = hardware.quota(_OWN_GROUPS, _GROUPS)
    yield from judge_processors(seen, quota, sharers, hardware.cpu_name(), hardware.has_bf16_units())


def judge_processors(seen: int, quota: float, sharers: Sharers, name: str, bf16: bool) -> Iterator[Finding]:
    """Yield what `seen` processors with the time of `quota` of them are for the ranks that share them."""
    about = Subject("host", "processors", value=min(float(seen), quota))
    usable = max(1, math.ceil(min(seen, quota)))
    if quota < seen:
        words = f"{seen} are visible, but the control group gives the time of {quota:.3g}: threads will be held up"
        fix = f"raise the container's quota (docker run --cpus), or pin it to {usable} with --cpuset-cpus"
        yield about.yellow(words, fix)
    elif sharers.on_cpu and sharers.local_size > usable:
        words = f"{sharers.local_size} ranks share {usable}: they will wait for one another"
        yield about.yellow(words, f"start at most {counted(usable, 'rank')} on this host")
    else:
        units = "in hardware" if bf16 else "emulated"
        yield about.green(f"{usable} to use ({name}), bf16 {units}")


def memory() -> Iterator[Finding]:
    """Yield how much memory is left on this host."""
    yield judge_memory(int(psutil.virtual_memory().available), hardware.memory_bytes())


def judge_memory(free_bytes: int, all_bytes: int) -> Finding:
    """Return what memory that is left means."""
    low = free_bytes < _LEAST_MEMORY_BYTES
    return Subject("host", "memory", value=free_bytes, unit="bytes").found(
        YELLOW if low else GREEN,
        f"{size(free_bytes)} of {size(all_bytes)} free",
        "end other programs: a rank alone holds several hundred MiB before it trains" if low else "",
    )


def shared_memory(sharers: Sharers, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Yield whether the data workers' batches fit into shared memory."""
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        words, fix = f"there is no {folder}", f"mount it: mount -t tmpfs tmpfs {folder}"
        yield Subject("host", "shared memory").red(words, fix)
        return
    yield judge_shared_memory(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, sharers)


def judge_shared_memory(free_bytes: int, all_bytes: int, sharers: Sharers) -> Finding:
    """Return whether `free_bytes` of shared memory are enough for the host's ranks."""
    need = WORKERS_HOLD_BYTES * sharers.local_size
    about = Subject("host", "shared memory", value=float(free_bytes), unit="bytes")
    if free_bytes >= need:
        return about.green(f"{size(free_bytes)} of {size(all_bytes)} free in /dev/shm")
    ask_gib = max(1, math.ceil(2 * need / GIB))
    return about.yellow(
        f"{size(free_bytes)} of {size(all_bytes)} free in /dev/shm; data workers of "
        f"{counted(sharers.local_size, 'rank')} need {size(need)} for images of 224 × 224, or die with a bus error",
        f"docker run --shm-size={ask_gib}g (or --ipc=host), mount -o remount,size={ask_gib}G /dev/shm, or train "
        "with --workers 0",
    )


def limits(sharers: Sharers) -> Iterator[Finding]:
    """Yield what the limits of a process leave to a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_files(soft, hard, sharers)
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()):
        yield judge_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield judge_threads(_threads_left(), sharers)


def judge_files(soft: int, hard: int, sharers: Sharers) -> Finding:
    """Return what a soft limit of open files means; -1 is none."""
    need = max(_LEAST_FILES, _FILES_OF_A_PEER * sharers.size)
    about = Subject("host", "open files", value=float(soft))
    if soft == resource.RLIM_INFINITY or soft >= need:
        words = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,} for a process"
        return about.green(words)
    raises = hard == resource.RLIM_INFINITY or hard >= need
    how = f"ulimit -n {need}" if raises else f"nofile {need} in /etc/security/limits.conf (docker run --ulimit nofile)"
    words = f"a process may open {soft:,}; {counted(sharers.size, 'rank')} with data workers need {need:,}"
    return about.yellow(words, f"{how}, in the shell that starts the job")


def judge_locked(soft: int) -> Finding:
    """Return what the soft limit of locked memory means where InfiniBand is there, which registers its buffers."""
    about = Subject("host", "locked memory", value=float(soft), unit="bytes")
    if soft == resource.RLIM_INFINITY:
        return about.green("no limit, as InfiniBand needs it")
    words = f"a process may lock {size(soft)}, but InfiniBand locks all that it sends from"
    fix = "ulimit -l unlimited (docker run --ulimit memlock=-1, memlock in /etc/security/limits.conf)"
    return about.yellow(words, fix)


def judge_threads(left: float, sharers: Sharers) -> Finding:
    """Return whether the threads and processes that may still be started are enough for the host's ranks."""
    need = _LEAST_THREADS * sharers.local_size
    about = Subject("host", "threads")
    if left >= need:
        words = "no limit near" if math.isinf(left) else f"{need:,} more can be started, or more"
        return replace(about, value=None if math.isinf(left) else left).green(words)
    words = f"only {left:,.0f} more can be started; {counted(sharers.local_size, 'rank')} with data workers need {need}"
    fix = "ulimit -u unlimited; in a container docker run --pids-limit=-1"
    return replace(about, value=left).yellow(words, fix)


def _threads_left() -> float:
    """Return how many processes and threads may still be started; infinite where no limit is near."""
    left = pids_left(_OWN_GROUPS, _GROUPS)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # it binds everybody but root
        left = min(left, soft - _threads_of(os.getuid()))
    return math.inf if left > 100_000 else max(0.0, left)


def _threads_of(user: int) -> int:
    found = psutil.process_iter(["uids", "num_threads"])
    return sum(each.info["num_threads"] or 0 for each in found if each.info["uids"] and each.info["uids"].real == user)


def pids_left(own_groups: Path, groups: Path) -> float:
    """Return how many processes and threads the control groups still allow; infinite without a limit.

    `own_groups` is the process's /proc/PID/cgroup, `groups` where the hierarchy is mounted; version 1 has a folder of
    its own for pids. (https://docs.kernel.org/admin-guide/cgroup-v2.html#pid)
    """
    left = math.inf
    for line in own_groups.read_text(encoding="utf-8").splitlines() if own_groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        root = groups / controllers
        own = root / path.strip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(root):
                break
            left = min(left, _number(group / "pids.max", math.inf) - _number(group / "pids.current", 0))
    return left


def _number(path: Path, otherwise: float) -> float:
    text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    return float(text) if text.isdecimal() else otherwise
