"""A warm process of the tests is what a cold one would be, as far as tests look."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from ..command import COLD, command, gone, processes, start, until, weights

RUN = "train digits --model mlp --accelerator cpu --strategy ddp --devices 2 --output run"
TELLS = """
import atexit, faulthandler, json, os, random, signal, sys, threading, warnings

atexit.register(print, "at the end")
drawn, threads = [random.random()], 0
if sys.argv[1] == "code":  # a cold one takes seconds for it
    import numpy, torch
    drawn, threads = [*drawn, numpy.random.rand(), torch.rand(1).item()], torch.get_num_threads()
print(json.dumps(drawn))
print(json.dumps({
    "threads": threads,
    "path": sys.path,
    "words": sys.argv[1:],
    "main": [__name__, __file__, __spec__.name],
    "environment": sorted(os.environ.items()),
    "streams": [(each.encoding, each.errors, each.line_buffering, each.mode, each.name, each.isatty(), each.newlines)
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
    "handlers": {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()
                 if isinstance(number, signal.Signals)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "warnings": [str(each) for each in warnings.filters[-4:]],
    "affinity": sorted(os.sched_getaffinity(0)),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[-2:],
    "faulthandler": faulthandler.is_enabled(),
    "cwd": os.getcwd(),
}))
sys.stdout.write("no end of line")
threading.Thread(target=lambda: (threading.main_thread().join(), print("of a thread", file=sys.stderr))).start()
if sys.argv[1] == "kills":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit({"code": 3, "words": "words"}[sys.argv[1]])
"""


@pytest.mark.parametrize("way", ["code", "words", "kills"])
def test_a_process_finds_the_same_and_ends_alike(way: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    warm, cold = (command(tmp_path, way, module="tells", through=through, LOCKSTEP="1") for through in ((), COLD))
    assert (warm.code, warm.err.splitlines()[-2:]) == (cold.code, cold.err.splitlines()[-2:])
    (drawn, of_warm, *rest), (others_drawn, of_cold, *others) = warm.out.splitlines(), cold.out.splitlines()
    assert json.loads(of_warm) == json.loads(of_cold)
    assert rest == others
    assert not {*json.loads(drawn)} & {*json.loads(others_drawn)}


def test_ranks_come_to_the_same_bits_and_say_the_same(tmp_path: Path) -> None:
    folders = tmp_path / "warm", tmp_path / "cold"
    for folder in folders:
        folder.mkdir()
    warm, cold = (
        command(folder, *RUN.split(), "--max-steps", 3, through=through)
        for folder, through in zip(folders, ((), COLD), strict=True)
    )
    assert (warm.code, warm.err) == (cold.code, cold.err) == (0, "")
    of_warm, of_cold = (weights(folder / "run") for folder in folders)
    assert of_warm == of_cold
    assert of_warm


def test_nothing_is_left_of_a_warm_command_that_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *RUN.split(), "--epochs", 1000) as run:
        until(lambda: len(processes(run)) >= 4 and (tmp_path / "run" / "steps.jsonl").exists())
        found = processes(run)
        assert run.pid in {child.pid for child in psutil.Process(os.getpid()).children()}
        run.kill()
        run.communicate()
        until(lambda: gone(found))
