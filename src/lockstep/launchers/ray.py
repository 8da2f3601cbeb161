"""Ranks on the nodes of a Ray cluster: Ray starts one command on each, which starts its ranks as on one host.

The cluster is the one that RAY_ADDRESS names, else the one that runs on this host, else one that is started here for
this run alone. --nodes and --devices say what is taken of it: as many nodes, with so many GPUs (or processors) on each.
This process is the driver: it needs no GPU and imports no torch, shows what rank 0 prints, passes Ctrl-C on, and raises
the first cause when a rank fails. Ray tells it of nodes that die.

Ray runs an actor's methods in threads, where Python hears no signals, beside a runtime of its own: so each node's actor
starts a process (see `serve`), in which the supervisor and its ranks are what they are under the other launchers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ..config.registry import auto, kind, with_ranks
from ..config.schema import ParallelConfig, RunConfig
from ..errors import LockstepError, RequestError, RunError, Stopped, counted, ranks_in_short
from ..monitor import failures
from ..monitor.failures import Failure, first_cause
from ..monitor.signals import KILLED, Interrupts, heeded
from ..printable import told
from ..world.topology import Topology
from . import stores
from .devices import Entry
from .supervisor import GRACE_S, Door, Supervisor, end_with, value_of
from .variables import having, unset

_CHILD = "import sys; from lockstep.launchers.ray import serve; serve(int(sys.argv[1]))"
_SEVERAL_HOSTS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_CONTROL = "control"  # what is asked of an actor while its ranks run
_PROBE_S = 5.0
_LOOK_S = 0.1
_LISTEN_S, _LEAVE_S = 1.0, 30.0  # for other nodes after the first failure, and where ranks save and stop
_ANSWER_S = 3.0  # for an actor to say that it lives, or that its ranks have ended
_DRAIN_S = 1.0  # for what a rank has printed last, where others hold its stdout open
_READ_BYTES = 1 << 16


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
    """Start the ranks on the cluster, wait for all of them, and return rank 0's value.

    `config` is not resolved yet: what `auto` comes to depends on the cluster's nodes. Raises `RequestError` for
    what the cluster has not got within --timeout, and the error of the rank that failed first.
    """
    if config.parallel.gpus:
        raise RequestError(
            f"--gpus {config.parallel.gpus}: under --launcher ray, Ray chooses each rank's GPUs; give their number, "
            "--devices."
        )
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"--launcher ray needs Ray, which cannot be imported here ({error}); "
            "install it on every node: pip install 'lockstep-torch[ray]'."
        ) from error
    with _cluster(env):
        config = dataclasses.replace(config, parallel=_resolved(config.parallel))
        with _bundles(config.parallel) as group, _Nodes(group, config) as nodes:
            return nodes.run(_packed(entry, config))


@contextlib.contextmanager
def _cluster(env: Mapping[str, str]) -> Iterator[None]:
    """Be a driver of the cluster within the block; one that the caller's own script has joined already is kept."""
    import ray

    if ray.is_initialized():
        yield
        return
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = env.get("RAY_ADDRESS", "")
    _check_address(address)
    with contextlib.ExitStack() as left:
        # Ray would tell its makers of a cluster that is started here.
        left.enter_context(having(unset({"RAY_USAGE_STATS_ENABLED": "0"})))
        try:
            try:
                ray.init(address="auto", **how)
            except ConnectionError:
                if address not in ("", "local"):
                    raise
                sys.stderr.write(told("no Ray cluster runs here: one is started on this host for this run"))
                sys.stderr.flush()
                left.enter_context(_on_loopback())
                ray.init(address="local", include_dashboard=False, **how)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RequestError(
                f"--launcher ray: Ray cannot be joined from here ({failures.one_line(error)}); is its cluster up?"
            ) from error
        left.callback(ray.shutdown)
        yield


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a cluster that is started in the block listen on loopback alone: who reaches its ports can have it run code.

    Its processes have the same setting from a variable, which is made for systems that know no clusters.
    """
    from .._torch import one_host_in_ray

    with one_host_in_ray(), having({_SEVERAL_HOSTS: "0"}):
        yield


def _check_address(address: str) -> None:
    """Raise where nothing listens at RAY_ADDRESS: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if address not in ("", "auto", "local"):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"RAY_ADDRESS is {address}, and no Ray cluster answers there ({error}); give HOST:PORT or auto on a node "
            "of the cluster, start one with ray start --head, or unset RAY_ADDRESS."
        ) from error


