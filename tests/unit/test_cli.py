"""The command line without a run: help, refusals, and which value wins. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import folders, hardware
from lockstep.cli import flags, info
from lockstep.cli.main import VERBS, main
from lockstep.config import OPTIMIZERS, PRECISIONS, SCHEDULES
from lockstep.data import sets
from lockstep.errors import RequestError, counted
from lockstep.kinds import KINDS
from lockstep.launchers import table as launchers
from lockstep.options import flatten, leaves, recipe, recipes, to_toml

from ..command import Ended, refusal, sentence

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
        ("train digits extra", "'extra' belongs to no flag; lockstep train --help lists all."),
        ("doctor digits", "'digits' belongs to no flag; lockstep doctor --help lists all."),
        ("doctor --xyzzy", "Unknown flag '--xyzzy': no name is like it. lockstep doctor --help lists all."),
        ("train digits --nodes=", "--nodes '': give a number, or a range such as 1:4."),
        ("train digits --nodes 1:", "--nodes '1:': give a number, or a range such as 1:4."),
        ("train digits --nodes \uff11", "--nodes '\uff11': give a number, or a range such as 1:4."),
        ("train digits --nodes 2:1", "--nodes '2:1': give 1 or more"),
        ("train digits --batch", "--batch lacks its value; give a whole number."),
        ("train digits --batch two", "--batch two: give a whole number."),
        ("train digits --batch=2.5", "--batch 2.5: give a whole number."),
        ("train digits --batch 3 4", "'4' belongs to no flag"),
        ("train digits --clip x", "--clip x: give a number."),
        ("train digits --milestones 1 x", "--milestones x: give a list of numbers."),
        ("train digits --output=", "--output '': give a path."),
        ("train digits --nesterov true", "takes no value, found 'true'; write --nesterov or --no-nesterov."),
        ("train digits --no-download x", "'x' belongs to no flag"),
        ("train digits --config", "--config lacks its value; give a path."),
        ("train digits -batch 3", "Unknown flag '-batch': did you mean --batch?"),
        ("train digits -b 3", "Unknown flag '-b': did you mean --batch?"),
        ("train digits --xyzzy", "Unknown flag '--xyzzy': no name is like it. lockstep train --help lists all."),
        ("train digits --model xyzzy", "Unknown model 'xyzzy': no name is like it. lockstep info lists models"),
        ("train digits --learning_rate 1", "did you mean --lr?"),
        ("train digits --learning-rate 1", "did you mean --lr?"),
        ("train digits --batch-size 1", "did you mean --batch?"),
        ("train digits --bs 1", "did you mean --batch?"),
        ("train digits --num-workers 1", "did you mean --workers?"),
        ("train digits --nproc 1", "did you mean --devices?"),
        ("train digits --num-gpus 1", "did you mean --devices?"),
        ("train digits --ngpus 1", "did you mean --devices?"),
        ("train digits --dataset x", "did you mean --data?"),
        ("train digits --amp", "did you mean --precision?"),
        ("train digits --fp16", "did you mean --precision?"),
        ("train digits --bf16", "did you mean --precision?"),
        ("train digits --wd 1", "did you mean --weight-decay?"),
        ("train digits --gpu 1", "did you mean --gpus?"),
        ("train digits --no-downlod", "did you mean --no-download"),
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
        ("train digits --accelerator gpu", "Unknown accelerator 'gpu': did you mean cuda?"),
        ("train digits --batchnorm snyc", "Unknown value of --batchnorm 'snyc': did you mean sync?"),
        ("train digits --augment crop flup", "Unknown augmentation 'flup': did you mean flip?"),
        ("train digits --image-size 9", "--image-size has no effect with --data digits: it belongs to imagefolder and"),
        ("train digits --data-dir x", "--data-dir has no effect with --data digits: it belongs to cifar10, cifar100"),
        ("train cifar10-small --samples 9", "--samples has no effect with --data cifar10: it belongs to fake;"),
        ("train cifar10-small --workers 2", "--workers has no effect with --data cifar10: it belongs to imagefolder;"),
        ("train digits --skip-corrupt", "--skip-corrupt has no effect with --data digits"),
        ("train digits --milestones 3", "--milestones has no effect with --schedule cosine: it belongs to step and"),
        ("train digits --gamma .5", "--gamma has no effect with --schedule cosine"),
        ("train digits --optimizer adamw --momentum .5", "--momentum has no effect with --optimizer adamw"),
        ("train digits --base-batch 64", "--base-batch has no effect with --lr-rule none: it belongs to linear and"),
        (
            "train digits --strategy dp --find-unused",
            "--find-unused has no effect with --strategy dp: it belongs to ddp",
        ),
        ("train digits --lr 0", "--lr 0.0: give a number above 0."),
        ("train digits --lr nan", "--lr nan: give a finite number."),
        ("train digits --lr inf", "--lr inf: give a finite number."),
        ("train digits --warmup inf", "--warmup inf: give a finite number."),
        ("train digits --ema nan", "--ema nan: give a finite number."),
        ("train digits --milestones 1 nan", "--milestones nan: give a finite number."),
        ("train digits --stall-timeout inf", "--stall-timeout inf: give a finite number."),
        ("train digits --timeout 1e9", "--timeout 1e+09: give seconds above 0, and at most a year."),
        ("train digits --warmup 21", "--warmup 21 (in epochs) is longer than the run's --epochs 20"),
        ("train digits --classes 0", "--classes 0: give 1 or more."),
        ("train digits --gamma -1", "--gamma -1.0: give a factor above 0."),
        ("train digits --base-batch 0", "--base-batch 0: give 1 or more."),
        ("train digits --epochs -1", "--epochs -1: give 1 or more."),
        ("train digits --seed -1", "--seed -1: give a number from 0"),
        ("train digits --lr-rule linear", "add --base-batch N"),
        ("train digits --schedule multistep", "needs rising --milestones in epochs, found none."),
        ("train digits --accumulate 2 --micro-batch 3", "say the same thing twice"),
        ("train digits --batch 2 --devices 3", "Global batch 2 does not split into 3 ranks: each needs at least one"),
        ("train digits --batch 1 --devices 3", "use --batch 3 or more, or at most 1 rank."),
        ("train digits --accumulate 33 --devices 2", "use --accumulate 32 or less, or --batch 66 or more."),
        ("train digits --accumulate 65", "does not split into 65 micro-batches on 1 rank"),
        ("train digits --batch 2 --world-size 3 --rank 0 --init-method tcp://h:1", "does not split into 3 ranks"),
        ("train digits --rank 2 --world-size 2", "--rank 2 lies outside the world of --world-size 2; ranks go from 0"),
        ("train digits --rank 0", "--rank 0 without --world-size"),
        ("train digits --nodes 2", "torchrun --nnodes 2"),
        ("train digits --strategy single --devices 2", "take dp, ddp or hybrid, or one device"),
        ("train digits --devices 2 --gpus 0", "--devices 2 disagrees with --gpus 0"),
        ("train digits --gpus a", "--gpus a: give different indices with commas"),
        (f"train digits --config {GONE}.toml", f"{GONE}.toml cannot be read: No such file or directory."),
        (f"train digits --data imagefolder --data-dir {GONE}", f"{GONE}/train is not there; give --data-dir"),
        (f"train digits --data cifar10 --no-download --data-dir {GONE}", f"needs {GONE}/cifar-10-batches-py"),
        (f"eval {GONE}", f"{GONE} is not there; give a run's folder"),
        ("eval", "lockstep eval lacks the run to evaluate, which comes first"),
        ("train digits --device 2", "did you mean --accelerator or --devices?"),
        (f"train cifar10-small --data-dir {Path(__file__)}", "test_cli.py is a file; give the folder that holds"),
        ("eval one two", "lockstep eval takes one run at a time, found one and two."),
        ("eval --devices 2", "lockstep eval lacks the run to evaluate, which comes first"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(capsys, *words.split())
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("verb", ["info", "eval"])
def test_a_verb_shows_how_it_is_used(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: lockstep {verb}")


def test_a_folder_that_cannot_be_the_runs_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "launch", lambda *args: pytest.fail("ranks were started"))
    (tmp_path / "file").touch()
    used = ("train", "digits", "--devices", 2, "--output", tmp_path)
    assert "file is a file; give a folder." in refusal(capsys, *used[:-1], tmp_path / "file")
    held = folders.claim(flags.parse(["digits", f"--output={tmp_path}"], prog="lockstep train"))
    with subprocess.Popen([sys.executable, "-m", "lockstep", *map(str, used)], stderr=subprocess.PIPE, text=True) as it:
        assert it.stderr is not None
        assert f"{tmp_path} is in use by another run (process {os.getpid()} on " in it.stderr.read()
    held.release()
    (tmp_path / "manifest.json").touch()
    assert "holds a run already" in refusal(capsys, *used)


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


@pytest.mark.parametrize(
    "words",
    ["--epochs 3", "--output x", "--resume auto", "--log-every 9", "--lr 3", "--accumulate 2", "--augment flip"],
)
def test_an_evaluation_refuses_what_it_could_only_ignore(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(recipe("digits")))
    said = refusal(capsys, "eval", tmp_path, *words.split())
    assert said.startswith(f"lockstep eval has no use for {words.split()[0]}")
    assert "'extra' belongs to no flag" in refusal(capsys, "eval", tmp_path, "--devices", 1, "extra")


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


def _lockstep(words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", *words.split()], text=True, check=False, **options)


@pytest.mark.parametrize("words", ["--help", "--version", "info", "train --help", "eval --help"])
def test_what_cannot_be_written_is_one_sentence(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = _lockstep(words, stdout=full, stderr=subprocess.PIPE)
    assert sentence(Ended(ended.returncode, "", ended.stderr), code=1).endswith("No space left on device.")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", ["--help", "info", "train --help"])
def test_a_reader_that_has_gone_hears_nothing(words: str) -> None:
    gone, ours = os.pipe()
    os.close(gone)
    ended = _lockstep(words, stdout=ours, stderr=subprocess.PIPE)
    os.close(ours)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("words", ["--help", "info", "train --help", "train digits --lr-rule linéar"])
def test_a_terminal_of_plain_ascii_is_spoken_to(words: str) -> None:
    ended = _lockstep(words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"})
    assert ended.returncode == (2 if "linéar" in words else 0)
    assert "lockstep" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


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
    assert flags.parse(["--data=cifar10", "--data_dir", "x"], prog="lockstep train").data.dir == Path("x")
    assert flags.parse(["digits", "--augment", "--lr=1e-2"], prog="lockstep train").data.augment == ()
    assert flags.parse(["digits", "--augment=crop", "flip"], prog="lockstep train").data.augment == ("crop", "flip")
    assert flags.parse(["--clip", "none", "--classes", "None"], prog="lockstep train").optim.clip is None
    with pytest.raises(RequestError, match="--epochs -1: give 1 or more"):
        flags.parse(["--epochs", "-1"], prog="lockstep train")


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


def test_numbers_of_things() -> None:
    assert [counted(number, "epoch") for number in (1, 2)] == ["1 epoch", "2 epochs"]
    assert counted(3000, "micro-batch") == "3,000 micro-batches"
