"""`lockstep verify run`: what a run leaves holds, each fault is found and named, and a verdict comes of anything."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import proof
from lockstep.checkpoint.layout import SUMS, digest, render
from lockstep.cli import flags
from lockstep.cli.main import main
from lockstep.errors import Stopped
from lockstep.proof import Check
from lockstep.prove import records
from lockstep.runs import run
from lockstep.verify import pages
from lockstep.verify.pages import EVAL, TRAIN, Page
from lockstep.world import World

from ..command import command, events, losses, refusal
from ..pool import RankPool

CLAIMS = ("files", "steps", "losses", "rates", "evaluations", "summary", "checkpoints", "replicas", "ledger")
WORDS = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--strategy", "single", "--batch", 50)


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
    return {check.name: check for check in records.judge(folder).checks}


def _wrong(folder: Path) -> list[str]:
    return [f"{check.name}: {check.found}" for check in records.judge(folder).failing]


def _outcomes(folder: Path) -> dict[str, str]:
    return {name: held["outcome"] for name, held in _json(folder / "summary.json")["proof"].items()}


def _holds(folder: Path, capsys: pytest.CaptureFixture[str], *open_claims: str) -> str:
    """Judge the run, of which every claim must hold but for these, which must be open; return what was said."""
    capsys.readouterr()
    assert main(["verify", "run", str(folder)]) == 0, capsys.readouterr()
    found = _outcomes(folder)
    assert set(CLAIMS) <= set(found)
    assert {name: outcome for name, outcome in found.items() if outcome != Check.HOLDS} == dict.fromkeys(
        open_claims, Check.OPEN
    )
    return " ".join(capsys.readouterr().out.split())


# ---- what holds


def test_a_whole_run_holds_and_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _json(copy / "summary.json")
    assert _holds(copy, capsys).endswith(f"{copy}: 9 claims hold.")
    summary = _json(copy / "summary.json")
    assert {name: value for name, value in summary.items() if name != "proof"} == {
        name: value for name, value in before.items() if name != "proof"
    }
    assert (summary["proof"]["steps"]["times"], summary["proof"]["evaluations"]["times"]) == (69, 3)
    assert summary["proof"]["rates"]["tolerance"] == proof.BIT_FOR_BIT
    for name, own in before["proof"].items():
        judged, varies = summary["proof"][name], {"found": "", "times": 0, "claim": ""}
        assert own | varies == judged | varies
        assert judged["claim"].startswith(own["claim"]), "of a ledger, more is asked afterwards"
    assert summary["proof"]["replicas"] == before["proof"]["replicas"]
    sheet = (copy / "proof.md").read_text()
    assert "| Each step had the learning rate of the config's schedule | **holds** | 69 | bit for bit |" in sheet


def test_it_is_found_from_a_checkpoint_and_judged_anew_each_time(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _spoil(copy, "step", 16, samples=63)
    for _ in range(2):
        assert "step 17 has 63 samples" in refusal(capsys, "verify", "run", copy / "checkpoints" / "last", code=3)
    assert _outcomes(copy)["steps"] == Check.FAILS
    _spoil(copy, "step", 16, samples=64)
    _holds(copy, capsys)


@pytest.mark.parametrize(
    "words",
    [
        ("--max-steps", 29),
        ("--drop-last", "--max-steps", 57),
        ("--accumulate", 4, "--max-steps", 40),
        ("--micro-batch", 7, "--clip", 0.5, "--ema", 0.9, "--optimizer", "adamw", "--lr", 0.001, "--max-steps", 31),
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


def test_a_run_that_is_complete_extended_or_carried_to_another_folder_holds(tmp_path: Path) -> None:
    first = _train(tmp_path / "first", "--epochs", 2)
    _train(first, "--epochs", 2, "--resume", "auto")
    assert _wrong(first) == []
    assert _wrong(Path(shutil.copytree(first, tmp_path / "copy"))) == [], "folders in place of links"
    other = _train(tmp_path / "other", "--epochs", 2, "--resume", first)
    assert _wrong(other) == []
    assert "begin after the last one" in _found(other)["evaluations"].found
    _train(first, "--epochs", 3, "--max-steps", 70, "--resume", "auto")
    assert _wrong(first) == []
    onwards = _train(tmp_path / "onwards", "--epochs", 3, "--resume", first)
    assert _wrong(onwards) == []
    assert "17 steps, 29 steps an epoch of 1,437 samples; the 70 before are" in _found(onwards)["steps"].found
    assert [row["step"] for row in events(onwards, "eval")] == [87]
    _train(first, "--epochs", 3, "--resume", first / "checkpoints" / "step-00000058")
    assert _wrong(first) == [], "taken up from an older checkpoint"


def test_a_run_on_two_ranks_with_more_asked_for_holds(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--drop-last", "--accumulate", 3, "--ema", 0.9, "--max-steps", 40, "--schedule", "onecycle")
    assert _on_ranks(pool, 2, tmp_path / "run", "--model", "mlp", "--batch", 50, "--epochs", 3, *asked) == ""
    assert [row["step"] for row in events(tmp_path / "run", "eval")] == [28, 40]
    said = _holds(tmp_path / "run", capsys, "ledger")
    assert "ledger, not checked: not recorded; --ledger records it." in said
    assert said.endswith("run: 8 claims hold, 1 not checked.")


def test_a_run_that_was_stopped_and_resumed_on_other_ranks_holds(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ("--model", "tests.models:Interrupting", "--batch", 80, "--schedule", "cosine", "--ledger")
    assert _on_ranks(pool, 2, folder, *words, "--epochs", 3)
    stopped = len(losses(folder))
    said = _holds(folder, capsys)
    assert f"The run is not complete: it was stopped on request at step {stopped} of 54, and can be resumed." in said
    # More epochs make another schedule: the steps behind had, rightly, other rates.
    more = ("--resume", "auto", "--epochs", 4)
    assert _on_ranks(pool, 3, folder, *words, *more, "--max-steps", 40) == ""
    assert "not complete" not in _holds(folder, capsys)
    _train(folder, *words, *more, "--max-steps", 45)
    _holds(folder, capsys, "replicas")
    assert "schedules over 3 and then 4 epochs" in _json(folder / "summary.json")["proof"]["rates"]["found"]
    assert [row["step"] for row in events(folder, "eval")] == [18, 36, 40, 45]
    _spoil(folder, "step", stopped, lr=events(folder, "step")[stopped]["lr"] * (1 + 2**-52))
    assert f"step {stopped + 1} had the learning rate" in refusal(capsys, "verify", "run", folder, code=3)


def test_a_killed_run_is_judged_as_far_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kill = json.dumps({"number": signal.SIGKILL, "at": 40, "group": True})
    saving = ("--checkpoint-every", 4, "--log-every", 2, "--epochs", 3)
    words = (*WORDS, "--model", "tests.models:signalling", *saving, "--output", "run")
    assert command(tmp_path, *words, SIGNALLING=kill).code == -signal.SIGKILL
    folder = tmp_path / "run"
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    for _ in range(2):  # what judging writes there is no summary of the run
        said = _holds(folder, capsys, "summary", "replicas", "ledger")
        assert re.search(
            r"summary, not checked: there is none: it was killed after step \d+ of 87, or still runs\.", said
        )
        assert "not complete" in said
    _spoil(folder, "step", 7, loss=None)
    assert "losses fails: the loss of step 8" in refusal(capsys, "verify", "run", folder, code=3)


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


# ---- what does not


def _lines(folder: Path) -> list[str]:
    lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _rewrite(folder: Path, change: Callable[[list[str], list[int]], object], event: str) -> None:
    """Let `change` edit the lines of `steps.jsonl`; it is given where those of `event` stand."""
    lines = _lines(folder)
    change(lines, [index for index, line in enumerate(lines) if json.loads(line)["event"] == event])
    (folder / "steps.jsonl").write_text("".join(lines))


def _spoil(folder: Path, event: str, number: int, **fields: Any) -> None:
    """Change fields of the `number`-th event of its kind."""

    def change(lines: list[str], at: list[int]) -> None:
        lines[at[number]] = json.dumps(json.loads(lines[at[number]]) | fields) + "\n"

    _rewrite(folder, change, event)


def _edit(event: str, change: Callable[[list[str], list[int]], object]) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, change, event)


def _change(event: str, number: int, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: _spoil(folder, event, number, **fields)


def _last_bit_of_a_rate(folder: Path) -> None:
    _spoil(folder, "step", 11, lr=math.nextafter(events(folder, "step")[11]["lr"], 1))


def _in_json(name: str, **fields: Any) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        (folder / name).write_text(json.dumps(_json(folder / name) | fields))

    return fault


def _in_config(before: str, after: str) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        text = (folder / "config.toml").read_text()
        assert f"\n{before}\n" in text
        (folder / "config.toml").write_text(text.replace(f"\n{before}\n", f"\n{after}\n"))

    return fault


def _flip(name: str) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        path = folder / "checkpoints" / name / "model.safetensors"
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 1
        path.write_bytes(held)

    return fault


def _point(link: str, target: str) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        (folder / "checkpoints" / link).unlink()
        (folder / "checkpoints" / link).symlink_to(target)

    return fault


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _end_at(folder: Path, size: int) -> None:
    os.truncate(folder / "steps.jsonl", (folder / "steps.jsonl").stat().st_size - size)


def _poison(folder: Path) -> None:
    """Make a running statistic infinite, and all checksums right."""
    from safetensors.torch import load_file, save_file

    path = folder / "checkpoints" / "step-00000069"
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("running_var"))
    tensors[name][1] = math.inf
    save_file(tensors, path / "model.safetensors")
    (path / SUMS).write_bytes(render({name: digest(path / name) for name in _json(path / SUMS)}))


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a step deleted": (
        _edit("step", lambda lines, at: lines.pop(at[16])),
        "steps",
        r"step 18 follows step 16 \(steps.jsonl line \d+\)",
    ),
    "a step doubled": (
        _edit("step", lambda lines, at: lines.insert(at[16], lines[at[16]])),
        "steps",
        "step 17 follows step 17",
    ),
    "two steps swapped": (
        _edit("step", lambda lines, at: lines.insert(at[30], lines.pop(at[31]))),
        "steps",
        "step 32 follows step 30",
    ),
    "a step's samples": (_change("step", 16, samples=63), "steps", "step 17 has 63 samples of epoch 0, and .* 64 of"),
    "a last step's samples": (_change("step", 22, samples=64), "steps", "step 23 has 64 samples .* gives it 29"),
    "a step's epoch": (_change("step", 40, epoch=2), "steps", "step 41 has 64 samples of epoch 2"),
    "a step is no number": (_change("step", 40, step="41"), "files", "line [0-9]+ is an event step whose step cannot"),
    "the last steps deleted": (
        _edit("step", lambda lines, at: lines.pop(at[-1])),
        "steps",
        "complete at step 68, and config.toml asks for 69",
    ),
    "a loss of null": (_change("step", 3, loss=None), "losses", "the loss of step 4 is not a finite number"),
    "a loss of NaN": (_change("step", 3, loss=math.nan), "losses", "the loss of step 4 is not a finite number"),
    "a norm": (_change("step", 3, grad_norm=math.inf), "losses", "the grad_norm of step 4 is not a finite number"),
    "a rate": (_last_bit_of_a_rate, "rates", r"step 12 had the learning rate 0.0500\d+, and config.toml gives 0.05 "),
    "an evaluation deleted": (
        _edit("eval", lambda lines, at: lines.pop(at[1])),
        "evaluations",
        "the evaluation after step 46 is not in steps.jsonl",
    ),
    "the last one deleted": (
        _edit("eval", lambda lines, at: lines.pop(at[2])),
        "evaluations",
        "the evaluation after step 69 is not in steps.jsonl",
    ),
    "an evaluation doubled": (
        _edit("eval", lambda lines, at: lines.insert(at[0], lines[at[0]])),
        "evaluations",
        "step 23 is evaluated twice",
    ),
    "an evaluation's samples": (_change("eval", 1, samples=359), "evaluations", "step 46 has 359 samples, and .* 360"),
    "an evaluation's step": (_change("eval", 1, step=45), "evaluations", "of step 45 stands after step 46"),
    "an evaluation's top1": (_change("eval", 1, top1=0.5001), "evaluations", "is no share of 360 samples"),
    "the best one's loss": (_change("eval", 1, loss=0.5), "checkpoints", "best: its loss is .*, and step 46 had 0.5"),
    "another share": (_change("eval", 0, top1=0.9), "summary", "best_top1 is 0.8.*, and by steps.jsonl it is 0.9"),
    "the summary's top1": (_in_json("summary.json", top1=0.5), "summary", "top1 is 0.5, and by steps.jsonl it is"),
    "its best": (_in_json("summary.json", best_top1=0.95), "summary", "best_top1 is 0.95, and by steps.jsonl it is"),
    "its steps": (_in_json("summary.json", steps=70), "summary", "steps is 70, and by steps.jsonl it is 69"),
    "its exit code": (_in_json("summary.json", exit=1), "summary", "exit is 1, and by steps.jsonl it is 0"),
    "its times": (_in_json("summary.json", epoch_s=[1.0, 1.0, 1.0]), "summary", r"epoch_s is \[1.0, 1.0, 1.0\]"),
    "no summary": (_remove("summary.json"), "summary", "summary.json is not there or is none, and .* exit code 0"),
    "a bit of last": (
        _flip("last"),
        "checkpoints",
        "checkpoints/last cannot be used: model.safetensors does not match",
    ),
    "a bit of best": (
        _flip("best"),
        "checkpoints",
        "checkpoints/best cannot be used: model.safetensors does not match",
    ),
    "another best": (_point("best", "step-00000069"), "checkpoints", "best: it is of step 69 .* step 46 had 0"),
    "another last": (_point("last", "step-00000046"), "checkpoints", "last: it is of step 46, and the run of 69"),
    "no last": (_remove("checkpoints/last"), "checkpoints", "There is no checkpoint at .*checkpoints/last"),
    "an infinity": (_poison, "checkpoints", "last: model/.*running_var is not finite"),
    "the rate asked for": (_in_config("lr = 0.05", "lr = 0.06"), "rates", "step 1 had the learning rate 0.05, .* 0.06"),
    "the seed": (_in_config("seed = 0", "seed = 1"), "checkpoints", "trained with seed 0, and config.toml has 1"),
    "the batch": (_in_config("batch = 64", "batch = 32"), "steps", "has batch 32, and the run was started with 64"),
    "the epochs": (_in_config("epochs = 3", "epochs = 4"), "steps", "asks for 4 epochs, and the run was last started"),
    "a broken config": (_in_config("epochs = 3", "epochs = "), "files", "config.toml is not valid TOML"),
    "no config": (_remove("config.toml"), "files", "config.toml cannot be read: No such file"),
    "the plan": (
        _in_json("manifest.json", batch_plan={"global_size": 64, "ranks": 3, "accumulation": 1}),
        "steps",
        "manifest.json has batch_plan .*'ranks': 3.* started with .*'ranks': 2",
    ),
    "what was chosen": (_in_json("manifest.json", chosen={}), "steps", "manifest.json has chosen {}, and the run was"),
    "no manifest": (_remove("manifest.json"), "files", "manifest.json cannot be read: No such file"),
    "no steps": (_remove("steps.jsonl"), "files", "steps.jsonl cannot be read: No such file"),
    "the last line cut": (lambda folder: _end_at(folder, 20), "files", "the last line of steps.jsonl is cut short"),
    "the last line gone": (
        lambda folder: _end_at(folder, len(_lines(folder)[-1])),
        "files",
        "steps.jsonl lacks the end of the run, which summary.json has",
    ),
    "the first line gone": (
        _edit("start", lambda lines, at: lines.pop(at[0])),
        "files",
        "steps.jsonl does not begin with the event of a start",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_named(copy: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    spoil, claim, words = FAULTS[fault]
    spoil(copy)
    said = refusal(capsys, "verify", "run", copy, code=3)
    assert said.startswith(f"{copy} is not what its records claim: {claim} fails: "), said
    assert re.search(words, said), said
    assert _outcomes(copy)[claim] == Check.FAILS
    if fault.startswith("no "):
        assert [name for name, outcome in _outcomes(copy).items() if outcome == Check.FAILS] == [claim], "told once"
    assert "**fails**" in (copy / "proof.md").read_text()


# ---- what the run wrote of itself


def test_replicas_have_to_be_compared_after_the_last_step(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = _json(copy / "summary.json")["proof"]["replicas"]
    assert own["found"].count("last after step 69") == 1
    # What is edited in the summary is no proof: the run's own events tell.
    proof.add(copy, proof.from_json({"replicas": own | {"outcome": Check.FAILS, "times": 0}}))
    _holds(copy, capsys)
    assert _json(copy / "summary.json")["proof"]["replicas"] == own
    earlier = own | {"found": own["found"].replace("last after step 69", "last after step 67"), "at_step": 67}
    _spoil(copy, "proof", -1, checks={"replicas": earlier})
    for _ in range(2):
        said = refusal(capsys, "verify", "run", copy, code=3)
        assert re.search("replicas fails: .* last after step 67", said)
        assert said.count("; but the run's last step is 69.") == 1


def _another_index(page: Page) -> Page:
    if page.kind == TRAIN and page.epoch == 0:
        page.indices[7] = page.indices[8]
    return page


LEDGERS: tuple[tuple[Callable[[bytes, list[Page]], bytes | list[Page] | None], str], ...] = (
    (lambda whole, held: [_another_index(page) for page in held], "epoch 0: sample "),
    (lambda whole, held: held[:-3], "missing"),
    (lambda whole, held: whole[:-3], "is cut short"),
    (lambda whole, held: whole[:300] + b"x" + whole[301:], "is damaged"),
    (lambda whole, held: None, "the run kept a ledger.bin, and it is not there"),
    (lambda whole, held: [], r"69 steps \(the first: 1\) are missing"),
    (
        lambda whole, held: [page for page in held if page.kind == TRAIN],
        r"3 evaluations \(the first after step 23\) not there",
    ),
    (
        lambda whole, held: [page for page in held if page.kind == TRAIN or page.epoch != 1],
        r"1 evaluation \(the first after step 46\) not there",
    ),
    (lambda whole, held: [page for page in held if page.kind == EVAL], r"69 steps \(the first: 1\) are missing"),
    (
        lambda whole, held: [page for page in held if page.kind == EVAL or page.epoch > 0],
        r"23 steps \(the first: 1\) are missing",
    ),
)


def test_a_ledger_is_judged_where_there_is_one(copy: Path) -> None:
    own = proof.from_json(_json(copy / "summary.json")["proof"])
    found = _found(copy)["ledger"]
    assert (found.outcome, found.times) == (Check.HOLDS, 6)
    assert [found.cost_s] == [check.cost_s for check in own if check.name == "ledger"]
    path = copy / pages.NAME
    whole = path.read_bytes()
    for change, words in LEDGERS:
        path.write_bytes(whole)
        data = change(whole, list(pages.read(path)))
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data if isinstance(data, bytes) else b"".join(page.encode() for page in data))
        (said,) = _wrong(copy)
        assert re.match(f"ledger: .*{words}", said), said


def test_what_a_run_found_wrong_of_itself_stays_wrong(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = "the copies are apart"
    proof.add(copy, [Check(name="buffers", claim="buffers are alike", outcome=Check.FAILS, times=3, found=found)])
    assert "buffers fails: the copies are apart" in refusal(capsys, "verify", "run", copy, code=3)
    assert _json(copy / "summary.json")["proof"]["buffers"]["times"] == 3


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
    for _ in range(100):
        done = [_replace(copy / chance.choice(json_files), chance) for _ in range(chance.choice([0, 1, 1, 3]))]
        done += [_scribble(copy / chance.choice([*json_files, "config.toml"]), chance)] if len(done) != 1 else []
        code = main(["verify", "run", str(copy)])
        said = capsys.readouterr()
        assert code in (0, 3), (done, said)
        assert (code == 3) == ("is not what its records claim" in said.err), (done, said)
        for name, data in kept.items():
            (copy / name).write_bytes(data)


def test_a_summary_of_an_earlier_start_is_no_summary_of_this_one(tmp_path: Path) -> None:
    copy = _train(tmp_path / "run", "--epochs", 2)
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
