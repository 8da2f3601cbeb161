"""What each rank says is kept, whichever way it is said."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

SAYS = """
import os, sys
from pathlib import Path
from lockstep import said
with said.kept(Path(sys.argv[1]), shown=sys.argv[2] == "shown"):
    print("by print")
    print("by stderr", file=sys.stderr)
    os.write(2, b"by C\\n")
    sys.stdout.write("\\x1b[1mbold\\x1b[0m\\n")
    sys.stdout.write("\\x1b[2K\\rbar 50%")
    sys.stdout.write("\\r\\x1b[2Kan event above the bar\\n\\x1b[1mbar\\x1b[0m 60%")
print("after")
"""


def _runs(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(started, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("shown", [True, False])
def test_what_a_rank_says_is_kept(shown: bool, tmp_path: Path) -> None:
    path = tmp_path / "output" / "rank_1.txt"
    done = _runs(SAYS, path, "shown" if shown else "kept")
    kept = path.read_text()
    assert "by print\n" in kept
    assert "by stderr\n" in kept
    assert "after" not in kept
    assert "after\n" in done.stdout
    assert "by C\n" in kept
    if shown:  # the console has everything, the file no cursor's moves
        assert kept.replace("by C\n", "") == "by print\nby stderr\nbold\nan event above the bar\n"
        assert "bar 50%" in done.stdout
        assert done.stderr == "by stderr\nby C\n"
    else:
        assert done.stdout == "after\n"
        assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
@pytest.mark.parametrize("shown", ["shown", "kept"])
def test_a_full_disk_ends_nobody_who_says_something(shown: str) -> None:
    says = SAYS.replace('os.write(2, b"by C\\n")', "")  # which is refused to whoever asks
    done = _runs(says, "/dev/full", shown)
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    assert done.stdout.endswith("after\n")


def test_where_nothing_can_be_kept_the_console_has_it(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file in the way")
    assert "by print" in _runs(SAYS, tmp_path / "output" / "rank_1.txt", "kept").stdout


CRASHES = """
import ctypes, os, sys
from pathlib import Path
from lockstep import said
with said.kept(Path(sys.argv[1]), shown=True):
    os.system("echo by a program")
    os.write(2, b"by C, and no more\\n")
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_the_last_words_of_a_rank_that_dies_are_on_the_console_and_kept(number: int, tmp_path: Path) -> None:
    path = tmp_path / "output" / "rank_0.txt"
    done = _runs(CRASHES, path, int(number))
    assert done.returncode == -number
    assert done.stdout == "by a program\n"
    assert done.stderr == "by C, and no more\n"
    kept = path.read_text()
    assert "by a program\n" in kept
    assert "by C, and no more\n" in kept
    assert ("Fatal Python error: Aborted" in kept) == (number == signal.SIGABRT)


TERMINAL = """
import os, sys
from pathlib import Path
from lockstep import said
with said.kept(Path(sys.argv[1]), shown=True):
    print(sys.stdout.isatty(), os.get_terminal_size(sys.stdout.fileno()).columns)
    for number in range(50):
        os.write(1, f"C {number}\\n".encode())
        print("Python", number)
"""


def test_a_terminal_stays_one_and_has_all_in_order(tmp_path: Path) -> None:
    path = tmp_path / "output" / "rank_0.txt"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 77, 0, 0))
    with subprocess.Popen([sys.executable, "-c", TERMINAL, str(path)], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux's word for a terminal that nobody has open any more
            while more := os.read(ours, 4096):
                seen += more
    os.close(ours)
    assert process.returncode == 0
    lines = seen.decode().splitlines()
    assert lines[0] == "True 77"
    assert sorted(lines[1:]) == sorted([f"C {number}" for number in range(50)] + [f"Python {n}" for n in range(50)])
    assert len(path.read_text().splitlines()) == 101


HOLDS_ON = """
import logging, sys
from pathlib import Path
from lockstep import said
with said.kept(Path(sys.argv[1]), shown=True):
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    logging.warning("within")
other = open(sys.argv[2], "w")  # may get the descriptor that led to the console
logging.warning("after")
"""


def test_who_holds_on_to_a_stream_writes_to_the_console(tmp_path: Path) -> None:
    path, other = tmp_path / "output" / "rank_0.txt", tmp_path / "other"
    done = _runs(HOLDS_ON, path, other)
    assert done.stderr == "within\nafter\n"
    assert path.read_text() == "within\n"
    assert other.read_text() == ""
