"""The roll call and the stores that it is held over: every rank hears what is wrong, in bounded time."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from lockstep.errors import AbsentError, RequestError
from lockstep.launchers import meeting_files, rendezvous, stores
from lockstep.launchers.claims import Claim
from lockstep.launchers.rendezvous import RollCall

from ..command import end
from ..ports import free_port
from ..starting import claim_of, doors_to, start_rank

HOST = "127.0.0.1"


def _heard(doors: Sequence[Callable[[], stores.Meeting]], claims: Sequence[Claim], timeout_s: float = 20) -> list[str]:
    """Hold a roll call among threads, which come one after the other; return what each heard."""
    meetings, calls = [], []

    def take(door: Callable[[], stores.Meeting], claim: Claim, opened: threading.Event) -> str:
        try:
            meetings.append(meeting := door())
            opened.set()  # torch opens a file with Python's lock held, while another thread may hold the file's
            call = RollCall(meeting, claim)
            ranks = len(call.take(timeout_s).claims)
            calls.append(call)
        except RequestError as error:
            return str(error)
        finally:
            opened.set()
        return f"{ranks} ranks"

    heard = []
    with ThreadPoolExecutor(len(claims)) as threads:
        for door, claim in zip(doors, claims, strict=True):
            heard.append(threads.submit(take, door, claim, opened := threading.Event()))
            opened.wait()
        told = [each.result() for each in heard]
        # Only once all have read it: the last to leave takes the file away.
        list(threads.map(lambda call: call.leave(clean=True), calls))
    return told


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_every_rank_hears_what_is_wrong(scheme: str, tmp_path: Path) -> None:
    def hear(*claims: Claim, timeout_s: float = 20) -> list[str]:
        return _heard(doors_to(scheme, tmp_path, [claim.rank for claim in claims]), claims, timeout_s)

    twice = hear(claim_of(0, 3), claim_of(1, 3, host="ann"), claim_of(1, 3, host="bob"))
    sizes = hear(claim_of(0, 2), claim_of(1, 3))
    missing = hear(claim_of(0, 4), claim_of(2, 4), timeout_s=1)
    kinds = hear(claim_of(0, 2), claim_of(1, 2, accelerator="cuda", gpus=("g",)))
    shared = hear(*(claim_of(rank, 2, accelerator="cuda", gpus=("GPU-1",)) for rank in range(2)))
    for told, words in (
        (twice, "rank 1 is claimed twice, by process .* on (ann|bob) and by process .* on (ann|bob)"),
        (sizes, "disagree on the world size"),
        (missing, "2 of 4 ranks came within --timeout 1 s; missing: rank 1, 3"),
        (kinds, "different accelerators"),
        (shared, "Ranks 0 and 1 on"),
    ):
        assert [sentence for sentence in told if not re.search(words, sentence)] == []
    zeros = hear(claim_of(0, 2), claim_of(0, 2), timeout_s=1)
    # Under tcp the second is of another job, which finds the first one's port taken.
    assert sum("rank 0 is claimed twice" in sentence for sentence in zeros) == (1 if scheme == "tcp" else 2)
    assert hear(claim_of(0, 3), claim_of(1, 3), claim_of(2, 3)) == ["3 ranks"] * 3  # at the same file as all the above
    assert not (tmp_path / "meeting").exists()


def test_a_server_that_was_stopped_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    port = free_port()
    code = (
        f"from lockstep.launchers import stores; kept = stores.serve({HOST!r}, {port}, 10); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        meeting = stores.connect(HOST, port, 10)
        server.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(AbsentError, match=r"the store went away .*no answer within 2 s"):
                RollCall(meeting, claim_of(1, 2)).take(2)
        finally:
            server.kill()


@contextlib.contextmanager
def _service(kind: str) -> Iterator[int]:
    """Serve something that is no store; yield its port."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()

        def serve() -> None:
            with contextlib.ExitStack() as peers, contextlib.suppress(OSError):
                while True:
                    peer = peers.enter_context(listener.accept()[0])
                    if kind == "speaks":
                        peer.sendall(b"SSH-2.0-OpenSSH\r\n")
                    if kind == "closes":
                        peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_place_where_nobody_can_meet_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PROBE_S", 1.0)
    (tmp_path / "notes.txt").write_text("not ours\n")
    with contextlib.ExitStack() as services:
        speaks, closes, silent = (services.enter_context(_service(kind)) for kind in ("speaks", "closes", "silent"))
        begun_s = time.monotonic()
        for opened, words in (
            (lambda: stores.connect(HOST, free_port(), 1), "nothing answers there within --timeout 1 s"),
            (lambda: stores.connect("no-such-host.invalid", 29500, 1), "does not resolve"),
            (lambda: stores.connect(HOST, silent, 1), "said nothing within --timeout 1 s"),
            (lambda: stores.connect(HOST, speaks, 1), "not the store of"),
            (lambda: stores.connect(HOST, closes, 1), "not the store of"),
            (lambda: stores.serve(HOST, silent, 1), "another program uses the port"),
            (lambda: stores.serve(HOST, speaks, 1), "another program uses the port"),
            (lambda: stores.serve("192.0.2.7", 29500, 1), "not one of this machine"),
            (lambda: stores.serve("no-such-host.invalid", 29500, 1), "does not resolve"),
            (lambda: stores.open_file(tmp_path / "no" / "folder"), "cannot be opened"),
            (lambda: stores.open_file(tmp_path), "not a plain file"),
            (lambda: stores.open_file(tmp_path / "notes.txt"), "not a meeting place"),
        ):
            with pytest.raises(RequestError, match=words):
                opened()
        assert time.monotonic() - begun_s < 30
        # In a rank's own process, torch says nothing beside it.
        meet = f"tcp://{HOST}:{speaks}"
        ended = end(start_rank("total", init_method=meet, rank=1, world_size=2, timeout=2))
        assert (ended.code, ended.out, len(ended.err.splitlines())) == (2, "", 1), ended
    assert (tmp_path / "notes.txt").read_text() == "not ours\n"


def test_a_file_that_is_half_written_is_told_or_mended(tmp_path: Path) -> None:
    """At every length that a killed writer can leave: torch itself would wait there for ever."""
    path = tmp_path / "meeting"
    store = stores.open_file(path).store
    store.set("word", "heard")
    content = path.read_bytes()
    store.set("more", "text")
    log = path.read_bytes()
    for length in [*range(1, log.index(b"refcount/") + len(b"refcount/")), *range(len(content) + 1, len(log))]:
        path.write_bytes(log[:length])
        with pytest.raises(RequestError, match=f"killed while it wrote there; remove {path} or .* --clear"):
            stores.open_file(path)
        assert path.read_bytes() == log[:length]
        if length > len(content):
            meeting_files.check(path, clears=True)
            assert path.read_bytes() == content
    assert stores.open_file(path).store.get("word") == b"heard"


@pytest.mark.parametrize("greeting", [stores._GREETING, b""], ids=["of this torch", "of another torch"])
def test_a_store_is_found_and_listens_on_its_address_alone(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_GREETING", greeting)  # the second is one that no store answers
    monkeypatch.setattr(stores, "_PROBE_S", 1.0)
    port = free_port()
    meeting = stores.serve(HOST, port, 5)
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == [HOST]
    stores.connect(HOST, port, 5).store.set("word", "heard")
    assert meeting.store.get("word") == b"heard"
