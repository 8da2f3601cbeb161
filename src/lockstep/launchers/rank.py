"""What every rank does, however its process came to be: meet the others, take its device, join the world, run, leave.

torch is imported here and in `stores` and nowhere else in the launchers' first steps, so that a command which only
looks up a name stays quick. These functions run in the rank's own process and may read and set its environment.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from .. import files, hardware
from ..config.registry import kind
from ..config.schema import RunConfig
from ..errors import LockstepError, RequestError, RunError
from ..monitor import bounded, failures, output, tracebacks
from ..monitor.failures import RankLostError
from ..monitor.notes import NoNotes
from ..monitor.progress import Pulse
from ..monitor.signals import SHOW_CURSOR
from ..printable import told
from ..world.topology import Topology
from . import guard, hosts, rollcall, stores
from .devices import Entry, drives_all, gpu_ids, gpu_index
from .variables import having, unset

if TYPE_CHECKING:
    import torch

    from .._torch import Store
    from ..world.world import World

Tell = Callable[[failures.Failure], None]
"""Passes on why this process is about to end, where nothing moves any more and no error can be raised."""

_PATIENCE_S = 30 * 24 * 3600.0  # of a collective: the watch, which knows who is at work, ends a wait in vain
_DIALS = 5  # gloo tries so often to reach a peer, each time for the whole time-out (seen: 50 s where 10 were given)
_BEAT_S = 30.0  # for a last beat to come back over a slow network
_CLOSE_S = 1.0  # for leaving a world that failed, before the failure is told without having left


@runtime_checkable
class FormsWorld(Protocol):
    """An entry that forms the world itself out of the ranks that have met, since it says why none can be formed."""

    def __call__(self, config: RunConfig, world: World) -> Any:
        """Not called: an entry like any other for whoever passes it on."""

    def before_world(self, config: RunConfig, topology: Topology, device: torch.device, store: Store) -> Any:
        """Be this rank, with a store that all ranks share, and return this rank's value (*collective*)."""


@dataclass(frozen=True)
class Seat:
    """What a rank has before it forms the world."""

    topology: Topology
    device: torch.device
    store: Store
    """One that all ranks share."""
    world: Callable[[], AbstractContextManager[World]]
    """Forms the world, which is left at the end of the block (*collective*)."""

    def run(self, entry: Entry, config: RunConfig) -> Any | None:
        """Run the entry as this rank; return its value on rank 0, None on the others (*collective*)."""
        if isinstance(entry, FormsWorld):
            value = entry.before_world(config, self.topology, self.device, self.store)
        else:
            with self.world() as world:
                value = entry(config, world)
        return value if self.topology.is_main else None


@contextlib.contextmanager
def met(
    config: RunConfig,
    env: Mapping[str, str],
    opens: Callable[[], stores.Meeting],
    *,
    index: int,
    size: int,
    known: Topology | None = None,
    tell: Tell,
) -> Iterator[Seat]:
    """Meet the other ranks at the store that `opens()` gives, be one of them in the block, leave (*collective*).

    `index` is this process's rank of `size`; `known` is its topology where whoever started it has said; otherwise nodes
    and local ranks follow from the ranks' hosts. Raises `RankLostError` for an error of the block that is an echo of a
    lost rank, where that one is known.
    """
    parallel = config.parallel
    hosts.check_interface(parallel.interface, env)
    meeting = opens()
    mine = rollcall.Claim(
        rank=index,
        size=size,
        accelerator=parallel.accelerator,
        gpus=gpu_ids(parallel, env),
        drives_all=drives_all(parallel),
        addresses=hosts.own_addresses(meeting.host or hosts.ANYWHERE, parallel.interface),
        interface=parallel.interface,
    )
    peers = rollcall.take(meeting, mine, parallel.timeout)
    came = peers.claims
    topology = known or rollcall.place(came, mine)
    with contextlib.ExitStack() as kept:
        try:
            _check_node(config, topology)
            bound_to = _bound_to(rollcall.interface(came, mine)) if size > 1 else {}
            kept.enter_context(having(bound_to | variables(config)))
            device = take_device(config, env, topology, sharing=rollcall.sharing(came, mine))
            kept.callback(tracebacks.answer())
            pulse = Pulse()
            watch = guard.watch(config, peers, pulse, tell)
        except BaseException:
            peers.leave(clean=False)
            raise
        try:
            store = peers.group_store()
            yield Seat(topology, device, store, lambda: _world(config, topology, device, store, pulse, meeting))
        except BaseException as error:
            watch.give_way()
            lost = guard.lost(error, config, peers, pulse, watch)
            peers.leave(clean=False)
            watch.close()
            if lost is not None:
                raise lost from error
            raise
        watch.close(_BEAT_S)
        peers.leave(clean=True)


