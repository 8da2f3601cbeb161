"""What the watch makes of beats: one sentence that says who stopped where, and who waits for it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from lockstep import bounded
from lockstep.beats import Beat, Beats, Seen
from lockstep.failures import Failure
from lockstep.pulse import Pulse
from lockstep.watch import Watch, explain

from ..command import until

NODES = ("a", "a", "b", "b")


def _seen(*told: tuple[int, str, int, str, float, float]) -> dict[int, Seen]:
    """(count, phase, step, place, idle_s, silent_s) of each rank."""
    return {
        rank: Seen(Beat(1, count, step, phase, place, idle_s), silent_s)
        for rank, (count, phase, step, place, idle_s, silent_s) in enumerate(told)
    }


SLOW = "give more --stall-timeout where it was only slow"
WAITS = (40, "backward", 512, "engine.py:50", 41.0, 0.3)


@pytest.mark.parametrize(
    ("seen", "nodes", "words"),
    [
        (
            _seen(WAITS, WAITS, WAITS, (38, "data", 512, "folder.py:88", 41.2, 0.3)),
            NODES,
            ["Rank 3 (node b) stopped 41 s ago", "folder.py:88 (step 512)", "ranks 0–2 wait in all-reduce", SLOW],
        ),
        (
            _seen(WAITS, (40, "backward", 512, "", 0.2, 41.0)),
            ("a", "a"),
            ["Rank 1 was stopped, died or was cut off 41 s ago", "backward (step 512)", "rank 0 waits in all-reduce"],
        ),
        (
            _seen((7, "save", 3, "write.py:9", 60.0, 0.1), (9, "barrier", 3, "", 59.0, 0.0), (7, "save", 3, "", 5, 0)),
            ("a", "b", "c"),
            ["Ranks 0, 2 (nodes a, c) stopped 60 s ago", "write.py:9 (step 3)", "rank 1 waits in barrier at step 3"],
        ),
        (
            _seen((7, "all-reduce", 3, "", 60.0, 0.1), (7, "all-reduce", 3, "", 59.0, 0.0)),
            ("a", "a"),
            ["Ranks 0–1 stopped 60 s ago in all-reduce (step 3); " + SLOW],
        ),
        (
            _seen((7, "all-reduce", 3, "", 60.0, 0.1), (2, "", 0, "", 59.0, 0.0)),
            ("a", "a"),
            ["Rank 1 stopped 59 s ago in its own code (step 0)", "rank 0 waits in all-reduce at step 3"],
        ),
    ],
)
def test_the_sentence_names_who_is_waited_for(seen: dict[int, Seen], nodes: Sequence[str], words: list[str]) -> None:
    sentence = explain(seen, nodes, 20.0)
    assert [each for each in words if each not in sentence] == [], sentence


def _watch(pulse: Pulse, store: Store, rank: int, stall_timeout_s: float, **options: Any) -> Watch:
    at: dict[str, Any] = {"nodes": ["a", "b"], "server": None, "beat_s": 0.05}
    return Watch(pulse, store.clone, rank=rank, stall_timeout_s=stall_timeout_s, **at | options)


def _watches(
    store: Store, pulses: list[Pulse], told: list[Failure], stall_timeout_s: float, **options: Any
) -> list[Watch]:
    options["ends"] = lambda _, failure: told.append(failure)
    return [_watch(pulse, store, rank, stall_timeout_s, **options) for rank, pulse in enumerate(pulses)]


def test_ranks_that_move_are_left_alone_and_one_that_stops_is_told_by_all(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    pulses, told = [Pulse(), Pulse()], list[Failure]()
    stall_s = 1.0
    watches = _watches(store, pulses, told, stall_s)
    for step in range(15):  # longer than the limit in all
        for pulse in pulses:
            pulse.step = step
            pulse.enter("forward")
        time.sleep(0.1)
    assert told == []
    pulses[0].enter("backward")  # and waits there; rank 1 stays in its forward pass
    until(lambda: len(told) == 2, 20 * stall_s)
    for watch in watches:
        watch.close()
    assert len(told) == 2
    assert told[0].sentence == told[1].sentence
    for failure in told:
        assert failure.sentence.startswith("Rank 1 (node b) stopped ")
        assert failure.sentence.endswith(f"rank 0 waits in all-reduce at step 14; {SLOW}")
        assert threading.current_thread().name in failure.trace
        assert "test_watch.py" in failure.trace


def test_who_reports_nothing_or_has_given_way_is_not_judged(tmp_path: Path) -> None:
    quiet, told = Pulse(), list[Failure]()
    watches = _watches(FileStore(str(tmp_path / "quiet"), 2), [quiet, Pulse()], told, 0.2)
    with quiet.during("all-reduce"):  # a collective, between two of which a loop of one's own may take long
        pass
    gives_way = _watches(FileStore(str(tmp_path / "gives way"), 2), [_waiting(), Pulse()], told, 0.2)
    for watch in gives_way:
        watch.give_way()
    time.sleep(0.8)
    for watch in (*watches, *gives_way):
        watch.close()
    assert told == []
    assert not any(thread.name.startswith("watch-") for thread in threading.enumerate())


def test_a_rank_that_has_died_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.watch._DEAD_S", 0.3)
    store, told = FileStore(str(tmp_path / "store"), 2), list[Failure]()
    dead: dict[int, str] = {}
    watches = _watches(store, [_waiting(), Pulse()], told, 3600.0, dead=lambda: dead)
    time.sleep(1.0)
    assert told == []
    dead[1] = "process 7 on b"
    until(lambda: bool(told), 20)
    for watch in watches:
        watch.close()
    assert re.fullmatch(
        r"Rank 1 \(process 7 on b\) died, last heard of in its own code at \w+\.py:\d+ \(step 0\): its own "
        "message, if it could leave one, says why",
        told[0].sentence,
    )


def _waiting() -> Pulse:
    pulse = Pulse()
    pulse.enter("backward")
    return pulse


def test_a_sentence_ends_all_at_once_and_the_server_last() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    ends: dict[int, tuple[str, float]] = {}

    def end(rank: int, watch: Watch, failure: Failure) -> None:
        watch.let_others_hear()
        ends[rank] = (failure.sentence, time.monotonic())

    # Rank 1 would wait an hour by itself: it hears of it from rank 0.
    watches = [
        _watch(_waiting(), store, rank, stall_s, server=0, ends=partial(end, rank))
        for rank, stall_s in enumerate((0.5, 3600.0))
    ]
    until(lambda: len(ends) == 2, 20)
    for watch in watches:
        watch.close()
    assert ends[0][0] == ends[1][0] != ""
    assert ends[1][1] <= ends[0][1]


_SERVER = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
print(store.port, flush=True)
time.sleep(600)
"""


