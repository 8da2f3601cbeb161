"""Ranks that are lost are started again: the run ends with the bits of one that nothing happened to."""

from __future__ import annotations

import shutil
import signal
import socket
from pathlib import Path

import pytest

from lockstep.config.options import read_toml

from ..command import (
    GATED,
    OPEN,
    ROOT,
    at,
    command,
    end,
    events,
    gate,
    gone,
    losses,
    processes,
    ranks_of,
    sentence,
    start,
    until,
    weights,
)
from ..ports import free_port


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_ranks_that_are_lost_come_back_to_the_very_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    """Of a run taken up at an older checkpoint, before its first save; and later, where the last one is damaged."""
    run = Path(shutil.copytree(undisturbed, tmp_path / "run", symlinks=True))
    older = run / "checkpoints" / "step-00000040"
    words = ("--devices", 2, "--max-restarts", 2, "--stall-timeout", 3, "--resume", older)
    gate(tmp_path, 41, below=60)
    with start(tmp_path, *GATED, *words) as agent:
        until(lambda: 41 <= len(losses(run)) < 60)  # no longer the 60 of the run that is left
        ranks_of(agent)[1].suspend()
        gate(tmp_path, 51, below=60)
        at(tmp_path, 51)

        last = older.with_name("step-00000050")
        until(lambda: last.samefile(last.with_name("last")) if last.exists() else False)
        flipped = bytearray((last / "model.safetensors").read_bytes())
        flipped[-1] ^= 1
        (last / "model.safetensors").write_bytes(flipped)
        ranks_of(agent)[0].kill()
        gate(tmp_path, OPEN)
        ended = end(agent)
    assert ended.code == 0, ended.err
    assert ended.out.count("continuing at step 40 of ") == 2
    assert "Rank 1 was stopped, died or was cut off " in ended.err
    assert "Rank 0 was killed by SIGKILL (out of memory?); the ranks start again (restart 2 of 2)." in ended.err
    assert "is damaged (model.safetensors does not match its checksum" in ended.err
    assert f"the run continues from {older.with_name('step-00000048')}\n" in ended.err
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)
    config = read_toml(run / "config.toml")
    assert (config.checkpoint.resume, config.record.output) == ("", None), "it repeats the run from its first step"


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ("breaking", 1, "data set failed at train sample 23 of --data"),
        ("beyond_the_classes", 2, "sample 41 has label 3"),
    ],
    ids=["breaking", "beyond_the_classes"],
)
def test_what_comes_back_is_told_and_what_is_refused_not_tried_again(
    data: str, code: int, words: str, tmp_path: Path
) -> None:
    run = f"train --data tests.own_data:{data} --model mlp --batch 8 --accelerator cpu --strategy ddp --devices 2"
    ended = command(tmp_path, *run.split(), "--max-restarts", 1, "--workers", 0, "--output", "run")
    assert words in sentence(ended, code=code)
    assert ended.err.count("(restart 1 of 1)") == (code == 1)


@pytest.mark.long
def test_the_nodes_that_are_left_go_on_and_one_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    port = free_port()
    words = [*GATED, "--epochs", 1000, "--devices", 1, "--nodes", "1:2", "--max-restarts", 2]
    words += ["--init-method", f"tcp://127.0.0.1:{port}"]
    gate(tmp_path, 10)
    with start(tmp_path, *words) as first:
        until(lambda: _listens(port))  # so that it is the first which serves the store
        second = start(tmp_path, *words)
        told = sentence(command(tmp_path, *words, "--batch", 32))
        assert "the agents of another job meet there, or of this one with other flags" in told
        at(tmp_path, 10)
        lost = processes(second)
        begun = len(events(tmp_path / "run", "start"))
        second.kill()  # and its rank with it, as where a machine loses its power
        second.communicate()
        until(lambda: gone(lost), 5)
        gate(tmp_path, 20)
        at(tmp_path, 20)
        with start(tmp_path, *words) as again:
            first.says("lockstep: stopping: ")  # as another node has come
            gate(tmp_path, 30)
            at(tmp_path, 30)
            first.send_signal(signal.SIGTERM)
            gate(tmp_path, OPEN)
            ended, other = end(first), end(again)
    assert (ended.code, other.code) == (75, 75), (ended.err, other.err)
    found = events(tmp_path / "run", "start")
    assert [row["plan"]["ranks"] for row in found[begun - 1 :]] == [2, 1, 2]
    made = losses(tmp_path / "run")
    assert [step for step, _ in made] == list(range(1, len(made) + 1))


@pytest.mark.long
def test_nodes_that_are_started_again_continue_a_script(tmp_path: Path) -> None:
    words = ["run", "--nodes", "1:2", "--devices", 1, "--accelerator", "cpu", "--output", "run"]
    words += ["--init-method", f"tcp://127.0.0.1:{free_port()}", ROOT / "examples" / "convnet.py", "--epochs"]
    assert command(tmp_path, *words, 1).code == 0
    again = command(tmp_path, *words, 2)
    assert again.code == 0, again
    assert "continuing at step 23 of 46" in again.err


@pytest.mark.long
def test_a_node_that_comes_while_the_ranks_still_start_is_taken_in_at_no_restart(tmp_path: Path) -> None:
    words = [*GATED, "--data", "tests.own_data:built_slowly", "--devices", 1, "--nodes", "1:2"]
    words += ["--init-method", f"tcp://127.0.0.1:{free_port()}"]
    (tmp_path / "builds").write_text("15")
    with start(tmp_path, *words) as first:
        until((tmp_path / "builder").exists)
        with start(tmp_path, *words) as second:
            ended, other = end(first), end(second)
    assert (ended.code, other.code) == (0, 0), (ended.err, other.err)
    assert [row["plan"]["ranks"] for row in events(tmp_path / "run", "start")][-1] == 2


@pytest.mark.parametrize("agents", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_that_torchrun_starts_again_come_to_the_same_bits(agents: int, undisturbed: Path, tmp_path: Path) -> None:
    meets = ("--rdzv-id", "job", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    restarts = ("--max-restarts", "2", "--nnodes", str(agents), "--nproc-per-node", str(2 // agents))
    through = ("-m", "torch.distributed.run", *restarts, *meets)
    gate(tmp_path, 10)
    running = [start(tmp_path, *GATED, "--resume", "auto", through=through) for _ in range(agents)]
    try:
        until(lambda: len(losses(tmp_path / "run")) >= 10 or any(agent.poll() is not None for agent in running))
        ranks = [each for agent in running for each in ranks_of(agent, "lockstep train")]
        next(each for each in ranks if each.environ()["RANK"] == "0").kill()
        gate(tmp_path, OPEN)
        ended = [end(agent) for agent in running]
    finally:
        for agent in running:
            agent.kill()
    assert [each.code for each in ended] == [0] * agents, ended
    assert len(events(tmp_path / "run", "start")) == 2
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)
