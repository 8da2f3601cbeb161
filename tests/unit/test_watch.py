"""What the watch makes of beats: one sentence that says who stopped where, and who waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, TCPStore

from lockstep.monitor import bounded, watchdog
from lockstep.monitor.failures import Failure
from lockstep.monitor.heartbeat import Beat, Beats, Seen
from lockstep.monitor.keys import Keys
from lockstep.monitor.progress import Pulse
from lockstep.monitor.watchdog import Watch, explain

from ..command import until

SLOW = "give more --stall-timeout where it was only slow"


def test_the_sentence_names_who_is_waited_for() -> None:
    def told(nodes: str, *beats: tuple[int, int, str, str, float]) -> str:
        return explain({rank: Seen(Beat(1, *beat), 0.3) for rank, beat in enumerate(beats)}, list(nodes), 20.0)

    waits = (40, 512, "backward", "engine.py:50", 41.0)
    said = told("aabb", waits, waits, waits, (38, 512, "data", "folder.py:88", 41.2))
    assert said.startswith("Rank 3 (node b) stopped 41 s ago")
    assert "folder.py:88 (step 512)" in said
    assert "ranks 0–2 wait in all-reduce" in said
    assert said.endswith(SLOW)
    said = told("abc", (7, 3, "save", "write.py:9", 60.0), (9, 3, "barrier", "", 59.0), (7, 3, "save", "", 5.0))
    assert said.startswith("Ranks 0, 2 (nodes a, c) stopped 60 s ago")
    assert "write.py:9 (step 3)" in said
    assert "rank 1 waits in barrier at step 3" in said


def _store() -> Keys:
    wait = timedelta(seconds=30)
    return Keys(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait), "watch")


def _file(folder: Path, size: int = 2) -> Keys:
    return Keys(FileStore(str(folder / "store"), size), "watch")


@contextmanager
def _watched(store: Keys, *pulses: Pulse, stalls_s: tuple[float, ...], **options: Any) -> Iterator[list[Failure]]:
    """Watch over two ranks; yield what they end with, in the order of their ends."""
    told: list[Failure] = []

    def ends(watch: Watch, failure: Failure) -> None:
        if failure.rank == 0:  # which serves the store, where a rank does
            watch.let_others_hear()
        told.append(failure)
        watch.let_others_hear()

    options = {"nodes": ["a", "b"], "server": None, "beat_s": 0.05, "ends": ends} | options
    watches = [
        Watch(pulse, store.clone, rank=rank, stall_timeout_s=stall_s, **options)
        for rank, (pulse, stall_s) in enumerate(zip(pulses, stalls_s, strict=True))
    ]
    try:
        yield told
    finally:
        for watchdog in watches:
            watchdog.close()


def test_ranks_that_move_are_left_alone_and_one_that_stops_is_told_by_all() -> None:
    pulses = [Pulse(), Pulse()]
    # Rank 1 would wait an hour by itself: it hears of it from rank 0, which serves the store.
    with _watched(_store(), *pulses, stalls_s=(1.0, 3600.0), server=0) as told:
        for step in range(15):  # longer than the limit in all
            for pulse in pulses:
                pulse.step = step
                pulse.enter("forward")
            time.sleep(0.1)
        assert told == []
        pulses[0].enter("backward")  # and waits there; rank 1 stays in its forward pass
        until(lambda: len(told) == 2, 20)
    assert [failure.rank for failure in told] == [1, 0]
    for failure in told:
        assert failure.sentence == told[0].sentence
        assert failure.sentence.startswith("Rank 1 (node b) stopped ")
        assert failure.sentence.endswith(f"rank 0 waits in all-reduce at step 14; {SLOW}")
        assert "test_watch.py" in failure.trace


def test_ranks_that_wait_for_each_other_are_told_long_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_CROSSED_S", 0.5)
    monkeypatch.setattr(Watch, "_place", lambda self: "train.py:3")  # both ranks are this process, which moves on
    pulses = [Pulse(), Pulse()]
    with _watched(_store(), *pulses, stalls_s=(3600.0, 3600.0)) as told:
        for pulse in pulses:
            pulse.enter("all-reduce")
        time.sleep(1.5)
        assert told == [], "one that takes long is no hang"
        pulses[1].step = 4
        pulses[1].enter("all-gather")
        until(lambda: len(told) == 2, 20)
    assert told[0].sentence.startswith("Rank 0 waits in all-reduce at train.py:3 (step 0) and rank 1 in all-gather")
    assert "each for the other: every rank has to call the same collectives" in told[0].sentence


def test_who_reports_nothing_is_not_judged(tmp_path: Path) -> None:
    quiet = Pulse()
    with _watched(_file(tmp_path), quiet, Pulse(), stalls_s=(0.2, 0.2)) as told:
        with quiet.during("all-reduce"):  # a collective, between two of which a loop of one's own may take long
            pass
        time.sleep(0.8)
    assert told == []
    assert not any(thread.name.startswith("watch-") for thread in threading.enumerate())


def _build(kind: str) -> Any:
    """Return a function that stands for a second where torch compiles, or where a user's own collective waits."""
    name = {"compilation": "torch._dynamo.convert_frame", "a collective": "torch.distributed.distributed_c10d"}[kind]
    space: dict[str, Any] = {"__name__": name, "sleep": time.sleep}
    exec("def stand(): sleep(1.2)", space)
    return space["stand"]


