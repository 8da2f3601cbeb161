"""`lockstep verify run`: what a run leaves holds, each fault is found and named, and a verdict comes of anything."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import checkpoint
from lockstep.checkpoint import write
from lockstep.checks import pages
from lockstep.cli import flags
from lockstep.cli.main import main
from lockstep.engine import run
from lockstep.errors import Stopped
from lockstep.record import checks
from lockstep.record.checks import Check
from lockstep.record.result import Scores
from lockstep.sessions import scoring
from lockstep.verify import claims
from lockstep.world.world import World

from ..command import command, losses, refusal
from ..pool import RankPool

MANIFEST, STEPS, SUMMARY = "manifest.json", "steps.jsonl", "summary.json"
CLAIMS = {"files", "steps", "samples", "losses", "checkpoints", "replicas", "ledger"}
WORDS = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--strategy", "single", "--batch", 50)
Capture = pytest.CaptureFixture[str]
Spoil = Callable[[Path], object]


def _run(world: World, words: list[str]) -> str:
    torch.set_num_threads(1)
    try:
        run(flags.parse(words, prog="lockstep train"), world)
    except Stopped as stopped:
        return str(stopped)
    return ""


def _on_ranks(pool: RankPool, ranks: int, folder: Path, *words: object) -> str:
    """Train the digits on so many ranks; return why that was stopped, "" where it was not."""
    given = ("digits", "--accelerator", "cpu", "--strategy", "ddp", "--output", folder, *words)
    return str(pool.run(ranks, _run, [str(word) for word in given])[0])


def _train(folder: Path, *words: object, code: int = 0) -> Path:
    assert main([str(word) for word in (*WORDS, "--output", folder, *words)]) == code
    return folder


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 69 steps whose third epoch, at a rate far too high, spoils the weights.

    So its best checkpoint is not its last one.
    """
    folder = tmp_path_factory.mktemp("whole") / "run"
    falls = ("--schedule", "multistep", "--milestones", 2, "--gamma", 1000, "--warmup", 0, "--lr", 0.05, "--clip", 1)
    assert _on_ranks(pool, 2, folder, "--epochs", 3, *falls, "--ledger") == ""
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))


