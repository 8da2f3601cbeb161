"""What the watchdog makes of heartbeats: one sentence that says who stopped where, and who waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, TCPStore

from lockstep.errors import ranks_named
from lockstep.monitor import bounded, watchdog
from lockstep.monitor.failures import Failure
from lockstep.monitor.heartbeat import Beat, Heartbeats
from lockstep.monitor.keys import Keys, Unanswered
from lockstep.monitor.progress import Progress
from lockstep.monitor.watchdog import Watchdog, explain

from ..command import until

SLOW = "raise --stall-timeout if it was only slow"


def test_the_sentence_names_who_is_waited_for() -> None:
    def told(nodes: str, *beats: tuple[int, int, str, str, float]) -> str:
        return explain({rank: Beat(*beat, silent_s=0.3) for rank, beat in enumerate(beats)}, list(nodes), 20.0)

    waits = (40, 512, "backward", "trainer.py:50", 41.0)
    said = told("aabb", waits, waits, waits, (38, 512, "data", "folder.py:88", 41.2))
    assert said.startswith(
        "Rank 3 (node b) stopped 41 s ago in data loading at folder.py:88 (step 512); ranks 0–2 wait"
    )
    assert said.endswith(f"wait in all-reduce at step 512; {SLOW}")
    said = told("abc", (7, 3, "save", "write.py:9", 60.0), (9, 3, "barrier", "", 59.0), (7, 3, "save", "", 5.0))
    assert said.startswith("Ranks 0, 2 (nodes a, c) stopped 60 s ago in saving at write.py:9 (step 3)")
    assert "rank 1 waits in barrier at step 3" in said


def test_a_few_ranks_are_named_and_many_are_a_span() -> None:
    assert ranks_named([0, 2]) == "rank 0 and rank 2"
    assert ranks_named(range(256)) == "ranks 0–255"


def _store() -> Keys:
    wait = timedelta(seconds=30)
    return Keys(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait), "watch")


@contextmanager
def _watched(store: Keys, *progresses: Progress, stalls_s: tuple[float, ...], **options: Any) -> Iterator[list[Any]]:
    """Watchdog over ranks; yield their watches, to which what they end with is added in the order of their ends."""
    told: list[Any] = []

    def ends(watchdog: Watchdog, failure: Failure) -> None:
        told.append(failure)
        watchdog.wait_for_readers()

    options = {"nodes": ["a", "b"], "server": None, "beat_s": 0.05, "ends": ends} | options
    watches = [
        Watchdog(progress, store.clone, rank=rank, stall_timeout_s=stall_s, **options)
        for rank, (progress, stall_s) in enumerate(zip(progresses, stalls_s, strict=True))
    ]
    told += watches
    try:
        yield told
    finally:
        for watchdog in watches:
            watchdog.close()


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what another rank says end this one at once."""
    monkeypatch.setattr(watchdog, "_UNWINDS_S", 0.1)


def test_ranks_that_move_are_left_alone_and_one_that_stops_is_told_by_all() -> None:
    progresses = [Progress(), Progress()]
    # Rank 1 would wait an hour by itself: it hears of it from rank 0, which serves the store.
    with _watched(_store(), *progresses, stalls_s=(1.0, 3600.0), server=0) as told:
        for step in range(15):  # longer than the limit in all
            for progress in progresses:
                progress.step = step
                progress.enter("forward")
            time.sleep(0.1)
        assert len(told) == 2
        progresses[0].enter("backward")  # and waits there; rank 1 stays in its forward pass
        until(lambda: len(told) == 4, 20)
    first, second = sorted(told[2:], key=lambda each: each.rank)  # the second may have heard of it at once
    assert (first.rank, first.is_echo, second.rank, second.is_echo) == (0, False, 1, True)
    for failure in (first, second):
        assert failure.sentence == first.sentence
        assert failure.sentence.startswith("Rank 1 (node b) stopped ")
        assert failure.sentence.endswith(f"rank 0 waits in all-reduce at step 14; {SLOW}")
        assert "test_watch.py" in failure.trace


