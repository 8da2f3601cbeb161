"""Ranks that die are started again: the run ends with the bits, or on the curve, of one that nothing happened to."""

from __future__ import annotations

import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep import locks
from lockstep.errors import RequestError
from lockstep.interrupts import INSIST, STOPPING
from lockstep.launchers import stores
from lockstep.launchers.plain_state import PlainState
from lockstep.launchers.table import launch

from .. import entries
from ..command import Running, command, end, events, gone, losses, processes, ranks_of, sentence, start, until, weights
from ..ports import free_port
from ..starting import config

RUN = (
    "train --data tests.own_data:slow --model mlp --strategy ddp --accelerator cpu --epochs 18 --checkpoint-every 30 "
    "--batch 16 --log-every 5 --workers 0 --precision fp64 --output run"
)


def _at(folder: Path, step: int) -> None:
    """Return once the run has made so many steps."""
    until(lambda: bool(rows := losses(folder / "run")) and rows[-1][0] >= step)


def _is_taken(folder: Path) -> bool:
    """Return True; it fails where another run could have the folder."""
    with pytest.raises(RequestError, match="is in use by another run"):
        locks.check_free(folder)
    return True


def _ranks(agent: Running, size: int) -> list[psutil.Process]:
    """Return the processes of an agent's ranks."""
    found = ranks_of(agent)
    assert len(found) == size
    return found


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command(folder, *RUN.split(), "--devices", 2)
    assert ended.code == 0, ended.err
    return folder / "run"


def test_ranks_that_are_killed_come_back_to_the_very_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    words = [*RUN.split(), "--devices", 2, "--max-restarts", 2, "--stall-timeout", 4]
    with start(tmp_path, *words) as agent:
        _at(tmp_path, 40)
        first = _ranks(agent, 2)
        first[0].kill()
        until(lambda: _is_taken(tmp_path / "run") and len(events(tmp_path / "run", "start")) == 2 and gone(first))
        _at(tmp_path, 120)
        _ranks(agent, 2)[1].suspend()
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert "Rank 0 was killed by SIGKILL (out of memory?); the ranks start again (restart 1 of 2)." in ended.err
    assert "Rank 1 was stopped, died or was cut off 4 s ago, last heard of in " in ended.err
    assert "(restart 2 of 2)" in ended.err
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert losses(tmp_path / "run") == losses(undisturbed)
    locks.check_free(tmp_path / "run")  # nobody has it any more


def test_a_failure_that_comes_back_is_told_once_the_restarts_are_spent(tmp_path: Path) -> None:
    words = "train --data tests.own_data:broken --model mlp --batch 8 --accelerator cpu --strategy ddp --devices 2"
    ended = command(tmp_path, *words.split(), "--max-restarts", 1, "--workers", 0, "--output", "run")
    assert ended.code == 1
    assert ended.err.count("(restart 1 of 1)") == 1
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("lockstep: The data set failed at train sample 23")
    assert last.endswith("OSError: disk on fire")


def test_ranks_that_leave_as_if_all_were_well_are_lost(tmp_path: Path) -> None:
    words = "train --data tests.own_data:leaving --model mlp --batch 8 --accelerator cpu --strategy ddp --devices 1"
    ended = command(tmp_path, *words.split(), "--max-restarts", 1, "--workers", 0, "--output", "run")
    assert ended.code == 1
    assert ended.err.count("(restart 1 of 1)") == 1
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("lockstep: Rank 0 exited with code 0 before it was done and without a word")


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    words = "train --data tests.own_data:beyond_the_classes --model mlp --batch 8 --accelerator cpu --strategy ddp"
    ended = command(tmp_path, *words.split(), "--devices", 2, "--max-restarts", 3, "--workers", 0)
    assert ended.code == 2
    assert "restart" not in ended.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_agent(number: signal.Signals, tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 2, "--epochs", 1000) as agent:
        _at(tmp_path, 10)
        ranks = processes(agent)[1:]
        agent.send_signal(number)
        ended = end(agent)
        until(lambda: gone(ranks), 5)
    assert ended.code == (75 if number is signal.SIGTERM else -9)
    if number is signal.SIGTERM:
        assert "lockstep: Stopped on request at step " in ended.err
        assert "and saved; continue with the same command and --resume" in ended.err
        assert "death signal" not in ended.err


