"""Launchers with real processes: who meets, who fails, who is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep import hardware
from lockstep.config import RunConfig
from lockstep.errors import LockstepError, ProofError, RequestError, RunError
from lockstep.launchers import rank, stores
from lockstep.launchers.claims import Claim
from lockstep.launchers.rendezvous import RollCall
from lockstep.launchers.table import launch
from lockstep.options import override
from lockstep.topology import Topology

from ..command import Running, losses, patience_s
from ..ports import free_port
from . import entries

ROOT = Path(__file__).parents[2]
STARTED_S = 60.0  # torch may take long to import on a busy machine


def _config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


def _start(
    entry: str, *, through: Sequence[str] = (), env: Mapping[str, str] | None = None, **values: Any
) -> subprocess.Popen[str]:
    options = json.dumps({"accelerator": "cpu", **values})
    return subprocess.Popen(
        [sys.executable, *through, "-m", "tests.distributed.run_entry", entry, options],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=STARTED_S)
    finally:
        process.kill()
    return process.returncode, out, err


def _until(holds: Callable[[], bool], limit_s: float) -> float:
    """Return the seconds until `holds()`; fail if it does not within the limit."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < limit_s, f"not within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - start


# ---- spawn


@pytest.mark.parametrize("size", [2, 3])
def test_spawned_ranks_form_one_world(size: int) -> None:
    told = launch(entries.total, _config(devices=size, seed=7), {})
    assert told is not None
    assert told["sum"] == [size, sum(range(size))]
    assert [rank[:3] for rank in told["ranks"]] == [[rank, rank, size] for rank in range(size)]
    assert len({os.getpid(), *(rank[3] for rank in told["ranks"])}) == size + 1
    assert told["threads"] == [max(1, hardware.cpus() // size)] * size
    assert told["interface"] == "lo"
    assert told["seed"] == 7
    assert not any(psutil.pid_exists(rank[3]) for rank in told["ranks"])


@pytest.mark.parametrize(
    ("way", "kind", "words"),
    [
        ("raise", RunError, r"^Rank 1 failed at .*entries\.py:\d+: ValueError: labels reach 10$"),
        ("exit", RunError, r"^Rank 1 failed at .*entries\.py:\d+: it called sys\.exit\(3\)"),
        ("vanish", RunError, r"^Rank 1 exited with code 7 before it was done"),
        ("killed", RunError, r"^Rank 1 was killed by SIGKILL \(out of memory\?\); continue with --resume auto\.$"),
        ("refuse", RequestError, r"^The data set has no image\.$"),
        ("disprove", ProofError, r"^Rank 1 differs in fc\.weight\.$"),
    ],
)
def test_the_first_failing_rank_is_named_and_nobody_is_left(
    way: str, kind: type[LockstepError], words: str, tmp_path: Path
) -> None:
    before = set(psutil.Process().children(recursive=True))
    begin_s = time.time()
    with pytest.raises(kind, match=words) as caught:
        launch(entries.fail, _config(devices=2, data_dir=way, output=tmp_path), {})
    over_s, failed_s = time.time(), float((tmp_path / "failing_since").read_text())
    assert over_s - failed_s < patience_s(failed_s - begin_s)  # the others would wait for a minute
    ranks = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [child for child in ranks if "resource_tracker" not in " ".join(child.cmdline())]
    if way == "raise":
        assert isinstance(caught.value, RunError)
        assert 'raise ValueError("labels reach 10")' in caught.value.trace
        assert "labels reach 10" in (tmp_path / "failures" / "rank_1.txt").read_text()


def test_a_spawned_rank_that_stalls_is_named_and_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RunError, match=r"^Rank 1 did not come to a collective .*; continue with --resume auto\.$"):
        launch(entries.lose, _config(devices=2, data_dir="SIGSTOP", seed=1, stall_timeout=2), {})
    ranks = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [child for child in ranks if "resource_tracker" not in " ".join(child.cmdline())]


def test_ranks_that_are_left_are_not_asked_to_save() -> None:
    code, _, err = _end(_start("busy", devices=2))
    assert (code, err) == (1, "RunError: Rank 1 was killed by SIGKILL (out of memory?); continue with --resume auto.\n")


def _noted(folder: Path, size: int) -> list[psutil.Process]:
    """Return the processes of the ranks, and of their data workers, once all have said that they run."""
    notes = [folder / f"rank_{rank}" for rank in range(size)]
    _until(lambda: all(note.exists() and note.read_text() for note in notes), STARTED_S)
    ranks = [psutil.Process(int(note.read_text())) for note in notes]
    return [process for rank in ranks for process in (rank, *rank.children(recursive=True))]


def _gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_a_stop_reaches_every_rank_and_comes_back_as_one(tmp_path: Path) -> None:
    command = _start("stoppable", devices=2, data_dir=str(tmp_path))
    ranks = _noted(tmp_path, 2)
    assert {os.getsid(rank.pid) for rank in ranks}.isdisjoint({os.getsid(command.pid)})
    command.send_signal(signal.SIGINT)
    code, _, err = _end(command)
    assert (code, err.strip()) == (75, "Stopped: Stopped after step 3; resume with --resume auto.")
    assert _gone(ranks)


def test_one_signal_from_two_senders_is_one_request(tmp_path: Path) -> None:
    """When a terminal is closed, its kernel and its shell both send SIGHUP."""
    run = tmp_path / "run"
    # However late the second is heard here, it comes soon enough; what soon means, tests/unit/test_interrupts.py says.
    patient = (
        "import sys, lockstep.interrupts as it; it._ECHO_S = 600; from lockstep.__main__ import main; sys.exit(main())"
    )
    words = ("--strategy", "ddp", "--devices", "2", "--epochs", "1000", "--output", str(run))
    with Running(
        [sys.executable, "-c", patient, "train", "digits", *words],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        _until(lambda: bool(losses(run)) or command.poll() is not None, STARTED_S)
        ranks = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGHUP)
        time.sleep(0.02)
        command.send_signal(signal.SIGHUP)
        code, _, err = _end(command)
    assert code == 75, err
    assert "and saved" in err
    assert list((run / "checkpoints").iterdir())
    _until(lambda: _gone(ranks), 10)  # among them is multiprocessing's tracker, which outlives its parent a bit


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    command = _start("stubborn", devices=2, data_dir=str(tmp_path))
    processes = _noted(tmp_path, 2)
    assert len(processes) == 4
    command.terminate()
    _until(lambda: all((tmp_path / f"asked_{rank}").exists() for rank in range(2)), STARTED_S)
    time.sleep(1.5)  # for half a second it would be the first one once more
    assert all(process.is_running() for process in processes)
    command.terminate()
    code, _, err = _end(command)
    assert (code, "second signal" in err) == (1, True), err
    _until(lambda: _gone(processes), 5)


def test_no_orphan_outlives_a_killed_parent(tmp_path: Path) -> None:
    command = _start("stubborn", devices=2, data_dir=str(tmp_path))
    processes = _noted(tmp_path, 2)
    command.kill()
    command.communicate()
    _until(lambda: _gone(processes), 30)  # data workers look for their parent every 5 s


@pytest.mark.parametrize("way", ["", "stop", "raise"])
def test_data_workers_leave_nothing_behind(way: str, tmp_path: Path) -> None:
    """Neither a word on stderr nor a file, however the rank ends."""
    left = tmp_path / "left"
    left.mkdir()
    command = _start("fed", devices=2, data_dir=str(tmp_path / (way or "done")), env={"TMPDIR": str(left)})
    code, _, err = _end(command)
    told = {"": "", "stop": "Stopped: Enough.\n", "raise": "RequestError: The data set has no image.\n"}[way]
    assert (code, err) == ({"": 0, "stop": 75, "raise": 2}[way], told)
    assert list(left.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a torch that cannot use the GPUs says")
def test_gpus_that_torch_cannot_use_are_refused_in_words_that_hold_for_auto_too() -> None:
    resolved = override(RunConfig(), accelerator="cuda")
    with pytest.raises(RequestError, match=r"^The driver shows GPUs, .* \(auto takes it too\), .* --accelerator cpu"):
        rank.settle(resolved, {}, Topology())


# ---- environment


def _torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]


def test_torchrun_starts_the_same_world() -> None:
    code, out, err = _end(_start("total", through=_torchrun()))
    assert code == 0, err
    told = json.loads(out)
    assert told["sum"] == [2, 1]
    assert told["threads"] == [max(1, hardware.cpus() // 2)] * 2
    assert told["interface"] == "lo"


def test_torchrun_shows_the_root_cause(tmp_path: Path) -> None:
    code, _, err = _end(_start("fail", through=_torchrun(), data_dir="raise", output=str(tmp_path)))
    assert code != 0
    assert "RunError: Rank 1 failed at" in err
    root_cause = err[err.index("Root Cause") :]
    assert "labels reach 10" in root_cause


# ---- manual


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_started_by_hand_meet_and_leave_nothing(scheme: str, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    url = f"file://{meeting}" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2 if scheme == "file" else 1):  # a second run at the same place follows at once
        late = _start("total", init_method=url, rank=1, world_size=2)
        time.sleep(0.5)
        first = _start("total", init_method=url, rank=0, world_size=2)
        (code, out, err), (late_code, late_out, late_err) = _end(first), _end(late)
        assert (code, late_code) == (0, 0), err + late_err
        told = json.loads(out)
        assert late_out == ""
        assert told["sum"] == [2, 1]
        assert [rank[:3] for rank in told["ranks"]] == [[0, 0, 2], [1, 1, 2]]
        assert told["interface"] == "lo"
        assert not meeting.exists()


@pytest.mark.parametrize(("victim", "signal_name"), [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGSTOP")])
def test_a_rank_that_is_lost_or_stalls_is_one_sentence_on_the_others(
    victim: int, signal_name: str, tmp_path: Path
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    values: dict[str, Any] = {"init_method": url, "world_size": 2, "stall_timeout": 3, "seed": victim}
    values["output"] = str(tmp_path)
    ranks = [_start("lose", rank=rank, data_dir=signal_name, **values) for rank in range(2)]
    survivor = 1 - victim
    code, _, err = _end(ranks[survivor])
    ranks[victim].kill()
    ranks[victim].communicate()
    lost = {
        "SIGKILL": rf"RunError: Rank {survivor} lost another rank while it waited for it in a collective "
        r"\(Connection (closed|reset) by peer( at 127\.0\.0\.1)?\): that rank's own message, if it could leave one, "
        r"says why; "
        r"continue with --resume auto\.\n",
        "SIGSTOP": rf"RunError: Rank {survivor} waited 3 s \(--stall-timeout\) in a collective for another rank, "
        r"which hangs, was stopped or is cut off: end the ranks that are left, and continue with --resume auto\.\n",
    }
    assert code == 1
    assert re.fullmatch(lost[signal_name], err), err
    assert "Traceback" in (tmp_path / "failures" / f"rank_{survivor}.txt").read_text()


def test_a_rank_lost_between_the_roll_call_and_the_group_is_noticed(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'meeting'}"
    waiting = _start("total", init_method=url, rank=0, world_size=2)
    deserting = [sys.executable, "-c", f"from tests.distributed import entries; entries.desert({url[7:]!r}, 1, 2)"]
    assert subprocess.run(deserting, cwd=ROOT, check=False).returncode == 3
    lost_s = time.monotonic()
    code, _, err = _end(waiting)
    assert time.monotonic() - lost_s < 30  # of --timeout 60 and --stall-timeout 600
    assert code == 1
    assert re.fullmatch(
        r"RankLostError: Rank 0: rank 1 \(process \d+ on \S+\) came, but ended before training began: "
        r"its own message says why; then start all ranks again\.\n",
        err,
    )


def test_a_rank_that_does_not_get_ready_is_waited_for_as_long_as_the_roll_call(tmp_path: Path) -> None:
    door = _doors("file", tmp_path, [0])[0]
    waiting = _start("total", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=2, timeout=5)
    call = RollCall(door(), _claim(1, 2))
    call.take(STARTED_S)
    code, _, err = _end(waiting)  # of --stall-timeout 600
    assert code == 1
    assert "rank 1 (process" in err
    assert "did not get ready within --timeout 5 s" in err
    call.leave(clean=False)


def test_ranks_hear_that_one_was_stopped_while_it_waited(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    first = _start("total", init_method=url, rank=0, world_size=3)
    second = _start("total", init_method=url, rank=1, world_size=3)
    probe = stores.connect("127.0.0.1", int(url.rpartition(":")[2]), STARTED_S)
    _until(lambda: bool(probe.store.check(["claim/0", "claim/1"])), STARTED_S)
    first.send_signal(signal.SIGINT)
    code, _, err = _end(second)
    _end(first)
    assert code == 2
    assert re.fullmatch(r"RequestError: tcp\S+ rank 0 \(process \d+ on \S+\) was stopped while .*\n", err)


def test_a_file_left_by_a_killed_run_is_explained(tmp_path: Path) -> None:
    meeting, notes = tmp_path / "meeting", tmp_path / "notes"
    notes.mkdir()
    url = f"file://{meeting}"
    killed = [_start("stubborn", init_method=url, rank=r, world_size=2, data_dir=str(notes)) for r in range(2)]
    processes = _noted(notes, 2)
    for process in killed:
        process.kill()
        process.communicate()
    for size in (2, 3):
        with pytest.raises(RequestError, match=f"left over from another run: process .* remove {meeting}"):
            launch(entries.total, _config(init_method=url, rank=0, world_size=size, timeout=20), {})
    assert meeting.exists()
    _until(lambda: _gone(processes), 30)
    meeting.unlink()


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
            self.answer = f"{len(call.take(self._timeout_s))} ranks"
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
            _until(caller.has_claimed, timeout_s + 20)
    for caller in callers:
        caller.join(timeout_s + 20)
    return [caller.answer for caller in callers]


def _claim(rank: int, size: int, **values: Any) -> Claim:
    return Claim(**{"rank": rank, "size": size, "accelerator": "cpu", **values})


def _doors(scheme: str, folder: Path, ranks: Sequence[int]) -> list[Callable[[], stores.Meeting]]:
    if scheme == "file":
        return [lambda: stores.open_file(folder / "meeting") for _ in ranks]
    port = free_port()
    return [
        lambda rank=rank: (stores.connect if rank else stores.serve)("127.0.0.1", port, 20)  # type: ignore[misc]
        for rank in ranks
    ]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_every_rank_hears_what_is_wrong(scheme: str, tmp_path: Path) -> None:
    def hear(claims: Sequence[Claim], timeout_s: float = 20) -> list[str]:
        return _roll_call(_doors(scheme, tmp_path, [claim.rank for claim in claims]), claims, timeout_s)

    twice = hear([_claim(0, 3), _claim(1, 3, host="ann"), _claim(1, 3, host="bob")])
    assert len(set(twice)) == 1
    assert "rank 1 is claimed twice, by process" in twice[0]
    assert "on ann and by process" in twice[0]
    assert "on bob" in twice[0]
    twice = hear([_claim(0, 2), _claim(0, 2)])
    assert len(set(twice)) == 1
    assert "rank 0 is claimed twice" in twice[0]
    sizes = hear([_claim(0, 2), _claim(1, 3)])
    assert len(set(sizes)) == 1
    assert "disagree on the world size: rank 0" in sizes[0]
    missing = hear([_claim(0, 4), _claim(2, 4)], timeout_s=5)
    assert "2 of 4 ranks came within --timeout 5 s; missing: rank 1, 3" in missing[0]
    assert len(set(missing)) == 1
    kinds = hear([_claim(0, 2), _claim(1, 2, accelerator="cuda", gpus=("g",))])
    assert [answer.startswith("The ranks compute on different accelerators") for answer in kinds] == [True] * 2
    shared = hear([_claim(r, 2, accelerator="cuda", gpus=("GPU-1",)) for r in range(2)])
    assert [answer.startswith("Ranks 0 and 1 on") for answer in shared] == [True] * 2
    assert hear([_claim(0, 3), _claim(1, 3), _claim(2, 3)]) == ["3 ranks"] * 3  # at the same file as all the above
    assert not (tmp_path / "meeting").exists()


def test_a_dead_world_on_another_host_is_never_joined(tmp_path: Path) -> None:
    """The claims of a run that was killed elsewhere: nobody can see that process, and it answers nothing."""
    doors = _doors("file", tmp_path, [0, 1])
    old = [_claim(rank, 2, host="gone", boot="another") for rank in range(2)]
    for door, claim in zip(doors, old, strict=True):
        door().store.compare_set(f"claim/{claim.rank}", "", claim.to_json())
    start = time.monotonic()
    assert "left over from another run" in _roll_call(doors[:1], [_claim(0, 2)])[0]
    doors[0]().store.set("claim/0", "")
    assert "1 of 2 ranks confirmed" in _roll_call(doors[:1], [_claim(0, 2)], timeout_s=2)[0]
    assert time.monotonic() - start < 30


def test_a_place_where_nobody_can_meet_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not ours\n")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        taken = silent.getsockname()[1]
        start = time.monotonic()
        doors: Sequence[tuple[Callable[[], stores.Meeting], str]] = (
            (lambda: stores.connect("127.0.0.1", free_port(), 1), "nothing answers there within --timeout 1 s"),
            (lambda: stores.connect("no-such-host.invalid", 29500, 1), "does not resolve"),
            (lambda: stores.connect("127.0.0.1", taken, 1), "not the store of a rank 0"),
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
            _start("total", init_method=f"tcp://127.0.0.1:{ports[kind]}", rank=rank, world_size=2, timeout=2)
            for kind, rank in (("speaks", 0), ("speaks", 1), ("closes", 1), ("silent", 1))
        ]
        told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports["speaks"])}
        ranks.append(_start("total", timeout=2, env=told))
        first, *others = [_end(rank) for rank in ranks]
    for ended, words in ((first, "another program uses the port"), *((each, "not the store of") for each in others)):
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
