"""Files of others: no code that they name is imported, and no name in them acts on a terminal."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from lockstep.cli.main import main
from lockstep.config.options import from_toml, override, to_toml
from lockstep.config.schema import RunConfig
from lockstep.files import write_json
from lockstep.monitor import failures
from lockstep.record import checks
from lockstep.record.checks import Check
from lockstep.screen import Screen, line

from ..command import refusal
from ..hostile import NAME, obeyed

# --- code

_LOSS = """
from pathlib import Path
from torch.nn.functional import cross_entropy as loss
Path("imported").touch()
"""
_VERBS = (
    ("eval", "run"),
    ("eval", "run/checkpoints/last"),
    ("train", "--config", "run/config.toml"),
    ("train", "digits", "--config=run/config.toml", "--resume", "run"),
    ("verify", "gradients", "--config", "run/config.toml"),
    ("verify", "curve", "--config", "run/config.toml"),
    ("submit", "slurm", "--dry-run", "--config", "run/config.toml"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules that leave a file `imported`, and a run that may name them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.py").write_text(_LOSS)
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "__init__.py").write_text(_LOSS)
    (tmp_path / "run" / "checkpoints" / "last").mkdir(parents=True)
    return tmp_path


def _imported(folder: Path) -> bool:
    return (folder / "imported").exists() or bool({"strange", "parent"} & set(sys.modules))


@pytest.mark.parametrize("words", _VERBS, ids=" ".join)
def test_code_that_a_file_names_is_not_imported(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("model", "data", "loss"):
        (folder / "run" / "config.toml").write_text(f'{key} = "parent.strange:x y"\nlabel-smoothing = 0\n')
        told = refusal(capsys, *words)
        assert told == (
            "run/config.toml names code, which is imported only if the command line names it; if you trust it, "
            f"add --{key} 'parent.strange:x y'."
        )
        # Not even where it seems to be a name of ours.
        (folder / "run" / "config.toml").write_text(f'{key} = "parent.strange"\n')
        assert "parent.strange" in refusal(capsys, *words)
        assert not _imported(folder)


@pytest.mark.parametrize("words", [("train",), ("run", "train.py")], ids=" ".join)
def test_a_tracker_that_a_file_names_is_not_imported(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("")
    (folder / "run" / "config.toml").write_text('track = ["csv", "strange:Tracker"]\n')
    told = refusal(capsys, words[0], "--config", "run/config.toml", *words[1:])
    assert told.endswith("if you trust it, add --track csv --track strange:Tracker.")
    assert not _imported(folder)


def test_no_other_verb_imports_what_a_file_names_nor_seeks_one_elsewhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 'model = "strange:x"\ndata = "strange:x"\nloss = "strange:x"\ntrack = ["strange:x"]\n'
    (folder / "config.toml").write_text(code)
    for path in ("run", "run/checkpoints/last"):
        assert "there is no config.toml" in refusal(capsys, "eval", path)
    (folder / "run" / "config.toml").write_text(code)
    (folder / "run" / "manifest.json").write_text("{}")
    for words in (("diff", "run", "run"), ("train", "digits", "--resume", "run")):
        assert main([*words]) != 0
    assert main(["doctor", "--accelerator", "cpu", "--config", "run/config.toml"]) == 0
    assert not _imported(folder)


def test_code_that_the_command_line_repeats_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(_LOSS)
    (folder / "mine.toml").write_text('model = "mlp"\nloss = "mine:loss"\nmax-steps = 1\naccelerator = "cpu"\n')
    for words in (("train", "--config", "mine.toml", "--output", "trained"), ("eval", "trained")):
        told = refusal(capsys, *words)
        added = shlex.split(told.rpartition("add ")[2].removesuffix("."))
        assert main([*words, *added]) == 0
    assert (folder / "imported").exists()
    assert "test accuracy" in capsys.readouterr().out


# --- what is said


def test_a_name_on_a_screen_neither_acts_nor_begins_a_line() -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=True, color_system=None, width=400, _environ={})
    table = Table(box=None, show_header=False)
    table.add_row(line(NAME, (NAME, "bold")))
    screen.say(NAME, (NAME, "link x:y"))
    screen.print(table)
    screen.print("[red]c[/] [link=x:y]d :smile:")
    shown = file.getvalue()
    assert not obeyed(shown.replace("\x1b[1m", "").replace("\x1b[0m", "").encode())
    assert shown.count("[red]c[/] [link=x:y]d :smile:") == 5
    assert len(shown.splitlines()) == 3


def test_what_is_written_has_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    config = override(RunConfig(), model=NAME, output=f"/x{NAME}")
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_toml((tmp_path / "config.toml").read_text()) == config
    write_json(tmp_path / "x.json", {NAME: [NAME]})
    assert json.loads((tmp_path / "x.json").read_text()) == {NAME: [NAME]}
    check = Check(name=NAME, claim=NAME + "| <b>", outcome=NAME, tolerance=NAME, found=NAME)
    (tmp_path / "proof.md").write_text(checks.sheet(NAME, [check]))
    failures.write(failures.Failure(0, NAME, NAME, f"Traceback\n{NAME}\n"), tmp_path)
    for path in tmp_path.iterdir():
        assert not obeyed(path.read_bytes()), path
        assert b"\nlockstep: forged" not in path.read_bytes() or path.name == "rank_0.txt"
    assert r"\| \<b>" in (tmp_path / "proof.md").read_text()
    assert "forged" in (tmp_path / "rank_0.txt").read_text().splitlines()[0]


def _of_configs(folder: Path) -> list[tuple[object, ...]]:
    text = json.dumps(NAME)
    asked: list[tuple[object, ...]] = []
    for number, words in enumerate(
        [f"{text} = 1", f"[{text}]\nx = 1", "model = 1\u202e", f"epochs = {text}", f"gpus = [{text}]"]
        + [f"{key} = {text}" for key in ("model", "data", "optimizer", "strategy", "launcher", "loss", "nodes")]
    ):
        path = folder / f"{number}{NAME.replace('/', '')}.toml"
        path.write_text(words)
        asked.append(("train", "--config", path))
    return [*asked, ("train", "--config", folder / NAME), ("train", NAME), ("train", "digits", f"--{NAME}", NAME)]


def _of_runs(folder: Path) -> list[tuple[object, ...]]:
    run = folder / f"run{NAME.replace('/', '')}"
    run.mkdir()
    (run / "config.toml").write_text('model = "mlp"\n')
    held = {"proof": {NAME: {"name": NAME, "claim": NAME, "outcome": NAME, "found": NAME, NAME: NAME}}, "exit": NAME}
    (run / "summary.json").write_text(json.dumps(held))
    (run / "manifest.json").write_text(json.dumps({NAME: NAME, "chosen": NAME, "versions": {NAME: NAME}}))
    (run / "steps.jsonl").write_text(json.dumps({"event": NAME, "step": NAME}) + "\n" + NAME)
    return [("eval", run), ("eval", folder / NAME), ("train", "digits", "--resume", run)]


def _of_nothing(folder: Path) -> list[tuple[object, ...]]:
    return [(NAME,), ("info", NAME), ("verify", NAME), ("doctor", f"--{NAME}"), ("doctor", "--interface", NAME)]


@pytest.mark.parametrize("make", [_of_configs, _of_runs, _of_nothing])
def test_no_verb_lets_a_name_act_on_the_terminal(
    make: Callable[[Path], list[tuple[object, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in make(tmp_path):
        code = main([str(word) for word in words])
        told = capfdbinary.readouterr()
        assert code != 0, words
        assert not obeyed(told.out + told.err), words
        lines = told.err.decode().splitlines()
        assert sum(each.startswith("lockstep: ") for each in lines) == 1, told.err
        assert lines[-1].startswith("lockstep: "), told.err
        assert not any(each.startswith("lockstep: forged") for each in told.out.decode().splitlines() + lines), words


@pytest.mark.parametrize(
    "option", ["-o/x", "-o /x", "--output /x", "-N2", "--exclusive -o/x", "-D/", "--wrap=x", "-a1-3"]
)
def test_what_the_script_settles_is_not_said_twice(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--sbatch {option}" in refusal(
        capsys, "submit", "slurm", "--dry-run", f"--sbatch={option}", "digits"
    ).replace("'", "")


def test_other_options_of_sbatch_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--exclusive", "--gpus=2", "--wait-all-nodes=1", "-wnode7", "--mem-per-cpu=1G", "--comment=a b")
    given = [f"--sbatch={option}" for option in options]
    assert main(["submit", "slurm", "--dry-run", *given, "digits"]) == 0
    shown = capsys.readouterr().out
    assert [option for option in options if f"#SBATCH {option}\n" not in shown] == []