def test_the_nodes_that_are_left_go_on_and_one_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    port = free_port()
    meets = f"tcp://127.0.0.1:{port}"
    words = [*RUN.split(), "--epochs", 150, "--devices", 1, "--nodes", "1:2", "--max-restarts", 2]
    words += ["--init-method", meets, "--stall-timeout", 10]
    with start(tmp_path, *words) as first:
        until(lambda: _listens(port))  # so that it is the first which serves the store
        second = start(tmp_path, *words)
        _at(tmp_path, 40)
        lost = processes(second)
        second.kill()  # and its rank with it, as where a machine loses its power
        second.communicate()
        until(lambda: gone(lost), 5)
        begun = len(events(tmp_path / "run", "start"))
        until(lambda: len(events(tmp_path / "run", "start")) > begun)
        alone = losses(tmp_path / "run")[-1][0]
        _at(tmp_path, alone + 20)
        with start(tmp_path, *words) as again:
            until(lambda: len(events(tmp_path / "run", "start")) > begun + 1)
            joined = losses(tmp_path / "run")[-1][0]
            _at(tmp_path, joined + 20)
            first.send_signal(signal.SIGTERM)
            ended, other = end(first), end(again)
    assert (ended.code, other.code) == (75, 75), (ended.err, other.err)
    assert "the ranks start again (restart 1 of 2)" in ended.err
    assert "Another node has come: the ranks save, and start again with it." in ended.err
    assert ended.err.count(STOPPING) == 2  # for that node, and for the signal
    assert ended.err.count(f"{STOPPING}{INSIST}") == 1
    found = losses(tmp_path / "run")
    assert [step for step, _ in found] == list(range(1, len(found) + 1))


def _two_nodes(folder: Path, *words: object) -> tuple[list[object], Running, Running]:
    """Return the command of two nodes that need each other, and their agents; they train."""
    port = free_port()
    command = [*RUN.split(), "--devices", 1, "--nodes", 2, "--max-restarts", 2, "--timeout", 10, *words]
    command += ["--init-method", f"tcp://127.0.0.1:{port}"]
    first = start(folder, *command)
    until(lambda: _listens(port))
    second = start(folder, *command)
    _at(folder, 10)
    return command, first, second


def test_a_stop_while_nodes_are_to_come_together_again_is_one(tmp_path: Path) -> None:
    _, first, second = _two_nodes(tmp_path, "--epochs", 1000)
    with first, second:
        second.kill()
        second.communicate()
        first.says("the ranks start again (restart")
        time.sleep(1.0)
        first.send_signal(signal.SIGTERM)
        ended = end(first)
    assert ended.code == 75, ended.err
    assert "Stopped while ranks were to start again; continue with --resume auto." in ended.err


@pytest.mark.slow
def test_a_stop_while_ranks_save_for_another_node_lets_them_save(tmp_path: Path) -> None:
    port = free_port()
    run = "train --data tests.own_data:very_slow --model mlp --batch 8 --accelerator cpu --strategy ddp --workers 0"
    words = [*run.split(), "--log-every", 1, "--output", "run", "--nodes", "1:2", "--devices", 1, "--max-restarts", 1]
    words += ["--init-method", f"tcp://127.0.0.1:{port}"]
    with start(tmp_path, *words) as first:
        _at(tmp_path, 1)
        with start(tmp_path, *words) as second:
            first.says("Another node has come")  # its rank has heard that it is to save, after a step of four seconds
            time.sleep(0.8)
            first.send_signal(signal.SIGTERM)
            ended = end(first)
            second.send_signal(signal.SIGTERM)
            end(second)
    assert ended.code == 75, ended.err  # stopped on request or, where all were quick, as ranks were to start again
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