@contextlib.contextmanager
def _world(
    config: RunConfig, topology: Topology, device: torch.device, store: Store, pulse: Pulse, meeting: stores.Meeting
) -> Iterator[World]:
    """Join the world over `store`, and leave it at the end of the block (*collective*)."""
    from ..world.world import World

    parallel, notes = config.parallel, meeting.notes or NoNotes()
    if topology.size == 1:
        yield World(topology, device, pulse=pulse, notes=notes)
        return
    try:
        with pulse.during("forming the process group"):  # where a store may be waited for that answers no more
            world = World.join(
                topology,
                device,
                store,
                timeout_s=_PATIENCE_S,
                form_s=parallel.timeout / _DIALS,
                pulse=pulse,
                notes=notes,
                collectives=parallel.collectives,
            )
    except RuntimeError as error:
        if not failures.is_echo(error):
            raise
        raise RankLostError(
            f"Rank {topology.rank}: all {topology.size} ranks came, but could not connect to one another within "
            f"--timeout {parallel.timeout:g} s: a firewall keeps ports between the nodes closed, or a rank ended "
            "meanwhile and its own message says why; then start all ranks again."
        ) from error
    try:
        world.barrier()  # a rank that was done at once would leave before another one had found it
        yield world
    except BaseException:
        close_soon(world)
        raise
    world.close()


def close_soon(world: World) -> None:
    """Leave the world after a failure, which tells the other ranks at once; give up where leaving itself hangs."""
    with contextlib.suppress(Exception):
        bounded.within(_CLOSE_S, world.close, "leaving")


def take_device(config: RunConfig, env: Mapping[str, str], topology: Topology, *, sharing: int = 1) -> torch.device:
    """Return the device of this rank, made the current one; take its share of the processors.

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
    """Return the environment variables that torch is to find while this process is a rank."""
    wanted: dict[str, str] = {}
    if config.precision.deterministic:
        # cuBLAS reads it at its first use, and without it some of its algorithms differ from run to run.
        wanted |= unset({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    if config.precision.compile:
        # torch names its own folder there as soon as torchvision is imported.
        if "torchinductor_" in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torchinductor_"):
            wanted["TORCHINDUCTOR_CACHE_DIR"] = _compiled()
        # Headers go to torch's own folder in /tmp all the same; without, a first compilation took as long (25 s).
        wanted |= unset({"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"})
    return wanted


def _compiled() -> str:
    """Return a folder for compiled code, which is run: nobody else can write there, as torch's own in /tmp allows."""
    try:
        return str(files.private_folder() / "compiled")
    except OSError as error:
        raise RequestError(
            f"--compile keeps its code in {error.filename}, which cannot be used: {error.strerror}; remove it, or set "
            "TORCHINDUCTOR_CACHE_DIR to a folder of your own."
        ) from error


def _bound_to(interface: str | None) -> dict[str, str]:
    """Return the variables that keep gloo's and NCCL's traffic on one interface, unless the user chose another."""
    # NCCL takes every interface whose name begins so, eth10 for eth1, unless told that the name is whole.
    return unset({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {})


def bound() -> str:
    """Return the network interface that gloo's traffic of this process is kept on; empty where none is chosen."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def _check_node(config: RunConfig, topology: Topology) -> None:
    """Raise where the ranks that came stand on other nodes than the flags say."""
    parallel = config.parallel
    for flag, asked, found in (
        ("--devices", parallel.devices if kind(parallel.strategy).process_per_device else None, topology.local_size),
        ("--nodes", parallel.nodes if 1 < parallel.nodes == parallel.most_nodes else None, topology.nodes),
    ):
        if asked is not None and asked != found:
            raise RequestError(
                f"{flag} {asked} disagrees with the ranks that came: node {topology.node} of {topology.nodes} has "
                f"{topology.local_size} of them; drop {flag}, or start the ranks accordingly."
            )


@contextlib.contextmanager
def accounted(rank: int, config: RunConfig, tell: Tell = lambda failure: None) -> Iterator[None]:
    """Turn what the block raises into one sentence of this rank; `tell` hears of the failure before it is raised."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = failures.account(error, rank, config)
        tell(failure)
        if isinstance(error, LockstepError):
            raise
        raise failure.error() from error


@contextlib.contextmanager
def teller() -> Iterator[Tell]:
    """Give what says why this rank ends, where no command is left to say it, on the stderr that there is now.

    By then what the rank says may go to a file.
    """
    try:
        console = os.dup(2)
    except OSError:  # the command was started with `2>&-`
        yield lambda failure: None
        return

    def say(failure: failures.Failure) -> None:
        with contextlib.suppress(OSError):
            cursor = SHOW_CURSOR if os.isatty(console) else ""  # which a bar may have hidden
            os.write(console, f"{cursor}{told(failure.sentence)}".encode(errors="replace"))

    try:
        yield say
    finally:
        os.close(console)


def vanish(error: BaseException) -> NoReturn:
    """End this process, which failed with `error` and has said so."""
    # The entry's variables go, and with them data workers, which end in order and remove their files.
    traceback.clear_frames(error.__traceback__)
    # Nothing that is left may hang: not a collective of a lost world, not a thread of the user's.
    output.flush()
    os._exit(RunError.exit_code)
