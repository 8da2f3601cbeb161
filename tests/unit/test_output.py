"""The output of each rank is kept in a file, however it is written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

_HEAD = """
import os, sys
from pathlib import Path
from lockstep.monitor import output
with output.logged_to_file(Path(sys.argv[1]), shown=sys.argv[2] == "shown"):
"""
WRITES = """
    print("by print")
    print("by stderr", file=sys.stderr)
    os.write(2, b"by C\\n")
    sys.stdout.write("\\x1b[1mbold\\x1b[0m\\n")
    sys.stdout.write("\\x1b[2K\\rbar 50%")
    sys.stdout.write("\\r\\x1b[2Kan event above the bar\\n\\x1b[1mbar\\x1b[0m 60%")
print("after")
"""
CRASHES = """
    os.system("echo by a program")
    os.write(2, b"by C, and no more\\n")
    os.kill(os.getpid(), 9)
"""
TERMINAL = """
    print(sys.stdout.isatty(), os.get_terminal_size(sys.stdout.fileno()).columns)
    for number in range(50):
        os.write(1, f"C {number}\\n".encode())
        print("Python", number)
"""


def _runs(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-c", _HEAD + code, *map(str, words)]
    return subprocess.run(started, capture_output=True, text=True, check=False)


def test_the_file_has_the_output_without_cursor_moves(tmp_path: Path) -> None:
    path = tmp_path / "output" / "rank_1.txt"
    done = _runs(WRITES, path, "shown")
    assert path.read_text() == "by print\nby stderr\nbold\nan event above the bar\n"
    assert "bar 50%" in done.stdout
    assert done.stdout.endswith("after\n")
    assert done.stderr == "by stderr\nby C\n"


def test_the_file_has_the_output_of_programs_and_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.txt"
    done = _runs(WRITES.replace('print("after")', "") + CRASHES, path, "kept")
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "")
    for line in ("by print", "by stderr", "by C", "by a program", "by C, and no more"):
        assert f"{line}\n" in path.read_text()


@pytest.mark.parametrize("shown", ["shown", "kept"])
def test_output_survives_a_full_disk(shown: str) -> None:
    code = WRITES.replace('os.write(2, b"by C\\n")', "")
    done = _runs(code, "/dev/full", shown)
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    assert done.stdout.endswith("after\n")


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.txt"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    words = [sys.executable, "-c", _HEAD + TERMINAL, str(path), "shown"]
    with subprocess.Popen(words, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux's word for a terminal that nobody has open any more
            while more := os.read(ours, 4096):
                seen += more
    os.close(ours)
    assert process.returncode == 0
    first, *lines = seen.decode().splitlines()
    assert first == "True 77"
    assert sorted(lines) == sorted(f"{who} {number}" for number in range(50) for who in ("C", "Python"))
    assert len(path.read_text().splitlines()) == 51