def test_nodes_that_need_one_that_was_stopped_are_stopped_too(tmp_path: Path) -> None:
    _, first, second = _two_nodes(tmp_path, "--epochs", 1000)
    with first, second:
        second.send_signal(signal.SIGTERM)
        ended = [end(each) for each in (second, first)]
    assert [each.code for each in ended] == [75, 75], ended
    for each in ended:
        assert "lockstep: Stopped on request at step " in each.err


@pytest.mark.slow
def test_a_node_that_is_lost_while_the_nodes_agree_is_done_without(tmp_path: Path) -> None:
    port = free_port()
    words = [*RUN.split(), "--epochs", 4, "--devices", 1, "--nodes", "2:4", "--init-method", f"tcp://127.0.0.1:{port}"]
    with start(tmp_path, *words) as first:
        until(lambda: _listens(port))
        with start(tmp_path, *words) as second, start(tmp_path, *words) as third:
            meeting = stores.join("127.0.0.1", port, 10)
            until(lambda: meeting.store.check(["job"]))
            state = PlainState(meeting.store, meeting.store.get("job").decode().partition("/")[0])
            until(lambda: bool(state.get_state()) and len(state.nodes.addresses) == 3)
            third.kill()  # it has come, and does not say what it has to: of that the others hear nothing for 6 s
            third.communicate()
            ended = [end(first), end(second)]
    assert [each.code for each in ended] == [0, 0], ended
    assert "A node was lost while the nodes agreed on who takes part; the others agree anew." in ended[0].err
    assert "2 ranks" in ended[0].out


@pytest.mark.slow
def test_a_node_that_is_not_needed_is_told_when_the_job_ends(tmp_path: Path) -> None:
    words, first, second = _two_nodes(tmp_path)
    with first, second, start(tmp_path, *words) as third:
        ended = [end(each) for each in (first, second, third)]
    assert [each.code for each in ended[:2]] == [0, 0], ended
    # Whether it finds the job closed, or its store gone already, is a matter of moments.
    assert re.search(r"this node was not needed|before this node had a part in it", ended[2].err), ended[2]
    assert ended[2].err.count("\n") == 1


