"""`lockstep verify run`: a run on two ranks holds, and each fault in what it left is found and named."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import proof
from lockstep.checkpoint.layout import SUMS, digest, render
from lockstep.cli.main import main
from lockstep.proof import Check
from lockstep.verify import pages

from ..command import command, events, losses, refusal

DDP = ("--strategy", "ddp", "--devices", 2)
PLAIN = ("train", "digits", "--model", "mlp", "--batch", 50, "--epochs", 3)
CLAIMS = ("files", "steps", "losses", "rates", "evaluations", "summary", "checkpoints", "replicas", "ledger")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 69 steps whose third epoch, at a rate far too high, spoils the weights.

    So its best checkpoint is not its last one.
    """
    folder = tmp_path_factory.mktemp("whole")
    falls = ("--schedule", "multistep", "--milestones", 2, "--gamma", 1000, "--warmup", 0, "--lr", 0.05, "--clip", 1)
    ended = command(folder, "train", "digits", *DDP, "--epochs", 3, *falls, "--ledger", "--output", "run")
    assert ended.code == 0, ended
    return folder / "run"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))


def _outcomes(folder: Path) -> dict[str, str]:
    return {name: held["outcome"] for name, held in _json(folder / "summary.json")["proof"].items()}


def _json(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(path.read_text())
    return held


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


def test_a_run_on_two_ranks_with_more_asked_for_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--drop-last", "--accumulate", 3, "--ema", 0.9, "--max-steps", 40, "--schedule", "onecycle")
    assert command(tmp_path, *PLAIN, *DDP, *asked, "--output", "run").code == 0
    assert [row["step"] for row in events(tmp_path / "run", "eval")] == [28, 40]
    said = _holds(tmp_path / "run", capsys, "ledger")
    assert "ledger, not checked: not recorded; --ledger records it." in said
    assert said.endswith("run: 8 claims hold, 1 not checked.")


def test_a_run_that_was_stopped_and_resumed_on_other_ranks_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*PLAIN, "--schedule", "cosine", "--ledger", "--model", "tests.models:signalling", "--output", "run")
    stop = json.dumps({"number": signal.SIGTERM, "at": 20})
    assert command(tmp_path, *words, *DDP, SIGNALLING=stop).code == 75
    run = tmp_path / "run"
    stopped = len(losses(run))
    said = _holds(run, capsys, "evaluations")
    assert f"The run is not complete: it was stopped on request at step {stopped} of 87, and can be resumed." in said
    # More epochs make another schedule: the steps behind had, rightly, other rates.
    more = ("--resume", "auto", "--epochs", 4)
    assert command(tmp_path, *words, *more, "--devices", 3, "--strategy", "ddp", "--max-steps", 60).code == 0
    assert "not complete" not in _holds(run, capsys)
    alone = (*words[:-1], str(run), *more, "--accelerator", "cpu", "--strategy", "single", "--max-steps", 70)
    assert main([str(word) for word in alone]) == 0
    _holds(run, capsys, "replicas")
    assert "schedules over 3 and then 4 epochs" in _json(run / "summary.json")["proof"]["rates"]["found"]
    assert [row["step"] for row in events(run, "eval")] == [29, 58, 60, 70]
    _spoil(run, "step", stopped, lr=events(run, "step")[stopped]["lr"] * (1 + 2**-52))
    assert f"step {stopped + 1} had the learning rate" in refusal(capsys, "verify", "run", run, code=3)


def test_a_killed_run_is_judged_as_far_as_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*PLAIN, "--model", "tests.models:signalling", "--checkpoint-every", 4, "--log-every", 2, "--output", "run")
    kill = json.dumps({"number": signal.SIGKILL, "at": 40, "group": True})
    assert command(tmp_path, *words, *DDP, SIGNALLING=kill).code == -signal.SIGKILL
    run = tmp_path / "run"
    with (run / "steps.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    said = _holds(run, capsys, "summary", "replicas", "ledger")
    assert re.search(r"summary, not checked: there is none: it was killed after step \d+ of 87, or still runs\.", said)
    assert "not complete" in _holds(run, capsys, "summary", "replicas", "ledger"), (
        "what judging writes there is no summary of the run"
    )
    _spoil(run, "step", 7, loss=None)
    assert "losses fails: the loss of step 8" in refusal(capsys, "verify", "run", run, code=3)


# ---- what does not


def _lines(folder: Path) -> list[str]:
    lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def _rewrite(folder: Path, change: Callable[[list[str], list[int]], None], event: str) -> None:
    """Let `change` edit the lines of `steps.jsonl`; it is given where those of `event` stand."""
    lines = _lines(folder)
    change(lines, [index for index, line in enumerate(lines) if json.loads(line)["event"] == event])
    (folder / "steps.jsonl").write_text("".join(lines))


def _spoil(folder: Path, event: str, number: int, **fields: Any) -> None:
    """Change fields of the `number`-th event of its kind."""

    def change(lines: list[str], at: list[int]) -> None:
        lines[at[number]] = json.dumps(json.loads(lines[at[number]]) | fields) + "\n"

    _rewrite(folder, change, event)


def _delete(event: str, number: int) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda lines, at: lines.__delitem__(at[number]), event)


