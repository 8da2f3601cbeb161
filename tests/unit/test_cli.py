"""The command line without a run: help, output, and which value wins. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import flags, info, run
from lockstep.cli.main import VERBS, main
from lockstep.compare import networks
from lockstep.config.options import flatten, leaves, override, read_toml, recipe, recipes, to_toml
from lockstep.config.schema import RunConfig
from lockstep.config.validity import OneOf
from lockstep.data import sets
from lockstep.errors import RequestError
from lockstep.sessions.script import Script

from ..command import Ended, refusal, sentence

FLAGS = """
model classes init-from freeze
data data-dir download workers augment image-size samples holdout skip-corrupt collate on-device
optimizer lr lr-scale momentum nesterov weight-decay schedule milestones gamma warmup lr-rule base-batch clip
loss step metric label-smoothing ema
batch accumulate micro-batch eval-batch drop-last draws
strategy devices gpus accelerator launcher nodes max-restarts init-method interface rank
world-size timeout stall-timeout batchnorm shard-modules shard-size shard-reshard exchange
exchange-every powersgd-rank powersgd-start collectives
precision channels-last compile cuda-graphs deterministic checkpoint-activations
resume checkpoint-every keep
output remote log-every quiet track profile
verify-every ledger
epochs max-steps eval-every patience seed
"""


def test_help_names_every_verb_every_flag_and_all_that_a_flag_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """A new flag needs a reason: whoever adds one, adds it to FLAGS, and says why somebody would change it."""
    assert [leaf.key for leaf in leaves()] == FLAGS.split()
    assert main([]) == 0
    front = capsys.readouterr().out
    assert all(f"  {verb} " in front for verb in VERBS)
    with pytest.raises(SystemExit, match="0"):
        main(["train", "digits", "--help"])
    text = capsys.readouterr().out
    for leaf in leaves():
        entry = re.search(rf"^  --{leaf.key}[ ,\n].*?(?=^  --|^\S|\Z)", text, re.DOTALL | re.MULTILINE)
        assert entry, leaf.key
        assert len(entry[0].split()) > 3, f"no help: {leaf.key}"
        names = (
            [*leaf.rule.words] if isinstance(leaf.rule, OneOf) else list(sets.DATA_SETS) if leaf.key == "data" else []
        )
        assert [name for name in names if not re.search(rf"\b{name}\b", entry[0])] == [], leaf.key
    assert "[64]" in text  # the recipe's batch


@pytest.mark.parametrize(
    "words",
    ["", *VERBS, "verify gradients", "verify curve", "submit slurm", "submit kubernetes"],
)
def test_help_fits_a_terminal_and_ends_with_an_example(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main([*words.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert re.search(r"^Examples?:\n(  lockstep .*\n)+\Z", text, re.MULTILINE)
    assert all(name in text for name in networks.PRESETS if words == "forecast")


def test_refusals_and_help_import_no_torch() -> None:
    code = (
        "import sys; from lockstep.cli.main import main\n"
        "for words in ('--help', '--version', 'train digit', 'train digits --batch 2 --devices 3', 'info', 'eval x', "
        "'eval --help', 'export x --to onnx', 'export --help', "
        "'train digits --launcher spawn --nodes 2', 'train digits --dry-run', 'verify run x'): "
        "main(words.split())\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("strategy", "launcher", "ranks"), [("ddp", "spawn", "2 ranks"), ("dp", "inline", "1 rank × 2 devices")]
)
def test_a_dry_run_says_what_would_run_and_where_and_starts_nothing(
    strategy: str,
    launcher: str,
    ranks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--devices", "2", "--accelerator", "cpu", "--accumulate", "2", "--dry-run"]
    assert main([*words, "--strategy", strategy]) == 0
    told = capsys.readouterr().out
    assert f"launcher {launcher}, strategy {strategy}, accelerator cpu, devices 2 on each node" in told
    assert f"global batch 64 = {ranks} × 2 micro-batches × 16" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_rank_trains_without_the_compiler_and_has_it_when_it_is_asked_for(tmp_path: Path, strategy: str) -> None:
    code = (
        "import sys, torch; from lockstep.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "layer = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(layer.parameters())\n"
        "torch.compile(lambda: layer(torch.ones(1, 2)), backend='eager')().sum().backward(); optimizer.step()\n"
        "assert 'torch._dynamo' in sys.modules and torch._dynamo.utils and optimizer.state_dict()\n"
        "assert torch.optim.Optimizer.state_dict.__wrapped__.__dynamo_disable.__module__.startswith('torch.')\n"
    )
    rendezvous = (
        "--world-size",
        "1",
        "--rank",
        "0",
        "--init-method",
        f"file://{tmp_path / 'meet'}",
    )  # gives it a group
    how = ("--strategy", strategy, *(rendezvous if strategy == "ddp" else ()))
    words = ("train", "digits", "--accelerator", "cpu", "--max-steps", "1", "--output", str(tmp_path / "run"), *how)
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)


def _lockstep(words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", *words.split()], text=True, check=False, **options)


def test_output_that_cannot_be_written() -> None:
    words = "info"
    with Path("/dev/full").open("w") as full:
        ended = _lockstep(words, stdout=full, stderr=subprocess.PIPE)
    assert sentence(Ended(ended.returncode, "", ended.stderr), code=1).endswith("No space left on device.")
    gone, ours = os.pipe()
    os.close(gone)  # as `| head` does
    ended = _lockstep(words, stdout=ours, stderr=subprocess.PIPE)
    os.close(ours)
    assert (ended.returncode, ended.stderr) == (1, "")
    ended = _lockstep(words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"})
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--config mine.toml --lr 0.5 --no-nesterov", {"batch": 96, "lr": 0.5, "augment": ["flip"], "nesterov": False}),
        ("--schedule multistep --milestones 1 2.5", {"schedule": "multistep", "milestones": [1.0, 2.5]}),
        ("--drop-last --rank 0 --world-size 1", {"drop-last": True, "rank": 0, "world-size": 1}),
        ("--data=cifar10 --data_dir x --clip None", {"data": "cifar10", "data-dir": "x", "clip": None}),
        ("--augment --lr=1e-1 --lr=1e-2", {"augment": [], "lr": 0.01}),
        ("--freeze a b --lr 2 --freeze=c --freeze d", {"freeze": ["a", "b", "c", "d"], "lr": 2.0}),
    ],
)
def test_flags_beat_the_file_and_the_file_beats_the_recipe(
    given: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('batch = 96\nlr = 1\naugment = ["flip"]\n')
    plain = flatten(recipe("digits"))
    found = flatten(flags.parse(["digits", *given.split()], prog="lockstep train"))
    assert {key: found.get(key) for key in expected} == expected
    assert {key for key, value in found.items() if value != plain.get(key)} <= expected.keys()


ODD: dict[str, Any] = {
    "data_dir": 'with "quotes" and ü',
    "augment": ["crop", "flip"],
    "lr": 1 / 3,
    "weight_decay": 5e-324,
    "schedule": "multistep",
    "milestones": [60, 120.5],
    "seed": 2**63 - 1,
}


@pytest.mark.parametrize("config", [RunConfig(), override(RunConfig(), **ODD), *map(recipe, recipes())])
def test_toml_and_back_is_the_same(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_toml(tmp_path / "config.toml") == config
    assert override(RunConfig(), **flatten(config)) == config


def test_what_a_command_raises_is_one_sentence_letter_by_letter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "Rank 0 failed at models.py:100: ValueError: [bold] \\[x] :smile:."

    def fail(given: list[str]) -> int:
        raise RequestError(told)

    def lose(given: list[str]) -> int:
        try:
            raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")
        except RuntimeError:
            raise KeyboardInterrupt from None  # a signal then is no orderly stop

    monkeypatch.setattr(info, "main", fail)
    assert refusal(capsys, "info") == told
    monkeypatch.setattr(info, "main", lose)
    assert "after another rank was lost" in refusal(capsys, "info", code=1)


@pytest.mark.parametrize(
    ("text", "words", "told"), [("x", "--devices 2 --epochs 3", 1), ("--devices", "--devices 2", 0)]
)
def test_a_flag_after_a_script_that_has_none_of_that_name_is_told(
    text: str, words: str, told: int, tmp_path: Path
) -> None:
    (path := tmp_path / "train.py").write_text(f"# {text}")
    assert run._misplaced(Script(str(path), tuple(words.split()))) == ["--devices"] * told
