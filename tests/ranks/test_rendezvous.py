"""The roll call and the stores that it is held over: every rank hears what is wrong, in bounded time."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.errors import AbsentError, RequestError
from lockstep.launchers import nodes, rollcall, stores
from lockstep.launchers.rollcall import Member
from lockstep.monitor.keys import Keys

from ..ports import free_port
from ..starting import member_of, openers_at

HOST = "127.0.0.1"


def _heard(
    openers: Sequence[Callable[[], stores.Rendezvous]], members: Sequence[Member], timeout_s: float = 20
) -> list[str]:
    """Hold a roll call among threads; return what each heard."""
    held: list[stores.Rendezvous] = []  # as rank 0 serves the store until the others have left

    def take(endpoint: Callable[[], stores.Rendezvous], member: Member) -> str:
        try:
            held.append(rendezvous := endpoint())
            return f"{len(rollcall.take(rendezvous, member, timeout_s))} ranks"
        except RequestError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as threads:
        told = list(threads.map(take, openers, members))
    for rendezvous in held:
        if rendezvous.file is not None:
            rendezvous.file.unlink()
    return told


@pytest.mark.parametrize("scheme", ["tcp", pytest.param("file", marks=pytest.mark.long)])
def test_every_rank_hears_what_is_wrong(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "_HEAR_S", 0.2)  # the other threads wait for the store already

    def hear(*members: Member, timeout_s: float = 20) -> list[str]:
        return _heard(openers_at(scheme, tmp_path, [member.rank for member in members]), members, timeout_s)

    twice = hear(member_of(0, 3), member_of(1, 3, host="ann"), member_of(1, 3, host="bob"))
    sizes = hear(member_of(0, 2), member_of(1, 3))
    missing = hear(member_of(0, 4), member_of(2, 4), timeout_s=1)
    skewed = hear(member_of(0, 2), member_of(1, 2, version="0.0.1"))
    kinds = hear(member_of(0, 2), member_of(1, 2, accelerator="cuda", gpus=("g",)))
    shared = hear(*(member_of(rank, 2, accelerator="cuda", gpus=("GPU-1",)) for rank in range(2)))
    few = hear(*(member_of(rank, 3, accelerator="cuda", gpus=("GPU-1", "GPU-2")) for rank in range(3)))
    for told, words in (
        (twice, "rank 1 is claimed twice, by process .* on (ann|bob) and by process .* on (ann|bob)"),
        (sizes, r"different world sizes, 2 .rank 0, process .* and 3 .rank 1, process .* the same --world-size"),
        (missing, "2 of 4 ranks came within --timeout 1 s; missing: ranks 1, 3"),
        (skewed, r"different versions of lockstep, .* and 0.0.1 .rank 1, process .* install one on every node"),
        (kinds, "different accelerators"),
        (shared, "Ranks 0 and 1 on"),
        (few, "Rank 2 .* is number 2 of its node, which shows 2 GPUs; start at most"),
    ):
        assert [sentence for sentence in told if not re.search(words, sentence)] == []
    assert (
        hear(member_of(0, 3), member_of(1, 3), member_of(2, 3)) == ["3 ranks"] * 3
    )  # at the same file as all the above


class _Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += name != "set_timeout"
        return getattr(self.store, name)


def test_a_rank_asks_the_store_a_handful_of_times() -> None:
    size, stands = 24, list[_Counted]()  # threads of one process, which share its lock
    openers = openers_at("tcp", Path(), range(size))

    def counted(endpoint: Callable[[], stores.Rendezvous], rank: int) -> stores.Rendezvous:
        rendezvous = endpoint()
        if rank:
            stands.append(_Counted(rendezvous.keys.store))
            rendezvous = stores.Rendezvous(Keys(stands[-1], stores.PREFIX), "here")  # type: ignore[arg-type]
        return rendezvous

    begun_s = time.monotonic()
    told = _heard(
        [functools.partial(counted, *each) for each in zip(openers, range(size), strict=True)],
        [member_of(rank, size) for rank in range(size)],
    )
    assert told == [f"{size} ranks"] * size
    assert time.monotonic() - begun_s < 20
    assert max(sum(each.asked.values()) for each in stands) <= 5, [each.asked for each in stands]


def test_what_lies_at_a_file_of_dead_ranks_does_no_harm_and_one_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.write_text(f'{{"lockstep": "{64 * "0"}", "host": "{HOST}", "port": {free_port()}}}')
    (tmp_path / f".meeting.{os.getpid()}.part").touch()  # of a process with the same number, which was killed
    late, first = openers_at("file", tmp_path, [1, 0])
    assert _heard([late, first], [member_of(1, 2), member_of(0, 2)]) == ["2 ranks"] * 2
    rendezvous = first()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RequestError, match="rank 0 is claimed twice, or another run meets there"):
        first()
    assert rendezvous.keys.read("place")


def test_members_of_an_earlier_start_are_not_taken_for_present_ones() -> None:
    """At a store that an agent keeps, where torchrun's ranks meet at each start."""
    port = free_port()
    agent = stores.serve(HOST, port)

    def take(member: Member, timeout_s: float = 20) -> tuple[Member, ...]:
        rendezvous = stores.connect(HOST, port, 5, job="job", served=True)
        return rollcall.take(rendezvous, member, timeout_s)

    with pytest.raises(AbsentError, match=r"1 of 2 ranks came within .*; missing: rank 0; start every rank"):
        take(member_of(1, 2), 0.5)
    for size in (2, 3, 2):
        members = tuple(member_of(rank, size) for rank in range(size))
        with ThreadPoolExecutor(size) as threads:
            first = threads.submit(take, members[0])
            time.sleep(0.3)  # so that rank 0 reads the places of the earlier start
            others = [*threads.map(take, members[1:])]
            assert [first.result(), *others] == [members] * size
    assert agent.hosted


