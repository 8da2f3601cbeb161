"""A rank's course: meet the others, take a device, run, leave.

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

Tell = Callable[[Failure], None]
"""Reports why this process is about to end, where no error can be raised any more."""
_PATIENCE_S = 30 * 24 * 3600.0  # of a collective: the watchdog, which knows the ranks' progress, ends a wait in vain
_DIALS = 5  # gloo tries so often to reach a peer, each time for the whole time-out (seen: 50 s where 10 were given)
_LEAST_BEAT_S, _BEAT_S, _BEAT_IN_MEMORY_S = 0.1, 1.0, 10.0  # each makes the memory fuller
_ANSWER_S = (1.0, 10.0)  # for the store that takes heartbeats: a part of --stall-timeout
_LEAVE_S = 10.0
_CAME = {"--devices": "the number of ranks that came on this node", "--nodes": "the number of nodes that came"}
_CLOSE_S = 1.0  # for leaving a world that failed, before the failure is told without having left
_WRITE_S = 2.0
_FLUSH_S = 0.5


@dataclass(frozen=True)
class Seat:
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
        if forms_world := getattr(entry, "before_world", None):  # the doctor's, which reports why no world can form
            value = forms_world(self.config, self.topology, self.device, self.store)
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
            with progress.during("forming the process group"):  # where a store may be waited for that answers no more
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
                "different networks, or a rank has ended and its own message says why; then start all ranks again."
            ) from error
        try:
            world.barrier()  # a rank that was done at once would leave before another one had found it
            yield world
        except BaseException:
            close_soon(world)
            raise
        world.close()


@contextlib.contextmanager
def met(
    config: RunConfig,
    env: Mapping[str, str],
    rendezvous: Rendezvous,
    topology: Topology,
    *,
    knows_node: bool,
    tell: Tell,
) -> Iterator[Seat]:
    """Meet the other ranks; yield this rank's seat; leave (*collective*).

    Without `knows_node`, `topology` has only rank and size; nodes and local ranks then follow from the ranks' hosts.
    Raises `RankLostError` for an error of the block that is an echo of a lost rank, where that rank is known.
    """
    parallel, index = config.parallel, topology.rank
    mine = Member(
        rank=index,
        size=topology.size,
        accelerator=parallel.accelerator,
        gpus=gpu_ids(parallel, env),
        drives_all=parallel.drives_all,
        addresses=hosts.own_addresses(rendezvous.host or hosts.ANYWHERE, parallel.interface),
        interface=parallel.interface,
    )
    with contextlib.ExitStack() as kept:
        if rendezvous.file is not None:
            kept.callback(rendezvous.file.unlink, missing_ok=True)
        members = rollcall.take(rendezvous, mine, parallel.timeout)
        start = rollcall.start_of(members)
        topology, progress = topology if knows_node else rollcall.place(members, mine), Progress()
        watchdog = start_watchdog(config, rendezvous, start, [member.host for member in members], index, progress, tell)
        try:
            if not knows_node:
                check_agrees(parallel, topology, _CAME)
            bound_to = _bound_to(rollcall.interface(members, mine)) if topology.size > 1 else {}
            kept.enter_context(having(bound_to | variables(config)))
            device = take_device(config, env, topology, sharing=rollcall.sharing(members, mine))
            from .._torch import PrefixStore

            store = PrefixStore(f"group/{start}", rendezvous.keys.store)
            yield Seat(config, topology, device, store, rendezvous.notes, progress)
        except BaseException as error:
            watchdog.give_way()
            if isinstance(error, Exception) and failures.is_echo(error):
                # Ranks that meet in their parent's memory are all its own: it sees which one has ended.
                if rendezvous.port and (sentence := watchdog.lost()):
                    raise RankLostError(f"{sentence}; {failures.resume_hint(config)}.") from error
            elif isinstance(error, Exception | SystemExit) and not isinstance(error, Stopped | RankLostError):
                watchdog.tell(failures.describe(error, index).sentence.removesuffix("."))
            raise
        watchdog.leave(_LEAVE_S)


def start_watchdog(
    config: RunConfig,
    rendezvous: Rendezvous,
    start: str,
    nodes: Sequence[str],
    rank: int,
    progress: Progress,
    tell: Tell,
) -> Watchdog:
    """Return a watchdog over ranks that have met."""
    stall_s = config.parallel.stall_timeout
    # An interactive session that is alone is the user's, who sees that nothing moves; so is one of other threads.
    is_ours = not hasattr(sys, "ps1") and threading.current_thread() is threading.main_thread()
    return Watchdog(
        progress,
        lambda: rendezvous.keys.clone(f"world/{start}/watch", min(max(stall_s / 4, _ANSWER_S[0]), _ANSWER_S[1])),
        rank=rank,
        nodes=nodes,
        server=None if rendezvous.outlives else 0,
        is_served=rendezvous.is_served,
        stall_timeout_s=stall_s,
        beat_s=min(max(stall_s / 10, _LEAST_BEAT_S), _BEAT_S if rendezvous.port else _BEAT_IN_MEMORY_S),
        ends=functools.partial(_end, config, progress, tell) if len(nodes) > 1 or is_ours else lambda *_: None,
    )


def _end(config: RunConfig, progress: Progress, tell: Tell, watchdog: Watchdog, failure: Failure) -> NoReturn:
    """End this process with the watchdog's failure."""
    failure = dataclasses.replace(failure, sentence=f"{failure.sentence}; {failures.resume_hint(config)}.")
    workers = multiprocessing.active_children()
    try:
        tracebacks.ask(worker.pid for worker in workers)
        with contextlib.suppress(OSError, bounded.Late):  # where it is the disk that hangs
            bounded.within(_WRITE_S, functools.partial(_write, failure, progress), "failures")
        tell(failure)
        watchdog.let_others_hear()
        with contextlib.suppress(bounded.Late):
            bounded.within(_FLUSH_S, output.flush, "last words")
        for worker in workers:  # which would look for this process for seconds
            worker.kill()
    finally:
        os._exit(RunError.exit_code)


