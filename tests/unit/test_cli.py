"""The command line without a run: help, refusals, and which value wins. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import flags, info
from lockstep.cli.main import VERBS, main
from lockstep.config import OPTIMIZERS, PRECISIONS, SCHEDULES
from lockstep.data import sets
from lockstep.errors import RequestError
from lockstep.kinds import KINDS
from lockstep.launchers import table as launchers
from lockstep.options import flatten, leaves, recipe

from ..command import Ended, refusal, sentence


def test_a_signal_after_another_rank_was_lost_is_no_orderly_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(words: list[str]) -> int:
        try:
            raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")
        except RuntimeError:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(info, "main", lose)
    assert "ended by a signal after another rank was lost" in refusal(capsys, "info", code=1)


def test_a_damaged_data_set_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    cifar = ("train", "digits", "--data", "cifar10", "--no-download", "--data-dir", tmp_path)
    assert "data_batch_1" in refusal(capsys, *cifar)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(b"not it")
    said = refusal(capsys, *cifar)
    assert "data_batch_1" in said
    assert str(folder) in said


def test_refusals_and_help_import_no_torch() -> None:
    code = (
        "import sys; from lockstep.cli.main import main\n"
        "for words in ('--help', '--version', 'train digit', 'train digits --batch 2 --devices 3', 'info', 'eval x', "
        "'eval --help', 'train digits --launcher spawn --nodes 2'): main(words.split())\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_names_every_verb_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == told
    assert all(f"  {verb} " in told for verb in VERBS)
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    told = capsys.readouterr().out
    assert told.startswith("usage: lockstep train")
    assert [leaf.key for leaf in leaves() if f"--{leaf.key} " not in told and f"--{leaf.key}," not in told] == []


def _lockstep(words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", *words.split()], text=True, check=False, **options)


@pytest.mark.parametrize("words", ["info", "train --help"])
def test_output_that_cannot_be_written(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = _lockstep(words, stdout=full, stderr=subprocess.PIPE)
    assert sentence(Ended(ended.returncode, "", ended.stderr), code=1).endswith("No space left on device.")
    assert len(ended.stderr.splitlines()) == 1
    gone, ours = os.pipe()
    os.close(gone)  # as `| head` does
    ended = _lockstep(words, stdout=ours, stderr=subprocess.PIPE)
    os.close(ours)
    assert (ended.returncode, ended.stderr) == (1, "")
    ended = _lockstep(words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"})
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "lockstep" in ended.stdout


def test_flags_beat_the_file_and_the_file_beats_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('batch = 96\nlr = 1\naugment = ["flip"]\n')
    given = ["digits", "--config", str(file), "--lr", "0.5", "--no-nesterov"]
    found = flatten(flags.parse(given, prog="lockstep train"))
    plain = flatten(recipe("digits"))
    differ = {key: value for key, value in found.items() if value != plain[key]}
    assert differ == {"batch": 96, "lr": 0.5, "augment": ["flip"], "nesterov": False}
    assert flags.parse([f"--config={file}"], prog="lockstep train").batch.size == 96


def test_every_flag_reaches_its_option() -> None:
    given = (
        "--model mlp --gpus 1,0 --milestones 1 2.5 --schedule multistep --clip 1 --drop-last --rank 0 --world-size 1"
    )
    found = flatten(flags.parse(given.split(), prog="lockstep train"))
    assert (found["model"], found["gpus"], found["milestones"]) == ("mlp", "1,0", [1.0, 2.5])
    assert (found["clip"], found["drop-last"], found["rank"], found["world-size"]) == (1.0, True, 0, 1)
    assert flags.parse(["--data=cifar10", "--data_dir", "x"], prog="lockstep train").data.dir == Path("x")
    assert flags.parse(["digits", "--augment", "--lr=1e-2"], prog="lockstep train").data.augment == ()
    assert flags.parse(["digits", "--augment=crop", "flip"], prog="lockstep train").data.augment == ("crop", "flip")
    assert flags.parse(["--clip", "none", "--classes", "None"], prog="lockstep train").optim.clip is None


def test_a_sentence_is_printed_letter_by_letter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "Rank 0 failed at models.py:100: ValueError: [bold] \\[x] :smile:"

    def fail(given: list[str]) -> int:
        raise RequestError(sentence)

    monkeypatch.setattr(info, "main", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == f"lockstep: {sentence}\n"


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("strategy", [*KINDS, "auto"]),
        ("launcher", [*launchers.names(), "auto"]),
        ("data", list(sets.names())),
        ("optimizer", list(OPTIMIZERS)),
        ("schedule", list(SCHEDULES)),
        ("precision", list(PRECISIONS)),
    ],
)
def test_the_help_of_a_flag_names_all_that_it_takes(
    key: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    found = re.search(rf"--{key} .*?(?=--\w|╰|\+-)", capsys.readouterr().out, re.DOTALL)
    assert found
    assert [name for name in names if not re.search(rf"\b{name}\b", found[0])] == []