def _greet(listener: socket.socket) -> None:
    """Say to all that come what no store says."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as peers:
        while True:
            peers.enter_context(listener.accept()[0]).sendall(b"SSH-2.0-OpenSSH\r\n")


@pytest.mark.long
def test_a_place_where_nobody_can_meet_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PROBE_S", 1.0)
    (tmp_path / "notes.txt").write_text("not ours\n")
    with socket.create_server((HOST, 0)) as quiet, socket.create_server((HOST, 0)) as speaking:
        threading.Thread(target=_greet, args=(speaking,), daemon=True).start()
        silent, speaks = (each.getsockname()[1] for each in (quiet, speaking))
        begun_s = time.monotonic()
        for opened, words in (
            (lambda: stores.connect(HOST, free_port(), 1), "nothing answers there within --timeout 1 s"),
            (lambda: stores.connect("no-such-host.invalid", 29500, 1), r"nothing answers there .*\(.*[Nn]ame"),
            (lambda: stores.connect(HOST, silent, 1), "no store of a rank 0 has answered there within"),
            (lambda: stores.connect(HOST, speaks, 1), "no store of a rank 0 has answered there within"),
            (lambda: stores.serve(HOST, speaks), "another process uses the port, such as a second rank 0"),
            (lambda: stores.serve("192.0.2.7", 29500), "not one of this machine"),
            (lambda: stores.at_file(tmp_path / "no" / "folder", is_main=True, timeout_s=1), "cannot be opened"),
            (lambda: stores.at_file(tmp_path / "notes.txt", is_main=True, timeout_s=1), "no rendezvous file of ranks"),
            (lambda: stores.at_file(tmp_path / "place", is_main=False, timeout_s=1), "rank 0 did not come there"),
        ):
            with pytest.raises(RequestError, match=words):
                opened()
        assert time.monotonic() - begun_s < 30
        speaking.shutdown(socket.SHUT_RDWR)
    assert (tmp_path / "notes.txt").read_text() == "not ours\n"


def test_a_store_listens_on_its_address_alone() -> None:
    port = free_port()
    rendezvous = stores.serve(HOST, port)
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == [HOST]
    stores.connect(HOST, port, 5).keys.write("word", "heard")
    assert rendezvous.keys.read("word") == "heard"


def test_an_agent_asks_again_whether_the_address_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name appears after the pod, and may mean the address of its predecessor first."""
    serve, asked = stores.serve, list[str]()

    def serve_late(host: str, port: int) -> stores.Rendezvous:
        asked.append(host)
        if len(asked) < 3:
            raise RequestError("the name is of another address")
        return serve(host, port)

    monkeypatch.setattr(stores, "serve", serve_late)
    monkeypatch.setattr(nodes, "_ASK_AGAIN_S", 0.1)
    assert nodes._open("127.0.0.1", free_port(), 5).hosted
    asked.clear()
    monkeypatch.setattr(nodes, "_ASK_AGAIN_S", 10.0)
    with pytest.raises(AbsentError, match=r"within --timeout 0\.3 s"):
        nodes._open("127.0.0.1", free_port(), 0.3)
