"""Findings of a single rank: versions, host, GPUs, names, folders."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from .. import hardware
from ..errors import counted, ranks_in_short
from ..files import unlinked
from ..launchers import hosts
from ..record import manifest
from ..world.topology import Topology
from .finding import GIB, MIB, RED, UNCHECKED, YELLOW, Finding, found, shown

_MUST_AGREE = ("lockstep-torch", "torch", "cuda", "NCCL")
"""Ranks with different ones speak different protocols, or compute other bits."""
_WORKERS_HOLD_BYTES = 4 * 2 * 32 * 3 * 224 * 224 * 4
"""In shared memory, of a rank: 4 data workers with 2 batches each of 32 images of 224 × 224 as float32."""
_TAKEN = 0.5  # of a GPU's memory: with more in other hands, a batch that fits elsewhere does not fit here

_CHECKPOINT_BYTES = 25_557_032 * 2 * 4  # a ResNet-50 in float32 with the momentum of each weight
_ROOMY_BYTES = 10 * GIB
_SLOW_BYTES_PER_S = 20e6  # below this, such a checkpoint takes more than ten seconds
_CHUNK_BYTES, _MOST_BYTES, _WRITE_S = 4 * MIB, 64 * MIB, 1.0
_APPEARS_S = 2.0  # for a file to be seen on another host; network disks remember for a while what was not there


def versions(driver: str) -> dict[str, str | None]:
    """Return the version of each part here; `driver` is NVIDIA's."""
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return manifest.versions() | {"NCCL": ".".join(map(str, nccl)) or None, "driver": driver or None}


def judge_versions(told: Mapping[int, Mapping[str, str | None]]) -> Iterator[Finding]:
    """Yield findings on the ranks' versions {rank: {part: version}}."""
    for part, version in told[0].items():
        if others := [rank for rank, each in told.items() if each[part] != version]:
            words = f"{version} on rank 0, {told[others[0]][part]} or others on {ranks_in_short(others)}"
            bad = RED if part in _MUST_AGREE else YELLOW
            yield found("host", f"{part} versions", words, f"install the same {part} on every node", bad=bad)
    yield found("host", "versions", ", ".join(f"{part} {version}" for part, version in told[0].items() if version))


def host(topology: Topology, on_cpu: bool) -> Iterator[Finding]:
    """Yield findings on this host's resources; `on_cpu`: ranks compute on the CPU."""
    ranks, usable, visible, quota = topology.local_size, hardware.cpus(), len(hardware.processors()), hardware.quota()
    bf16 = "in hardware" if hardware.bf16_units() else "emulated"
    words, fix = f"{usable} to use ({hardware.cpu_name()}), bf16 {bf16}", ""
    if quota < visible:
        words = f"{visible} are visible, but the control group gives the time of {quota:.3g}: threads will be held up"
        fix = f"raise the container's quota (docker run --cpus), or pin it to {usable} with --cpuset-cpus"
    elif on_cpu and ranks > usable:
        words = f"{ranks} ranks share {usable}: they will wait for one another"
        fix = f"start at most {counted(usable, 'rank')} on this host"
    yield found("host", "processors", words, fix, value=usable)

    free_bytes = int(psutil.virtual_memory().available)
    words = f"{shown(free_bytes, 'bytes')} of {shown(hardware.memory_bytes(), 'bytes')} free"
    fix = "end other programs: a rank alone holds several hundred MiB before it trains" if free_bytes < GIB else ""
    yield found("host", "memory", words, fix, value=free_bytes, unit="bytes")

    with contextlib.suppress(FileNotFoundError):  # on systems that have it elsewhere
        free_bytes, need = _free_bytes(Path("/dev/shm")), _WORKERS_HOLD_BYTES * ranks
        words, fix = f"{shown(free_bytes, 'bytes')} free in /dev/shm", ""
        if free_bytes < need:
            words += f"; data workers of {counted(ranks, 'rank')} need {shown(need, 'bytes')}, or die with a bus error"
            gib = max(1, math.ceil(2 * need / GIB))
            fix = f"docker run --shm-size={gib}g (or --ipc=host), mount -o remount,size={gib}G /dev/shm, or --workers 0"
        yield found("host", "shared memory", words, fix, value=free_bytes, unit="bytes")

    soft, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max(1024, 8 * topology.size)  # 1024 is usual
    words, fix = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,} for a process", ""
    if soft != resource.RLIM_INFINITY and soft < need:  # data workers pass tensors as open files
        words += f"; {counted(topology.size, 'rank')} with data workers need {need:,}"
        fix = f"ulimit -n {need} in the shell that starts the job (docker run --ulimit nofile={need})"
    yield found("host", "open files", words, fix, value=soft)


def usable_gpus(gpus: int, *, chosen_cpu: bool) -> Iterator[Finding]:
    """Yield whether torch can use the GPUs, unless the CPU was chosen."""
    if trouble := hardware.driver_trouble():
        fix = "run nvidia-smi; load the driver, or reboot"
        yield found("devices", "driver", f"the NVIDIA driver does not answer: {trouble}", fix)
    if not gpus or chosen_cpu:
        words = f"{gpus} here, left alone as --accelerator cpu asks" if gpus else "none: ranks compute on the CPU"
        yield Finding("devices", "GPUs", UNCHECKED, words)
    elif not torch.cuda.is_available():
        why, fix = "is a build without CUDA", "pip install --force-reinstall torch torchvision (PyPI's have CUDA)"
        if built := torch.version.cuda:
            why = f"(built for CUDA {built}) cannot use them: the driver is too old, or a GPU is lost"
            fix = "install a newer driver, or a torch built for an older CUDA (pytorch.org); see nvidia-smi"
        words = f"the driver shows {gpus}, but torch {torch.__version__} {why}"
        yield found("devices", "GPUs", words, f"{fix}, or take --accelerator cpu", bad=RED)