@pytest.mark.parametrize("work", ["setup", "compilation"])
def test_while_one_rank_prepares_or_compiles_nobody_is_judged(work: str) -> None:
    first, second = Pulse(), Pulse()
    with _watched(_store(), first, second, stalls_s=(3600.0, 0.4)) as told:
        for phase in ("setup", "data", "all-gather"):  # where it waits
            second.enter(phase)
        first.enter("setup" if work == "setup" else "forward")
        time.sleep(1.2) if work == "setup" else _build(work)()
        assert told == []
        first.enter("data")  # at once it has as long as any phase
        time.sleep(0.2)
        assert told == []
        until(lambda: len(told) == 2, 20)
    assert told[0].sentence.startswith("Rank 0 (node a) stopped ")


def test_a_rank_that_is_lost_while_another_one_prepares_is_told() -> None:
    pulses = [Pulse(), Pulse(), Pulse()]
    with _watched(_store(), *pulses[:2], stalls_s=(0.5, 0.5), nodes=["a", "b", "c"]) as told:
        pulses[0].enter("all-gather")
        pulses[1].enter("setup")
        until(lambda: len(told) == 2, 5)  # the third has never sent a beat
    assert told[0].sentence.startswith("Rank 2 (node c) was stopped, died or was cut off ")
    assert told[0].sentence.endswith("; rank 0 waits in all-gather at step 0")


@pytest.mark.parametrize(
    ("phase", "is_judged"), [("backward", False), ("setup", False), ("eval", False), ("data", True)]
)
def test_a_rank_alone_is_judged_only_where_it_waits(phase: str, is_judged: bool) -> None:
    pulse = Pulse()
    with _watched(_store(), pulse, stalls_s=(0.2,), nodes=["a"]) as told:
        pulse.enter(phase)
        time.sleep(0.8)
    assert len(told) == is_judged


def test_a_collective_of_the_users_own_is_waited_in_no_longer_than_others() -> None:
    first, second = Pulse(), Pulse()  # both in code of the user's, which reports nothing
    with _watched(_store(), first, second, stalls_s=(0.4, 3600.0)) as told:
        _build("a collective")()
    assert told[0].sentence.startswith("Ranks 0–1 ")  # which are one process here


def test_time_for_which_this_process_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulses = [Pulse(), Pulse()]
    for pulse in pulses:
        pulse.enter("backward")
    with _watched(_file(tmp_path), *pulses, stalls_s=(10.0, 10.0)) as told:
        time.sleep(0.2)
        real = time.monotonic
        monkeypatch.setattr(
            "lockstep.monitor.watchdog.time.monotonic", lambda: real() + 3600.0
        )  # as if asleep for an hour
        time.sleep(0.5)
        assert told == []


def _beats(opens: Any, rank: int, size: int) -> Beats:
    return Beats(opens, lambda number: Beat(number, 1, 0, "forward"), rank=rank, size=size, server=0, beat_s=0.1)


def test_a_rank_whose_beats_no_longer_rise_is_silent() -> None:
    store = _store()
    first, second, _ = (_beats(store.clone, rank, 4) for rank in range(3))  # the third beats once
    for _ in range(3):
        time.sleep(0.2)
        second.exchange(urgent=True)
        bounded.within(5.0, partial(first.exchange, urgent=True), "asks")
    silent_s = {rank: each.silent_s for rank, each in first.seen().items()}
    assert silent_s[1] < 0.3
    assert min(silent_s[2], silent_s[3]) > 0.3


def test_among_many_ranks_that_are_read_now_and_then_the_server_is_not_silent(tmp_path: Path) -> None:
    store, size = _file(tmp_path, 64), 64
    ranks = [_beats(lambda: store, rank, size) for rank in range(size)]
    for beats in ranks[:2] * 8:
        beats.exchange(urgent=False)
        time.sleep(0.1)
        seen = ranks[1].seen()
        assert 0 not in seen or seen[0].silent_s < 0.2  # three beats are silence (see launchers/guard.py)
    assert 0 in seen


_HANGS = """
import sys, time, types
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from lockstep import __main__ as command
from lockstep.monitor import bounded

class Slow:  # what is left of the interpreter takes long to end, so that the call comes back before it has
    def __del__(self, sleep=time.sleep):
        sleep(3)

sys.modules["held"] = types.ModuleType("held")
sys.modules["held"].slow = Slow()

def fails():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    try:
        bounded.within(0.2, lambda: store.get("what never comes"), "hangs")
    except bounded.Late:
        return 1

command.run = fails
command.main()
"""


def test_a_store_that_answers_while_the_process_ends_does_not_change_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr  # and not −6, with which C++ would abort it
