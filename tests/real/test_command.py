"""The command from end to end, in processes of its own: what it leaves, and that nothing which ends it loses a bit."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import checkpoint
from lockstep.checkpoint import Checkpoints
from lockstep.cli.main import main
from lockstep.options import from_toml, to_toml
from lockstep.state import State

from ..command import COLD, Ended, command, end, events, losses, refusal, sentence, start, until, weights
from ..ports import free_port

DDP = ("--strategy", "ddp", "--devices", 2)
ONE = ("--strategy", "single")
PLAIN = ("train", "digits", "--model", "mlp", "--batch", 50, "--precision", "fp64", "--max-steps", 12)
# 23 steps an epoch; BatchNorm, crops, momentum and a schedule: whatever a continuation could get wrong.
STEPS = 50
NET = ("train", "digits", "--max-steps", STEPS, "--log-every", 2)

SUMMARY = {
    *("top1", "top5", "best_top1", "steps", "epoch_s", "images_per_s", "step_p50_s", "step_p95_s", "data_wait_s"),
    *("peak_memory_bytes", "exit"),
}


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Ended]]:
    """Return the folder of an uninterrupted run with these options, and how it ended; each is run once."""
    runs: dict[tuple[object, ...], tuple[Path, Ended]] = {}

    def of(*words: object) -> tuple[Path, Ended]:
        if words not in runs:
            folder = tmp_path_factory.mktemp("whole")
            runs[words] = folder / "run", command(folder, *words, "--output", "run")
            assert runs[words][1].code == 0, runs[words][1]
        return runs[words]

    return of


Whole = Callable[..., tuple[Path, Ended]]


def _copy(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run", symlinks=True))


def _signalled(folder: Path, *words: object, number: signal.Signals, at: int, **how: object) -> Ended:
    """Run the command with a net that sends it a signal in this process's training pass `at`; nobody is left then."""
    asked = json.dumps({"number": number, "at": at} | how)
    ended = command(folder, *words, "--model", "tests.models:signalling", SIGNALLING=asked)
    until(lambda: not _living_in(folder), 10)
    return ended


