"""Findings of a single rank: versions, host, memory of a GPU, names, folders."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from .. import cuda, hardware
from ..errors import counted, ranks_in_short
from ..files import unlinked
from ..launchers import hosts
from ..record import manifest
from ..world.topology import Topology
from .finding import GIB, RED, YELLOW, Finding, conclude, shown

_MUST_AGREE = ("lockstep-torch", "torch", "cuda", "NCCL")
"""Ranks with different versions speak different protocols, or compute different bits."""
_WORKERS_HOLD_BYTES = 16 * 2 * 32 * 3 * 224 * 224
"""Shared memory of a rank: 16 data workers with 2 batches each of 32 images of 224 × 224 bytes."""
_NCCL_BYTES = 2 * 33_030_528
"""Shared memory of a rank for NCCL, where GPUs have no peer-to-peer access: a segment for each neighbour in a ring."""
_MIN_FREE_SHARE = 0.5  # of a GPU's memory: with less, a batch that fits other GPUs does not fit this one
_CHECKPOINT_BYTES = 25_557_032 * 2 * 4  # a ResNet-50 in float32 with the momentum of each weight
_ROOMY_BYTES = 10 * GIB
_APPEARS_S = 2.0  # for a file to appear on another host; network disks cache missing names for a while


def versions(driver: str) -> dict[str, str | None]:
    """Return the version of each part here; `driver` is NVIDIA's."""
    return manifest.versions() | {"NCCL": ".".join(map(str, cuda.nccl_version())) or None, "driver": driver or None}


def judge_versions(by_rank: Sequence[Mapping[str, str | None]]) -> Iterator[Finding]:
    """Yield findings on the ranks' versions, one {part: version} per rank."""
    for part, version in by_rank[0].items():
        if deviating := [rank for rank, versions in enumerate(by_rank) if versions[part] != version]:
            words = f"{version} on rank 0, {by_rank[deviating[0]][part]} or others on {ranks_in_short(deviating)}"
            bad = RED if part in _MUST_AGREE else YELLOW
            yield conclude("host", f"{part} versions", words, f"install the same {part} on every node", bad=bad)
    words = ", ".join(f"{part} {version}" for part, version in by_rank[0].items() if version)
    yield conclude("host", "versions", words)


def host(topology: Topology, on_cpu: bool) -> Iterator[Finding]:
    """Yield findings on this host's resources; `on_cpu`: ranks compute on the CPU."""
    ranks, usable = topology.local_size, hardware.cpus()
    words, fix = f"{usable} available ({hardware.cpu_name()})", ""
    if on_cpu and ranks > usable:
        words = f"{ranks} ranks share {usable}: they will slow one another down"
        fix = f"start at most {counted(usable, 'rank')} on this host"
    yield conclude("host", "processors", words, fix, value=usable)

    free_bytes = int(psutil.virtual_memory().available)
    words = f"{shown(free_bytes, 'bytes')} of {shown(hardware.memory_bytes(), 'bytes')} free"
    fix = "end other programs: a rank takes several hundred MiB before it trains" if free_bytes < GIB else ""
    yield conclude("host", "memory", words, fix, value=free_bytes, unit="bytes")

    with contextlib.suppress(FileNotFoundError):  # some systems have no /dev/shm
        free_bytes, need = _free_bytes(Path("/dev/shm")), _WORKERS_HOLD_BYTES * ranks
        users = f"data workers of {counted(ranks, 'rank')}"
        if not on_cpu and ranks > 1:
            need, users = need + _NCCL_BYTES * ranks, f"{users} and NCCL"
        words, fix = f"{shown(free_bytes, 'bytes')} free in /dev/shm", ""
        if free_bytes < need:
            words += f"; {users} need {shown(need, 'bytes')}, or die with a bus error"
            fix = f"docker run --ipc=host (or --shm-size={1 + 2 * need // GIB}g), or --workers 0"
        yield conclude("host", "shared memory", words, fix, value=free_bytes, unit="bytes")

    soft, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max(1024, 8 * topology.size)  # 1024 is usual
    words, fix = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,} per process", ""
    if soft != resource.RLIM_INFINITY and soft < need:  # data workers pass tensors as open files
        words += f"; {counted(topology.size, 'rank')} with data workers need {need:,}"
        fix = f"ulimit -n {need} in the shell that starts the job (docker run --ulimit nofile={need})"
    yield conclude("host", "open files", words, fix, value=soft)