def _has() -> list[dict[str, float]]:
    """Return the resources of each node that is alive, those with most GPUs first."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda has: (has.get("GPU", 0), has.get("CPU", 0)), reverse=True)


def _resolved(asked: ParallelConfig) -> ParallelConfig:
    """Return `asked` with strategy, accelerator and devices as the cluster has them."""
    nodes = _has()
    on_gpus = asked.accelerator == "cuda" or (asked.accelerator == "auto" and nodes[0].get("GPU", 0) >= 1)
    least = nodes[min(asked.nodes, len(nodes)) - 1]  # of the nodes that would be taken
    count = asked.devices or (max(1, int(least.get("GPU", 0))) if on_gpus else 1)
    strategy = auto(several=count * asked.nodes > 1) if asked.strategy == "auto" else asked.strategy
    if not kind(strategy).has_ranks and count * asked.nodes > 1:
        raise RequestError(
            f"--launcher ray starts ranks, and --strategy {strategy} is one process; take --strategy {with_ranks()}."
        )
    accelerator = "cuda" if on_gpus else "cpu"
    return dataclasses.replace(asked, strategy=strategy, accelerator=accelerator, devices=count)


@contextlib.contextmanager
def _bundles(parallel: ParallelConfig) -> Iterator[Any]:
    """Hold a bundle of resources for each node within the block.

    Raises `RequestError` where Ray cannot give them within --timeout.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    count, unit = parallel.devices or 1, "GPU" if parallel.accelerator == "cuda" else "CPU"
    bundle = {"CPU": count} | ({"GPU": count} if unit == "GPU" else {})
    group = placement_group([bundle] * parallel.nodes, strategy="STRICT_SPREAD" if parallel.nodes > 1 else "PACK")
    try:
        ready, _ = ray.wait([group.ready()], timeout=parallel.timeout)
        if not ready:
            nodes, free = _has(), ray.available_resources().get(unit, 0)
            each = "each of " * (parallel.nodes > 1)
            raise RequestError(
                f"--nodes {parallel.nodes} --devices {count}: Ray did not give {counted(count, unit)} on {each}"
                f"{counted(parallel.nodes, 'node')} within --timeout {parallel.timeout:g} s; its cluster has "
                f"{counted(len(nodes), 'node')} ({unit}s: {', '.join(f'{has.get(unit, 0):g}' for has in nodes)}), and "
                f"{free:g} {unit}s are free; ask for less, wait until others are done, or add nodes."
            )
        yield group
    finally:
        remove_placement_group(group)


