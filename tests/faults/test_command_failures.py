"""The command when something is wrong: one sentence, in bounded time, with the right exit code, and nobody left."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.interrupts import STOPPING

from ..command import (
    PATIENCE_S,
    Ended,
    command,
    end,
    events,
    gone,
    losses,
    processes,
    ranks_of,
    refusal,
    sentence,
    start,
    until,
)
from ..needs import need
from ..ports import free_port

DDP = ("--strategy", "ddp", "--devices", 2)
TRAIN = ("train", "digits", "--batch", 50, "--max-steps", 12)
MEET = ("--world-size", 2, "--timeout", 1.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- in training


def test_a_loss_that_is_no_number_names_step_rank_and_samples(folder: Path) -> None:
    ended = command(folder, *TRAIN, *DDP, "--model", "tests.models:Exploding", "--precision", "fp32", "--output", "run")
    said = sentence(ended, code=1)
    # Not a number from the fourth pass on, of which the rehearsal before the first step is one.
    assert said.startswith("The loss at step 3 is not a finite number on rank 0 and rank 1;")
    assert "Traceback" not in ended.err
    assert said.endswith("Lower --lr or add --clip.")  # what the run has not got already
    found = []
    for rank in (0, 1):
        told = json.loads((folder / "run" / "failures" / f"nonfinite_step_3_rank_{rank}.json").read_text())
        assert (told["step"], told["rank"]) == (3, rank)
        found += [index for share in told["indices"] for index in share]
    assert len(set(found)) == 50
    assert json.loads((folder / "run" / "summary.json").read_text())["exit"] == 1


def test_a_bit_that_flips_on_one_rank_stops_the_run(folder: Path) -> None:
    words = (*TRAIN, *DDP, "--model", "tests.models:Flipping", "--precision", "fp32", "--output", "run")
    said = sentence(command(folder, *words, "--verify-every", 2), code=3)
    # The eighth pass is the seventh step's: before the first there is a rehearsal.
    assert "The replicas are not the same bits after step 8: rank 0 and rank 1 differ in model/body.4.weight by" in said
    assert "before, they were the same after step 6." in said
    assert json.loads((folder / "run" / "summary.json").read_text())["exit"] == 3
    assert "Traceback" in (folder / "run" / "failures" / "rank_0.txt").read_text()


def test_an_exception_in_the_users_model_is_told_once(folder: Path) -> None:
    ended = command(folder, *TRAIN, *DDP, "--model", "tests.models:Failing", "--output", "run")
    over_s = time.time()
    said = sentence(ended, code=1)
    assert re.fullmatch(r"Rank 1 failed at \S+/tests/models\.py:\d+: ValueError: out of luck", said)
    told = folder / "run" / "failures" / "rank_1.txt"
    assert over_s - told.stat().st_mtime < PATIENCE_S
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("out of luck")' in ended.err
    assert "out of luck" in told.read_text()
    assert json.loads((folder / "run" / "summary.json").read_text())["error"] == said


def test_parameters_that_the_loss_does_not_reach_are_named(folder: Path) -> None:
    ended = command(folder, *TRAIN, *DDP, "--model", "tests.models:Unused", "--output", "run")
    said = sentence(ended)
    assert "does not reach the parameters forgotten.weight, forgotten.bias" in said
    assert "--find-unused" in said
    assert losses(folder / "run") == []
    found = command(folder, *TRAIN, *DDP, "--model", "tests.models:Unused", "--output", "run", "--find-unused")
    assert found.code == 0, found
    assert len(losses(folder / "run")) == 12


def test_synchronised_batch_statistics_are_refused_where_they_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *TRAIN, "--strategy", "dp", "--devices", 2, "--batchnorm", "sync", "--output", "run")
    assert "--batchnorm sync cannot work under --strategy dp" in said
    assert "use --batchnorm local, or --strategy ddp" in said


def test_labels_outside_the_classes_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("--data", "tests.own_data:beyond_the_classes", "--model", "mlp", "--workers", 0, "--augment")
    said = refusal(capsys, *TRAIN, *own, "--output", "run")
    assert (
        "train sample 41 has label 3, but the classes are 0 to 2" in said
    )  # of the first batch, after the run has begun
    assert not (folder / "run").exists()
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").touch()
    assert refusal(capsys, *TRAIN, *own, "--output", "mine") == said
    assert [path.name for path in (folder / "mine").iterdir()] == ["notes.txt"]
    assert "labels would lie outside" in refusal(capsys, *TRAIN, "--classes", 9, "--output", "other")


def test_outputs_that_cannot_be_scored_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, *TRAIN, "--strategy", "single", "--model", "tests.models:TooFew")
    assert "returns 9 scores a sample, and the labels are of 10 classes" in said
    said = sentence(command(folder, *TRAIN, *DDP, "--model", "tests.models:Pair"))
    assert "returns 2 things at once" in said
    assert not list(folder.glob("runs/*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that is nearly full after a first checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(disk)]
    need([] if subprocess.run(mount, capture_output=True, check=False).returncode == 0 else ["root, to mount a disk"])
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_stops_no_training_but_is_no_success(folder: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    ended = command(folder, *TRAIN, "--checkpoint-every", 5, "--output", run)
    told = sentence(ended, code=1)
    assert "The checkpoint of step 10 could not be written" in ended.err
    assert "No space left" in ended.err
    assert "training goes on" in ended.err
    assert told == (
        "The weights of the last step, 12, are not on the disk: the last one is of step 5; mend what the warnings "
        f"tell of and continue with the same command and --resume {run.relative_to(folder)}."
    )
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == (1, 12)
    assert summary["top1"] is not None
    assert summary["images_per_s"] is not None
    assert "Traceback" not in ended.err
    assert checkpoint.load(run).meta["step"] == 5
    assert "done after 12 steps" in ended.out


def test_a_second_signal_ends_the_run_at_once(folder: Path) -> None:
    words = (*TRAIN, "--strategy", "single", "--model", "tests.models:Slow", "--output", "run")
    with start(folder, *words) as run:
        until((folder / "stepping").exists)
        family = processes(run)
        run.send_signal(signal.SIGTERM)
        run.says(STOPPING)
        time.sleep(1.5)  # for half a second it would be the first one once more
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        said = sentence(end(run, 20), code=1)  # the step under way takes a minute
    assert "Killed by a second signal" in said
    until(lambda: gone(family), 5)


@pytest.mark.parametrize("strategy", [("--strategy", "single"), DDP], ids=["single", "ddp"])
def test_a_stop_does_not_wait_for_the_end_of_an_evaluation(folder: Path, strategy: tuple[object, ...]) -> None:
    words = (*TRAIN, *strategy, "--output", "run", "--resume", "auto", "--model", "tests.models:SlowToEvaluate")
    with start(folder, *words, "--eval-batch", 2) as run:  # three quarters of a minute and more
        until(lambda: bool(events(folder / "run", "evaluate")))
        time.sleep(1)
        run.send_signal(signal.SIGTERM)
        ended = end(run, 20)
    assert "Stopped on request at step 12 of 12 and saved" in sentence(ended, code=75)
    assert "stopping: finishes the step" in ended.err
    again = command(folder, *words)
    assert again.code == 0, again
    assert [row["step"] for row in events(folder / "run", "eval")] == [12]


def test_two_runs_do_not_write_to_one_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*TRAIN, "--strategy", "single", "--model", "tests.models:Slow", "--output", "run")
    with start(folder, *words):  # killed at the end of the block, without a chance to give the folder back
        until((folder / "stepping").exists)
        for more in ((), ("--resume", "auto")):
            said = refusal(capsys, *TRAIN, "--strategy", "single", *more, "--output", "run")
            assert said.startswith("run is in use by another run (process ")
    assert command(folder, *TRAIN, "--strategy", "single", "--output", "run", "--resume", "auto").code == 0


def test_a_data_worker_that_dies_is_named(folder: Path) -> None:
    words = ("--data", "tests.own_data:exiting", "--model", "mlp", "--batch", 8, "--accelerator", "cpu", *DDP)
    told = sentence(command(folder, "train", *words, "--workers", 1), code=1)
    # torch has the code where it hears of the end by a signal, before it misses the worker's answer.
    assert re.match(
        r"Rank \d: a data worker \(process \d+\) ended( with exit code 7)?: if the host ran out of mem", told
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_data_set_starts_can_be_ended(folder: Path, workers: int) -> None:
    words = ("--data", "tests.own_data:starting", "--model", "mlp", "--batch", 8, "--accelerator", "cpu")
    assert command(folder, "train", *words, "--workers", workers, "--epochs", 1, "--stall-timeout", 30).code == 0


def test_an_interrupt_that_a_data_set_raises_itself_is_its_failure(folder: Path) -> None:
    words = ("--data", "tests.own_data:interrupting", "--model", "mlp", "--batch", 8, "--accelerator", "cpu")
    told = sentence(command(folder, "train", *words, "--workers", 1), code=1)
    assert "The data set failed at train sample 23" in told
    assert "KeyboardInterrupt" in told


# ---- before training


def test_to_go_on_after_a_rank_was_lost_in_start_up_does_not_extend_an_earlier_run(folder: Path) -> None:
    assert command(folder, *TRAIN, "--strategy", "single").code == 0
    before = losses(folder / "runs" / "digits-resnet8")
    longer = ("train", "digits", "--batch", 50, "--max-steps", 14)
    with start(folder, *longer, *DDP) as run:
        until(lambda: len(ranks_of(run)) == 2)
        ranks_of(run)[1].kill()
        assert "continue with --resume auto" in sentence(end(run), code=1)
    went_on = command(folder, *longer, "--strategy", "single", "--resume", "auto")
    assert "nothing to resume in runs/digits-resnet8-2: a new run" in went_on.out
    assert losses(folder / "runs" / "digits-resnet8") == before
    assert len(losses(folder / "runs" / "digits-resnet8-2")) == 14


def test_a_run_that_is_refused_leaves_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusal(capsys, *TRAIN, "--strategy", "single", "--classes", 9)
    refusal(capsys, *TRAIN, "--strategy", "single", "--classes", 9, "--output", "run")
    assert [path for path in folder.rglob("*") if path.name != "runs"] == []
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").touch()
    refusal(capsys, *TRAIN, "--strategy", "single", "--classes", 9, "--output", "mine")
    assert (folder / "mine" / "notes.txt").exists()


def test_a_disk_that_is_full_at_the_start_is_refused(
    folder: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(OSError), (small_disk / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    said = refusal(capsys, *TRAIN, "--strategy", "single", "--output", small_disk / "run")
    assert said.endswith("No space left on device; make room there, or give another --output.")


def test_whether_a_run_goes_on_is_said(folder: Path) -> None:
    words = (*TRAIN, "--strategy", "single", "--output", "run", "--resume", "auto")
    assert "nothing to resume in run: a new run" in command(folder, *words).out
    again = command(folder, *words, "--max-steps", 14)
    assert "continuing at step 12 of 14, from run/checkpoints/step-00000012" in again.out


def test_a_world_that_does_not_fill_up_says_who_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"file://{folder / 'meeting'}"
    for url in (f"tcp://127.0.0.1:{free_port()}", file, file):  # a file can be met at again
        begin_s = time.monotonic()
        said = refusal(capsys, *TRAIN, *MEET, "--rank", 0, "--init-method", url)
        assert f"{url}: 1 of 2 ranks came within --timeout 1.5 s; missing: rank 1" in said
        assert ("or give every rank --clear-meeting" in said) == (url == file)
        assert time.monotonic() - begin_s < 1.5 + 10
    assert not (folder / "runs").exists()


def test_a_place_where_ranks_cannot_meet_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert "another program uses the port" in refusal(capsys, *TRAIN, *MEET, "--rank", 0, "--init-method", busy)
    elsewhere = ("--init-method", "tcp://192.0.2.7:29500")
    assert "not one of this machine" in refusal(capsys, *TRAIN, *MEET, "--rank", 0, *elsewhere)
    nobody = ("--init-method", f"tcp://127.0.0.1:{free_port()}")
    said = refusal(capsys, *TRAIN, *MEET, "--rank", 1, *nobody)
    assert "nothing answers there within --timeout 1.5 s" in said


def test_two_processes_with_one_rank_hear_of_each_other(folder: Path) -> None:
    words = (*TRAIN, "--world-size", 3, "--init-method", f"file://{folder / 'meeting'}", "--rank", 1)
    with start(folder, *words) as one, start(folder, *words) as other:
        told = {sentence(end(each)) for each in (one, other)}
    assert len(told) == 1, told
    assert "rank 1 is claimed twice, by process" in told.pop()


def test_ranks_that_were_asked_for_different_runs_are_refused(folder: Path) -> None:
    words = (*TRAIN, "--world-size", 2, "--init-method", f"file://{folder / 'meeting'}", "--output", "run")
    with (
        start(folder, *words, "--rank", 0, "--lr", 0.1) as zero,
        start(folder, *words, "--rank", 1, "--lr", 0.2) as one,
    ):
        told = {sentence(end(each)) for each in (zero, one)}
    assert len(told) == 1, told
    assert told.pop().startswith("Rank 1 was started with --lr 0.2 (rank 0 has 0.1): the replicas would drift apart;")
    assert not (folder / "run" / "config.toml").exists()


def test_the_environment_of_a_launcher_that_contradicts_itself_is_refused(folder: Path) -> None:
    ended = command(folder, *TRAIN, RANK="2", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert "RANK is 2, but WORLD_SIZE is 2" in sentence(ended)


def test_the_installed_command_says_its_version(folder: Path) -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("lockstep"), "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"lockstep \d+\.\d+\.\d+\n", found.stdout)
    told = command(folder, "--version")
    assert told == Ended(0, found.stdout, "")
