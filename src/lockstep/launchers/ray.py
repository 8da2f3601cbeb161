"""Ranks on the nodes of a Ray cluster. Ray starts one process on each, which starts its ranks as on one host.

--nodes and --devices set the share of the cluster: so many nodes, with so many GPUs (or processors) on each. This
process is the driver: it needs no GPU and imports no torch, shows the output of rank 0's node, passes Ctrl-C on, and
raises the first cause when a rank fails. Ray runs an actor's methods in threads, where Python hears no signals: so each
node's actor starts a process (`serve`) with the supervisor and its ranks, as under other launchers.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from ..config.registry import KINDS, resolved, with_ranks
from ..config.schema import ParallelConfig, RunConfig
from ..errors import LockstepError, RequestError, RunError, Stopped, counted, ranks_in_short
from ..monitor import failures
from ..monitor.failures import Failure, first_cause
from ..monitor.signals import KILLED, Interrupts
from ..world.topology import Topology
from . import stores
from .plan import Entry, LaunchPlan
from .process import end_with, value_of
from .stores import Endpoint
from .supervisor import GRACE_S, Supervisor

_CHILD = "import sys; from lockstep.launchers.ray import serve; serve(int(sys.argv[1]))"
_PROBE_S = 5.0
_LOOK_S = 0.1
_LISTEN_S, _LEAVE_S = 1.0, 30.0  # for other nodes after a failure, and where ranks save or have but lost others
_ANSWER_S = 3.0
_READ_BYTES = 1 << 16


def launch(entry: Entry, planned: LaunchPlan, env: Mapping[str, str]) -> Any | None:
    """Run the ranks on the cluster; return rank 0's value.

    The plan's config is not resolved yet: `auto` depends on the cluster's nodes. Raises the error of the rank that
    failed first, and `RequestError` where the cluster does not give the resources within --timeout.
    """
    config = planned.config
    if gpus := config.parallel.gpus:
        raise RequestError(f"--gpus {gpus}: under --launcher ray, Ray chooses each rank's GPUs; give --devices.")
    try:
        from ray import cloudpickle
    except ImportError as error:
        how = "install it on every node: pip install 'lockstep-torch[ray]'"
        raise RequestError(f"--launcher ray needs Ray, which cannot be imported here ({error}); {how}.") from error
    with _cluster(env.get("RAY_ADDRESS", "")):
        config = dataclasses.replace(config, parallel=_resolved(config.parallel))
        payload = cloudpickle.dumps((entry, config))
        with _actors(config.parallel) as (actors, found):
            return _Job(actors, found, config, payload).value()


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connect to the cluster within the block. An earlier connection of the user's script is kept."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        if address not in ("", "auto"):  # where nothing listens, Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(
            f"RAY_ADDRESS is {address or 'not set'}, and no Ray cluster answers there ({failures.one_line(error)}); "
            "start one with ray start --head, or, for one host, take --launcher spawn."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _resources(unit: str) -> list[float]:
    """Return each live node's number of GPUs or CPUs, in descending order."""
    import ray

    return sorted((node["Resources"].get(unit, 0) for node in ray.nodes() if node["Alive"]), reverse=True)


def _resolved(asked: ParallelConfig) -> ParallelConfig:
    """Return `asked` with strategy, accelerator and devices resolved for the cluster."""
    gpus = _resources("GPU")
    on_gpus = asked.accelerator == "cuda" or (asked.accelerator == "auto" and gpus[0] >= 1)
    least = gpus[min(asked.nodes, len(gpus)) - 1]  # of the nodes that would be taken
    count = asked.devices or (max(1, int(least)) if on_gpus else 1)
    is_several = count * asked.nodes > 1
    strategy = resolved(asked.strategy, several=is_several)
    if is_several and not KINDS[strategy].has_ranks:
        raise RequestError(
            f"--launcher ray starts ranks, and --strategy {strategy} is one process; take --strategy {with_ranks()}."
        )
    return dataclasses.replace(asked, strategy=strategy, accelerator="cuda" if on_gpus else "cpu", devices=count)


