"""What the README says to copy does what it says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import flags
from lockstep.cli.main import main

from ..command import CODE, ROOT, command, events, refusal

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_model_and_data_of_ones_own(tmp_path: Path) -> None:
    own = README.partition("## Your own model and data")[2]
    code = re.search(r"```python\n(.*?)```", own, re.DOTALL)
    shown = re.search(r"\$ lockstep (.*)\n", own)
    assert code
    assert shown
    (tmp_path / "mine.py").write_text(code[1], encoding="utf-8")
    ended = command(tmp_path, *shlex.split(shown[1]), "--output", "run")
    assert ended.code == 0, ended
    assert events(tmp_path / "run", "eval")[-1]["samples"] == 200


def _script(folder: Path) -> Path:
    code = re.search(r"```python\n(.*?)```", README.partition("## From Python")[2], re.DOTALL)
    assert code
    path = folder / "script.py"
    path.write_text(code[1].replace("epochs=3", "epochs=1"), encoding="utf-8")
    return path


def _run(folder: Path, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, input=given, env=env, capture_output=True, text=True, check=False
    )


def test_training_from_python(tmp_path: Path) -> None:
    done = _run(tmp_path, str(_script(tmp_path)))
    assert done.returncode == 0, done
    summary = json.loads((tmp_path / "runs" / "digits-resnet8" / "summary.json").read_text())
    assert done.stdout.splitlines()[-1] == f"{summary['top1']} runs/digits-resnet8"


def test_a_script_that_other_processes_cannot_import_is_one_sentence(tmp_path: Path) -> None:
    script = _script(tmp_path)
    unguarded = script.read_text().replace('if __name__ == "__main__":', "if True:")
    told = _run(tmp_path, "-", given=unguarded).stderr.splitlines()
    assert told[-1].startswith("lockstep.errors.RequestError: A script that is read from <stdin> cannot start")
    script.write_text(unguarded)
    told = _run(tmp_path, str(script)).stderr.splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert [line for line in told[1:] if not line.startswith(" ")] == [
        "lockstep.errors.RequestError: Each rank imports the script that starts the ranks, and would start them again; "
        'put that script\'s start under `if __name__ == "__main__":`.'
    ]
    session = "import lockstep\ndef entry(c, w): pass\n\nlockstep.launch(entry, lockstep.RunConfig(), {})\n"
    session = session.replace("RunConfig()", 'override(lockstep.RunConfig(), strategy="ddp", devices=2)')
    told = _run(tmp_path, "-i", given=session).stderr.splitlines()
    assert any("RequestError: entry was defined in an interactive session" in line for line in told), told


def _code() -> list[str]:
    """Return what the README shows as code, a command a line; "…" stands for the beginning of any command."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    lines = [line.removeprefix("$ ").partition("#")[0] for block in blocks for line in block.splitlines()]
    return sorted({code.strip() for code in [*lines, *re.findall(r"`([^`\n]+)`", prose)]})


GIVEN = {"RECIPE …": "digits", "HOST:PORT": "h:1", "I:P": "h:1", "--rank [Rr]": "--rank 1", "RUN": "x"}


def _commands() -> list[str]:
    """Return each command of lockstep's, without its name, with values in place of those that the reader gives."""
    found = [re.match(r"(?:torchrun .* -m )?lockstep (.*)|… (--[a-z].*)", code) for code in _code()]
    commands = [each[1] or f"train digits {each[2]}" for each in found if each]
    for name, value in GIVEN.items():
        commands = [re.sub(rf"{name}(?!\w)", value, words) for words in commands]
    return sorted({words.replace("…", "digits" if "slurm" in words else "").strip() for words in commands})


@pytest.mark.parametrize("words", _commands())
def test_each_command_is_understood(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *rest = shlex.split(words)
    if words == "train --help":
        return  # the flags that it lists: below
    if verb == "train":
        assert flags.parse(rest, prog="lockstep train")
    elif rest[:1] in (["gradients"], ["curve"]):
        assert flags.parse(rest[1:], prog=f"lockstep verify {rest[0]}")
    elif verb == "submit":
        assert main([verb, *rest, "--dry-run"]) == 0
    elif rest:  # of runs that are not there
        assert re.search(r"is not there|no such file", refusal(capsys, verb, *rest))
    else:
        assert main([verb, "--help"]) == 0


def test_each_flag_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    named = {flag for code in _code() if "lockstep" in code or code.startswith(("…", "--")) for flag in _flags(code)}
    for words in ("train", "submit slurm", "verify gradients", "verify curve", "doctor"):
        with contextlib.suppress(SystemExit):
            main([*words.split(), "--help"])
    known = _flags(capsys.readouterr().out)
    assert len(named) > 30
    assert named - known - {"--nproc-per-node"} == set()  # torchrun's


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


@pytest.mark.long
@pytest.mark.parametrize(("target", "less"), [("demo", "--epochs 1 --output run"), ("test", "--collect-only -n 0")])
def test_the_commands_at_the_top_run(target: str, less: str, tmp_path: Path) -> None:
    assert f"$ make {target} " in README
    told = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in told.splitlines() if "lockstep train" in line or "pytest" in line]
    first, *words = [*shlex.split(line), *less.split()]
    if target == "test":
        words = [str(ROOT / word) if (ROOT / word).exists() else word for word in words]
        words += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    started = [str(Path(sys.executable).with_name(Path(first).name)), *words]
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(started, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended


def test_each_file_that_it_names_is_there() -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / path).exists(), path
