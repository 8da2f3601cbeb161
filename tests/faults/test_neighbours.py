"""A neighbour on the host, who reaches what another user can reach of a job: it goes on as if nobody were there."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from base64 import b64encode
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from lockstep.launchers import stores

from ..command import GATED, OPEN, at, end, gate, losses, processes, ranks_of, start, weights
from ..ports import free_port

_NOBODY = 65534


def _neighbour_opens(path: Path) -> bool:
    """Return whether another user can open a file."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            path.open("rb").close()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _ports(process: psutil.Process) -> list[int]:
    return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to look as another user")
def test_what_ranks_meet_in_is_nobody_elses() -> None:
    with stores.memory() as path:
        assert path.read_bytes() == b""
        assert not _neighbour_opens(path)


@pytest.mark.parametrize("restarts", [0, 1])
def test_whoever_talks_to_the_ports_of_a_job_on_one_host_changes_nothing(
    restarts: int, undisturbed: Path, tmp_path: Path
) -> None:
    gate(tmp_path, 5)
    with start(tmp_path, *GATED, "--devices", 2, "--max-restarts", restarts) as parent:
        at(tmp_path, 5)
        own, ranks = processes(parent)[0], ranks_of(parent)
        assert _ports(own) == []
        ports = [port for rank in ranks for port in _ports(rank)]
        assert ports, "gloo's, which has no other way"
        for port in ports:
            for words in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
                with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as caller:
                    caller.sendall(words)
        if restarts:
            ranks[1].kill()
        gate(tmp_path, OPEN)
        ended = end(parent)
    assert ended.code == 0, ended.err
    assert (losses(tmp_path / "run"), weights(tmp_path / "run")) == (losses(undisturbed), weights(undisturbed))


class _Touches:
    """A pickle of this makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_a_stranger_who_writes_every_key_of_the_store_ends_the_job_and_does_no_more(tmp_path: Path) -> None:
    port, theirs, ran = free_port(), tmp_path / "theirs", tmp_path / "ran"
    theirs.mkdir()
    nodes = ("--nodes", 2, "--devices", 1, "--max-restarts", 1, "--init-method", f"tcp://127.0.0.1:{port}")
    hostile: list[Any] = [b64encode(pickle.dumps(_Touches(ran))), pickle.dumps(_Touches(ran)), b"\xff" * 4096]
    hostile += [str(theirs).encode(), b"\x1b[31m{", b"[" * 100_000, b'{"rank": "1", "count": [], "fault": {}}', b""]
    gate(tmp_path, 10)
    with contextlib.ExitStack() as left:
        started = [left.enter_context(start(tmp_path, *GATED, "--resume", "auto", *nodes)) for _ in range(2)]
        at(tmp_path, 10)
        stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
        with contextlib.suppress(RuntimeError):  # the store has gone, as rank 0 has ended
            for value in hostile:
                for key in [*stranger.list_keys(), "lockstep/folder", "lockstep/sentence"]:
                    stranger.set(key.removeprefix("/"), value)
                time.sleep(1.5)  # a heartbeat and a half
        gate(tmp_path, OPEN)
        found = [end(each) for each in started]
    assert {each.code for each in found} <= {0, 1, 2}, found
    assert not any(theirs.iterdir())
    assert not ran.exists()
    assert not any("\x1b[31m" in each.err or str(theirs) in each.err for each in found)
    assert {each.name for each in tmp_path.iterdir()} <= {"run", "theirs", "gate", "runs"}
    pickle.loads(hostile[1])
    assert ran.exists()  # so it would