@contextlib.contextmanager
def _actors(parallel: ParallelConfig) -> Iterator[tuple[list[Any], list[tuple[str, str, int]]]]:
    """Start an actor with devices on each node; yield (actors, their `where`).

    Kills them and all their processes at the end. Raises `RequestError` where Ray does not start them within --timeout.
    """
    import ray.exceptions
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    count, unit = parallel.devices or 1, "GPU" if parallel.accelerator == "cuda" else "CPU"
    bundle = {"CPU": count, unit: count}
    group = placement_group([bundle] * parallel.nodes, strategy="STRICT_SPREAD" if parallel.nodes > 1 else "PACK")
    # Several calls at once: one waits for the ranks, and others ask about them.
    actor = ray.remote(num_cpus=count, num_gpus=bundle.get("GPU", 0), max_concurrency=4, max_restarts=0)(Node)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at) for at in range(parallel.nodes)]
    actors = [actor.options(scheduling_strategy=place).remote() for place in places]
    try:
        try:
            found = ray.get([each.where.remote() for each in actors], timeout=parallel.timeout)
        except ray.exceptions.RayError as error:
            has, free = _resources(unit), ray.available_resources().get(unit, 0)
            raise RequestError(
                f"--nodes {parallel.nodes} --devices {count}: Ray did not start a process with {counted(count, unit)} "
                f"on each of {counted(parallel.nodes, 'node')} within --timeout {parallel.timeout:g} s "
                f"({failures.one_line(error)}); its cluster has {counted(len(has), 'node')} ({unit}s: "
                f"{', '.join(f'{each:g}' for each in has)}), and {free:g} {unit}s are free; ask for less, or wait; "
                "every node needs lockstep-torch and Ray in the versions of this one."
            ) from error
        yield actors, found
    finally:
        for each in actors:
            ray.kill(each, no_restart=True)  # its process ends with it, and the ranks with that
        remove_placement_group(group)


class _Job:
    """A run on its nodes, as the driver sees it."""

    def __init__(
        self, actors: Sequence[Any], found: Sequence[tuple[str, str, int]], config: RunConfig, payload: bytes
    ) -> None:
        """Start the pickled (entry, config) on all ranks."""
        nodes, parallel = len(actors), config.parallel
        here = (parallel.devices or 1) if parallel.process_per_device else 1
        endpoint = Endpoint(host=found[0][0], port=found[0][2], secret=secrets.token_bytes(32)) if nodes > 1 else None
        paths, folder = [str(Path(path).absolute()) for path in sys.path], str(Path.cwd())
        self._actors, self._here, self._resume_hint = actors, here, failures.resume_hint(config)
        self._names = [f" on node {address} ({name})" for address, name, _ in found]
        self._ended: dict[int, bytes | Failure] = {}
        self._waiting: dict[Any, int] = {}
        for node, actor in enumerate(actors):
            places = Topology.of_node(here, first=node * here, size=nodes * here, node=node, nodes=nodes)
            spec = pickle.dumps((paths, places, config, payload, endpoint, self._names[node]))
            self._waiting[actor.run.remote(spec, folder)] = node
        self._shown = [0, 0]
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self._shown]

    def value(self) -> Any:
        """Await all ranks; return rank 0's value or raise the first cause."""
        import ray

        causes, told = list[Failure](), list[Any]()
        since_s = time.monotonic()
        with Interrupts() as interrupts:  # for the next look: nothing is raised amid a call of Ray's
            while self._waiting:
                if interrupts.insisted:
                    raise RunError(KILLED)
                if interrupts.asked and not told:
                    told = [actor.stop.remote() for actor in self._actors]
                for each in ray.wait([*self._waiting], timeout=_LOOK_S)[0]:
                    node = self._waiting.pop(each)
                    self._ended[node] = self._end_of(node, each)
                self._show()
                if not causes:
                    since_s = time.monotonic()
                causes = [ended for ended in self._ended.values() if isinstance(ended, Failure)]
                # After a failure the others are heard a moment longer: the first report is not always the first cause.
                # After echoes alone, the wait is longer, since Ray reports a lost node late.
                is_open = all(cause.is_echo or cause.kind == Stopped.__name__ for cause in causes)
                if causes and time.monotonic() - since_s > (_LEAVE_S if is_open else _LISTEN_S):
                    break
        if causes:
            raise first_cause(causes).error()
        return value_of(cast(bytes, self._ended[0]))

    def _end_of(self, node: int, result: Any) -> bytes | Failure:
        import ray.exceptions

        try:
            ended: bytes | Failure = ray.get(result)
        except ray.exceptions.RayError as error:
            ranks = range(node * self._here, (node + 1) * self._here)
            how = f"{self._names[node]} died ({failures.one_line(error)}); {self._resume_hint}."
            ended = Failure(ranks[0], "", f"{ranks_in_short(ranks).capitalize()}{how}", "")
        return ended

    def _show(self) -> None:
        """Print the new output of rank 0's node."""
        import ray.exceptions

        for number, stream in enumerate((sys.stdout, sys.stderr)):
            with contextlib.suppress(ray.exceptions.RayError):
                while data := ray.get(self._actors[0].printed.remote(number, self._shown[number]), timeout=_ANSWER_S):
                    self._shown[number] += len(data)
                    print(self._decoders[number].decode(data), end="", file=stream, flush=True)


