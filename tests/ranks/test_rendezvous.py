"""The roll call and the stores that it is held over: every rank hears what is wrong."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.errors import AbsentError, RequestError
from lockstep.launchers import meeting_files, rendezvous, stores
from lockstep.launchers.claims import Claim
from lockstep.launchers.rendezvous import RollCall, StartMovedError

from ..command import until
from ..ports import free_port
from ..starting import claim_of, doors_to, outcome, start_rank


class _Caller(threading.Thread):
    """One process's part in a roll call."""

    def __init__(self, opens: Callable[[], stores.Meeting], claim: Claim, timeout_s: float) -> None:
        super().__init__()
        self.answer = ""
        self._opens = opens
        self._claim = claim
        self._timeout_s = timeout_s
        self._meeting: stores.Meeting | None = None

    def run(self) -> None:
        try:
            self._meeting = self._opens()
            call = RollCall(self._meeting, self._claim)
            self.answer = f"{len(call.take(self._timeout_s).claims)} ranks"
            call.leave(clean=True)
        except RequestError as error:
            self.answer = str(error)

    def has_claimed(self) -> bool:
        """Whether the store holds this claim, or its process has gone again."""
        key = f"claim/{self._claim.rank}"
        if self.answer or self._meeting is None:
            return bool(self.answer)
        return self._meeting.store.check([key]) and self._claim.nonce.encode() in self._meeting.store.get(key)


def _roll_call(
    opens: Sequence[Callable[[], stores.Meeting]], claims: Sequence[Claim], timeout_s: float = 20
) -> list[str]:
    """Hold a roll call among threads, each of which claims after the one before; return what each heard."""
    callers = [_Caller(door, claim, timeout_s) for door, claim in zip(opens, claims, strict=True)]
    for caller, follows in zip(callers, [*callers[1:], None], strict=True):
        caller.start()
        if follows is not None:
            until(caller.has_claimed, timeout_s + 20)
    for caller in callers:
        caller.join(timeout_s + 20)
    return [caller.answer for caller in callers]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_every_rank_hears_what_is_wrong(scheme: str, tmp_path: Path) -> None:
    def hear(claims: Sequence[Claim], timeout_s: float = 20) -> list[str]:
        return _roll_call(doors_to(scheme, tmp_path, [claim.rank for claim in claims]), claims, timeout_s)

    twice = hear([claim_of(0, 3), claim_of(1, 3, host="ann"), claim_of(1, 3, host="bob")])
    assert len(set(twice)) == 1
    assert "rank 1 is claimed twice, by process" in twice[0]
    assert "on ann and by process" in twice[0]
    assert "on bob" in twice[0]
    twice = hear([claim_of(0, 2), claim_of(0, 2)], timeout_s=1)
    assert "rank 0 is claimed twice" in twice[1]
    if scheme == "tcp":  # there the second is of another job, which finds the first one's port taken
        assert "1 of 2 ranks came within --timeout 1 s; missing: rank 1" in twice[0]
    else:
        assert len(set(twice)) == 1
    sizes = hear([claim_of(0, 2), claim_of(1, 3)])
    assert len(set(sizes)) == 1
    assert "disagree on the world size: rank 0" in sizes[0]
    missing = hear([claim_of(0, 4), claim_of(2, 4)], timeout_s=1)
    assert "2 of 4 ranks came within --timeout 1 s; missing: rank 1, 3" in missing[0]
    assert len(set(missing)) == 1
    kinds = hear([claim_of(0, 2), claim_of(1, 2, accelerator="cuda", gpus=("g",))])
    assert [answer.startswith("The ranks compute on different accelerators") for answer in kinds] == [True] * 2
    shared = hear([claim_of(r, 2, accelerator="cuda", gpus=("GPU-1",)) for r in range(2)])
    assert [answer.startswith("Ranks 0 and 1 on") for answer in shared] == [True] * 2
    assert (
        hear([claim_of(0, 3), claim_of(1, 3), claim_of(2, 3)]) == ["3 ranks"] * 3
    )  # at the same file as all the above
    assert not (tmp_path / "meeting").exists()


def test_a_server_that_was_stopped_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 1.0)
    port = free_port()
    serves = f"kept = stores.serve('127.0.0.1', {port}, 10)"
    code = f"from lockstep.launchers import stores; {serves}; print(flush=True); input()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        meeting = stores.connect("127.0.0.1", port, 10)
        server.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(AbsentError, match=r"the store went away during the roll call .*no answer within 2 s"):
                RollCall(meeting, claim_of(1, 2)).take(2)
        finally:
            server.kill()


@pytest.mark.parametrize("before", [2, 3])
def test_ranks_whose_start_nobody_tells_find_it_out(before: int) -> None:
    """What is left of an earlier start, of as many ranks or more: of one on another host, the place."""
    host, port = "127.0.0.1", free_port()
    kept = stores.serve(host, port, 10)
    left = claim_of(1, before, host="gone", boot="another")
    old = stores.connect(host, port, 10, job="job", place=(1, before)).store
    old.set("size", left.to_json())
    old.set("claim/1", left.to_json())
    found: dict[int, int] = {}

    def meet(rank: int) -> None:
        while rank not in found:
            meeting = stores.connect(host, port, 10, job="job", place=(rank, 2))
            call = RollCall(meeting, claim_of(rank, 2), clears=True)
            with contextlib.suppress(StartMovedError):
                found[rank] = len(call.take(10).claims)

    first, second = (threading.Thread(target=meet, args=(rank,)) for rank in (0, 1))
    first.start()
    time.sleep(0.5)  # so that it finds its place free, and the other one has it follow
    second.start()
    for thread in (first, second):
        thread.join(20)
    assert found == {0: 2, 1: 2}
    assert kept.hosted


