"""What a run in one process leaves is judged by itself; whatever lies there, nothing but a verdict comes of it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep import proof
from lockstep.cli.main import main
from lockstep.files import write_json
from lockstep.proof import Check
from lockstep.prove import on_disk, records
from lockstep.verify.pages import TRAIN, read

from ..command import events, refusal

WORDS = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--strategy", "single", "--batch", 50)


def _train(folder: Path, *words: object) -> Path:
    assert main([str(word) for word in (*WORDS, "--output", folder, *words)]) == 0
    return folder


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Nets as small as these gain nothing from threads, and lose a lot to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 58 steps in 2 epochs."""
    return _train(tmp_path_factory.mktemp("whole") / "run", "--epochs", 2)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))


def _found(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in records.judge(folder).checks}


def _wrong(folder: Path) -> list[str]:
    return [f"{check.name}: {check.found}" for check in records.judge(folder).failing]


# ---- what holds


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--max-steps", 40),
        ("--max-steps", 29),
        ("--drop-last", "--max-steps", 57),
        ("--accumulate", 4, "--max-steps", 29),
        ("--micro-batch", 7, "--clip", 0.5, "--max-steps", 31),
        ("--ema", 0.9, "--optimizer", "adamw", "--lr", 0.001),
        ("--momentum", 0, "--no-nesterov", "--schedule", "onecycle"),
        ("--schedule", "step", "--milestones", 0.3, "--lr-rule", "sqrt", "--base-batch", 30),
        ("--batch", 5000, "--epochs", 3, "--checkpoint-every", 1),
        ("--precision", "fp64", "--checkpoint-every", 7, "--model", "resnet8", "--max-steps", 31),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_run_of_one_process_holds(tmp_path: Path, words: tuple[object, ...]) -> None:
    found = _found(_train(tmp_path / "run", "--epochs", 2, *words))
    assert {name: check.found for name, check in found.items() if check.outcome != Check.HOLDS} == {
        "replicas": found["replicas"].found,
        "ledger": "not recorded; --ledger records it",
    }
    assert found["replicas"].outcome == Check.OPEN
    assert "one process" in found["replicas"].found


def test_a_run_that_is_extended_complete_or_carried_to_another_folder_holds(copy: Path, tmp_path: Path) -> None:
    _train(copy, "--epochs", 2, "--resume", "auto")
    assert _wrong(copy) == []
    other = _train(tmp_path / "other", "--epochs", 2, "--resume", copy)
    assert _wrong(other) == []
    assert "begin after the last one" in _found(other)["evaluations"].found
    _train(copy, "--epochs", 3, "--max-steps", 70, "--resume", "auto")
    assert _wrong(copy) == []
    onwards = _train(tmp_path / "onwards", "--epochs", 3, "--resume", copy)
    found = _found(onwards)
    assert _wrong(onwards) == []
    assert found["steps"].found.endswith(
        "17 steps, 29 steps an epoch of 1,437 samples; the 70 before are in another folder"
    )
    assert [row["step"] for row in events(onwards, "eval")] == [87]


def test_a_run_taken_up_from_an_older_checkpoint_holds(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "--epochs", 2, "--max-steps", 40)
    older = run / "checkpoints" / "step-00000029"
    _train(run, "--epochs", 2, "--resume", older)
    assert _wrong(run) == []


def test_a_copy_of_a_run_that_has_folders_for_links_holds(whole: Path, tmp_path: Path) -> None:
    assert _wrong(Path(shutil.copytree(whole, tmp_path / "copy"))) == []


def test_a_run_that_failed_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*WORDS, "--model", "tests.models:Exploding", "--output", str(tmp_path / "run"))
    assert main([str(word) for word in words]) == 1
    capsys.readouterr()
    assert main(["verify", "run", str(tmp_path / "run")]) == 3
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"losses fails: the loss of step 4 is not a finite number \(steps.jsonl line \d+\)", said)
    assert re.search(r"The run is not complete: it failed at step \d+ of 580 with exit code 1\.", said)
    assert "checkpoints, not checked: none was written" in said