def _packed(entry: Entry, config: RunConfig) -> tuple[RunConfig, bytes]:
    """Return the config, and (entry, config) for other processes; paths are from this one's folder, everywhere."""
    from ray import cloudpickle

    data = dataclasses.replace(config.data, dir=config.data.dir.absolute())
    record = config.record
    if record.output is not None:
        record = dataclasses.replace(record, output=record.output.absolute())
    config = dataclasses.replace(config, data=data, record=record)
    try:
        return config, bytes(cloudpickle.dumps((entry, config)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{getattr(entry, '__qualname__', entry)!s} cannot be run in other processes ({error}); "
            "define it at the top level of a module."
        ) from error


class _Nodes:
    """The actors of a run, one a node: on leaving the `with` block none is left, nor anything they started."""

    def __init__(self, group: Any, config: RunConfig) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        parallel = config.parallel
        self._parallel, self._again = parallel, failures.again(config)
        self._here = (parallel.devices or 1) if kind(parallel.strategy).process_per_device else 1
        self._interrupts, self._heeding, self._told = Interrupts(), contextlib.ExitStack(), False
        self._names: list[str] = []
        count = parallel.devices or 1
        takes = {"num_cpus": count, "num_gpus": count if parallel.accelerator == "cuda" else 0}
        actor = ray.remote(concurrency_groups={_CONTROL: 2}, max_restarts=0)(Node)
        self._actors = [
            actor.options(
                **takes,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
            ).remote()
            for node in range(parallel.nodes)
        ]

    def __enter__(self) -> _Nodes:
        self._heeding.enter_context(heeded(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray.exceptions import RayError

        with self._heeding:
            with contextlib.suppress(RayError):
                self._show()
                ended = [self._control(actor, "end") for actor in self._actors]
                ray.wait(ended, num_returns=len(ended), timeout=_ANSWER_S)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)

    def run(self, packed: tuple[RunConfig, bytes]) -> Any:
        """Run the pickled (entry, config) on all ranks and return rank 0's value, or raise the first cause."""
        found = self._where()
        door = None  # on one node, its memory
        if len(found) > 1:
            door = Door(host=found[0][0], port=found[0][2], secret=secrets.token_bytes(32))
        paths, folder = [str(Path(path).absolute()) for path in sys.path], str(Path.cwd())
        waiting: dict[Any, int] = {}
        for node, actor in enumerate(self._actors):
            spec = pickle.dumps((paths, self._places(node), *packed, door, f" on node {self._names[node]}"))
            waiting[actor.run.remote(spec, folder, node == 0)] = node
        values: dict[int, bytes] = {}
        causes: list[Failure] = []
        since_s = time.monotonic()
        while waiting:
            self._look(waiting, values, causes)
            if not causes:
                since_s = time.monotonic()
            # Others are heard a moment longer after the first failure: the loudest is not always the first.
            is_stop = all(cause.kind == Stopped.__name__ for cause in causes)
            if time.monotonic() - since_s > (_LEAVE_S if is_stop else _LISTEN_S):
                break
        if not causes:
            return value_of(values[0])
        cause = first_cause(causes)
        if cause.is_echo and (lost := self._silent(waiting)):
            cause = self._lost(lost, "died, or its node was lost")
        raise cause.error()

    def _places(self, node: int) -> list[Topology]:
        here, nodes = self._here, self._parallel.nodes
        return Topology.of_node(here, first=node * here, size=nodes * here, node=node, nodes=nodes)

    def _where(self) -> list[tuple[str, str, int]]:
        """Return each node's address, name and a free port there."""
        import ray
        from ray.exceptions import RayError

        asked = [self._control(actor, "where") for actor in self._actors]
        found: list[tuple[str, str, int]] = []
        deadline = time.monotonic() + self._parallel.timeout
        try:
            while not found:
                self._check_insisted()
                with contextlib.suppress(ray.exceptions.GetTimeoutError):
                    found = ray.get(asked, timeout=_LOOK_S)
                if not found and time.monotonic() >= deadline:
                    raise TimeoutError("no answer within --timeout")
        except (RayError, TimeoutError) as error:
            raise RequestError(
                f"--launcher ray: the ranks' actors did not start ({_brief(error)}); every node needs lockstep-torch "
                "and Ray in the same versions as here."
            ) from error
        self._names = [f"{address} ({name})" for address, name, _ in found]
        return found

    def _control(self, actor: Any, method: str, *given: Any) -> Any:
        return getattr(actor, method).options(concurrency_group=_CONTROL).remote(*given)

    def _look(self, waiting: dict[Any, int], values: dict[int, bytes], causes: list[Failure]) -> None:
        """Take in what nodes come to, pass signals on, and show what rank 0 has printed."""
        import ray
        from ray.exceptions import RayError

        self._check_insisted()
        if self._interrupts.asked and not self._told:
            self._told = True
            for actor in self._actors:
                self._control(actor, "signal", int(signal.SIGTERM))
        for each in ray.wait([*waiting], num_returns=1, timeout=_LOOK_S)[0]:
            node = waiting.pop(each)
            try:
                ended = ray.get(each)
            except RayError as error:
                causes.append(self._lost([node], f"died ({_brief(error)})"))
                continue
            if isinstance(ended, Failure):
                causes.append(ended)
            else:
                values[node] = ended
        with contextlib.suppress(RayError):
            self._show()

    def _show(self) -> None:
        import ray

        with contextlib.suppress(TimeoutError):
            for number, data in ray.get(self._control(self._actors[0], "read"), timeout=_ANSWER_S):
                _write(sys.stdout if number == 1 else sys.stderr, data)

    def _lost(self, nodes: Sequence[int], how: str) -> Failure:
        """Return the failure of all ranks of these nodes."""
        ranks = [place.rank for node in nodes for place in self._places(node)]
        who, where = ranks_in_short(ranks), ", ".join(self._names[node] for node in nodes)
        return Failure(ranks[0], "", f"{who[0].upper()}{who[1:]} on node {where} {how}; {self._again}.", "")

    def _silent(self, waiting: Mapping[Any, int]) -> list[int]:
        """Return those nodes whose actors do not answer any more, which Ray tells late where a node is lost."""
        import ray
        from ray.exceptions import RayError

        asked = {self._control(self._actors[node], "where"): node for node in waiting.values()}
        for each in ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER_S)[0] if asked else ():
            with contextlib.suppress(RayError):
                ray.get(each)
                del asked[each]
        return sorted(asked.values())

    def _check_insisted(self) -> None:
        if self._interrupts.insisted:
            raise RunError(KILLED)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts.hear()  # and the next look sees it: nothing is raised amid the end


class Node:
    """One node's process, and what it has printed. Ray makes an actor of this, which imports no torch."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._printed: list[tuple[int, bytes]] = []
        self._asked: list[int] = []
        self._lock = threading.Lock()

    def where(self) -> tuple[str, str, int]:
        """Return this node's address, as Ray knows it, its name, and a port that is free there."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            return address, socket.gethostname(), free.getsockname()[1]

    def run(self, spec: bytes, folder: str, shown: bool) -> bytes | Failure:
        """Run this node's ranks in `folder`, where the node has it; return what `Supervisor.run` does.

        `spec` is what `serve` takes; what is printed is kept for `read` where it is to be `shown`, and else in Ray's
        logs.
        """
        ours, theirs = Pipe()
        pipe = subprocess.PIPE if shown else None
        with ours:
            with theirs, self._lock:
                self._child = child = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    cwd=folder if Path(folder).is_dir() else None,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    start_new_session=True,
                )
                for number in self._asked:
                    child.send_signal(number)
            pumps = [self._pump(1, child.stdout), self._pump(2, child.stderr)]
            ended: bytes | Failure = Failure(0, "", "A node's process ended without a word: see Ray's logs.", "")
            with contextlib.suppress(EOFError, OSError):
                ours.send_bytes(spec)
                while not ours.poll(_LOOK_S) and child.poll() is None:
                    pass
                if ours.poll():
                    ended = pickle.loads(ours.recv_bytes())  # from our own child, through a pipe that no stranger holds
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            self.end()
        with self._lock:
            self._child = None
        for pump in pumps:
            pump.join(_DRAIN_S)
        return ended

    def signal(self, number: int) -> None:
        """Send the process a signal, as soon as there is one."""
        with self._lock:
            self._asked.append(number)
            if self._child is not None:
                self._child.send_signal(number)

    def end(self) -> None:
        """Kill the process, if there is one; its ranks end with it."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._child is not None:
                os.killpg(self._child.pid, signal.SIGKILL)

    def read(self) -> list[tuple[int, bytes]]:
        """Return what was printed since the last call: (1 for stdout or 2 for stderr, bytes)."""
        with self._lock:
            printed, self._printed = self._printed, []
        return printed

    def _pump(self, number: int, pipe: IO[bytes] | None) -> threading.Thread:
        def pump() -> None:
            with pipe or contextlib.nullcontext():
                while pipe is not None and (data := os.read(pipe.fileno(), _READ_BYTES)):
                    with self._lock:
                        self._printed.append((number, data))

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        return thread


def serve(descriptor: int) -> None:
    """Be one node's process: start its ranks, watch them, and tell the actor how they ended, through the pipe there."""
    pipe = Connection(descriptor)
    paths, places, config, payload, door, where = pickle.loads(pipe.recv_bytes())  # from the actor, our parent
    threading.Thread(target=end_with, args=(pipe,), daemon=True, name="lifeline").start()
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
    ended: bytes | Failure
    try:
        with Supervisor(config, where) as supervisor, stores.memory() as memory:
            ended = supervisor.run(places, payload, door or Door(memory=memory))
    except LockstepError as error:
        ended = failures.describe(error, places[0].rank)
    pipe.send_bytes(pickle.dumps(ended))


def _write(stream: IO[str] | None, data: bytes) -> None:
    if stream is None:
        return
    stream.flush()
    if isinstance(stream, io.TextIOWrapper):
        stream.buffer.write(data)
    else:  # a notebook's
        stream.write(data.decode(errors="replace"))
    stream.flush()


def _brief(error: BaseException) -> str:
    """Return the telling part of what Ray says of a death, which goes on for lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "The actor" in line or "cause" in line.lower()] or lines
    return (telling[0] if telling else type(error).__name__)[:200].rstrip(". ")
