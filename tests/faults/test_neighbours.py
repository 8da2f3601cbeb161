"""A neighbour on the host, who reaches what another user can reach of a job: it goes on as if nobody were there."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from lockstep.launchers import stores
from lockstep.monitor.keys import SECRET, Keys

from ..command import GATED, OPEN, at, command, end, gate, losses, processes, ranks_of, start, until, weights
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


def test_what_a_stranger_writes_into_the_store_of_ranks_counts_for_nothing(undisturbed: Path, tmp_path: Path) -> None:
    """Of ranks that torchrun starts again, whose store torch serves to everybody on the host."""
    port, theirs = free_port(), tmp_path / "theirs"
    theirs.mkdir()
    through = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    gate(tmp_path, 15)
    words = (*GATED, "--resume", "auto")  # the note of the run's folder will not be there
    with start(tmp_path, *words, through=(*through, "--master-port", str(port))) as agent:
        at(tmp_path, 15)
        stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
        until(lambda: any("/beat/" in key for key in stranger.list_keys()))  # each rank's first heartbeat
        keys = [key.strip("/") for key in stranger.list_keys() if "lockstep/" in key]
        assert any("claim/" in key for key in keys)
        for key in keys:
            stranger.set(key, "\x1b[31mthe run ends, says the neighbour")
        beats = next(key.rpartition("/beat/")[0] for key in keys if "/beat/" in key)
        stranger.set(f"{beats}/sentence", "the run ends, says the neighbour")
        notes = next(key.rpartition("/lasting/")[0] for key in keys if "/lasting/" in key)
        Keys(stranger, f"{notes}/lasting").write("folder", str(theirs))
        ranks_of(agent, "lockstep")[1].kill()
        gate(tmp_path, OPEN)
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert "neighbour" not in ended.err
    assert "somebody who does not have this job's secret writes into its store" in ended.err
    assert not any(theirs.iterdir())
    assert (losses(tmp_path / "run"), weights(tmp_path / "run")) == (losses(undisturbed), weights(undisturbed))


@pytest.mark.long
def test_a_rank_with_another_secret_is_told_why_it_is_alone(tmp_path: Path) -> None:
    meets = ("--launcher", "manual", "--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", 2)
    words = ("train", "digits", "--accelerator", "cpu", "--strategy", "ddp", "--timeout", 5, "--output", "run", *meets)
    gate(tmp_path, OPEN)
    with start(tmp_path, *words, "--rank", 1, **{SECRET: "another"}) as other:
        first = command(tmp_path, *words, "--rank", 0, **{SECRET: "one"})
        ended = end(other)
    assert (first.code, ended.code) == (2, 2)
    assert "1 of 2 ranks came within --timeout 5 s; missing: rank 1" in first.err
    assert f"give all of them the same {SECRET}" in ended.err
