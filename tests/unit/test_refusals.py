"""What cannot be honoured is refused in one sentence: what was asked, what was found, what to do.

A line of a table is a command without its first words, and what its sentence has to say; [words] before the command
are what its environment holds, by tests/environments.py. All run through the command in this process: exit code 2, one
line on stderr, no rank started, and nothing made in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.options import leaves, override, recipe, to_toml
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError

from ..command import COLD, command, refusal
from ..environments import environment

Refuses = Callable[[str, list[str]], None]

COMMANDS = """
trian digits                           | 'trian' | did you mean train
train digit                            | 'digit' | did you mean digits? | --config FILE.toml
train --batch 64 digits                | Unrecognized options: digits
eval --devices 2                       | No run given
eval gone                              | gone is not there
eval trained --epochs 3                | no use for --epochs
eval trained --split valid             | 'valid' | did you mean validation?
eval trained --predictions x.txt       | x.txt | a file .csv
export --to onnx                       | No run given
export gone --to safetensors | gone is not there
export trained                         | No --to given | torch.export, onnx, safetensors, hub
export trained --to safetensors --push me/net | --push belongs to --to hub
export trained --to onxx               | did you mean onnx?
export trained --to safetensors --epochs 3 | lockstep export has no use for --epochs
export trained --to safetensors --output file | --output file exists
diff                                   | compares two checkpoints, found 0
diff a b --tolerance nan               | --tolerance nan: give a finite number
submit pbs digits                      | Unknown scheduler 'pbs'
submit slurm digits                    | sbatch is not on PATH
submit kubernetes digits               | No --image given
doctor --batch 3                       | no use for --batch
"""

TRAIN = """
--batch two                            | Error parsing --batch | 'two'
--devices --seed 1                     | Missing value for argument '--devices'
--holdout 1                            | --holdout 1.0 | below 1
--nesterov true                        | Unrecognized options: true
--config gone.toml                     | gone.toml | No such file
--config broken.toml                   | broken.toml | not valid TOML
--config mistyped.toml                 | mistyped.toml | batch | a whole number
--model no_such_module:Net             | 'no_such_module' | start in the folder
--model mine.py                        | Unknown model 'mine.py' | your own goes with module:attribute
--data photos                          | --data imagefolder --data-dir photos
--data imagefolder --data-dir gone     | gone/train is not there | --data-dir
--data webdataset --data-dir gone      | gone/train/*.tar | gone/train is not there | --data-dir
--data cifar10 --no-download --data-dir gone | gone/cifar-10-batches-py | allow --download
--image-size 9                         | --image-size | --data digits | imagefolder
--optimizer adamw --momentum .5        | --momentum | --optimizer adamw
--momentum 0                           | --momentum is 0 | --no-nesterov
--warmup 21                            | --warmup 21 | --epochs 20 | --warmup 20 or less
--lr-rule linear                       | --lr-rule linear | --base-batch
--collate mine:pad                     | --collate needs --step
--schedule multistep --milestones 3 2  | --milestones | 3 2
--accumulate 2 --micro-batch 3         | --accumulate 2 and --micro-batch 3 | give one
--batch 2 --devices 3                  | batch 2 | 3 devices | a batch of 3 or more
--batch 2 --devices 3 --strategy dp    | batch 2 | 3 devices | fewer devices
--accumulate 33 --devices 2            | 33 micro-batches on 2 devices | a smaller --accumulate
--micro-batch 1 --batch 5 --devices 4  | 2 micro-batches on 4 devices | a larger --micro-batch
--rank 2 --world-size 2                | --rank 2 | --world-size 2
--profile 5:2                          | --profile 5:2 | such as 10:15
--profile 0:2                          | --profile 0:2 | from 1 up
--nodes 3:2                            | --nodes '3:2' | such as 1:4
--nodes 2                              | torchrun --nnodes 2
--exchange-every 9                     | --exchange-every belongs to --exchange local-sgd or diloco
--powersgd-rank 2                      | --powersgd-rank and --powersgd-start belong to --exchange powersgd
--exchange powersgd --strategy fsdp    | --exchange powersgd | --strategy fsdp | take ddp or zero1
--cuda-graphs on                       | --cuda-graphs needs CUDA | cpu | leave it out
--cuda-graphs on --strategy dp         | --cuda-graphs on cannot work with --strategy dp | leave one of them out
--cuda-graphs on --draws global        | --draws global
--cuda-graphs on --micro-batch auto    | --micro-batch auto
--no-shard-reshard                     | --no-shard-reshard belong to --strategy fsdp
--shard-size 2 --exchange bf16 --strategy fsdp | --exchange bf16 | --shard-size | leave one out
--exchange diloco --strategy zero1     | --exchange diloco | --strategy zero1 | take --strategy ddp
--exchange diloco --batchnorm sync     | --exchange diloco | leave --batchnorm sync out
--exchange powersgd --precision fp16   | --exchange powersgd | --precision fp16 | take bf16
--exchange diloco --devices 1          | --exchange diloco needs several ranks
--exchange local-sgd --strategy dp     | --exchange local-sgd | --strategy dp is one process
--strategy single --devices 2          | take dp or ddp or zero1 or fsdp or hybrid, or one device
--devices 2 --gpus 0                   | --devices 2 | --gpus 0 | give one
--gpus 0                               | --gpus 0 | this machine shows no GPU
--accelerator cuda                     | --accelerator cuda | this machine shows no GPU | --accelerator cpu
--accelerator npu                      | --accelerator npu: torch | was built for | --accelerator auto
--output held                          | held holds a run already | --resume auto
--output s3://b/a --remote s3://b/c    | --output s3://b/a and --remote s3://b/c | give one URL
--remote runs/a                        | --remote runs/a: give a URL
--remote foo://b/a --output new        | foo://b/a cannot be used | Protocol not known: foo
--remote oss://b/a --output new        | oss://b/a needs a package that is not installed | ossfs
--output file --devices 2              | file is a file | give a folder
"""

# A flag and what was given, and what is told; other programs' names of flags, and ours.
NEARLY = """
--modle x: --model, --device 2: --accelerator or --devices?, --model resnet81: resnet8,
--strategy dpp: dp or ddp or fsdp?,
--launcher spwan: spawn?, --data digit: digits?, --optimizer sdg: sgd?, --loss cross_entropi: cross_entropy,
--accelerator gpu: cuda?, --augment crop flup: flip?, --learning_rate 1: --lr?, --num-workers 1: --workers?
"""

BEYOND = """
lr 0, clip 0, momentum 1, ema 1, timeout 1e9, stall-timeout 0, batch 0, samples 9223372036854775808
"""

STARTS = """
--strategy dp --nodes 2                | --strategy dp is one process | 2 ranks
--strategy hybrid --devices 2 --batch 2 {meet} --rank 0 --world-size 2 | batch 2 | 4 devices
--strategy hybrid --devices 2 --batchnorm sync | --batchnorm sync cannot work under --strategy hybrid | --strategy ddp
--launcher inline --devices 2          | --launcher inline is one process | needs 2
[torchrun] --launcher spawn --devices 2 | has started 4 ranks | unset RANK WORLD_SIZE LOCAL_RANK
[torchrun] --max-restarts 2            | --launcher environment starts ranks once | give torchrun its own
[torchrun] --devices 3                 | --devices 3 | LOCAL_WORLD_SIZE is 2
--launcher environment                 | RANK and WORLD_SIZE are not set
--world-size 2 --rank 0                | --init-method
--world-size 2 {meet}                  | --rank
--world-size 2 --rank 0 --init-method file://x | file://x | three slashes
--nodes 1:2 {meet} --interface eth77   | --interface eth77 | has no interface
[GLOO_SOCKET_IFNAME=x] --nodes 1:2 {meet} --interface lo | --interface lo disagrees | GLOO_SOCKET_IFNAME is x
[RANK=0]                               | WORLD_SIZE is not set
[RANK=0 WORLD_SIZE=2]                  | MASTER_ADDR is not set
[open-mpi OMPI_COMM_WORLD_SIZE=4]      | LOCAL_SIZE is 2 | -x MASTER_ADDR
[batch]                                | SLURM_NTASKS is 4 | --launcher spawn
[SLURM_NTASKS=2]                       | SLURM_NTASKS is 2 | left over, unset it
""".replace("{meet}", "--init-method tcp://h:1")

SUBMIT = """
--time 20m digits                      | --time 20m | minutes:seconds
--ntasks-per-node 4 --gpus-per-node 2 digits | --ntasks-per-node 4 | --gpus-per-node 2
--sbatch=--nodes=3 digits              | --nodes=3 | give --nodes
--nodes 2 digits --devices 4           | --devices 4 | --gpus-per-
digits --launcher spawn                | --launcher spawn | srun starts the ranks
digits --accelerator cuda              | add --gpus-per-node
--nodes 2 --ntasks-per-node 64 digits  | batch 64 | 128 devices
"""

RUN = """
                                       | No script given
absent.py                              | absent.py cannot be read: No such file or directory
.                                      | . cannot be read: Is a directory
binary                                 | binary is no script that Python can read
broken.py                              | broken.py is no script that Python can read | (broken.py, line 1)
-m absent_module                       | -m absent_module: there is no such module
--model mlp --devices 2 --lr 1 mine.py --batch 3 | takes no --model, --lr: the script decides
--config trained/config.toml mine.py   | takes no --config
--devcies 2 mine.py                    | did you mean --devices
--strategy dp mine.py                  | drives several devices from one process
--output mine.py mine.py               | --output mine.py is a file
"""

CURVE = """
--resume auto                          | no use for --resume auto
--strategy single                      | --strategy single is what the others are compared with
--strategy hybrid                      | needs several nodes | lockstep verify gradients measures it
--output s3://b/a                      | --output s3://b/a: it writes to local disks alone
--devices 1                            | --devices 1 leaves nothing to compare
--batch 1                              | batch 1 | 2 devices
--output proved                        | proved holds a run already
[torchrun]                             | starts all ranks itself | unset RANK WORLD_SIZE LOCAL_RANK
"""

# What reaches the model, the data set or the loss: refused on the first rank, with torch, before anything trains.
OWN = """
--model {own}:none                     | returned None | an nn.Module
--model {own}:buggy                    | called with (classes=10) | raised TypeError at | refused.py:20
--model {own}:Missing                  | has no 'Missing'
--model lacking:Net                    | importing lacking | ModuleNotFoundError at | lacking.py:2 | no_such_package
--model {own}:narrow                   | cannot take this data set's samples | (1, 8, 8)
--model {own}:noted                    | more than tensors in its state (1._extra_state)
--model {own}:lazy                     | shapes a first batch decides (1.weight, 1.bias)
--model {own}:unnormed                 | without running statistics (1)
--model mobilenet_v3_small             | (1, 8, 8) | to have 3 channels, but got 1
--data {own}:outside                   | test sample 3 has label 3 | 0 to 2
--data {own}:empty                     | train data | no sample
--data {own}:one_set                   | returned TensorDataset | two data sets
--data {own}:streams                   | cannot be read by index | map-style
--data {own}:fractions                 | train labels are torch.float32 | one whole number for each sample
--data {own}:broken                    | raised FileNotFoundError at | my.csv
--data {own}:vectors --augment crop    | --augment crop | images of bytes
--data {own}:vectors --augment mixup   | --augment mixup mixes images
--augment flip randaugment             | --augment randaugment belongs to --data imagefolder
--augment cutmix --loss {own}:loss     | --augment cutmix | cross_entropy
--data fake --image-size 7 --augment crop | --augment crop | 8 × 8 pixels or more, found 7 × 7
--data {own}:vectors --model resnet8   | takes images | --model mlp
--on-device on                         | --on-device on | use auto
--holdout 1e-9                         | --holdout 1e-09 | none of 1,437 samples
--precision tf32                       | tf32 | NVIDIA GPU | found cpu
--loss {own}:by_samples                | returned a tensor of shape (8,)
--loss {own}:detached                  | returned a number without a gradient
--loss {own}:averaged                  | divides by the samples that it sees | for 8 samples (scores (8,
--resume gone                          | gone | no checkpoint
""".replace("{own}", "tests.refused")

SCRIPTS = """
--lr 1 mine.py               | lockstep verify curve takes no --lr: the script decides
--strategy dp mine.py        | --strategy dp drives several devices | each process of a script has one
--rank 0 --world-size 2 --init-method file:///x mine.py --rank 1 | no use for --rank 0
--devices 1 mine.py          | --devices 1 leaves nothing to compare
"""

FIRST_STEP = """
--max-steps 3 mine.py        | --max-steps has no use
--all mine.py                | --all has no use here
--lr 1 mine.py               | lockstep verify gradients takes no --lr
--world-size 2 --rank 0 --init-method file:///x mine.py | lockstep verify gradients has no use for --rank 0
"""

GRADIENTS = """
--devices 1                  | --devices 1 leaves nothing to compare
--strategy single            | --strategy single has one replica
--step nowhere:step          | --step nowhere:step: no module 'nowhere'
"""

VERIFY = """
verify                       | No proof given; use
verify run runs/x            | no longer exists | proof.md | gradients or curve
"""

TABLES = {
    "": COMMANDS + VERIFY.lstrip(),
    "train digits": TRAIN,
    "train digits --accelerator cpu": STARTS,
    "run": RUN,
    "submit slurm --dry-run": SUBMIT,
    "verify curve digits --accelerator cpu": CURVE,
    "verify curve --accelerator cpu": SCRIPTS,
    "verify gradients --accelerator cpu": FIRST_STEP,
    "verify gradients digits --accelerator cpu": GRADIENTS,
    "train --accelerator cpu --model mlp": OWN,
}
ROWS = [(begun, *row.split("|", 1)) for begun, rows in TABLES.items() for row in rows.strip("\n").splitlines()]


@pytest.fixture
def refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refuses]:
    """Run a command in a folder, where it has to refuse and to leave nothing; fail where its sentence lacks words."""
    monkeypatch.chdir(tmp_path)
    for name in environment("srun batch array torchrun open-mpi mpich"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(BaseProcess, "start", lambda process: pytest.fail("a rank was started"))
    files = {
        "file": "",
        "mine.py": "class Net: ...",
        "broken.py": "main(",
        "binary": "\0",
        "lacking.py": "import math\nimport no_such_package",
        "broken.toml": "batch = = 3",
        "mistyped.toml": 'batch = "3"',
        "held/manifest.json": "",
        "proved/single/manifest.json": "",
        "trained/config.toml": to_toml(recipe("digits")),
        "photos/cat.jpg": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))

    def refuse(command: str, words: list[str]) -> None:
        told = refusal(capsys, *command.split())
        assert [word for word in words if word not in told] == [], told

    yield refuse
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.mark.parametrize(
    ("begun", "given", "words"), ROWS, ids=[f"{begun} {given.strip()}" for begun, given, _ in ROWS]
)
def test_it_is_refused(begun: str, given: str, words: str, refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.fullmatch(r"(?:\[(.*)])?(.*)", given.strip())
    assert found
    for name, value in environment(found[1] or "").items():
        monkeypatch.setenv(name, value)
    refuses(f"{begun} {found[2]}", [word.strip() for word in words.split("|")])


def test_what_is_nearly_a_name_is_told_the_name(refuses: Refuses) -> None:
    for given, name in (each.split(": ") for each in NEARLY.replace("\n", " ").strip().split(", ")):
        refuses(f"train digits {given}", [f"did you mean {name}"])


def test_a_number_out_of_its_range(refuses: Refuses) -> None:
    for flag, value in (each.split() for each in BEYOND.split(",")):
        fit = "--data fake" if flag == "samples" else ""
        refuses(f"train digits {fit} --{flag} {value}", [f"--{flag} {value[:1]}"])


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_model_that_cannot_be_compiled(tmp_path: Path) -> None:
    words = ("train", "digits", "--model", "mlp", "--compile", "--max-steps", 1, "--quiet")
    environ = {"CXX": "no-such-g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = command(tmp_path, *words, through=COLD, **environ)
    said = ended.err.splitlines()[-1]
    assert ended.code == 2
    assert said.startswith("lockstep: --compile: torch cannot compile the model: "), said
    assert "no-such-g++" in said


@pytest.mark.parametrize(
    "command",
    [
        *("diff {} b", "eval {}", "train digits --resume {}"),
        *("train --data imagefolder --data-dir {}", "train digits --accelerator cpu --output {}"),
    ],
)
def test_a_path_that_the_system_does_not_look_up(command: str, refuses: Refuses) -> None:
    """As one in another user's folder, which root may look into."""
    refuses(command.format("x" * 256), ["File name too long"])


def test_a_value_from_python_of_another_type() -> None:
    for key, value, kind in (
        ("batch", "3", "a whole number"),
        ("download", 1, "true or false"),
        ("augment", "crop", "a list of words"),
        ("bacth", 3, "did you mean batch"),
    ):
        with pytest.raises(RequestError, match=f"{key}.*{kind}"):
            override(RunConfig(), **{key: value})


def test_every_number_is_finite_and_not_negative() -> None:
    nan, infinite = float("nan"), float("inf")
    bad: dict[Any, list[Any]] = {int: [-1], float: [nan, infinite, -1.0], tuple[float, ...]: [[1, nan], [1, infinite]]}
    for leaf in leaves():
        for value in bad.get(leaf.kind, []):
            with pytest.raises(RequestError, match=f"--{leaf.key} "):
                override(RunConfig(), **{leaf.key: value})