def test_a_dead_world_on_another_host_is_never_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims of a run that was killed elsewhere: nobody can see that process, and it answers nothing."""
    monkeypatch.setattr(rendezvous, "_HEAR_S", 1.0)
    doors = doors_to("file", tmp_path, [0, 1])
    old = [claim_of(rank, 2, host="gone", boot="another") for rank in range(2)]
    for door, claim in zip(doors, old, strict=True):
        door().store.compare_set(f"claim/{claim.rank}", "", claim.to_json())
    start = time.monotonic()
    assert "left over from another run" in _roll_call(doors[:1], [claim_of(0, 2)])[0]
    doors[0]().store.set("claim/0", "")
    assert "1 of 2 ranks confirmed" in _roll_call(doors[:1], [claim_of(0, 2)], timeout_s=2)[0]
    assert time.monotonic() - start < 30


def test_a_place_where_nobody_can_meet_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PROBE_S", 1.0)
    (tmp_path / "notes.txt").write_text("not ours\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        taken = silent.getsockname()[1]
        start = time.monotonic()
        doors: Sequence[tuple[Callable[[], stores.Meeting], str]] = (
            (lambda: stores.connect("127.0.0.1", free_port(), 1), "nothing answers there within --timeout 1 s"),
            (lambda: stores.connect("no-such-host.invalid", 29500, 1), "does not resolve"),
            (lambda: stores.connect("127.0.0.1", taken, 1), "whoever listens there said nothing within --timeout 1 s"),
            (lambda: stores.serve("127.0.0.1", taken, 1), "another program uses the port"),
            (lambda: stores.serve("192.0.2.7", 29500, 1), "not one of this machine"),
            (lambda: stores.serve("no-such-host.invalid", 29500, 1), "does not resolve"),
            (lambda: stores.open_file(tmp_path / "no" / "folder"), "cannot be opened"),
            (lambda: stores.open_file(tmp_path), "not a plain file"),
            (lambda: stores.open_file(tmp_path / "notes.txt"), "not a meeting place"),
        )
        for door, words in doors:
            with pytest.raises(RequestError, match=words):
                door()
        assert time.monotonic() - start < 25
    assert (tmp_path / "notes.txt").read_text() == "not ours\n"


def test_a_file_that_is_half_written_is_told_or_mended(tmp_path: Path) -> None:
    """At every length that a killed writer can leave: torch itself would wait there for ever."""
    path = tmp_path / "meeting"
    store = stores.open_file(path).store
    store.set("word", "heard")
    content = path.read_bytes()
    store.set("more", "text")
    log = path.read_bytes()
    for length in range(len(content) + 1, len(log)):
        path.write_bytes(log[:length])
        with pytest.raises(
            RequestError, match=f"killed while it wrote there; remove {path} or give every rank --clear"
        ):
            stores.open_file(path)
        assert path.read_bytes() == log[:length]
        meeting_files.check(path, clears=True)
        assert path.read_bytes() == content
    assert stores.open_file(path).store.get("word") == b"heard"
    for length in range(1, log.index(b"refcount/") + len(b"refcount/")):
        path.write_bytes(log[:length])
        with pytest.raises(RequestError, match="killed while it wrote there"):
            stores.open_file(path)
    path.write_bytes(log)
    assert stores.open_file(path).store.get("more") == b"text"


@contextlib.contextmanager
def _service(kind: str) -> Iterator[int]:
    """Serve something that is no store; yield its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
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


def test_another_service_at_the_address_is_one_sentence_and_nothing_else() -> None:
    with contextlib.ExitStack() as services:
        ports = {kind: services.enter_context(_service(kind)) for kind in ("speaks", "closes", "silent")}
        ranks = [
            start_rank("total", init_method=f"tcp://127.0.0.1:{ports[kind]}", rank=rank, world_size=2, timeout=2)
            for kind, rank in (("speaks", 0), ("speaks", 1), ("closes", 1), ("silent", 1))
        ]
        told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports["speaks"])}
        ranks.append(start_rank("total", timeout=2, env=told))
        first, *others = [outcome(rank) for rank in ranks]
    wanted = (
        "another program uses the port",
        "not the store of",
        "not the store of",
        "said nothing",
        "not the store of",
    )
    for ended, words in zip((first, *others), wanted, strict=True):
        code, out, err = ended
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert words in err


def test_the_store_of_this_torch_is_known_by_its_answer() -> None:
    assert stores._greeting_is_torchs()
    meeting = stores.serve("127.0.0.1", port := free_port(), 5)
    other = stores.connect("127.0.0.1", port, 5)
    other.store.set("word", "heard")
    assert meeting.store.get("word") == b"heard"
    assert other.is_open()


def test_a_store_of_a_torch_that_greets_otherwise_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_GREETING", b"")  # which no store answers
    monkeypatch.setattr(stores, "_PROBE_S", 1.0)
    meeting = stores.serve("127.0.0.1", port := free_port(), 5)
    other: Any = stores.connect("127.0.0.1", port, 1).store
    assert other.set("word", "heard") is None
    assert meeting.store.get("word") == b"heard"


def test_a_store_listens_on_its_address_alone() -> None:
    port = free_port()
    meeting = stores.serve("127.0.0.1", port, 5)
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert meeting.hosted