def _json(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(path.read_text())
    return held


def _found(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in claims.judge(folder).checks}


def _wrong(folder: Path) -> list[str]:
    return [f"{check.name}: {check.found}" for check in claims.judge(folder).failing]


def _outcomes(folder: Path) -> dict[str, str]:
    return {name: held["outcome"] for name, held in _json(folder / SUMMARY)["proof"].items()}


def _holds(folder: Path, capsys: Capture, *open_claims: str) -> str:
    """Judge the run, of which every claim must hold but for these, which must be open; return what was said."""
    capsys.readouterr()
    assert main(["verify", "run", str(folder)]) == 0, capsys.readouterr()
    found = _outcomes(folder)
    assert set(found) >= CLAIMS
    assert {name: outcome for name, outcome in found.items() if outcome != Check.HOLDS} == dict.fromkeys(
        open_claims, Check.OPEN
    )
    return " ".join(capsys.readouterr().out.split())


# ---- what holds


def test_a_whole_run_holds_and_says_so(copy: Path, capsys: Capture) -> None:
    before = _json(copy / SUMMARY)
    assert _holds(copy, capsys).endswith(f"{copy}: 7 claims hold.")
    summary = _json(copy / SUMMARY)
    judged = summary["proof"]
    assert summary | {"proof": {}} == before | {"proof": {}}
    assert (judged["steps"]["times"], judged["checkpoints"]["times"], judged["ledger"]["times"]) == (69, 3, 6)
    assert judged["replicas"] == before["proof"]["replicas"]
    sheet = (copy / "proof.md").read_text()
    assert "| Each optimizer step has its planned samples | **holds** | 69 | exactly |" in sheet


@pytest.mark.parametrize(
    "words",
    [
        "--drop-last --micro-batch 7 --clip 0.5 --ema 0.9 --optimizer adamw --lr 0.001 --max-steps 57",
        "--checkpoint-every 7 --schedule onecycle --lr-rule sqrt --base-batch 30 --max-steps 31",
    ],
)
def test_a_run_of_one_process_holds(tmp_path: Path, words: str) -> None:
    found = _found(_train(tmp_path / "run", "--epochs", 2, *words.split()))
    assert {name for name, check in found.items() if check.outcome != Check.HOLDS} == {"replicas", "ledger"}
    assert "one process" in found["replicas"].found
    assert found["ledger"].found == "not recorded; --ledger records it"


def test_a_run_that_is_complete_extended_or_carried_to_another_folder_holds(tmp_path: Path) -> None:
    first = _train(tmp_path / "first", "--epochs", 2)
    _train(first, "--epochs", 2, "--resume", "auto")
    assert _wrong(Path(shutil.copytree(first, tmp_path / "copy"))) == [], "folders in place of links"
    _train(first, "--epochs", 3, "--max-steps", 70, "--resume", "auto")
    assert _wrong(first) == []
    onwards = _train(tmp_path / "onwards", "--epochs", 3, "--resume", first)
    assert _wrong(onwards) == []
    _train(first, "--epochs", 3, "--resume", first / "checkpoints" / "step-00000058")
    assert _wrong(first) == [], "taken up from an older checkpoint"


def _scored(patch: pytest.MonkeyPatch, *tops: float) -> None:
    """Have the next evaluations come to these top1."""
    right, given = scoring.scored, iter(tops)

    def scored(*asked: Any, **how: Any) -> Scores:
        found = right(*asked, **how)
        assert found is not None
        return dataclasses.replace(found, top1=next(given), top5=1.0)

    patch.setattr(scoring, "scored", scored)


def _best(folder: Path) -> int:
    return int(checkpoint.load(folder / "checkpoints" / "best").meta["step"])


def test_best_is_the_best_of_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on in another one may never again be as good as it was."""
    _scored(monkeypatch, 0.8, 0.9, 0.5, 0.7, 0.6)
    first = _train(tmp_path / "first", "--epochs", 2)
    onwards = _train(tmp_path / "onwards", "--epochs", 5, "--resume", first)
    assert (_best(first), _best(onwards), _wrong(onwards)) == (58, 116, [])


def test_best_is_the_best_of_those_that_could_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_once(tensors: Any, path: Path) -> None:
        if "-00000058-" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_file(tensors, path)

    monkeypatch.setattr(write, "save_file", full_once)
    _scored(monkeypatch, 0.7, 0.9, 0.8)
    folder = _train(tmp_path / "run", "--epochs", 3)
    assert (_best(folder), _wrong(folder)) == (87, [])


def test_a_run_that_was_stopped_and_resumed_on_other_ranks_holds(
    pool: RankPool, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    words = ("--model", "tests.models:Interrupting", "--batch", 80, "--schedule", "cosine", "--ledger")
    assert _on_ranks(pool, 2, folder, *words, "--epochs", 3)
    stopped = len(losses(folder))
    said = _holds(folder, capsys)
    assert f"The run is not complete: it was stopped on request at step {stopped} of 54, and can be resumed." in said
    more = ("--resume", "auto", "--epochs", 4)
    assert _on_ranks(pool, 3, folder, *words, *more, "--max-steps", 40) == ""
    assert "not complete" not in _holds(folder, capsys)
    _train(folder, *words, *more, "--max-steps", 45)
    _holds(folder, capsys, "replicas")


def test_a_killed_run_is_judged_as_far_as_it_came(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "run"
    words = (*WORDS, "--model", "tests.models:signalling", "--checkpoint-every", 4, "--log-every", 2, "--epochs", 3)
    kill = json.dumps({"number": signal.SIGKILL, "at": 40, "group": True})
    assert command(tmp_path, *words, "--output", "run", SIGNALLING=kill).code == -signal.SIGKILL
    with (folder / STEPS).open("a") as file:
        file.write('{"event": "step", "st')
    said = _holds(folder, capsys, "replicas", "ledger")
    assert re.search(r"The run is not complete: it was killed after step \d+ of 87, or still runs", said)
    _set("step", 8, "loss", "null")(folder)
    assert "losses fails: the loss of step 8" in refusal(capsys, "verify", "run", folder, code=3)


def test_a_run_that_failed_is_told_as_such(tmp_path: Path, capsys: Capture) -> None:
    _train(tmp_path / "run", "--model", "tests.models:Exploding", code=1)
    said = refusal(capsys, "verify", "run", tmp_path / "run", code=3)
    assert re.search(r"losses fails: the loss of step 4 is not a finite number \(steps.jsonl line \d+\)", said)
    assert re.match(r"it failed at step \d+ of 580 with exit code 1", claims.judge(tmp_path / "run").unfinished)


# ---- what does not


def _edit(file: str, pattern: str, replacement: str) -> Spoil:
    """Return the edit of one place in a file of the run, by a regular expression."""

    def spoil(folder: Path) -> None:
        text, found = re.subn(pattern, replacement, (folder / file).read_text(), count=1)
        assert found
        (folder / file).write_text(text)

    return spoil


def _set(event: str, step: int, field: str, value: str) -> Spoil:
    """Return the edit of a field of the event of its kind for this step."""
    return _edit(STEPS, rf'("event": "{event}", "step": {step}, .*?"{field}": )[^,}}]+', rf"\g<1>{value}")


def _line(event: str, step: int, instead: str = "") -> Spoil:
    return _edit(STEPS, rf'(\{{"event": "{event}", "step": {step}, .*\n)', instead)


def _flip(folder: Path) -> None:
    path = folder / "checkpoints" / "best" / "model.safetensors"
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def _point(link: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / "checkpoints" / link).unlink()
        (folder / "checkpoints" / link).symlink_to(target)

    return spoil


def _ledger(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / pages.NAME).write_bytes(change((folder / pages.NAME).read_bytes()))

    return spoil


FAULTS: list[tuple[Spoil, str, str]] = [
    (_edit("config.toml", "\nepochs = 3\n", "\nepochs = \n"), "files", "config.toml is not valid TOML"),
    (lambda folder: (folder / MANIFEST).unlink(), "files", "manifest.json cannot be read"),
    (lambda folder: (folder / SUMMARY).unlink(), "files", "summary.json cannot be read"),
    (_line("log", 69, '{"event": "log", "st\n'), "files", r"steps.jsonl line \d+ cannot be read"),
    (_line("step", 17), "steps", r"step 18 follows step 16 \(steps.jsonl line \d+\)"),
    (_line("step", 69), "steps", "the finish at step 69 follows step 68"),
    (_edit(STEPS, '"first_step": 0', '"first_step": 7'), "steps", "step 1 follows step 7"),
    (_set("step", 23, "samples", "64"), "samples", "step 23 has 64 samples .* by the plan 29 samples"),
    (_edit(STEPS, '"steps_per_epoch": 23', '"steps_per_epoch": 0'), "samples", "its records cannot be read"),
    (_set("step", 4, "loss", "NaN"), "losses", "the loss of step 4 is not a finite number"),
    (_set("step", 5, "loss", '"low"'), "losses", "the loss of step 5 is not a finite number"),
    (_flip, "checkpoints", "checkpoints/best cannot be used: model.safetensors does not match"),
    (_point("last", "step-00000046"), "checkpoints", "last: it is of step 46, and the run of 69"),
    (_edit(STEPS, r'("event": "proof", .*?"at_step": )69', r"\g<1>67"), "replicas", "but the run's last step is 69"),
    (_edit("config.toml", "\nseed = 0\n", "\nseed = 1\n"), "ledger", "in step 1, rank 0 and rank 1 computed other"),
    (_edit(STEPS, '("event": "eval", "step": )46', r"\g<1>45"), "ledger", r"1 evaluation \(the first after step 45\)"),
    (_edit(STEPS, r'("name": "ledger", .*?"outcome": )"holds"', r'\g<1>"fails"'), "ledger", "whole epochs and"),
    (_ledger(lambda whole: whole[:-3]), "ledger", "is cut short"),
    (_ledger(lambda whole: whole[:300] + b"x" + whole[301:]), "ledger", "is damaged"),
    (lambda folder: (folder / pages.NAME).unlink(), "ledger", "the run kept a ledger.bin, and it is not there"),
]


@pytest.mark.parametrize(("spoil", "claim", "words"), FAULTS, ids=[words for _, _, words in FAULTS])
def test_each_fault_is_found_and_named(copy: Path, capsys: Capture, spoil: Spoil, claim: str, words: str) -> None:
    spoil(copy)
    said = refusal(capsys, "verify", "run", copy / "checkpoints" / "last", code=3)
    assert said.startswith(f"{copy} is not what its records claim: {claim} fails: "), said
    assert re.search(words, said), said
    assert _outcomes(copy)[claim] == Check.FAILS
    assert "**fails**" in (copy / "proof.md").read_text()


def test_what_was_found_wrong_before_stays_wrong(copy: Path, capsys: Capture) -> None:
    checks.add(copy, [Check(name="copies", claim="Copies are alike", outcome=Check.FAILS, found="they are apart")])
    assert "copies fails: they are apart" in refusal(capsys, "verify", "run", copy, code=3)
    assert _outcomes(copy)["copies"] == Check.FAILS
