"""The command line without a run: help, refusals, and which value wins. Nothing here imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import hardware
from lockstep.cli import flags
from lockstep.cli.main import VERBS, main
from lockstep.config import flatten, leaves, recipe, recipes
from lockstep.errors import RequestError

from ..command import refusal

GONE = "a-folder-that-is-not-there"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trian digits", "Unknown verb 'trian': did you mean train"),
        ("info x", "takes no arguments, found x"),
        ("train digit", "Unknown recipe 'digit': did you mean digits? Your own file goes with --config FILE.toml."),
        ("train digits --modle x", "Unknown flag '--modle': did you mean --model"),
        ("train digits --no-batch", "Unknown flag '--no-batch': did you mean --batch"),
        ("train --batch 64 digits", "'digits' belongs to no flag; a recipe comes first"),
        ("train digits extra", "Unrecognized options: extra;"),
        ("train digits --batch", "Missing value for argument '--batch'"),
        ("train digits --batch two", "Error parsing --batch: invalid literal for int() with base 10: 'two';"),
        ("train digits --milestones 1 x", "Error parsing --milestones"),
        ("train digits --strategy dpp", "Unknown strategy 'dpp': did you mean dp or ddp?"),
        ("train digits --launcher spwan", "Unknown launcher 'spwan': did you mean spawn?"),
        ("train digits --data digit", "Unknown data set 'digit': did you mean digits?"),
        ("train digits --model my.nets:Net", "no module 'my.nets' in"),
        ("train digits --model my.nets:", "write module:attribute"),
        ("train digits --data my_data:load", "no module 'my_data' in"),
        ("train digits --precision fp23", "Unknown precision 'fp23': did you mean fp32"),
        ("train digits --optimizer sdg", "Unknown optimizer 'sdg': did you mean sgd?"),
        ("train digits --schedule cosin", "Unknown schedule 'cosin': did you mean cosine"),
        ("train digits --lr-rule liner", "Unknown learning-rate rule 'liner': did you mean linear"),
        ("train digits --accelerator gpu", "Unknown accelerator 'gpu'"),
        ("train digits --batchnorm snyc", "Unknown value of --batchnorm 'snyc': did you mean sync?"),
        ("train digits --augment crop flup", "Unknown augmentation 'flup': did you mean flip?"),
        ("train digits --lr 0", "--lr 0.0: give a finite number above 0."),
        ("train digits --lr nan", "--lr nan: give a finite number above 0."),
        ("train digits --epochs -1", "--epochs -1: give 1 or more."),
        ("train digits --seed -1", "--seed -1: give a number from 0"),
        ("train digits --lr-rule linear", "add --base-batch N"),
        ("train digits --schedule multistep", "needs rising --milestones in epochs, found []"),
        ("train digits --accumulate 2 --micro-batch 3", "say the same thing twice"),
        ("train digits --batch 2 --devices 3", "Global batch 2 does not split into 3 ranks: each needs at least one"),
        ("train digits --batch 1 --devices 3", "use --batch 3 or more, or at most 1 rank."),
        ("train digits --accumulate 33 --devices 2", "use --accumulate 32 or less, or --batch 66 or more."),
        ("train digits --accumulate 65", "does not split into 65 micro-batches on 1 rank"),
        ("train digits --batch 2 --world-size 3 --rank 0 --init-method tcp://h:1", "does not split into 3 ranks"),
        ("train digits --rank 2 --world-size 2", "--rank 2 lies outside the world of --world-size 2; ranks go from 0"),
        ("train digits --rank 0", "--rank 0 without --world-size"),
        ("train digits --nodes 2", "torchrun --nnodes 2"),
        ("train digits --strategy single --devices 2", "take ddp or one device"),
        ("train digits --devices 2 --gpus 0", "--devices 2 disagrees with --gpus 0"),
        ("train digits --gpus a", "--gpus a: give different indices with commas"),
        (f"train digits --config {GONE}.toml", f"--config {GONE}.toml cannot be read"),
        (f"train digits --data imagefolder --data-dir {GONE}", f"{GONE}/train is not there; give --data-dir"),
        (f"train digits --data cifar10 --no-download --data-dir {GONE}", f"needs {GONE}/cifar-10-batches-py"),
        (f"eval {GONE}", f"{GONE} lies in no run's folder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(capsys, *words.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(bool(hardware.gpus(None)), reason="says what a machine without a GPU says")
@pytest.mark.parametrize("words", ["--gpus 0", "--accelerator cuda"])
def test_devices_that_are_not_there_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "this machine shows no GPU" in refusal(capsys, "train", "digits", *words.split())


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
        "for words in (['--help'], ['--version'], ['train', 'digit'], ['train', 'digits', '--batch', '2', '--devices', "
        "'3'], ['info'], ['eval', 'x'], ['eval', '--help']): main(words)\n"
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
    assert [leaf.key for leaf in leaves() if f"--{leaf.key} " not in told and f"--{leaf.key}," not in told] == []


def test_info_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in (*recipes(), "resnet18", "cifar100", "ddp", "spawn", "torch"))


def test_flags_beat_the_file_and_the_file_beats_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('batch = 96\nlr = 1\naugment = ["flip"]\n')
    given = ["digits", "--config", str(file), "--lr", "0.5", "--no-nesterov"]
    found = flatten(flags.parse(given, prog="lockstep train"))
    plain = flatten(recipe("digits"))
    differ = {key: value for key, value in found.items() if value != plain[key]}
    assert differ == {"batch": 96, "lr": 0.5, "augment": ["flip"], "nesterov": False}
    assert flags.parse([f"--config={file}"], prog="lockstep train").batch.size == 96
    file.write_text("bacth = 96\n")
    with pytest.raises(RequestError, match=r"mine\.toml"):
        flags.parse(given, prog="lockstep train")


def test_every_flag_reaches_its_option() -> None:
    given = (
        "--model mlp --gpus 1,0 --milestones 1 2.5 --schedule multistep --clip 1 --drop-last --rank 0 --world-size 1"
    )
    found = flatten(flags.parse(given.split(), prog="lockstep train"))
    assert (found["model"], found["gpus"], found["milestones"]) == ("mlp", "1,0", [1.0, 2.5])
    assert (found["clip"], found["drop-last"], found["rank"], found["world-size"]) == (1.0, True, 0, 1)
    assert flags.parse(["--data_dir", "x"], prog="lockstep train").data.dir == Path("x")