def test_a_rank_that_fails_tells_the_others_why() -> None:
    with _watched(_store(), Progress(), Progress(), stalls_s=(3600.0, 3600.0)) as told:
        told[0].give_way()
        told[0].publish("Rank 0 failed: labels reach 10")
        until(lambda: len(told) == 3, 20)
        assert (told[2].rank, told[2].sentence, told[2].is_echo) == (1, "Rank 0 failed: labels reach 10", True)
        assert told[0].lost() == "Rank 0 failed: labels reach 10"


def test_a_rank_of_which_nothing_is_heard_any_more_is_the_one_that_was_lost() -> None:
    with _watched(_store(), Progress(), Progress(), stalls_s=(3600.0, 3600.0)) as told:
        time.sleep(0.3)
        told[1].close()
        told[0].give_way()
        assert told[0].lost().startswith("Rank 1 (node b) was stopped, died or was cut off ")


def test_who_reports_nothing_is_not_judged() -> None:
    quiet = Progress()
    with _watched(_store(), quiet, Progress(), stalls_s=(0.2, 0.2)) as told:
        with quiet.during("all-reduce"):  # a collective, between two of which a loop of one's own may take long
            pass
        time.sleep(0.8)
    assert len(told) == 2


def test_a_rank_whose_device_waits_for_another_one_is_judged() -> None:
    waits = SimpleNamespace(query=lambda: False, record=lambda: None)  # as torch.Event, behind an exchange under way
    first, second = Progress(), Progress()
    first.event = waits
    with _watched(_store(), first, second, stalls_s=(0.8, 3600.0)) as told:
        with first.during("all-reduce"):  # the host leaves it at once, and waits in code of its own, as in .item()
            pass
        until(lambda: len(told) == 4, 20)
    sentence = min(told[2:], key=lambda failure: failure.rank).sentence
    assert sentence.startswith("Rank 1 (node b) stopped ")
    assert "; rank 0 waits in all-reduce at step 0" in sentence


def test_code_of_its_own_beside_a_dead_rank_is_judged() -> None:
    with _watched(_store(), Progress(), stalls_s=(0.8,)) as told:  # the second one has never sent a beat
        until(lambda: len(told) == 2, 20)
    assert told[1].sentence.startswith("Rank 1 (node b) was stopped, died or was cut off ")


def test_the_last_event_follows_each_exchange() -> None:
    progress, recorded = Progress(), list[str]()
    progress.event = SimpleNamespace(record=lambda: recorded.append(progress.phase), query=lambda: len(recorded) > 1)
    for _ in range(2):
        with progress.during("all-reduce"):
            assert progress.device_waits() == (len(recorded) < 2)
    assert recorded == ["", ""]
    assert not progress.device_waits()


def _build(kind: str) -> Any:
    """Return a function that stands for a second where torch compiles, or a collective waits."""
    name = {
        "compilation": "torch._dynamo.convert_frame",
        "a collective": "torch.distributed.distributed_c10d",
    }[kind]
    space: dict[str, Any] = {"__name__": name, "sleep": time.sleep}
    exec("def stand(): sleep(1.2)", space)
    return space["stand"]


@pytest.mark.parametrize("work", ["setup", "compilation"])
def test_while_one_rank_prepares_or_compiles_nobody_is_judged(work: str) -> None:
    first, second = Progress(), Progress()
    with _watched(_store(), first, second, stalls_s=(3600.0, 0.4)) as told:
        for phase in ("setup", "data", "all-gather"):  # where it waits
            second.enter(phase)
        first.enter("setup" if work == "setup" else "forward")
        time.sleep(1.2) if work == "setup" else _build(work)()
        assert len(told) == 2
        first.enter("data")  # at once it has as long as any phase
        time.sleep(0.2)
        assert len(told) == 2
        until(lambda: len(told) == 4, 20)
    assert told[2].sentence.startswith("Rank 0 (node a) stopped ")