def test_under_fp16_an_overflow_is_no_fault(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "step":
            line["grad_norm"] = math.inf if line["step"] == 3 else 1.0
    for precision, outcome in (("fp32", Check.FAILS), ("fp16", Check.HOLDS)):
        lines[0]["chosen"]["precision"] = precision
        (copy / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert _found(copy)["losses"].outcome == outcome


# ---- the ledger


def test_a_ledger_is_judged_where_there_is_one(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "--max-steps", 40, "--ledger")
    own = proof.from_json(json.loads((run / "summary.json").read_text())["proof"])
    found = _found(run)["ledger"]
    assert (found.outcome, found.times) == (Check.HOLDS, 4)
    assert [found.cost_s] == [check.cost_s for check in own if check.name == "ledger"]

    path = run / "ledger.bin"
    pages, whole = list(read(path)), path.read_bytes()
    page = next(page for page in pages if page.kind == TRAIN and page.epoch == 0)
    page.indices[7] = page.indices[8]
    for data, words in (
        (b"".join(page.encode() for page in pages), "epoch 0: sample "),
        (b"".join(page.encode() for page in pages[:-3]), "missing"),
        (whole[:-3], "is cut short"),
        (whole[:300] + b"x" + whole[301:], "is damaged"),
        (None, "the run kept a ledger.bin, and it is not there"),
    ):
        path.unlink() if data is None else path.write_bytes(data)
        (said,) = _wrong(run)
        assert re.match(f"ledger: .*{words}", said), said


# ---- what lies there otherwise


def test_what_is_no_run_is_refused(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not there; give a run's folder" in refusal(capsys, "verify", "run", tmp_path / "nothing")
    assert "lies in no run's folder" in refusal(capsys, "verify", "run", tmp_path / "empty")
    assert "takes one run, found 0" in refusal(capsys, "verify", "run")
    assert "takes one run, found 2" in refusal(capsys, "verify", "run", whole, whole)
    assert "takes no flags, found --all" in refusal(capsys, "verify", "run", whole, "--all")
    assert main(["verify", "run", "--help"]) == 0
    assert "usage: lockstep verify run RUN" in capsys.readouterr().out


@pytest.mark.parametrize("blocked", ["proof.md", "summary.json"])
def test_where_nothing_can_be_written_the_verdict_stands(
    copy: Path, blocked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if blocked == "summary.json":
        (copy / blocked).write_text('{"exit": 0, "proof"')
    else:
        (copy / blocked).unlink(missing_ok=True)
        (copy / blocked).mkdir()
    before = (copy / "summary.json").read_text()
    code = main(["verify", "run", str(copy)])
    said = "".join(capsys.readouterr())
    assert code == (3 if blocked == "summary.json" else 0)
    assert f"warning: proof.md and summary.json in {copy} could not be written (" in said
    assert "the verdict stands." in said
    assert blocked != "summary.json" or (copy / "summary.json").read_text() == before


STRANGE: tuple[object, ...] = (None, True, -1, 0, 1.5, 10**30, "x", [], {}, [1], {"a": 1}, math.nan)


def _scribble(path: Path, chance: random.Random) -> str:
    """Overwrite some bytes of a file with others; return what was done."""
    data = path.read_bytes()
    at, length = chance.randrange(len(data)), chance.choice([1, 3, 200])
    path.write_bytes(data[:at] + bytes(chance.randrange(256) for _ in range(length)) + data[at + length :])
    return f"{path.name}: {length} bytes from {at} on"


def _replace(path: Path, chance: random.Random) -> str:
    """Give something in a file of JSON a value that it cannot have; return what was done."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = chance.randrange(len(lines)) if chance.random() < 0.7 else 0
    row = owner = json.loads(lines[number])
    key, value = chance.choice([*row]), chance.choice(STRANGE)
    while isinstance(owner[key], dict) and owner[key] and chance.random() < 0.7:
        owner = owner[key]
        key = chance.choice([*owner])
    owner[key] = value
    lines[number] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")
    return f"{path.name} line {number + 1}: {key} = {value!r}"


def test_whatever_lies_there_a_verdict_comes_of_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(6)
    assert main(["verify", "run", str(copy)]) == 0
    kept = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}
    json_files = ["steps.jsonl", "steps.jsonl", "summary.json", "manifest.json"]
    for _ in range(200):
        done = [_replace(copy / chance.choice(json_files), chance) for _ in range(chance.choice([0, 1, 1, 3]))]
        done += [_scribble(copy / chance.choice([*json_files, "config.toml"]), chance)] if len(done) != 1 else []
        code = main(["verify", "run", str(copy)])
        said = capsys.readouterr()
        assert code in (0, 3), (done, said)
        assert (code == 3) == ("is not what its records claim" in said.err), (done, said)
        for name, data in kept.items():
            (copy / name).write_bytes(data)


@pytest.mark.parametrize(
    ("gone", "failing"),
    [
        ("summary.json", ["summary"]),
        ("steps.jsonl", ["files"]),
        ("config.toml", ["files"]),
        ("manifest.json", ["files"]),
    ],
)
def test_a_file_that_is_gone_is_told_once(copy: Path, gone: str, failing: list[str]) -> None:
    (copy / gone).unlink()
    assert [check.name for check in records.judge(copy).failing] == failing
    if gone == "steps.jsonl":
        assert _found(copy)["replicas"].found.endswith("steps.jsonl cannot be read")


def test_a_summary_of_an_earlier_start_is_no_summary_of_this_one(copy: Path) -> None:
    before = (copy / "summary.json").read_bytes()
    _train(copy, "--epochs", 3, "--resume", "auto", "--max-steps", 70)
    lines = (copy / "steps.jsonl").read_text().splitlines(keepends=True)
    # As a kill after step 65 leaves it.
    (last,) = [index for index, line in enumerate(lines) if '"step": 65' in line and '"event": "step"' in line]
    (copy / "steps.jsonl").write_text("".join(lines[: last + 1]) + lines[last + 1][:30])
    for name in ("last", "best"):
        (copy / "checkpoints" / name).unlink()
        (copy / "checkpoints" / name).symlink_to("step-00000058")
    (copy / "summary.json").write_bytes(before)
    judged = records.judge(copy)
    assert [(check.name, check.found) for check in judged.failing] == []
    assert judged.unfinished == "it was killed after step 65 of 70, or still runs"
    assert _found(copy)["summary"].found == f"the one there is an earlier start's: {judged.unfinished}"


def test_the_folder_is_found(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_disk.find(copy) == copy
    for part in ("checkpoints", "checkpoints/last", "checkpoints/step-00000058"):
        assert on_disk.find(copy / part).resolve() == copy.resolve()
    monkeypatch.chdir(copy / "checkpoints" / "last")
    assert on_disk.find(Path()).resolve() == copy.resolve()
    write_json(copy / "summary.json", {"proof": {}})
    assert on_disk.read(copy).summary is None
