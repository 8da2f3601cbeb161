"""Ranks that people start by hand, one command each, which meet at a place that all of them name.

    --init-method tcp://HOST:PORT --world-size 2 --rank 0      rank 0 listens at HOST, an address of its machine
    --init-method file:///PATH --world-size 2 --rank 0         a file on a disk that all ranks share; it must not exist
    --init-method env://                                       MASTER_ADDR and MASTER_PORT say the address

In a Slurm array job, --rank and --world-size follow from the job's place in its array, unless they are given.

Which ranks share a node is found out at the roll call, from the hosts that they run on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..config import ParallelConfig, RunConfig
from ..errors import RequestError
from . import rank, secret, stores
from .base import Entry
from .devices import meets_by_url
from .dialects import of_array

_EXAMPLES = "give tcp://HOST:PORT, file:///PATH, or env://"


class ManualLauncher:
    """Joins the ranks that meet at --init-method."""

    name = "manual"

    def starts_here(self, config: RunConfig) -> bool:
        """Return False: other hosts may run ranks, rank 0 among them."""
        return False

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return False: flags ask for it, never the environment."""
        return False

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Run the entry as --rank of --world-size; return its value on rank 0, else None."""
        with self.seat(config, env) as seat:
            return seat.run(entry, config)

    @contextlib.contextmanager
    def seat(self, config: RunConfig, env: Mapping[str, str]) -> Iterator[rank.Seat]:
        """Be --rank of --world-size while the block runs."""
        index, size = _who(config.parallel, env)
        url = _url(config.parallel, env)
        with rank.teller() as tell, rank.accounted(index, config):
            opens = _door(url, index, size, config.parallel, env)
            with rank.met(config, env, opens, index=index, size=size, tell=tell) as seat:
                yield seat


def _who(parallel: ParallelConfig, env: Mapping[str, str]) -> tuple[int, int]:
    told = _told(parallel, env)
    index = _number("--rank", parallel.rank, told.get("RANK"))
    size = _number("--world-size", parallel.world_size, told.get("WORLD_SIZE"))
    if not index < size:
        raise RequestError(f"--rank {index} lies outside the world of {size}; ranks go from 0 to {size - 1}.")
    return index, size


def _told(parallel: ParallelConfig, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the rank and the world size by the environment, for those that flags do not give.

    Within an array job they are the job's place in its array, once --init-method says where to meet: by itself an
    array may as well be so many runs. One flag without the other has to agree with the array.
    """
    if not meets_by_url(parallel):
        return env
    by_hand = (parallel.rank, parallel.world_size)
    array = None if None not in by_hand else of_array(env)
    if array is None:
        return {}
    for flag, given, variable, told in (
        ("--rank", parallel.rank, "SLURM_ARRAY_TASK_ID", array[0]),
        ("--world-size", parallel.world_size, "SLURM_ARRAY_TASK_COUNT", array[1]),
    ):
        if given is not None and given != told:
            raise RequestError(
                f"{flag} {given} disagrees with the array job, where {variable}={env[variable]} makes it {told}; leave "
                "it out, or give both --rank and --world-size."
            )
    return {"RANK": str(array[0]), "WORLD_SIZE": str(array[1])}


def _number(flag: str, given: int | None, told: str | None) -> int:
    if given is not None:
        return given
    if told is None or not told.isdecimal():
        raise RequestError(
            f"--launcher manual needs {flag}: each rank is started with its own --rank, and the same --world-size."
        )
    return int(told)


def _url(parallel: ParallelConfig, env: Mapping[str, str]) -> str:
    url = parallel.init_method
    if not url:
        raise RequestError(f"--rank and --world-size need --init-method, the place where ranks meet: {_EXAMPLES}.")
    if url.rstrip("/") != "env:":
        return url
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(variable):
            raise RequestError(f"--init-method env:// needs {variable} in the environment; set it on every rank.")
    return stores.address_of(env["MASTER_ADDR"], env["MASTER_PORT"])


def _door(
    url: str, index: int, size: int, parallel: ParallelConfig, env: Mapping[str, str]
) -> Callable[[], stores.Meeting]:
    """Return what opens the meeting place that a URL names, for the rank of this index."""
    parts = urlsplit(url)
    if parallel.clear_meeting and parts.scheme != "file":
        raise RequestError(
            f"--clear-meeting is for a file that a dead run has left; {url} ends with the process that serves it: "
            "leave the flag out."
        )
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise RequestError(f"--init-method {url}: the path starts at the root, with three slashes: file:///PATH.")
        path = Path(unquote(parts.path))
        return lambda: stores.open_file(path, clears=parallel.clear_meeting)
    if parts.scheme == "tcp":
        host, port = host_and_port(url)
        opens = stores.serve if index == 0 else stores.connect
        # Who else may be on rank 0's node is known only where each rank has a node of its own.
        apart = parallel.nodes > 1 and (index == 0 or parallel.nodes == size)
        known = secret.of_job(env, on_one_host=host in ("localhost", "127.0.0.1", "::1"))
        return lambda: opens(host, port, parallel.timeout, secret=known, apart=apart)
    raise RequestError(f"--init-method {url} names no meeting place that is known; {_EXAMPLES}.")


def host_and_port(url: str) -> tuple[str, int]:
    """Return the two that tcp://HOST:PORT names. Raises `RequestError` where it does not."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path.strip("/") or parts.query:
        raise RequestError(
            f"--init-method {url}: give an address and a port from 1 to 65535, such as tcp://10.0.0.1:29500."
        )
    return host, port
