"""The notes: both languages say the same, and what a page shows runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from notes.__main__ import CHAPTERS, FIGURES, main
from notes.chapter import data_file

from ..command import CODE, ROOT

FOLDERS = {"en": ROOT / "docs/notes", "zh": ROOT / "docs/zh/notes"}
WORDS = range(600, 1101)
"""Words of a chapter's English prose."""
LIMIT_S = 240
WRONG = "-12345.678"
"""An answer that is wrong in every chapter."""

each_chapter = pytest.mark.parametrize("number", CHAPTERS)
each_page = pytest.mark.parametrize(
    "name", ["index.md", *(f"{n:02}-{m.replace('_', '-')}.md" for n, m in CHAPTERS.items())]
)


def _name(number: int) -> str:
    return f"{number:02}-{CHAPTERS[number].replace('_', '-')}.md"


def _page(name: str, language: str = "en") -> str:
    return (FOLDERS[language] / name).read_text(encoding="utf-8")


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the (language, code) of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def _links(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)\s]+)\)", _prose(text)))


def _levels(text: str) -> list[str]:
    return re.findall(r"^(#+) ", _prose(text), re.MULTILINE)


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of a reader who has activated the environment; `folder` takes the files."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}


def _run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=_environment(folder), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@each_page
def test_both_languages_have_the_same_parts(name: str) -> None:
    english, chinese = _page(name), _page(name, "zh")
    assert _levels(chinese) == _levels(english)
    assert _blocks(chinese) == _blocks(english)
    web = [[link for link in _links(text) if link.startswith("http")] for text in (english, chinese)]
    assert web[1] == web[0]
    assert len(_links(chinese)) == len(_links(english))


@each_page
@pytest.mark.parametrize("language", FOLDERS)
def test_each_file_that_a_page_names_is_there(name: str, language: str) -> None:
    files = [link.partition("#")[0] for link in _links(_page(name, language)) if not link.startswith("http")]
    missing = [file for file in files if file and not (FOLDERS[language] / file).exists()]
    assert not missing


@each_chapter
def test_a_chapter_is_whole(number: int) -> None:
    assert data_file(number).is_file()
    for language, figures in FIGURES.items():
        page = _page(_name(number), language)
        assert (ROOT / figures / f"{number:02}.svg").is_file()
        assert f"](figures/{number:02}.svg)" in page
        assert re.match(rf"# {number}\. .*[?？]\n", page)
        assert ("console", f"$ python -m notes {number}\n") in _blocks(page)
        assert f"python -m notes {number} --answer " in _blocks(page)[-1][1]
        assert f"]({_name(number)})" in _page("index.md", language)
    assert len(_prose(_page(_name(number))).split()) in WORDS


@each_chapter
def test_an_exercise_refuses_a_wrong_answer(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["notes", str(number), f"--answer={WRONG}"])
    assert main() == 1
    assert capsys.readouterr().out.strip() not in ("", "Right.")


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_page
def test_the_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    console = "".join(code for language, code in _blocks(_page(name)) if language == "console")
    for line in re.findall(r"^\$ (.*)$", console, re.MULTILINE):
        ended = _run("bash", "-c", line, folder=tmp_path)
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)


@pytest.mark.slow
@each_chapter
def test_the_python_of_a_page_runs(number: int, tmp_path: Path) -> None:
    """All blocks of a page are one script."""
    code = "\n".join(code for language, code in _blocks(_page(_name(number))) if language == "python")
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    ended = _run(sys.executable, str(script), folder=tmp_path)
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