def _double(event: str, number: int) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda lines, at: lines.insert(at[number], lines[at[number]]), event)


def _swap(folder: Path) -> None:
    def change(lines: list[str], at: list[int]) -> None:
        lines[at[30]], lines[at[31]] = lines[at[31]], lines[at[30]]

    _rewrite(folder, change, "step")


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


def _cut(folder: Path) -> None:
    os.truncate(folder / "steps.jsonl", (folder / "steps.jsonl").stat().st_size - 20)


def _cut_off_the_end(folder: Path) -> None:
    (folder / "steps.jsonl").write_text("".join(_lines(folder)[:-1]))


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
    "a step deleted": (_delete("step", 16), "steps", r"step 18 follows step 16 \(steps.jsonl line \d+\)"),
    "a step doubled": (_double("step", 16), "steps", "step 17 follows step 17"),
    "two steps swapped": (_swap, "steps", "step 32 follows step 30"),
    "a step's samples": (_change("step", 16, samples=63), "steps", "step 17 has 63 samples of epoch 0, and .* 64 of"),
    "a last step's samples": (_change("step", 22, samples=64), "steps", "step 23 has 64 samples .* gives it 29"),
    "a step's epoch": (_change("step", 40, epoch=2), "steps", "step 41 has 64 samples of epoch 2"),
    "a step is no number": (_change("step", 40, step="41"), "files", "line [0-9]+ is an event step whose step cannot"),
    "the last steps deleted": (_delete("step", -1), "steps", "complete at step 68, and config.toml asks for 69"),
    "a loss of null": (_change("step", 3, loss=None), "losses", "the loss of step 4 is not a finite number"),
    "a loss of NaN": (_change("step", 3, loss=math.nan), "losses", "the loss of step 4 is not a finite number"),
    "a norm": (_change("step", 3, grad_norm=math.inf), "losses", "the grad_norm of step 4 is not a finite number"),
    "a rate": (_last_bit_of_a_rate, "rates", r"step 12 had the learning rate 0.0500\d+, and config.toml gives 0.05 "),
    "an evaluation deleted": (_delete("eval", 1), "evaluations", "the evaluation after step 46 is not in steps.jsonl"),
    "the last one deleted": (_delete("eval", 2), "evaluations", "the evaluation after step 69 is not in steps.jsonl"),
    "an evaluation doubled": (_double("eval", 0), "evaluations", "step 23 is evaluated twice"),
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
    "the last line cut": (_cut, "files", "the last line of steps.jsonl is cut short"),
    "the last line gone": (_cut_off_the_end, "files", "steps.jsonl lacks the end of the run, which summary.json has"),
    "the first line gone": (_delete("start", 0), "files", "steps.jsonl does not begin with the event of a start"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_named(copy: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    spoil, claim, words = FAULTS[fault]
    spoil(copy)
    said = refusal(capsys, "verify", "run", copy, code=3)
    assert said.startswith(f"{copy} is not what its records claim: {claim} fails: "), said
    assert re.search(words, said), said
    assert _outcomes(copy)[claim] == Check.FAILS
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


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (lambda page: False, "69 steps (the first: 1) are missing"),
        (lambda page: page.kind == pages.TRAIN, "3 evaluations (the first after step 23) not there"),
        (lambda page: page.kind == pages.TRAIN or page.epoch != 1, "1 evaluation (the first after step 46) not there"),
        (lambda page: page.kind == pages.EVAL, "69 steps (the first: 1) are missing"),
        (lambda page: page.kind == pages.EVAL or page.epoch > 0, "23 steps (the first: 1) are missing"),
    ],
)
def test_a_ledger_that_lacks_a_part_is_found(
    copy: Path, capsys: pytest.CaptureFixture[str], keep: Callable[[pages.Page], bool], said: str
) -> None:
    path = copy / pages.NAME
    path.write_bytes(b"".join(page.encode() for page in [*pages.read(path)] if keep(page)))
    found = refusal(capsys, "verify", "run", copy, code=3)
    assert "ledger fails: " in found
    assert said in found


def test_what_a_run_found_wrong_of_itself_stays_wrong(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = "the copies are apart"
    proof.add(copy, [Check(name="buffers", claim="buffers are alike", outcome=Check.FAILS, times=3, found=found)])
    assert "buffers fails: the copies are apart" in refusal(capsys, "verify", "run", copy, code=3)
    assert _json(copy / "summary.json")["proof"]["buffers"]["times"] == 3
