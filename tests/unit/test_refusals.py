"""What cannot be honoured is refused in one sentence that says what was asked, what was found and what to do.

Each line of a table is a command and, after it, what its sentence has to say. All run through the command in this
process: exit code 2, one line on stderr, and nothing made in the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import hardware
from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.launchers import table
from lockstep.options import leaves, override, recipe, to_toml

from ..command import refusal
from ..environments import environment

Refuses = Callable[..., str]


def rows(text: str, **words: str) -> list[list[str]]:
    """Return the cells of each line, with `words` put where they are named."""
    for name, word in {"meet": "--init-method tcp://h:1", "own": "tests.refused", **words}.items():
        text = text.replace(f"{{{name}}}", word)
    return [[cell.strip() for cell in line.split("|")] for line in text.strip("\n").splitlines()]


@pytest.fixture
def refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refuses]:
    """Run a command in an empty folder, from which only it may start; it has to refuse and to leave nothing there."""
    monkeypatch.chdir(tmp_path)
    for name in environment("srun batch array torchrun open-mpi mpich"):
        monkeypatch.delenv(name, raising=False)
    before: list[Path] = []

    def refuse(*words: object) -> str:
        before[:] = [*tmp_path.iterdir()]
        return refusal(capsys, *words)

    yield refuse
    assert [*tmp_path.iterdir()] == before


def says(sentence: str, words: list[str]) -> None:
    """Fail where the sentence lacks one of the words."""
    assert [word for word in words if word not in sentence] == [], sentence


COMMANDS = """
trian digits                           | 'trian' | did you mean train
info x                                 | takes no arguments | x
train digit                            | 'digit' | did you mean digits? | --config FILE.toml
train --batch 64 digits                | 'digits' belongs to no flag | a recipe comes first
doctor --xyzzy                         | '--xyzzy' | no name is like it | lockstep doctor --help
eval --devices 2                       | lacks the run | which comes first
eval one two                           | one run at a time | one and two
eval gone                              | gone is not there | give a run's folder
train --data cifar10 --data-dir {file} | {file} is a file | give the folder
submit pbs digits                      | Unknown scheduler 'pbs'
submit slurm digits                    | sbatch is not on PATH
"""

TRAIN = """
extra                                  | 'extra' belongs to no flag | lockstep train --help
--batch                                | --batch lacks its value | a whole number
--batch two                            | --batch two | a whole number
--clip x                               | --clip x | give a number
--milestones 1 x                       | --milestones x | a list of numbers
--output=                              | --output '' | give a path
--config gone.toml                     | gone.toml cannot be read | No such file
--nesterov true                        | 'true' | --nesterov or --no-nesterov
--nodes 1:                             | --nodes '1:' | a number, or a range
--nodes 2:1                            | --nodes '2:1' | the least number first
--model xyzzy                          | 'xyzzy' | no name is like it | lockstep info
--model pyramidnet-111-48              | found 111 | use 110 or 116
--model no_such_module:Net             | no module 'no_such_module' | start in the folder
--model my.nets:                       | module:attribute
--data no_such.module:load             | no module 'no_such.module'
--image-size 9                         | --image-size has no effect with --data digits | belongs to imagefolder and
--optimizer adamw --momentum .5        | --momentum has no effect with --optimizer adamw
--strategy dp --find-unused            | --find-unused has no effect with --strategy dp | belongs to ddp
--label-smoothing .1 --loss my:loss    | --label-smoothing 0.1 | --loss is my:loss
--momentum 0                           | --momentum is 0 | --no-nesterov
--warmup 21                            | --warmup 21 (in epochs) | --epochs 20 | --warmup 20 or less
--data fake --samples 3                | --samples 3 | 4 or more
--data fake --image-size 0             | --image-size 0 | 1 or more pixels
--lr-rule linear                       | --lr-rule linear | add --base-batch N
--schedule multistep --milestones 3 2  | needs rising --milestones | found 3 2
--schedule step --milestones 3 4       | one --milestones value | found 3 4
--accumulate 2 --micro-batch 3         | --accumulate 2 and --micro-batch 3 | give one
--batch 2 --devices 3                  | Global batch 2 | 3 ranks
--accumulate 33 --devices 2            | use --accumulate 32 or less, or --batch 66 or more
--rank 2 --world-size 2                | --rank 2 | --world-size 2 | ranks go from 0
--rank 0                               | --rank 0 without --world-size | such as
--nodes 2                              | torchrun --nnodes 2
--strategy single --devices 2          | take dp, ddp or hybrid, or one device
--devices 2 --gpus 0                   | --devices 2 disagrees with --gpus 0 | give one
--gpus 0,0                             | --gpus 0,0 | different indices with commas
--gpus 0 --accelerator cpu             | --gpus 0 disagrees with --accelerator cpu
--data imagefolder --data-dir gone     | gone/train is not there | give --data-dir
--data cifar10 --no-download --data-dir gone | gone/cifar-10-batches-py | allow --download
"""

# A flag and what was given, and what is told; other programs' names of flags, and ours.
NEARLY = """
--modle x: --model, -batch 3: --batch?, --device 2: --accelerator or --devices?, --model resnet81: resnet8,
--model mobilenet_v3_smal: mobilenet_v3_small, --strategy dpp: dp or ddp?, --launcher spwan: spawn?,
--data digit: digits?, --precision fp23: fp32, --optimizer sdg: sgd?, --schedule cosin: cosine,
--loss cross_entropi: cross_entropy, --lr-rule liner: linear, --accelerator gpu: cuda?, --batchnorm snyc: sync?,
--augment crop flup: flip?, --learning_rate 1: --lr?, --batch-size 1: --batch?, --num-workers 1: --workers?,
--ngpus 1: --devices?, --dataset 1: --data?, --amp 1: --precision?, --wd 1: --weight-decay?, --gpu 1: --gpus?
"""

BEYOND = """
lr 0, gamma -1, clip 0, momentum 1, ema 1, label-smoothing 1, timeout 1e9, stall-timeout 0, batch 0, classes 0,
epochs 0, base-batch 0, samples 9223372036854775808
"""

LAUNCHES = """
--strategy dp --nodes 2 |  | --strategy dp is one process | 2 ranks
--strategy dp | srun | --strategy dp is one process | 3 ranks | SLURM_STEP_NUM_TASKS
--launcher spawn --devices 2 --rank 0 --world-size 2 {meet} |  | --rank 0, --world-size 2 belong to | drop them
--launcher inline --devices 2 |  | --launcher inline is one process | --strategy ddp needs 2
--launcher spawn --nodes 2 |  | --launcher spawn | this host alone
--launcher spawn --devices 2 | torchrun | RANK=3, WORLD_SIZE=4 | has started 4 ranks | unset RANK WORLD_SIZE LOCAL_RANK
--launcher inline | mpich | PMI_RANK=1, PMI_SIZE=2 | has started 2 ranks
--launcher environment {meet} | torchrun | MASTER_ADDR and MASTER_PORT | {meet} belongs to
--launcher environment |  | RANK and WORLD_SIZE are not set
--launcher spawn --devices 2 --max-restarts 2 |  | --max-restarts 2 belongs to --launcher elastic | drop it
--max-restarts 2 | torchrun | --launcher environment starts ranks once | give torchrun its own
--launcher manual --rank 0 --world-size 2 {meet} --nodes 1:3 |  | --nodes 1:3 | --launcher manual | give one number
--world-size 2 --rank 0 |  | need --init-method
--world-size 2 {meet} |  | needs --rank
--world-size 2 --rank 0 --init-method tcp://h:99999 |  | tcp://h:99999 | an address and a port
--world-size 2 --rank 0 --init-method file://x |  | file://x | three slashes
--world-size 2 --rank 0 --init-method udp://h:1 |  | udp://h:1 | no meeting place
| RANK=0 | WORLD_SIZE is not set
| RANK=2 WORLD_SIZE=2 | RANK is 2, but WORLD_SIZE is 2
| RANK=0 WORLD_SIZE=2 | MASTER_ADDR is not set
| RANK=x WORLD_SIZE=2 | RANK is 'x'
| ranks LOCAL_RANK=0 | LOCAL_RANK is 0 where RANK is 1
--devices 3 | torchrun | --devices 3 disagrees | LOCAL_WORLD_SIZE is 2
--nodes 3 | srun | --nodes 3 disagrees | SLURM_STEP_NUM_NODES is 2
--world-size 3 --rank 1 | srun | --rank 1 disagrees | SLURM_PROCID is 2
--world-size 3 --rank 1 | mpich | --world-size 3 disagrees | PMI_SIZE is 2
--strategy hybrid | srun-one-node | --strategy hybrid | one process | SLURM_STEP_TASKS_PER_NODE | is 3
| srun WORLD_SIZE=4 | WORLD_SIZE is 4 | srun has started 3 tasks
| srun SLURM_STEP_TASKS_PER_NODE=2 | SLURM_STEP_NUM_TASKS is 3 | SLURM_STEP_TASKS_PER_NODE is 2
| srun SLURM_STEP_TASKS_PER_NODE=x | SLURM_STEP_TASKS_PER_NODE is 'x' | such as
| srun SLURM_STEP_NODELIST=no-such-name | no-such-name | set MASTER_ADDR to
| srun SLURM_STEP_NODELIST=n[1-2 | SLURM_STEP_NODELIST
| srun MASTER_PORT=0 | MASTER_PORT is 0 | 1 to 65535
| mpich MPI_LOCALNRANKS=3 | MPI_LOCALNRANKS is 3, but PMI_SIZE is 2
| open-mpi OMPI_COMM_WORLD_SIZE=4 | LOCAL_SIZE is 2 | -x MASTER_ADDR=<address | -x MASTER_PORT
| OMPI_COMM_WORLD_RANK=0 | OMPI_COMM_WORLD_RANK is 0 | OMPI_COMM_WORLD_SIZE is not set
| batch | SLURM_NTASKS is 4 | SLURM_STEP_ID is not set | name --launcher spawn
| SLURM_NTASKS=2 | SLURM_NTASKS is 2 | SLURM_STEP_ID is not set | left over, unset it
| step SLURM_NTASKS=x | SLURM_NTASKS is 'x' | takes a number
| RANK=1 WORLD_SIZE=2 mpich PMI_RANK=0 | RANK is 1 | PMI_RANK is 0
{shared} --world-size 3 | array | --world-size 3 disagrees | SLURM_ARRAY_TASK_COUNT=4
{shared} | array SLURM_ARRAY_TASK_COUNT=3 | SLURM_ARRAY_TASK_COUNT is 3 | indices from
{shared} | array SLURM_ARRAY_TASK_ID=5 | SLURM_ARRAY_TASK_ID is 5 | do not follow
{shared} | array srun | SLURM_ARRAY_TASK_COUNT is 4 | srun has started 3 tasks
"""

SUBMIT = """
--nodes two digits                     | --nodes two | a whole number
--time 20m digits                      | --time 20m | minutes:seconds, hours:minutes:seconds, or days-hours
--gpus-per-node 0 digits               | --gpus-per-node 0 | from 1 up
--mem lots digits                      | --mem lots | the memory of a node
--partition=a"b digits                 | --partition 'a"b' | one word
--ntasks-per-node 4 --gpus-per-node 2 digits | --ntasks-per-node 4 disagrees with --gpus-per-node 2
--sbatch=--nodes=3 digits              | --sbatch --nodes=3 | give --nodes
--sbatch=--array=0-3 digits            | does not allow for --array
--nodes 2 digits --devices 4           | --devices 4 | give --gpus-per-
--nodes 2 digits --launcher spawn      | --launcher spawn | srun starts the ranks
--nodes 2 digits {meet}                  | {meet} | the ranks
digits --max-restarts 3                | --max-restarts 3 | srun starts the ranks once
--nodes 2 --gpus-per-node 4 digits --strategy hybrid --batch 4 | 2 ranks of 4 devices
--gpus-per-node 2 digits --accelerator cpu | --accelerator cpu disagrees with --gpus-per-node 2
digits --accelerator cuda              | add --gpus-per-node N
--nodes 2 digits --strategy dp         | --strategy dp is one process | --nodes 2
--nodes 2 --ntasks-per-node 64 digits  | Global batch 64 | 128 ranks
digits --resume runs/x                 | give --output RUN --resume auto
digist                                 | did you mean digits?
digits --output a"b                    | a"b | which Slurm cannot read | another --output
"""

# What reaches the model, the data set or the loss: refused on the first rank, with torch, before anything trains.
OWN = """
--model {own}:none                     | returned None | an nn.Module
--model {own}:buggy                    | called with (classes=10) | raised TypeError at | refused.py:22
--model {own}:OBJECT                   | an object of type Identity | give a class or function
--model {own}:Missing                  | has no 'Missing'
--model broken:Net                     | importing broken raised ModuleNotFoundError at | broken.py:2 | no_such_package
--model {own}:narrow                   | cannot take this data set's samples | shape (1, 8, 8) | it raised
--model {own}:lazy                     | shapes a first batch decides (1.weight, 1.bias) | run a batch
--model {own}:noted                    | more than tensors in its state (1._extra_state)
--model {own}:unnormed                 | without running statistics (1)
--model {own}:sparse                   | sparse gradients (1)
--model mobilenet_v3_small             | takes images of 3 channels, the data has 1 | take one of our own
--data {own}:outside                   | test sample 3 has label 3 | 0 to 2
--data {own}:empty                     | train data (TensorDataset) has no sample
--data {own}:one_set                   | returned one TensorDataset | two data sets
--data {own}:streams                   | train data (_Stream) cannot be read by index | map-style
--data {own}:fractions                 | train labels are torch.float32 of shape (9,) | one whole number for each sample
--data {own}:words                     | train sample 0 has label '3' | a whole number from 0 to 2
--data {own}:broken                    | raised FileNotFoundError at | my.csv
--data {own}:NUMBERS                   | an object of type list | give a class or function
--data {own}:vectors --augment crop    | --augment crop | images of bytes
--data {own}:vectors --model resnet8   | takes images, of shape (channels, height, width) | take --model mlp
--data fake --image-size 7 --augment crop | crop needs images of 8 × 8 pixels or more
--on-device on                         | --on-device on | use auto
--precision tf32                       | needs an NVIDIA GPU of Ampere or newer | found cpu
--loss {own}:by_samples                | returned a tensor of shape (2,)
--loss {own}:plain_number              | returned float
--loss {own}:detached                  | a number without a gradient
--loss {own}:nowhere                   | has no 'nowhere'
--resume gone                          | gone | no checkpoint
"""

TEXTS = {
    b"model = 'r\xe9seau'": "not text in UTF-8",
    b"batch = = 3": "not valid TOML",
    b"bacht = 3": "did you mean batch",
    b'batch = "3"': "it takes a whole number",
}
VALUES: dict[str, list[tuple[str, Any]]] = {
    "it takes a whole number": [("batch", "3"), ("batch", 3.0), ("batch", True), ("batch", None)],
    "it takes a number": [("lr", "0.1"), ("lr", 10**400)],
    "it takes true or false": [("download", 1)],
    "it takes a list of words": [("augment", "crop")],
    "is not UTF-8": [("output", Path("p\udce9"))],
    "did you mean batch": [("bacth", 3)],
}


@pytest.mark.parametrize("row", rows(COMMANDS, file=__file__), ids=lambda row: row[0])
def test_a_command_that_cannot_be(row: list[str], refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    says(refuses(*row[0].split()), row[1:])


@pytest.mark.parametrize("row", rows(TRAIN), ids=lambda row: row[0])
def test_a_run_that_cannot_be(row: list[str], refuses: Refuses) -> None:
    says(refuses("train", "digits", *row[0].split()), row[1:])


def test_what_is_nearly_a_name_is_told_the_name(refuses: Refuses) -> None:
    for given, name in (each.split(": ") for each in NEARLY.replace("\n", " ").strip().split(", ")):
        says(refuses("train", "digits", *given.split()), [f"did you mean {name}"])


def test_a_number_out_of_its_range(refuses: Refuses) -> None:
    for flag, value in (each.split() for each in BEYOND.split(",")):
        data, schedule = ("fake" if flag == "samples" else "digits"), ("step" if flag == "gamma" else "cosine")
        told = refuses("train", "digits", "--data", data, "--schedule", schedule, f"--{flag}", value)
        says(told, [f"--{flag} {value[:1]}"])


@pytest.mark.skipif(bool(hardware.gpus(None)), reason="says what a machine without a GPU says")
def test_a_gpu_that_is_not_there(refuses: Refuses) -> None:
    for flag in ("--gpus 0", "--accelerator cuda"):
        says(refuses("train", "digits", *flag.split()), ["this machine shows no GPU"])


@pytest.mark.parametrize(
    "row", rows(LAUNCHES, shared="--init-method file:///shared/x"), ids=lambda row: f"{row[0]} in {row[1]}"
)
def test_a_start_that_cannot_be(row: list[str], refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(row[1]).items():
        monkeypatch.setenv(name, value)
    says(refuses("train", "digits", "--accelerator", "cpu", *row[0].split()), row[2:])


@pytest.mark.parametrize("row", rows(SUBMIT), ids=lambda row: row[0])
def test_a_job_that_cannot_be(row: list[str], refuses: Refuses) -> None:
    words = row[0].replace("\\n", "\n").split(" ")
    says(refuses("submit", "slurm", "--dry-run", *words), row[1:])


@pytest.mark.parametrize("row", rows(OWN), ids=lambda row: row[0])
def test_parts_that_cannot_be_used(row: list[str], refuses: Refuses, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\nimport no_such_package")
    model = () if "--model" in row[0] else ("--model", "mlp")
    says(refuses("train", "--accelerator", "cpu", *model, *row[0].split()), row[1:])


def test_an_evaluation_has_no_use_for_flags_of_training(refuses: Refuses, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(recipe("digits")))
    for flags in ("--epochs 3", "--resume auto", "--lr 3"):
        says(refuses("eval", tmp_path, *flags.split()), [f"lockstep eval has no use for {flags.split()[0]}"])


def test_a_module_or_a_folder_alone_is_told_what_to_write(refuses: Refuses, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "mine.py").write_text("class Net: ...")
    says(refuses("train", "digits", "--model", "mine.py"), ["is a module", "--model mine:Net"])
    says(refuses("train", "digits", "--data", "mine"), ["is a module", "--data mine:splits"])
    says(refuses("train", "digits", "--data", "photos"), ["--data imagefolder --data-dir photos"])


def test_a_folder_that_cannot_be_the_runs(refuses: Refuses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "launch", lambda *args: pytest.fail("ranks were started"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").touch()
    for words in (("train",), ("submit", "slurm", "--dry-run")):
        says(refuses(*words, "digits", "--output", "run"), ["run holds a run already", "--resume auto"])
    says(refuses("train", "digits", "--devices", 2, "--output", __file__), ["is a file", "give a folder"])
    (tmp_path / "link").symlink_to("gone")
    says(refuses("train", "digits", "--output", "link"), ["--output", "link is a link to", "gone, which is not there"])


def test_a_file_that_is_no_config(refuses: Refuses, tmp_path: Path) -> None:
    for text, told in TEXTS.items():
        (tmp_path / "mine.toml").write_bytes(text)
        says(refuses("train", "digits", "--config", "mine.toml"), ["mine.toml", told])


@pytest.mark.parametrize("found", VALUES)
def test_a_value_from_python_of_another_type(found: str) -> None:
    for key, value in VALUES[found]:
        with pytest.raises(RequestError, match=found) as caught:
            override(RunConfig(), **{key: value})
        assert key in str(caught.value)


def test_every_number_is_finite_and_not_negative() -> None:
    nan, infinite = float("nan"), float("inf")
    bad: dict[Any, list[Any]] = {int: [-1], float: [nan, infinite, -1.0], tuple[float, ...]: [[1, nan], [1, infinite]]}
    for leaf in leaves():
        for value in bad.get(leaf.kind, []):
            with pytest.raises(RequestError, match=f"--{leaf.key} "):
                override(RunConfig(), **{leaf.key: value})