def judge_gpu(index: int, gpu: hardware.Gpu) -> Finding:
    """Return a finding on a GPU and its free memory."""
    state = hardware.query_nvml("nvmlDeviceGetMemoryInfo", hardware.nvml_handle(gpu.uuid))
    free_bytes = gpu.memory_bytes if state is None else int(state.free)
    words, fix = f"{gpu.name}, {shown(gpu.memory_bytes, 'bytes')}, {shown(free_bytes, 'bytes')} free", ""
    if free_bytes < _MIN_FREE_SHARE * gpu.memory_bytes:
        words += ": another program holds most of its memory"
        fix = "end it (nvidia-smi lists programs), or take other GPUs with --gpus"
    return conclude("devices", f"GPU {index}", words, fix, value=free_bytes, unit="bytes")


def network(address: str, *, by_name: bool) -> Iterator[Finding]:
    """Yield findings on this host's interface and name. `by_name`: other hosts resolve its name."""
    interface = next((name for name, addresses in hosts.interfaces().items() if address in addresses), "no interface")
    yield conclude("network", "interface", f"{interface} {address}")
    name, addresses = socket.gethostname(), list[str]()
    with contextlib.suppress(OSError):
        addresses = [str(entry[0]) for *_, entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    words, fix = f"{name} resolves to {', '.join(dict.fromkeys(addresses))}", ""
    if not addresses or (by_name and hosts.is_loopback(addresses)):
        if not addresses:
            words = f"{name} does not resolve; torchrun and other tools need it"
        fix = f"add a line to /etc/hosts: {address} {name} (in place of another one), or name an --interface"
    yield conclude("network", "host name", words, fix, bad=RED if by_name else YELLOW)


def output(folder: Path, name: str) -> Iterator[Finding]:
    """Yield findings on writing into `folder`, or its nearest existing parent; leave a file `name` there."""
    base = existing(folder)
    try:
        with open(base / name, "xb", buffering=0, opener=unlinked) as file:
            file.write(b"lockstep doctor\n")
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            (base / name).unlink()
        fix = "give another folder as --output, or make it writable, with room in it"
        yield conclude("disk", "output", f"{base} cannot be written: {error.strerror}", fix, bad=RED)
    else:
        yield judge_space(base, _free_bytes(base))


def judge_space(base: Path, free_bytes: int) -> Finding:
    """Return a finding on the room for checkpoints."""
    words, fix = f"{shown(free_bytes, 'bytes')} free in {base}", ""
    if free_bytes < _ROOMY_BYTES:
        words += f": three checkpoints of a ResNet-50 take {shown(3 * _CHECKPOINT_BYTES, 'bytes')}, larger models more"
        fix = "make room, or give an --output elsewhere"
    return conclude("disk", "free space", words, fix, value=free_bytes, unit="bytes")


def shared(folder: Path, name: str, wait_s: float = _APPEARS_S) -> Iterator[Finding]:
    """Yield whether the file that rank 0 wrote in `output` appears here soon."""
    path, deadline = existing(folder) / name, time.monotonic() + wait_s
    while not (is_seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    words, fix = f"all ranks see the same {path.parent}", ""
    if not is_seen:
        words = f"{path.parent} is another folder here than on rank 0, which alone writes checkpoints: no resuming here"
        fix = "give an --output on a disk that all nodes mount; --init-method file:// needs one as well"
    yield conclude("disk", "shared", words, fix)


def data(folder: Path) -> Iterator[Finding]:
    """Yield whether the data folder can be read."""
    words, fix = f"{folder} can be read", ""
    try:
        os.scandir(folder).close()
    except OSError as error:
        words, fix = f"{folder} cannot be read: {error.strerror}", "give one that this user can read here as --data-dir"
    yield conclude("disk", "data", words, fix)


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _free_bytes(folder: Path) -> int:
    return int(psutil.disk_usage(str(folder)).free)
