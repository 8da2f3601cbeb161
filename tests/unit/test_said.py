"""What each rank says is kept, whichever way it is said."""

from __future__ import annotations

import subprocess
import sys
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
print("after")
"""


@pytest.mark.parametrize("shown", [True, False])
def test_what_a_rank_says_is_kept(shown: bool, tmp_path: Path) -> None:
    path = tmp_path / "output" / "rank_1.txt"
    words = [sys.executable, "-c", SAYS, str(path), "shown" if shown else "kept"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    kept = path.read_text()
    assert "by print\n" in kept
    assert "by stderr\n" in kept
    assert "after" not in kept
    assert "after\n" in done.stdout
    if shown:  # the console has everything, the file no cursor's moves
        assert kept == "by print\nby stderr\nbold\n"
        assert "bar 50%" in done.stdout
        assert done.stderr == "by stderr\nby C\n"
    else:
        assert "by C\n" in kept
        assert done.stdout == "after\n"
        assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
@pytest.mark.parametrize("shown", ["shown", "kept"])
def test_a_full_disk_ends_nobody_who_says_something(shown: str) -> None:
    says = SAYS.replace('os.write(2, b"by C\\n")', "")  # which is refused to whoever asks
    done = subprocess.run([sys.executable, "-c", says, "/dev/full", shown], capture_output=True, text=True, check=False)
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    assert done.stdout.endswith("after\n")


def test_where_nothing_can_be_kept_the_console_has_it(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file in the way")
    words = [sys.executable, "-c", SAYS, str(tmp_path / "output" / "rank_1.txt"), "kept"]
    assert "by print" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
