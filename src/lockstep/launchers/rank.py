"""A rank's process: meet the others, take a device, run, leave.

These functions run in the rank's own process, may read and set its environment, and import torch when they are called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from .. import files, hardware
from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError, RunError, Stopped
from ..monitor import bounded, failures, output, tracebacks
from ..monitor.failures import Failure, RankLostError
from ..monitor.notes import Notes
from ..monitor.progress import Progress
from ..monitor.watchdog import Watchdog
from ..world.topology import Topology
from . import hosts, rollcall
from .devices import gpu_ids, gpu_index
from .plan import Entry
from .rollcall import Member
from .stores import Rendezvous
from .variables import having, unset

if TYPE_CHECKING:
    import torch

    from .._torch import Store
    from ..world.world import World

Report = Callable[[Failure], None]
"""Reports why this process ends where it can no longer raise an error."""
_PATIENCE_S = 30 * 24 * 3600.0  # of a collective: the watchdog ends a wait, by the ranks' progress
_DIALS = 5  # attempts of gloo to reach a peer, each for the whole time-out (50 s were measured for 10 s)
_LEAST_BEAT_S, _BEAT_S, _BEAT_IN_MEMORY_S = 0.1, 1.0, 10.0  # each beat uses more of the memory
_ANSWER_S = (1.0, 10.0)  # limits for an answer of the store to a heartbeat
_LEAVE_S = 10.0
_ROLL_CALL = {"--devices": "the number of ranks that came on this node", "--nodes": "the number of nodes that came"}
_CLOSE_S = 1.0  # for leaving a world that failed, before the failure is reported
_WRITE_S = 2.0
_FLUSH_S = 0.5


@dataclass(frozen=True)
class JoinedRank:
    """A rank's config, place, device and store before it forms the world."""

    config: RunConfig
    topology: Topology
    device: torch.device
    store: Store
    """Shared by all ranks."""
    notes: Notes
    progress: Progress

    def run(self, entry: Entry) -> Any | None:
        """Run the entry; return its value on rank 0, else None (*collective*)."""
        if before_world := getattr(entry, "before_world", None):  # the doctor's, which reports why no world can form
            value = before_world(self.config, self.topology, self.device, self.store)
        else:
            with self.world() as world:
                value = entry(self.config, world)
        return value if self.topology.is_main else None

    @contextlib.contextmanager
    def world(self) -> Iterator[World]:
        """Form the world; leave it at the block's end (*collective*)."""
        from ..world.world import World

        parallel, topology, progress = self.config.parallel, self.topology, self.progress
        if topology.size == 1:
            yield World(topology, self.device, progress=progress, notes=self.notes)
            return
        try:
            with progress.during("forming the process group"):  # a store may no longer answer
                world = World.join(
                    topology,
                    self.device,
                    self.store,
                    timeout_s=_PATIENCE_S,
                    form_s=parallel.timeout / _DIALS,
                    progress=progress,
                    notes=self.notes,
                    collectives=parallel.collectives,
                )
        except RuntimeError as error:
            if not failures.is_echo(error):
                raise
            raise RankLostError(
                f"Rank {topology.rank}: all {topology.size} ranks came, but could not connect to one another within "
                f"--timeout {parallel.timeout:g} s: a firewall keeps ports between the nodes closed, --interface names "
                "different networks, or a rank has ended: see its own message; then start all ranks again."
            ) from error
        try:
            world.barrier()  # otherwise a rank that ends at once would leave before another one has connected
            yield world
        except BaseException:
            close_soon(world)
            raise
        world.close()