def _beat(number: int) -> Beat:
    return Beat(number, 1, 0, "forward")


def test_a_store_that_stops_for_a_while_silences_its_server_alone_and_for_that_while() -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())

        def opens() -> Store:
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))

        # Rank 0 is the one that serves, as far as the others know.
        ranks = [Beats(opens, _beat, rank=rank, size=3, server=0, beat_s=0.1) for rank in range(3)]
        for beats in ranks:
            beats.exchange(urgent=True)
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(bounded.Late):
            bounded.within(1.0, lambda: ranks[2].exchange(urgent=True), "asks")
        seen = ranks[2].seen()
        assert seen[0].silent_s > 0.9
        assert seen[1].silent_s < 0.5
        server.send_signal(signal.SIGCONT)
        for beats in ranks * 2:
            bounded.within(20.0, partial(beats.exchange, urgent=True), "asks")
        assert all(each.silent_s < 0.5 for beats in ranks for each in beats.seen().values())
        assert ranks[1].seen()[2].beat.number == 4
    finally:
        server.kill()
        server.communicate()


def test_after_an_answer_that_did_not_come_the_store_is_asked_anew() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    opened: list[Store] = []

    def opens() -> Store:
        opened.append(client := store.clone())
        client.set_timeout(timedelta(seconds=1))
        return client

    first, second = (Beats(opens, _beat, rank=rank, size=2, server=None, beat_s=0.1) for rank in range(2))
    first.exchange(urgent=True)
    store.delete_key("beat/1")
    first.exchange(urgent=True)  # waits for it in vain
    assert len(opened) == 2
    second.exchange(urgent=True)
    first.exchange(urgent=True)
    assert len(opened) == 3
    assert first.seen()[1].beat.number == 2


def test_who_says_nothing_from_the_start_is_waited_for_no_longer_than_others_and_is_silent() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    first, second = (Beats(store.clone, _beat, rank=rank, size=3, server=0, beat_s=0.1) for rank in range(2))
    for _ in range(3):
        time.sleep(0.2)
        second.exchange(urgent=True)
        bounded.within(5.0, partial(first.exchange, urgent=True), "asks")
    seen = first.seen()
    assert seen[2].silent_s > 0.5
    assert seen[1].silent_s < 0.3
    assert explain(seen, ["a"] * 3, 0.4).startswith(
        "Rank 2 was stopped, died or was cut off 1 s ago, last heard of in "
    )


def test_a_rank_whose_beats_no_longer_rise_is_silent(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    first, second = (Beats(lambda: store, _beat, rank=rank, size=2, server=None, beat_s=0.1) for rank in range(2))
    second.exchange(urgent=True)  # its last word
    for _ in range(3):
        first.exchange(urgent=True)
        time.sleep(0.2)
    first.exchange(urgent=True)
    assert first.seen()[1].silent_s > 0.5


def test_among_many_ranks_that_are_read_now_and_then_the_server_is_not_silent(tmp_path: Path) -> None:
    store, size = FileStore(str(tmp_path / "store"), 64), 64
    ranks = [Beats(lambda: store, _beat, rank=rank, size=size, server=0, beat_s=0.1) for rank in range(size)]
    for beats in ranks[:2] * 8:
        beats.exchange(urgent=False)
        time.sleep(0.1)
        seen = ranks[1].seen()
        assert 0 not in seen or seen[0].silent_s < 0.2  # three beats are silence (see launchers/guard.py)
    assert 0 in seen


def test_what_makes_no_sense_in_the_store_is_passed_over(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    first, second = (Beats(lambda: store, _beat, rank=rank, size=2, server=None, beat_s=0.1) for rank in range(2))
    for odd in ("no beat", "[1]", '{"number": 1}'):
        store.set("beat/1", odd)
        assert first.exchange(urgent=True) == ""
        assert first.seen()[1].beat.number == 0
    second.exchange(urgent=True)
    first.exchange(urgent=True)
    assert first.seen()[1].beat.number == 2


def test_time_for_which_this_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Failure] = []
    watches = _watches(FileStore(str(tmp_path / "store"), 2), [_waiting(), _waiting()], told, 10.0)
    time.sleep(0.2)
    real, ahead_s = time.monotonic, 3600.0
    monkeypatch.setattr("lockstep.watch.time.monotonic", lambda: real() + ahead_s)  # as if asleep for an hour
    time.sleep(0.5)
    assert told == []
    assert all(watch._idle_s < 7 for watch in watches)
    for watch in watches:
        watch.close()
