"""What the README says to copy does what it says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from lockstep.cli import compare, eject, flags, forecast
from lockstep.cli.main import main
from lockstep.compare import grid, networks

from ..command import CODE, COLD, ROOT, command, events, refusal

README, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
PAGES = ("session", "runs", "verify", "own-data", "launchers", "same-model")
DOCS = README + "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
"""The README and the pages with its details."""


def _shown(heading: str, pattern: str) -> str:
    """Return what a pattern finds first under a heading."""
    found = re.search(pattern, DOCS.partition(f"# {heading}")[2], re.DOTALL)
    assert found, heading
    return found[1]


def test_the_model_and_data_of_ones_own(tmp_path: Path) -> None:
    own = "Your own model and data"
    (tmp_path / "mine.py").write_text(_shown(own, r"```python\n(.*?)```"), encoding="utf-8")
    ended = command(tmp_path, *shlex.split(_shown(own, r"\$ lockstep ([^\n]*)")), "--output", "run")
    assert ended.code == 0, ended
    assert events(tmp_path / "run", "eval")[-1]["samples"] == 200


@pytest.mark.long
def test_training_from_python(tmp_path: Path) -> None:
    script, code = tmp_path / "script.py", _shown("From Python", r"```python\n(.*?)```").replace("epochs=3", "epochs=1")
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}

    def run(text: str) -> subprocess.CompletedProcess[str]:
        script.write_text(text, encoding="utf-8")
        words = [sys.executable, str(script)]
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = run(code)
    assert done.returncode == 0, done
    summary = json.loads((tmp_path / "runs" / "digits-resnet8" / "summary.json").read_text())
    assert done.stdout.splitlines()[-1] == f"{summary['top1']} runs/digits-resnet8"

    error = run(code.replace('if __name__ == "__main__":', "if True:")).stderr.splitlines()[-1]
    assert error.startswith("lockstep.errors.RequestError: Each rank imports the script that starts the ranks")
    assert 'under `if __name__ == "__main__":`' in error


def _code() -> list[str]:
    """Return what the README shows as code, a command a line; "…" stands for the beginning of any command."""
    blocks = re.findall(r"```console\n(.*?)```", DOCS, re.DOTALL)
    prose = re.sub(r"```.*?```", "", DOCS, flags=re.DOTALL)
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
        known = list(takewhile(lambda word: not word.endswith(".py"), rest[1:]))  # a script's own flags are its own
        assert flags.parse(known, prog=f"lockstep verify {rest[0]}")
    elif verb == "compare" and rest[0] != "--from":
        own, known = flags.take([word for word in rest if not word.endswith(".py")], compare.FLAGS, prog="x")
        assert grid.axes(own.get("--vary", [])) or known == ["digits"]
        assert flags.parse(known, prog="lockstep compare", check=lambda *_: None)
    elif verb == "forecast":
        own, known = flags.take(rest, forecast.FLAGS, prog="x")
        measured = own["--network"].endswith(".json") or own["--network"].startswith("runs/")
        assert measured or networks.links("--network", own["--network"])
        assert flags.parse(known, prog="lockstep forecast")
    elif verb == "eject" and rest:
        assert rest[0].endswith(".py") or eject.text([word for word in rest if word not in (">", "train.py")])
    elif verb in ("audit", "run") and rest:
        assert [word for word in rest if word.endswith(".py")]
    elif verb == "submit":
        (tmp_path / "train.py").touch()
        assert main([verb, rest[0], "--dry-run", *rest[1:]]) == 0
    elif rest:  # of runs that are not there
        assert re.search(r"is not there|[Nn]o such file", refusal(capsys, verb, *rest))
    else:
        assert main([verb, "--help"]) == 0


def test_each_flag_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    named = {flag for code in _code() if "lockstep" in code or code.startswith(("…", "--")) for flag in _flags(code)}
    verbs = "train, run, eval, audit, eject, submit slurm, verify gradients, verify curve, doctor, compare, forecast"
    for words in verbs.split(", "):
        with contextlib.suppress(SystemExit):
            main([*words.split(), "--help"])
    known = _flags(capsys.readouterr().out)
    assert len(named) > 30
    assert named - known - {"--nproc-per-node", "--its", "--own", "--flags"} == set()  # of torchrun and of scripts


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


@pytest.mark.long
def test_the_demo_at_the_top_learns_the_digits(tmp_path: Path) -> None:
    """The whole recipe; the held-out fifth is 360 digits."""
    assert "$ make demo " in README
    told = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in told.splitlines() if "lockstep train" in line]
    ended = command(tmp_path, *shlex.split(line)[1:], "--output", "run", through=COLD)
    assert ended.code == 0, ended
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["top1"] >= 0.98


@pytest.mark.parametrize("text", [README, CHINESE], ids=["English", "Chinese"])
def test_each_file_and_heading_that_it_names_is_there(text: str) -> None:
    for path, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        assert (ROOT / path).exists(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", (ROOT / (path or "README.md")).read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], heading


def test_both_languages_say_the_same() -> None:
    def parts(text: str) -> tuple[object, ...]:
        links = [path.replace("docs/zh/", "docs/") for path in re.findall(r"\]\(([^)]*)\)", text)]
        tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
        return (
            re.findall(r"^(#+) ", text, re.MULTILINE),
            re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL),
            tables,
            sorted(link for link in links if not link.startswith("README")),
        )

    assert parts(README) == parts(CHINESE)


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) <= 180
    assert len(README.split()) <= 1500