@pytest.mark.slow
def test_a_run_taken_up_at_an_older_checkpoint_is_so_again_after_a_restart(undisturbed: Path, tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--devices", 2) as whole:
        _at(tmp_path, 100)
        whole.send_signal(signal.SIGTERM)
        assert end(whole).code == 75
    older = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[0]
    first_step = int(older.name.removeprefix("step-"))
    words = [*RUN.split(), "--devices", 2, "--max-restarts", 1, "--resume", older]
    with start(tmp_path, *words) as agent:
        until(lambda: len(events(tmp_path / "run", "start")) == 2)
        _at(tmp_path, first_step + 5)
        _ranks(agent, 2)[1].kill()  # before its next checkpoint: the last one in the folder is of the run that was left
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert "(restart 1 of 1)" in ended.err
    assert ended.out.count(f"continuing at step {first_step} of ") == 2
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(undisturbed: Path, tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 1) as agent:
        _at(tmp_path, 100)
        ranks = _ranks(agent, 2)
        for rank in ranks:
            rank.suspend()  # nothing is saved meanwhile
        last = (tmp_path / "run" / "checkpoints" / "last").resolve()
        saved = sorted(last.parent.glob("step-*"))
        flipped = bytearray((last / "model.safetensors").read_bytes())
        flipped[-1] ^= 1
        (last / "model.safetensors").write_bytes(flipped)
        ranks[0].kill()
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert "is damaged (model.safetensors does not match its checksum" in ended.out
    assert f"the run goes on from {saved[saved.index(last) - 1]}\n" in ended.out
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_what_a_rank_starts_is_started_as_anywhere_else() -> None:
    found = [launch(entries.started, config(devices=1, strategy="ddp", max_restarts=count), {}) for count in (0, 1)]
    assert found == [multiprocessing.get_start_method()] * 2


def test_a_script_that_would_start_ranks_again_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import lockstep\n"
        "config = lockstep.recipe('digits', devices=2, strategy='ddp', accelerator='cpu', max_restarts=2)\n"
        "lockstep.launch(lockstep.run, config)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].startswith("lockstep.errors.RequestError: Each rank imports the script")
    assert "restart 1" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_after_training_costs_but_time(number: signal.Signals, tmp_path: Path) -> None:
    words = "train digits --model mlp --strategy ddp --accelerator cpu --devices 2 --epochs 1 --stall-timeout 3"
    with start(tmp_path, *words.split(), "--max-restarts", 1, "--output", "run") as agent:
        _at(tmp_path, 1)
        main = _ranks(agent, 2)[0]
        until(lambda: (tmp_path / "run" / "summary.json").exists())
        main.send_signal(number)
        ended = end(agent, 60)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_while_ranks_start_is_told_as_one(number: signal.Signals, tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 2) as agent:
        until(lambda: len(ranks_of(agent)) == 2)
        agent.send_signal(number)
        ended = end(agent)
    assert ended.code == 75, ended.err
    assert ended.err.splitlines()[-1] in (
        "lockstep: Stopped outside of training; there was nothing to save.",
        "lockstep: Stopped before training began.",
    )


def test_a_stop_while_ranks_start_again_says_how_to_go_on(tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 2, "--epochs", 1000) as agent:
        _at(tmp_path, 10)
        first = _ranks(agent, 2)
        first[1].kill()
        until(lambda: gone(first) and len(ranks_of(agent)) == 2)
        agent.send_signal(signal.SIGTERM)
        ended = end(agent)
    assert ended.code == 75, ended.err
    last = ended.err.splitlines()[-1]
    assert last == "lockstep: Stopped while ranks were to start again; continue with --resume auto."


def test_a_second_signal_ends_all_at_once_and_says_so(tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--devices", 2, "--max-restarts", 2, "--epochs", 1000) as agent:
        _at(tmp_path, 10)
        ranks = processes(agent)[1:]
        for rank in _ranks(agent, 2):
            rank.suspend()  # so that none can save before it comes
        agent.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        agent.send_signal(signal.SIGTERM)
        ended = end(agent)
        until(lambda: gone(ranks), 5)
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("lockstep: Killed by a second signal, without saving; the last check")


def test_a_terminal_that_closes_asks_once_though_two_signals_come(tmp_path: Path) -> None:
    words = [*RUN.split(), "--devices", 1, "--max-restarts", 2, "--epochs", 1000]
    with start(tmp_path, *words) as agent:
        _at(tmp_path, 10)
        for _ in range(2):  # the kernel's and the shell's
            agent.send_signal(signal.SIGHUP)
        ended = end(agent)
    assert ended.code == 75
    assert "lockstep: Stopped on request at step " in ended.err


def test_agents_of_different_jobs_and_ranks_by_hand_do_not_mix(tmp_path: Path) -> None:
    port = free_port()
    words = [*RUN.split(), "--epochs", 1000, "--nodes", "1:2", "--devices", 1, "--max-restarts", 1]
    meets = ("--init-method", f"tcp://127.0.0.1:{port}")
    with start(tmp_path, *words, *meets) as agent:
        until(lambda: _listens(port))
        for other in (("--batch", 32), ("--output", "elsewhere")):
            told = sentence(command(tmp_path, *words, *meets, *other))
            assert "the agents of another job meet there, or of this one with other flags" in told
        agent.send_signal(signal.SIGTERM)
        end(agent)
    port = free_port()
    meets = ("--init-method", f"tcp://127.0.0.1:{port}")
    with start(tmp_path, *RUN.split(), *meets, "--world-size", 2, "--rank", 0) as by_hand:
        until(lambda: _listens(port))
        told = sentence(command(tmp_path, *words, *meets))
        assert "the ranks of another job, which were started by hand, meet there; give this job a port" in told
        by_hand.send_signal(signal.SIGTERM)
        end(by_hand)