def test_a_rank_that_is_lost_while_another_one_prepares_is_told() -> None:
    progresses = [Progress(), Progress()]
    with _watched(_store(), *progresses, stalls_s=(0.5, 0.5), nodes=["a", "b", "c"]) as told:
        progresses[0].enter("all-gather")
        progresses[1].enter("setup")
        until(lambda: len(told) == 4, 5)  # the third has never sent a beat
    assert told[2].sentence.startswith("Rank 2 (node c) was stopped, died or was cut off ")
    assert told[2].sentence.endswith("; rank 0 waits in all-gather at step 0")


@pytest.mark.parametrize(
    ("phase", "is_judged"), [("backward", False), ("setup", False), ("eval", False), ("data", True)]
)
def test_a_rank_alone_is_judged_only_where_it_waits(phase: str, is_judged: bool) -> None:
    progress = Progress()
    with _watched(_store(), progress, stalls_s=(0.2,), nodes=["a"]) as told:
        progress.enter(phase)
        time.sleep(0.8)
        bounded.within(10, told[0].give_way, "the user's own error")  # where nothing ends the process, it goes on
    assert len(told) == 1 + is_judged


def test_a_collective_of_the_users_own_is_waited_in_no_longer_than_others() -> None:
    with _watched(
        _store(), Progress(), Progress(), stalls_s=(0.4, 3600.0)
    ) as told:  # both in code that reports nothing
        _build("a collective")()
    assert told[2].sentence.startswith("Ranks 0–1 ")  # which are one process here


def test_time_for_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    progresses = [Progress(), Progress()]
    for progress in progresses:
        progress.enter("backward")
    with _watched(_store(), *progresses, stalls_s=(10.0, 10.0)) as told:
        time.sleep(0.2)
        real = time.monotonic
        # As if asleep for an hour.
        monkeypatch.setattr("lockstep.monitor.watchdog.time.monotonic", lambda: real() + 3600.0)
        time.sleep(0.5)
        assert len(told) == 2


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_rank_whose_beats_no_longer_rise_is_silent(kind: str, tmp_path: Path) -> None:
    store = _store() if kind == "tcp" else Keys(FileStore(str(tmp_path / "store"), -1), "watch")
    own = Beat(1, 0, "forward")
    first, second, third = (Heartbeats(store.clone, rank=rank, size=4, server=None) for rank in range(3))
    third.exchange(own, urgent=True)  # once
    for _ in range(4):
        time.sleep(0.2)
        for each in (second, first):
            each.exchange(own, urgent=True)
    silent_s = {rank: beat.silent_s for rank, beat in first.seen(own).items()}
    assert silent_s[1] < 0.3
    assert min(silent_s[2], silent_s[3]) > 0.3


def test_among_many_ranks_that_are_read_when_it_is_urgent_nobody_is_silent_before(tmp_path: Path) -> None:
    store, own = Keys(FileStore(str(tmp_path / "store"), -1), "watch"), Beat(1, 0, "forward")
    first, second = (Heartbeats(store.clone, rank=rank, size=64, server=0) for rank in range(2))
    for _ in range(6):
        for each in (first, second):
            each.exchange(own, urgent=False)
        time.sleep(0.1)
        assert max(beat.silent_s for beat in second.seen(own).values()) < 0.3  # three beats are silence
    second.exchange(own, urgent=True)
    silent_s = {rank: beat.silent_s for rank, beat in second.seen(own).items()}
    assert silent_s[0] < 0.3 < silent_s[2]


def test_a_store_that_was_silent_for_a_while_is_connected_to_again() -> None:
    store, pauses_s = _store().store, [1.0, 1.0, 0.0]

    def slow(_: Any = None) -> Any:
        time.sleep(pauses_s.pop(0))
        return store.clone()

    keys = Keys(SimpleNamespace(check=slow, clone=slow), "watch", limit_s=0.2)  # type: ignore[arg-type]
    for request in (lambda: keys.check(["beat/0"]), keys.clone):  # as of a rank's heartbeats
        with pytest.raises(Unanswered):
            request()
    keys.clone().write("beat/0", "lives")


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