@contextlib.contextmanager
def join(
    config: RunConfig,
    env: Mapping[str, str],
    rendezvous: Rendezvous,
    topology: Topology,
    *,
    knows_node: bool,
    report: Report,
) -> Iterator[JoinedRank]:
    """Meet the other ranks; yield this one; leave (*collective*).

    Without `knows_node`, `topology` has only rank and size; nodes and local ranks then follow from the ranks' hosts.
    Raises `RankLostError` for an error of the block that is an echo, if the lost rank is known.
    """
    parallel, index = config.parallel, topology.rank
    member = Member(
        rank=index,
        size=topology.size,
        accelerator=parallel.accelerator,
        gpus=gpu_ids(parallel, env),
        drives_all=parallel.drives_all,
        addresses=hosts.own_addresses(rendezvous.host or hosts.ANYWHERE, parallel.interface),
        interface=parallel.interface,
    )
    with contextlib.ExitStack() as stack:
        if rendezvous.file is not None:
            stack.callback(rendezvous.file.unlink, missing_ok=True)
        members = rollcall.take(rendezvous, member, parallel.timeout)
        start, names, progress = rollcall.start_of(members), [other.host for other in members], Progress()
        topology = topology if knows_node else rollcall.place(members, member)
        watchdog = start_watchdog(config, rendezvous, start, names, index, progress, report)
        try:
            if not knows_node:
                check_agrees(parallel, topology, _ROLL_CALL)
            interfaces = _interface_variables(rollcall.interface(members, member)) if topology.size > 1 else {}
            stack.enter_context(having(interfaces | variables(config)))
            device = take_device(config, env, topology, sharing=rollcall.sharing(members, member))
            from .._torch import PrefixStore

            store = PrefixStore(f"group/{start}", rendezvous.keys.store)
            yield JoinedRank(config, topology, device, store, rendezvous.notes, progress)
        except BaseException as error:
            watchdog.give_way()
            if isinstance(error, Exception) and failures.is_echo(error):
                # In their parent's memory, all ranks are children of the parent, which knows the one that has ended.
                if rendezvous.port and (sentence := watchdog.lost()):
                    raise RankLostError(f"{sentence}; {failures.resume_hint(config)}.") from error
            elif isinstance(error, Exception | SystemExit) and not isinstance(error, Stopped | RankLostError):
                watchdog.publish(failures.describe(error, index).sentence.removesuffix("."))
            raise
        watchdog.leave(_LEAVE_S)


def start_watchdog(
    config: RunConfig,
    rendezvous: Rendezvous,
    start: str,
    nodes: Sequence[str],
    rank: int,
    progress: Progress,
    report: Report,
) -> Watchdog:
    """Return a watchdog over ranks that have met."""
    stall_s = config.parallel.stall_timeout
    # A lone rank in an interactive session, or in a thread, belongs to the user, who sees that nothing moves.
    may_end = len(nodes) > 1 or (not hasattr(sys, "ps1") and threading.current_thread() is threading.main_thread())
    return Watchdog(
        progress,
        lambda: rendezvous.keys.clone(f"world/{start}/watch", min(max(stall_s / 4, _ANSWER_S[0]), _ANSWER_S[1])),
        rank=rank,
        nodes=nodes,
        server=None if rendezvous.outlives else 0,
        stall_timeout_s=stall_s,
        beat_s=min(max(stall_s / 10, _LEAST_BEAT_S), _BEAT_S if rendezvous.port else _BEAT_IN_MEMORY_S),
        ends=functools.partial(_end, config, progress, report) if may_end else lambda *_: None,
    )


def _end(config: RunConfig, progress: Progress, report: Report, watchdog: Watchdog, failure: Failure) -> NoReturn:
    """End this process with the watchdog's failure."""
    failure = dataclasses.replace(failure, sentence=f"{failure.sentence}; {failures.resume_hint(config)}.")
    workers = multiprocessing.active_children()
    try:
        tracebacks.request(worker.pid for worker in workers)
        with contextlib.suppress(OSError, bounded.Late):  # the disk may hang
            bounded.within(_WRITE_S, functools.partial(_write, failure, progress), "failures")
        report(failure)
        watchdog.wait_for_readers()
        with contextlib.suppress(bounded.Late):
            bounded.within(_FLUSH_S, output.flush, "flush")
        for worker in workers:  # otherwise they look for this process for seconds
            worker.kill()
    finally:
        os._exit(RunError.exit_code)


def _write(failure: Failure, progress: Progress) -> None:
    if progress.folder is not None:
        failures.write(failure, progress.folder / "failures")
    if progress.failed is not None:
        progress.failed(failure.sentence)


def close_soon(world: World) -> None:
    """Leave the world after a failure, within 1 s, so that the other ranks notice."""
    with contextlib.suppress(Exception):
        bounded.within(_CLOSE_S, world.close, "leaving")