def _write(failure: Failure, progress: Progress) -> None:
    if progress.folder is not None:
        failures.write(failure, progress.folder / "failures")
    if progress.failed is not None:
        progress.failed(failure.sentence)


def close_soon(world: World) -> None:
    """Leave the world after a failure, within 1 s. The other ranks notice."""
    with contextlib.suppress(Exception):
        bounded.within(_CLOSE_S, world.close, "leaving")


def take_device(config: RunConfig, env: Mapping[str, str], topology: Topology, *, sharing: int = 1) -> torch.device:
    """Return the device of this rank; take its share of the processors.

    `sharing` is the number of ranks that may run on the same processors, this one included.
    """
    import torch

    # torchrun sets OMP_NUM_THREADS=1 and others leave it to the machine: the number of threads decides the order of
    # sums on a CPU, so every launcher takes the same, and the same world gives the same bits. Set for a process that
    # is alone, it is the user's own.
    if topology.size > 1 or "OMP_NUM_THREADS" not in env:
        torch.set_num_threads(max(1, hardware.cpus() // sharing))
    hardware.keep_freed_memory(env)
    if config.parallel.accelerator != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RequestError(
            "The driver shows GPUs, so that the accelerator is cuda (auto takes it too), but torch "
            f"{torch.__version__} cannot use them; take --accelerator cpu, or install a CUDA build of torch that fits "
            "the driver."
        )
    device = torch.device("cuda", gpu_index(config.parallel, env, topology.local_rank))
    torch.cuda.set_device(device)
    return device


def variables(config: RunConfig) -> dict[str, str]:
    """Return the environment variables to set for torch in a rank."""
    # With torch 2.15's new backend for NCCL the backward pass waits for each of DDP's exchanges, by its code.
    wanted = unset({"TORCH_DIST_USE_NCCL2": "0"})
    if config.precision.deterministic:
        # cuBLAS reads it at its first use, and without it some of its algorithms differ from run to run; so do sums in
        # switches (NVLS), which torch itself leaves out only where it is told before the process group is formed.
        wanted |= unset({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"})
    if config.precision.compile:
        # torch names its own folder there as soon as torchvision is imported; in /tmp, others could write its code.
        if "torchinductor_" in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_"):
            try:
                wanted["TORCHINDUCTOR_CACHE_DIR"] = str(files.private_folder() / "compiled")
            except OSError as error:
                raise RequestError(
                    f"--compile keeps its code in {error.filename}, which cannot be used: {error.strerror}; remove it, "
                    "or set TORCHINDUCTOR_CACHE_DIR to a folder of your own."
                ) from error
        # Headers go to torch's own folder in /tmp all the same; without, a first compilation took as long (25 s).
        wanted |= unset({"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"})
    return wanted


def _bound_to(interface: str | None) -> dict[str, str]:
    # NCCL takes every interface whose name begins so, eth10 for eth1, unless told that the name is whole.
    return unset({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {})


def bound() -> str:
    """Return the network interface that gloo's traffic is kept on, or ""."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def check_agrees(asked: ParallelConfig, found: Topology, names: Mapping[str, str]) -> None:
    """Raise `RequestError` where the flags in `names` contradict the found world."""
    for flag, wanted, has in (
        ("--world-size", asked.world_size, found.size),
        ("--rank", asked.rank, found.rank),
        # One process that drives several devices is one rank.
        ("--devices", asked.devices if asked.process_per_device else None, found.local_size),
        ("--nodes", asked.nodes if 1 < asked.nodes == asked.most_nodes else None, found.nodes),
    ):
        if flag in names and wanted not in (None, has):
            raise RequestError(
                f"{flag} {wanted}, but {names[flag]} is {has}; drop {flag}, or start the ranks with the same number."
            )


@contextlib.contextmanager
def teller() -> Iterator[Tell]:
    """Yield a function that reports failures to the present stderr. Later, stderr may be a file."""
    with contextlib.ExitStack() as kept:
        console = -1
        with contextlib.suppress(OSError):  # the command was started with `2>&-`
            console = os.dup(2)
            kept.callback(os.close, console)
        yield lambda failure: output.say(failure.sentence, console)


def vanish(error: BaseException) -> NoReturn:
    """End this process, whose failure with `error` is already reported."""
    # The entry's variables go, and with them data workers, which end in order and remove their files.
    traceback.clear_frames(error.__traceback__)
    # Nothing that is left may hang: not a collective of a lost world, not a thread of the user's.
    output.flush()
    os._exit(RunError.exit_code)
