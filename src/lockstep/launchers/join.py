"""Ranks started by a person or another program join the others.

    --init-method tcp://HOST:PORT --world-size 2 --rank 0      rank 0 listens at HOST, an address of this machine
    --init-method file:///PATH --world-size 2 --rank 0         a file on a disk that all ranks share
    --init-method env://                                       MASTER_ADDR and MASTER_PORT are the address

Ranks of another program read all of this from the environment (see `environments`). Without a launcher, this process
is the only rank.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..config.schema import ParallelConfig, RunConfig
from ..errors import LockstepError, RequestError
from ..files import LOCK, write_whole
from ..monitor import failures
from ..monitor.failures import Failure
from ..monitor.notes import FOLDER, Notes
from ..world.topology import Topology
from . import environments, hosts, rank
from .environments import Place
from .plan import Entry, LaunchPlan
from .stores import Endpoint

_EXAMPLES = "give tcp://HOST:PORT, file:///PATH, or env://"
_ECHO_WAITS_S = 5.0


def launch(entry: Entry, launch_plan: LaunchPlan, env: Mapping[str, str]) -> Any | None:
    """Run the entry as this process's rank."""
    with join(launch_plan.config, env) as joined_rank:
        return joined_rank.run(entry)


@contextlib.contextmanager
def join(config: RunConfig, env: Mapping[str, str]) -> Iterator[rank.JoinedRank]:
    """Join as this process's rank under a resolved config (*collective*)."""
    parallel = config.parallel
    hosts.check_interface(parallel.interface, env)
    place = _place(parallel, env)
    index = place.topology.rank
    with rank.console() as print_failure:

        def report(failure: Failure) -> None:
            print_failure(failure)
            _write_error_file(failure, place.error_file)

        try:
            rank.check_agrees(parallel, place.topology, place.names)
            rendezvous = (place.endpoint or _endpoint(parallel, env)).open(index, parallel.timeout, _notes(config, env))
            topology, knows_node = place.topology, place.knows_node
            with rank.join(config, env, rendezvous, topology, knows_node=knows_node, report=report) as joined_rank:
                yield joined_rank
        except (Exception, SystemExit) as error:
            failure = failures.account(error, index, config)
            _write_error_file(failure, place.error_file)
            if isinstance(error, LockstepError):
                raise
            raise failure.error() from error


def _notes(config: RunConfig, env: Mapping[str, str]) -> Notes:
    """Return a note of the run's folder if torch's agent has started these ranks again.

    Rank 0 of the earlier start may still hold the folder's lock, on a node that was lost.
    """
    folder, restarts = config.record.output, env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if folder is None or restarts == "0" or config.checkpoint.resume != "auto":
        return Notes()
    # Without a shared disk, the folder on a node other than rank 0's has the output of ranks at most.
    is_begun = any((folder / name).exists() for name in (LOCK, "output"))
    return Notes({FOLDER: str(folder.absolute())}.get) if is_begun else Notes()


def _write_error_file(failure: Failure, path: Path | None) -> None:
    """Write the failure to torchrun's error file, as torch's `record` does, but without the trace.

    This process prints the trace itself, and torchrun would print it once more.
    """
    if path is None:
        return
    if failure.is_echo:  # torchrun takes the first rank that ends, or the earliest report, for the root cause
        time.sleep(_ECHO_WAITS_S)
        return
    message = {"message": failure.sentence, "extraInfo": {"timestamp": str(int(failure.time))}}
    with contextlib.suppress(OSError):  # a full disk must not hide why the rank failed
        write_whole(path, json.dumps({"message": message}).encode())


def _place(parallel: ParallelConfig, env: Mapping[str, str]) -> Place:
    """Return this rank's place by the environment, or by flags.

    In an array job with an --init-method URL, rank and world size follow from the array index. Without the URL, the
    elements may be separate runs.
    """
    if parallel.launcher == "environment":
        return environments.read(env)
    if parallel.launcher == "inline":
        return Place(Topology(), Endpoint())
    by_url, index, size = parallel.has_rendezvous_url, parallel.rank, parallel.world_size
    if index is None or size is None:
        array = environments.of_array(env) if by_url else None
        values = array or [None if by_url else environments.integer(env.get(name)) for name in ("RANK", "WORLD_SIZE")]
        index, size = values[0] if index is None else index, values[1] if size is None else size
    if index is None or size is None or not index < size:
        raise RequestError(
            f"--launcher manual: --rank is {index}, --world-size {size}; start each rank with its own --rank, from 0 "
            "up, and all with the same --world-size."
        )
    return Place(Topology(rank=index, size=size), knows_node=False)


def _endpoint(parallel: ParallelConfig, env: Mapping[str, str]) -> Endpoint:
    """Return where this rank meets the others by --init-method."""
    url, interface = parallel.init_method, parallel.interface
    if not url:
        raise RequestError(f"--rank and --world-size need --init-method, the rendezvous of the ranks: {_EXAMPLES}.")
    if not parallel.has_rendezvous_url:
        for variable in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(variable):
                raise RequestError(f"--init-method env:// needs {variable} in the environment; set it on every rank.")
        url = hosts.url(env["MASTER_ADDR"], env["MASTER_PORT"])
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise RequestError(f"--init-method {url}: the path starts at the root, with three slashes: file:///PATH.")
        host = hosts.own_addresses(hosts.ANYWHERE, interface)[0] if interface else ""
        return Endpoint(file=Path(unquote(parts.path)), host=host)
    if parts.scheme != "tcp":
        raise RequestError(f"--init-method {url}: the scheme of this URL is unknown; {_EXAMPLES}.")
    host, port = hosts.host_and_port(url)
    return Endpoint(host=host, port=port)