class Node:
    """One node's process and its output. Ray makes an actor of this, which imports no torch."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._files = [tempfile.TemporaryFile() for _ in range(2)]

    def where(self) -> tuple[str, str, int]:
        """Return this node's address (as Ray knows it), name and free port."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            return address, socket.gethostname(), free.getsockname()[1]

    def run(self, spec: bytes, folder: str) -> bytes | Failure:
        """Run this node's ranks in `folder`; return their pickled value or failure. `spec` is what `serve` reads."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        ours, theirs = Pipe()
        with ours:
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=self._files[0],
                    stderr=self._files[1],
                    start_new_session=True,
                )
            ended: bytes | Failure | None = None
            with contextlib.suppress(EOFError, OSError):
                ours.send_bytes(spec)
                ended = pickle.loads(ours.recv_bytes())  # from our own child, through a pipe that no stranger holds
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(GRACE_S)
            self._child.kill()
        code = self._child.wait()
        how = Stopped.__name__ if code == -signal.SIGTERM else ""  # before it could hear of it
        return ended or Failure(0, how, f"A node's process ended (code {code}) before its ranks were done.", "")

    def stop(self) -> None:
        """Have the ranks save and end."""
        while self._child is None:  # `run` is about to start it
            time.sleep(_LOOK_S)
        self._child.terminate()

    def printed(self, number: int, start: int) -> bytes:
        """Return the process's stdout (0) or stderr (1) from byte `start` on."""
        return os.pread(self._files[number].fileno(), _READ_BYTES, start)  # which leaves the child's own place there


def serve(descriptor: int) -> None:
    """Run one node's ranks for its actor. Reads their spec from the pipe `descriptor`, and sends the outcome back."""
    pipe = Connection(descriptor)
    paths, places, config, payload, endpoint, where = pickle.loads(pipe.recv_bytes())  # from the actor, our parent
    threading.Thread(target=end_with, args=(pipe,), daemon=True, name="lifeline").start()
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
    ended: bytes | Failure
    try:
        with Supervisor(config, where) as supervisor, stores.memory() as memory:
            ended = supervisor.run(places, payload, endpoint or Endpoint(memory=memory))
    except LockstepError as error:
        ended = failures.describe(error, places[0].rank)
    pipe.send_bytes(pickle.dumps(ended))