def _living_in(folder: Path) -> list[psutil.Process]:
    """Return the processes whose current folder this is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder.resolve()):
                found.append(process)
    return found


# ---- what a run leaves


def test_a_run_leaves_what_tools_read(whole: Whole) -> None:
    run, ended = whole(*NET, *DDP)
    assert [row["step"] for row in events(run, "step")] == list(range(1, STEPS + 1))
    assert {*events(run, "step")[0]} >= {"event", "step", "epoch", "loss", "lr", "samples"}
    # An epoch of 1,437 digits in batches of 64 ends with one of 29.
    assert [row["samples"] for row in events(run, "step")[:23]] == [64] * 22 + [29]
    evaluated = events(run, "eval")
    assert [(row["step"], row["samples"]) for row in evaluated] == [(23, 360), (46, 360), (50, 360)]
    assert {*evaluated[0]} >= {"top1", "top5", "loss"}

    summary = _summary(run)
    assert {*summary} >= SUMMARY
    assert (summary["steps"], summary["exit"]) == (STEPS, 0)
    assert summary["top1"] == evaluated[-1]["top1"]
    assert summary["best_top1"] == max(row["top1"] for row in evaluated)
    assert len(summary["epoch_s"]) == 2  # the third epoch was cut short
    assert {*summary["peak_memory_bytes"]} == {"host", "device"}
    assert summary["proof"]["replicas"]["times"] >= 3
    assert f"last after step {STEPS}" in summary["proof"]["replicas"]["found"]
    assert 0 < summary["step_p50_s"] <= summary["step_p95_s"]

    asked = tomllib.loads((run / "config.toml").read_text())
    assert (asked["model"], asked["batch"], asked["max-steps"]) == ("resnet8", 64, STEPS)
    assert to_toml(from_toml((run / "config.toml").read_text())) == (run / "config.toml").read_text()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["batch_plan"] == {"global_size": 64, "ranks": 2, "accumulation": 1, "devices": 1}
    assert manifest["topology"]["size"] == 2
    chosen = {name: manifest["chosen"][name] for name in ("strategy", "launcher", "devices", "batchnorm", "precision")}
    assert chosen == {"strategy": "ddp", "launcher": "spawn", "devices": 2, "batchnorm": "sync", "precision": "fp32"}
    assert {"torch", "python", "lockstep-torch"} <= {*manifest["versions"]}
    assert "command" in manifest

    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert checkpoint.load(run / "checkpoints" / "last").meta["step"] == STEPS
    assert checkpoint.load(run / "checkpoints" / "best").meta["best_top1"] == summary["best_top1"]
    assert not (run / "failures").exists()

    assert "\x1b" not in ended.out + ended.err
    assert ended.out.splitlines()[0] == "global batch 64 = 2 ranks × 1 micro-batch × 32"
    assert f"test accuracy {summary['top1']:.2%}" in ended.out
    assert ended.err == ""


def test_the_demo_learns_the_digits(tmp_path: Path) -> None:
    """The whole recipe, as `make demo` runs it; the held-out fifth is 360 digits."""
    ended = command(tmp_path, "train", "digits", *DDP, "--output", "run", through=COLD)
    assert ended.code == 0, ended
    assert _summary(tmp_path / "run")["top1"] >= 0.98


# ---- launchers


def _by_hand(folder: Path, url: str) -> Path:
    words = (*PLAIN, "--output", "run", "--init-method", url, "--world-size", 2)
    with (
        start(folder, *words, "--rank", 1, through=COLD) as one,
        start(folder, *words, "--rank", 0, through=COLD) as zero,
    ):
        late, first = end(one), end(zero)
    assert (late.code, late.out, first.code) == (0, "", 0), (late, first)
    return folder / "run"


@pytest.mark.long
def test_every_launcher_gives_the_same_bits(whole: Whole, tmp_path: Path) -> None:
    spawned, _ = whole(*PLAIN, *DDP)
    for way in ("torchrun", "tcp", "file"):
        folder = tmp_path / way
        folder.mkdir()
        if way == "torchrun":
            torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
            ended = command(folder, *PLAIN, "--output", "run", through=torchrun)
            assert ended.code == 0, ended
            launcher = "environment"
        else:
            _by_hand(folder, f"tcp://127.0.0.1:{free_port()}" if way == "tcp" else f"file://{folder / 'meeting'}")
            launcher = "manual"
        assert json.loads((folder / "run" / "manifest.json").read_text())["chosen"]["launcher"] == launcher
        assert losses(folder / "run") == losses(spawned), way
        assert weights(folder / "run") == weights(spawned), way


def test_one_process_is_on_the_same_curve(whole: Whole) -> None:
    one, two = losses(whole(*PLAIN, *ONE)[0]), losses(whole(*PLAIN, *DDP)[0])
    assert [step for step, _ in one] == [step for step, _ in two] == list(range(1, 13))
    assert all(abs(a - b) / b < 1e-9 for (_, a), (_, b) in zip(one, two, strict=True))


# ---- kills


@pytest.mark.parametrize("devices", [ONE, DDP], ids=["single", "ddp"])
def test_killed_at_any_step_a_run_ends_with_the_same_bits(
    whole: Whole, tmp_path: Path, devices: tuple[object, ...]
) -> None:
    # In the step after one that was saved, at moments that fall into the writing of the checkpoint too.
    every, most = (2, 10) if devices is ONE else (4, 5)
    rehearsals = 0 if devices is ONE else 1
    chance = random.Random(20 + len(devices))
    words = (*NET, *devices, "--checkpoint-every", every, "--output", "run", "--resume", "auto")
    for group in (False, True):
        at = rehearsals + every * chance.randint(2, most) + 1
        how = {"group": group, "pause_s": chance.uniform(0, 0.02)}
        assert _signalled(tmp_path, *words, number=signal.SIGKILL, at=at, **how).code == -signal.SIGKILL
        assert not (tmp_path / "run" / "summary.json").exists()
    ended = command(tmp_path, *words, "--model", "tests.models:signalling")
    assert ended.code == 0, ended
    expected, _ = whole(*NET, *devices)
    assert losses(tmp_path / "run") == losses(expected)
    assert weights(tmp_path / "run") == weights(expected)
    assert [(row["step"], row["top1"]) for row in events(tmp_path / "run", "eval")] == [
        (row["step"], row["top1"]) for row in events(expected, "eval")
    ]


# ---- signals


def test_stopped_by_signals_a_run_saves_and_ends_with_the_same_bits(whole: Whole, tmp_path: Path) -> None:
    words = (*NET, *DDP, "--output", "run", "--resume", "auto")
    stopped = 0
    for number, at in ((signal.SIGTERM, 8), (signal.SIGINT, 10), (signal.SIGHUP, 12)):
        said = sentence(_signalled(tmp_path, *words, number=number, at=at), code=75)
        least = stopped + at - 1  # the first pass of a process is the rehearsal
        stopped = len(losses(tmp_path / "run"))
        assert said.startswith(f"Stopped on request at step {stopped} of {STEPS} and saved; continue with ")
        assert said.endswith("the same command and --resume run.")
        assert least <= stopped < STEPS
        assert checkpoint.load(tmp_path / "run").meta["step"] == stopped
        assert _summary(tmp_path / "run")["exit"] == 75
        assert not (tmp_path / "run" / "failures").exists()
    ended = command(tmp_path, *words, "--model", "tests.models:signalling")
    assert ended.code == 0, ended
    expected, _ = whole(*NET, *DDP)
    assert losses(tmp_path / "run") == losses(expected)
    assert weights(tmp_path / "run") == weights(expected)


def test_stopped_after_an_epochs_last_step_a_run_evaluates_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("train", "digits", "--model", "tests.models:Interrupting", "--output", "run", "--resume", "auto")
    assert "Stopped on request at step 23 of 40" in refusal(capsys, *words, "--max-steps", 40, code=75)
    assert events(tmp_path / "run", "eval") == []
    assert main([str(word) for word in (*words, "--max-steps", 40)]) == 0
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 41))
    assert [row["step"] for row in events(tmp_path / "run", "eval")] == [23, 40]
    assert len(_summary(tmp_path / "run")["epoch_s"]) == 1


# ---- continuing


def test_continued_under_another_strategy_it_stays_on_the_curve(whole: Whole, tmp_path: Path) -> None:
    run = _copy(whole(*PLAIN, *DDP)[0], tmp_path)
    more = ("--strategy", "dp", "--devices", 2, "--max-steps", 24, "--resume", "run")
    assert command(tmp_path, *PLAIN[:-2], *more).code == 0
    alone, _ = whole(*PLAIN[:-2], "--max-steps", 24, *ONE)
    pairs = zip(losses(run), losses(alone), strict=True)
    assert all(ours[0] == theirs[0] and abs(ours[1] - theirs[1]) < 1e-9 * theirs[1] for ours, theirs in pairs)


def test_a_finished_run_is_left_as_it_is_and_can_be_extended(whole: Whole, tmp_path: Path) -> None:
    done, _ = whole(*NET, *DDP)
    run = _copy(done, tmp_path)
    again = command(tmp_path, *NET, *ONE, "--resume", "run")
    assert again.code == 0, again
    assert losses(run) == losses(done)
    assert weights(run) == weights(done)
    assert _summary(run)["top1"] == _summary(done)["top1"]
    assert _summary(run)["steps"] == STEPS
    assert "is of step 50, and this run would end at step 20" in sentence(
        command(tmp_path, *NET, "--max-steps", 20, *ONE, "--resume", "run"), code=2
    )
    more = command(tmp_path, *NET, "--max-steps", STEPS + 3, *ONE, "--resume", "run")
    assert more.code == 0, more
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 4))
    assert losses(run)[:STEPS] == losses(done)


def test_what_is_another_run_is_refused(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _copy(whole(*NET, *DDP)[0], tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for option, value, had in (("--model", "mlp", "resnet8"), ("--batch", 32, 64), ("--seed", 1, 0)):
        said = refusal(capsys, *NET, *ONE, option, value, "--resume", "run")
        assert f"another run's: asked for {option} {value} (it has {had})" in said
        assert "give these flags the values that it has" in said
    assert "they are part of the model" in refusal(capsys, *NET, *ONE, "--accumulate", 2, "--resume", "run")
    assert "holds a run already: continue it with --resume auto" in refusal(capsys, *NET, *ONE, "--output", "run")
    assert "no such file or folder" in refusal(capsys, *NET, *ONE, "--resume", "nowhere")

    newest, older = (f"run/checkpoints/step-{step:08d}" for step in (50, 46))
    damaged = run / "checkpoints" / "last" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    said = refusal(capsys, *NET, *ONE, "--resume", "run")  # auto goes on from the one before it
    assert "model.safetensors does not match its checksum" in said
    assert f"the last good one is {older}: give that one instead" in said
    assert newest not in said
    advised = _copy(run, tmp_path / "advised")
    good = advised / "checkpoints" / "step-00000046"
    assert command(tmp_path, *NET, *ONE, "--output", advised, "--resume", good.relative_to(tmp_path)).code == 0
    damaged.with_name("state.json").unlink()
    assert older in refusal(capsys, "eval", "run")

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.pth").write_bytes(b"\x80\x04")
    assert "holds no lockstep checkpoint" in refusal(capsys, *NET, *ONE, "--resume", foreign)
    assert "never loaded" in refusal(capsys, *NET, *ONE, "--resume", foreign / "model.pth")
    state = checkpoint.load(Path(older))
    other = Checkpoints(tmp_path / "other", warn=pytest.fail)
    names = [name for name in state.tensors if name.startswith("model/")]
    other.save(State({name: state.tensors[name] for name in names[1:]}, state.meta), step=46, best=True)
    other.close()
    said = refusal(capsys, *NET, *ONE, "--resume", "other/last")
    assert f"The checkpoint is of another model: it lacks {names[0].removeprefix('model/')}." in said
    changed = {path for path, time_ns in before.items() if not path.exists() or path.stat().st_mtime_ns != time_ns}
    damaged_here = {"last", "best", "step-00000050", "model.safetensors", "state.json"}
    assert {path.name for path in changed} <= {*damaged_here, ".lock"}  # who looked last


# ---- evaluation


def test_a_checkpoint_has_the_scores_that_the_run_gave(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = whole(*NET, *DDP)
    scores = events(run, "eval")[-1]
    said = f"test accuracy {scores['top1']:.2%}  top-5 {scores['top5']:.2%}  loss {scores['loss']:.4f}  360 images"
    said += f"  step {STEPS}"
    two = command(run.parent, "eval", "run", "--devices", 2)
    assert (two.code, two.out.strip(), two.err) == (0, said, "")
    many = command(run.parent, "eval", "run", "--devices", 3, "--batch", 2)  # no batch of two ranks' is split here
    assert (many.code, many.out.strip()) == (0, said)
    best = max(events(run, "eval"), key=lambda row: row["top1"])
    one = command(run.parent, "eval", "run/checkpoints/best")
    assert (one.code, one.err) == (0, "")
    assert f"{best['top1']:.2%}" in one.out
    assert f"step {best['step']}" in one.out
