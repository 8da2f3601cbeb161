"""One way to join: whoever has started this process, it finds out which rank it is, and where the others meet.

    --init-method tcp://HOST:PORT --world-size 2 --rank 0      rank 0 listens at HOST, an address of its machine
    --init-method file:///PATH --world-size 2 --rank 0         a file on a disk that all ranks share
    --init-method env://                                       MASTER_ADDR and MASTER_PORT say the address

By hand, nodes and local ranks follow from the hosts that the ranks run on. In a Slurm array job, --rank and
--world-size follow from the job's place in its array, unless they are given. Of ranks that another program has started,
the environment says it all (see `environments`). A process without others is a world of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..config.registry import kind
from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError
from ..files import write_whole
from ..monitor.failures import Failure
from ..printable import told
from ..world.topology import Topology
from . import environments, hosts, rank, stores
from .devices import Entry, gpu_ids, host_and_port, meets_by_url
from .environments import Place

_EXAMPLES = "give tcp://HOST:PORT, file:///PATH, or env://"
_ECHO_WAITS_S = 1.5


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
    """Run the entry as the rank that a resolved config makes of this process; return its value on rank 0."""
    with seat(config, env) as mine:
        return mine.run(entry, config)


@contextlib.contextmanager
def seat(config: RunConfig, env: Mapping[str, str]) -> Iterator[rank.Seat]:
    """Be the rank that a resolved config makes of this process while the block runs (*collective*)."""
    launcher = config.parallel.launcher
    is_alone = launcher == "inline"
    place = environments.read(env) if launcher == "environment" else None
    known = Topology() if is_alone else place.topology if place is not None and place.knows_node else None
    if place is not None:
        index, size = place.topology.rank, place.topology.size
    else:
        index, size = (0, 1) if is_alone else _by_hand(config.parallel, env)

    def leave_word(failure: Failure) -> None:
        if place is not None and place.error_file is not None:
            _leave(failure, place.error_file)

    with rank.teller() as say, rank.accounted(index, config, leave_word):

        def tell(failure: Failure) -> None:
            say(failure)
            leave_word(failure)

        opens: Callable[[], stores.Meeting] = stores.alone
        if place is None and not is_alone:
            opens = _door(config.parallel, index, size, env)
        elif place is not None:
            _check_agrees(config.parallel, place)
            _check_node(config.parallel, place, env)
            opens = _door_of(place, config.parallel.timeout, env)
        with rank.met(config, env, opens, index=index, size=size, known=known, tell=tell) as seat:
            yield seat


def _leave(failure: Failure, path: Path) -> None:
    """Write the failure as torch's `record` decorator would, where torchrun looks for it.

    Without its trace, which this process shows itself: torchrun would show it once more.
    """
    if failure.is_echo:  # torchrun takes the earliest report, in whole seconds, for the root cause, and ends the others
        time.sleep(_ECHO_WAITS_S)
    about = {"timestamp": str(int(failure.time)), "lockstep": asdict(dataclasses.replace(failure, trace=""))}
    with contextlib.suppress(OSError):  # a full disk must not hide why the rank failed
        write_whole(path, json.dumps({"message": {"message": failure.sentence, "extraInfo": about}}).encode())


def _by_hand(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[int, int]:
    """Return this rank and the world size by flags, or else by the environment.

    Within an array job they are the job's place in its array, once --init-method says where to meet: by itself an
    array may as well be so many runs.
    """
    index, size = parallel.rank, parallel.world_size
    if index is None or size is None:
        by_url = meets_by_url(parallel)
        array = environments.of_array(env) if by_url else None
        if array and (index not in (None, array[0]) or size not in (None, array[1])):
            raise RequestError(
                f"--rank {index}, --world-size {size}: by its place in the array, this job is rank {array[0]} of "
                f"{array[1]}; leave both out, or give both."
            )
        told = [None if by_url else environments.whole(env.get(name, "")) for name in ("RANK", "WORLD_SIZE")]
        by_env, size_by_env = array or told
        index, size = by_env if index is None else index, size_by_env if size is None else size
    if index is None or size is None:
        raise RequestError(
            f"--launcher manual needs {'--rank' if index is None else '--world-size'}: each rank is started with its "
            "own --rank, and the same --world-size."
        )
    if not index < size:
        raise RequestError(f"--rank {index} lies outside the world of {size}; ranks go from 0 to {size - 1}.")
    return index, size


def _door(parallel: ParallelConfig, index: int, size: int, env: Mapping[str, str]) -> Callable[[], stores.Meeting]:
    """Return what opens the meeting place that --init-method names, for the rank of this index."""
    url = parallel.init_method
    if not url:
        raise RequestError(f"--rank and --world-size need --init-method, the place where ranks meet: {_EXAMPLES}.")
    if not meets_by_url(parallel):
        for variable in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(variable):
                raise RequestError(f"--init-method env:// needs {variable} in the environment; set it on every rank.")
        url = hosts.url(env["MASTER_ADDR"], env["MASTER_PORT"])
    if parallel.clear_meeting:
        sys.stderr.write(told("--clear-meeting is no longer needed: a file:// that a dead run has left does no harm"))
    parts, timeout_s = urlsplit(url), parallel.timeout
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise RequestError(f"--init-method {url}: the path starts at the root, with three slashes: file:///PATH.")
        path, secret = Path(unquote(parts.path)), stores.of_job(env, on_one_host=False)
        return lambda: stores.at_file(
            path, is_main=index == 0, timeout_s=timeout_s, interface=parallel.interface, secret=secret
        )
    if parts.scheme != "tcp":
        raise RequestError(f"--init-method {url} names no meeting place that is known; {_EXAMPLES}.")
    host, port = host_and_port(url)
    # Who else may be on rank 0's node is known only where each rank has a node of its own.
    apart = parallel.nodes > 1 and (index == 0 or parallel.nodes == size)
    known = stores.of_job(env, on_one_host=host in ("localhost", "127.0.0.1", "::1"))
    opens = stores.serve if index == 0 else stores.connect
    return lambda: opens(host, port, timeout_s, secret=known, apart=apart)


def _door_of(place: Place, timeout_s: float, env: Mapping[str, str]) -> Callable[[], stores.Meeting]:
    """Return what opens the meeting place that the environment names."""
    topology = place.topology
    is_main, on_one_host = topology.is_main, place.knows_node and topology.nodes == 1
    secret = stores.of_job(env, on_one_host=on_one_host)
    if (file := place.file) is not None:
        return lambda: stores.at_file(file, is_main=is_main, timeout_s=timeout_s, local=True, secret=secret)
    if on_one_host and place.error_file is not None:
        # The folder of this agent's, of a random name: what another job has sealed is none of this one's notes.
        secret += str(place.error_file.parents[2]).encode()
    host, port = topology.address, topology.port
    if place.served:
        return lambda: stores.connect(host, port, timeout_s, secret=secret, job=place.job, served=True)
    knows_hosts = place.knows_node and place.nodes_are_hosts
    apart = knows_hosts and (topology.nodes > 1 if is_main else topology.node > 0)
    opens = stores.serve if is_main else stores.connect
    return lambda: opens(host, port, timeout_s, secret=secret, apart=apart)


def _check_agrees(asked: ParallelConfig, place: Place) -> None:
    """Raise where flags say another world than the environment."""
    found = place.topology
    # One process that drives several devices is one rank; and what the environment does not say, the roll call finds.
    devices = asked.devices if place.knows_node and kind(asked.strategy).process_per_device else None
    nodes = asked.nodes if place.knows_node and asked.nodes > 1 else None
    for flag, wanted, has in (
        ("--world-size", asked.world_size, found.size),
        ("--rank", asked.rank, found.rank),
        ("--devices", devices, found.local_size),
        ("--nodes", nodes, found.nodes),
    ):
        if wanted is not None and wanted != has:
            raise RequestError(
                f"{flag} {wanted} disagrees with the environment, where {place.names[flag]} is {has}; "
                f"drop {flag}, or start the ranks with the same number."
            )


def _check_node(asked: ParallelConfig, place: Place, env: Mapping[str, str]) -> None:
    """Raise where this node has more ranks than the strategy wants there, or than there are GPUs."""
    here, name = place.topology.local_size, place.names["--devices"]
    if not place.knows_node or here == 1:
        return
    if kind(asked.strategy).drives_all:
        raise RequestError(
            f"--strategy {asked.strategy} drives all devices of a node in one process, but {name} is {here}; "
            "start one process on each node."
        )
    if asked.accelerator != "cuda":
        return
    shown = len(gpu_ids(asked, env))
    variable, granted = place.gpus or ("the number of GPUs that this process sees", shown)
    # One that sees a single GPU may have it for itself: the roll call finds out whether two would share it.
    gpus = min(granted, shown) if shown > 1 else granted
    if gpus < here and (place.gpus or shown > 1):
        raise RequestError(
            f"{name} is {here}, but {variable if gpus == granted else 'the number of GPUs that this process sees'} is "
            f"{gpus}: each rank needs a GPU of its own; start at most {gpus} on this node, or ask for more GPUs."
        )