def take_device(config: RunConfig, env: Mapping[str, str], topology: Topology, *, sharing: int = 1) -> torch.device:
    """Return the device of this rank; take its share of the processors.

    `sharing` is the number of ranks that may run on the same processors, this one included.
    """
    import torch

    from .. import cuda

    # The number of threads decides the order of sums on a CPU. torchrun sets OMP_NUM_THREADS=1, other launchers do not
    # set it: lockstep sets the same number under each, so that the same world gives the same bits. For a lone process
    # the variable is the user's.
    if topology.size > 1 or "OMP_NUM_THREADS" not in env:
        torch.set_num_threads(max(1, hardware.cpus() // sharing))
    hardware.keep_freed_memory(env)
    name = config.parallel.accelerator
    if name == "cpu":
        return torch.device("cpu")
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != name:
        raise RequestError(
            f"The driver shows GPUs, but torch {torch.__version__} cannot use them; take --accelerator cpu, or install "
            "a CUDA build of torch that fits the driver."
        )
    device = torch.device(name, gpu_index(config.parallel, env, topology.local_rank))
    torch.accelerator.set_device_index(device)
    if architecture := cuda.lacking(device):
        raise RequestError(
            f"{device} has the architecture {architecture}, for which torch {torch.__version__} has no code; install a "
            "build of torch for it, or take --accelerator cpu."
        )
    return device


def variables(config: RunConfig) -> dict[str, str]:
    """Return the environment variables to set for torch in a rank."""
    # With torch 2.15's new backend for NCCL, the backward pass waits for each of DDP's exchanges.
    # NVML counts GPUs by their place in the machine; CUDA would put the fastest first.
    values = unset({"TORCH_DIST_USE_NCCL2": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    if config.precision.deterministic:
        # cuBLAS reads its variable at its first use; without it some of its algorithms differ from run to run. So do
        # sums in switches (NVLS), which torch excludes only if the setting precedes the process group.
        values |= unset({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"})
    if config.precision.compile:
        # torch sets its folder in /tmp when torchvision is imported; there, other users could write its code.
        if "torchinductor_" in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_"):
            try:
                values["TORCHINDUCTOR_CACHE_DIR"] = str(files.private_folder() / "compiled")
            except OSError as error:
                raise RequestError(
                    f"--compile keeps its code in {error.filename}, which cannot be used: {error.strerror}; remove it, "
                    "or set TORCHINDUCTOR_CACHE_DIR to a private folder."
                ) from error
        # Headers would still go to torch's folder in /tmp; without them, a first compilation took as long (25 s).
        values |= unset({"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"})
    return values


def _interface_variables(interface: str | None) -> dict[str, str]:
    # Without "=", NCCL also takes interfaces whose names begin in the same way: eth10 for eth1.
    return unset({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {})


def bound() -> str:
    """Return the network interface of gloo's traffic, or ""."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def check_agrees(parallel: ParallelConfig, topology: Topology, names: Mapping[str, str]) -> None:
    """Raise `RequestError` if the flags in `names` contradict the topology."""
    for flag, requested, actual in (
        ("--world-size", parallel.world_size, topology.size),
        ("--rank", parallel.rank, topology.rank),
        # One process that drives several devices is one rank.
        ("--devices", parallel.devices if parallel.process_per_device else None, topology.local_size),
        ("--nodes", parallel.nodes if 1 < parallel.nodes == parallel.most_nodes else None, topology.nodes),
    ):
        if flag in names and requested not in (None, actual):
            raise RequestError(
                f"{flag} {requested}, but {names[flag]} is {actual}; drop {flag}, or start the ranks with the same "
                "number."
            )


@contextlib.contextmanager
def console() -> Iterator[Report]:
    """Yield a function that prints failures to the present stderr. Later, stderr may be a file."""
    with contextlib.ExitStack() as stack:
        descriptor = -1
        with contextlib.suppress(OSError):  # the command was started with `2>&-`
            descriptor = os.dup(2)
            stack.callback(os.close, descriptor)
        yield lambda failure: output.say(failure.sentence, descriptor)


def exit_silently(error: BaseException) -> NoReturn:
    """End this process, whose failure with `error` is already reported."""
    # Frees the entry's variables, and with them data workers, which end in order and remove their files.
    traceback.clear_frames(error.__traceback__)
    # At once: a collective of a lost world or a thread of the user may hang.
    output.flush()
    os._exit(RunError.exit_code)