def judge_gpu(index: int, gpu: hardware.Gpu) -> Finding:
    """Return a finding on a GPU and its free memory."""
    memory = hardware.asked("nvmlDeviceGetMemoryInfo", hardware.nvml_handle(gpu.uuid))
    free_bytes = gpu.memory_bytes if memory is None else int(memory.free)
    words, fix = f"{gpu.name}, {shown(gpu.memory_bytes, 'bytes')}, {shown(free_bytes, 'bytes')} free", ""
    if free_bytes < _TAKEN * gpu.memory_bytes:
        words += ": another program holds most of its memory"
        fix = "end it (nvidia-smi lists programs), or take other GPUs with --gpus"
    return found("devices", f"GPU {index}", words, fix, value=free_bytes, unit="bytes")


def address_of(interface: str, towards: str) -> str:
    """Return the address of the interface, or the one `towards` another host."""
    chosen = sorted(hosts.interfaces().get(interface, []), key=lambda each: ":" in each)  # IPv4 first
    return chosen[0] if chosen else hosts.own_address(towards) or "127.0.0.1"  # a laptop without a network


def network(address: str, *, is_chosen: bool, others: bool) -> Iterator[Finding]:
    """Yield findings on this host's interface and name.

    `is_chosen` tells whether the interface was chosen, `others` whether other hosts have to find this one.
    """
    interface = next((name for name, each in hosts.interfaces().items() if address in each), "no interface")
    yield found("network", "interface", f"{interface} {address}")
    name, addresses = socket.gethostname(), []
    with contextlib.suppress(OSError):
        addresses = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    words, fix = f"{name} resolves to {', '.join(dict.fromkeys(addresses))}", ""
    if not addresses:
        words = f"{name} does not resolve; torchrun and other tools need it"
        fix = f"add a line to /etc/hosts: {address} {name}"
    elif others and hosts.is_loopback(addresses):
        words += ", where other hosts reach nobody"
        fix = f"add a line to /etc/hosts: {address} {name} (in place of {addresses[0]}), or name an --interface"
    # Where no interface is chosen, gloo takes what the name resolves to.
    yield found("network", "host name", words, fix, bad=RED if others and not is_chosen else YELLOW)


def output(folder: Path, left: list[Path]) -> Iterator[Finding]:
    """Yield findings on writing into `folder`, or its nearest existing parent.

    The path of the file that was written is added to `left`.
    """
    base = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    left.append(base / f".lockstep-doctor-{secrets.token_hex(8)}")
    try:
        free_bytes = _free_bytes(base)
        bytes_per_s = _written(left[-1], min(_MOST_BYTES, free_bytes // 2))
    except OSError as error:
        fix = "give another folder as --output, or make it writable, with room in it"
        yield found("disk", "output", f"{base} cannot be written: {error.strerror}", fix, bad=RED)
    else:
        yield from judge_output(base, free_bytes, bytes_per_s)


def _written(path: Path, most_bytes: int) -> float:
    """Return the bytes/s at which a new file was written."""
    chunk = secrets.token_bytes(_CHUNK_BYTES)  # not zeros: some disks store those as nothing
    since_s, count = time.perf_counter(), 0
    with open(path, "xb", buffering=0, opener=unlinked) as file:
        while count == 0 or (count < most_bytes and time.perf_counter() - since_s < _WRITE_S):
            count += file.write(chunk[: max(1, most_bytes - count)])
            os.fsync(file.fileno())  # else the whole file may wait in memory until the end
        took_s = time.perf_counter() - since_s
        file.truncate(0)
    return count / took_s


def judge_output(base: Path, free_bytes: int, bytes_per_s: float) -> Iterator[Finding]:
    """Yield whether checkpoints find room, and how long one takes."""
    words, fix = f"{shown(free_bytes, 'bytes')} free in {base}", ""
    if free_bytes < _ROOMY_BYTES:
        words += f": three checkpoints of a ResNet-50 take {shown(3 * _CHECKPOINT_BYTES, 'bytes')}, larger models more"
        fix = "make room, or give an --output elsewhere"
    yield found("disk", "free space", words, fix, value=free_bytes, unit="bytes")
    words, fix = f"{shown(bytes_per_s, 'bytes/s')} to {base}, fsync included", ""
    if bytes_per_s < _SLOW_BYTES_PER_S:
        words += f": a ResNet-50's checkpoint takes {_CHECKPOINT_BYTES / bytes_per_s:.0f} s"
        fix = "give an --output on a faster disk, or save more rarely"
    yield found("disk", "write speed", words, fix, value=bytes_per_s, unit="bytes/s")


def shared(path: Path, wait_s: float = _APPEARS_S) -> Iterator[Finding]:
    """Yield whether a file of rank 0's is soon seen here."""
    words, fix = f"all ranks see the same {path.parent}", ""
    deadline = time.monotonic() + wait_s
    while not (is_seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not is_seen:
        words = f"{path.parent} is another folder here than on rank 0, which alone writes checkpoints: no resuming here"
        fix = "give an --output on a disk that all nodes mount; --init-method file:// needs one as well"
    yield found("disk", "shared", words, fix)


def data(folder: Path) -> Iterator[Finding]:
    """Yield whether the data folder that was asked for can be read."""
    words, fix = f"{folder} can be read", ""
    try:
        os.scandir(folder).close()
    except OSError as error:
        words, fix = f"{folder} cannot be read: {error.strerror}", "give one that this user can read here as --data-dir"
    yield found("disk", "data", words, fix)


def _free_bytes(folder: Path) -> int:
    return int(psutil.disk_usage(str(folder)).free)
