"""What a run is asked to do: frozen dataclasses; a `RunConfig` is whole and valid once it exists.

Each leaf has one public key: the command's flag (`--batch 256`), the TOML key (`batch = 256`) and the name in
`override(config, batch=256)` (see `options`). Its annotation says which values it takes; the comment beside it, or the
string under it, is its help on the command line. What follows from them (a rank's share, the chosen strategy) is not
here: a config says only what was asked, and what the line of a named strategy says of it.

    recipe (TOML in the package)  <  --config FILE.toml  <  flags
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import RequestError, choose
from .registry import KINDS, LAUNCHERS
from .validity import Bounds, OneOf, check

_key = tyro.conf.arg
_MaybeInt = Annotated[int | None, _key(metavar="INT")]
_FromZero = Bounds(least=0, below=2**63)
_Positive = Annotated[float, Bounds(above=0)]
_NotNegative = Annotated[float, Bounds(least=0)]
_Share = Annotated[float, Bounds(least=0, below=1)]
_Seconds = Annotated[float, Bounds(above=0, below=366 * 24 * 3600)]
_Switch = Annotated[str, OneOf(("auto", "on", "off"))]
SPANNING_SCHEDULES = ("cosine", "onecycle")
"""Those whose learning rates depend on how many epochs the run has."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    name: Annotated[str, _key(name="model")] = "resnet18"
    """A name from `lockstep info`, a torchvision classifier, or module:attribute of your own."""
    classes: _MaybeInt = None  # Number of classes; by default the data set's own.
    init_from: str = ""
    """Weights that a new run begins with: of a run or a checkpoint, a .safetensors or .pth file, or pretrained for
    torchvision's own; tensors that are not there, or of another shape, are drawn."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names, such as layer1.* conv1.*; BatchNorm layers whose
    parameters are all frozen compute as in an evaluation, and their running statistics stay as they are."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how they are varied."""

    name: Annotated[str, _key(name="data")] = "digits"
    """digits, cifar10, cifar100, imagefolder, fake, or module:attribute of your own."""
    dir: Annotated[Path, _key(name="data-dir")] = Path("data")  # Where the data set is, or is downloaded to.
    download: bool = True  # Download the data set, with its checksum, where --data-dir lacks it.
    workers: Annotated[_MaybeInt, _FromZero] = None
    """Processes for each rank that decode JPEGs (imagefolder and your own data sets); 0 decodes in the rank itself. By
    default as many as it has processors, and 4 at most; with --step none."""
    augment: Annotated[tuple[str, ...], OneOf(("crop", "flip", "cutout"))] = ()  # Any of crop, flip, cutout.
    image_size: Annotated[int, Bounds(least=1, below=4097)] = 224  # Side in pixels of imagefolder's and fake's images.
    samples: Annotated[int, Bounds(least=4, below=2**63)] = 1024  # Training images of the fake data set.
    holdout: _Share = 0.0  # Share of the training set (each class) for validation, chosen by --seed; 0 for none.
    skip_corrupt: bool = False  # Leave images out that cannot be decoded, and count them, instead of stopping.
    collate: str = ""  # With --step: module:attribute that makes a batch of a list of samples; by default torch's.
    on_device: _Switch = "auto"  # Keep small data sets in the accelerator's memory: auto, on, off.


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, and its learning rate over optimizer steps."""

    name: Annotated[str, OneOf(("sgd", "adamw", "muon")), _key(name="optimizer")] = "sgd"
    """sgd, adamw, or muon (matrices by Muon, the rest by AdamW)."""
    lr: _Positive = 0.1  # Peak learning rate.
    lr_scale: tuple[str, ...] = ()
    """Factors on the learning rate by PATTERN=FACTOR of parameter names, such as fc.*=10 layer1.*=0.1; the first
    pattern that a name matches counts."""
    momentum: _Share = 0.9  # Momentum of sgd and muon.
    nesterov: bool = False  # Nesterov's momentum.
    weight_decay: _NotNegative = 1e-4  # Weight decay (decoupled for adamw and muon).
    schedule: Annotated[str, OneOf(("constant", "step", "multistep", "cosine", "onecycle"))] = "constant"
    """constant, step, multistep, cosine or onecycle."""
    milestones: tuple[float, ...] = ()  # Epochs at which multistep multiplies by gamma; for step, the epochs between.
    gamma: _Positive = 0.1  # Factor of step and multistep.
    warmup: _NotNegative = 0.0  # Epochs of linear warm-up before the schedule (onecycle: its rising part).
    lr_rule: Annotated[str, OneOf(("none", "linear", "sqrt"))] = "none"  # none, linear or sqrt of batch ÷ base-batch.
    base_batch: _MaybeInt = None  # The batch that --lr was tuned for; needed by --lr-rule linear and sqrt.
    clip: Annotated[float | None, Bounds(above=0), _key(metavar="FLOAT")] = None  # Largest norm of all gradients.
    loss: str = "cross_entropy"  # Or module:attribute, called as loss(scores, labels, reduction="sum").
    step: str = ""
    """module:attribute of your own, for any task: called as step(model, batch), it returns the sum of the loss over the
    batch, alone or with the number of things that it is a sum over (tokens, say; by default samples)."""
    metric: str = ""
    """With --step: module:attribute of your own, called as metric(model, batch), which returns a sum over the batch, or
    (sum, count); more is better, and `best` follows it. An epoch whose count is 0 has no score."""
    label_smoothing: _Share = 0.0  # Share of each label that is spread over all classes.
    ema: Annotated[float | None, Bounds(above=0, below=1), _key(metavar="FLOAT")] = None
    """Decay of an exponential moving average of the weights, which evaluation then uses."""

    @property
    def lr_scales(self) -> list[tuple[str, float]]:
        """(pattern, factor) of each --lr-scale."""
        pairs = (word.rpartition("=") for word in self.lr_scale)
        return [(pattern, float(factor)) for pattern, _, factor in pairs]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch of one optimizer step, over all ranks."""

    size: Annotated[int, _key(name="batch")] = 256  # Global batch: samples in one optimizer step, over all ranks.
    accumulate: _MaybeInt = None  # Number of global micro-batches that one optimizer step is cut into.
    micro_batch: _MaybeInt = None  # Instead of --accumulate: the most samples a rank computes at once.
    eval_batch: _MaybeInt = None  # Samples a rank evaluates at once; by default its share of the global batch.
    drop_last: bool = False  # Leave out an epoch's last, smaller batch.
    draws: Annotated[str, OneOf(("rank", "global"))] = "rank"  # Random numbers: of each rank, or global, as of one.


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The devices, the way to use them, and how their processes meet."""

    strategy: Annotated[str, OneOf(KINDS, ("auto",))] = "auto"
    """single, dp, ddp or hybrid; auto takes ddp where there are several devices."""
    devices: _MaybeInt = None  # Devices on this node; by default all GPUs, or one CPU process.
    gpus: str = ""  # Chosen GPUs by index, such as 0,1 (as numbered among those visible to this process).
    accelerator: Annotated[str, OneOf(("auto", "cpu", "cuda"))] = "auto"  # auto, cpu or cuda.
    launcher: Annotated[str, OneOf(LAUNCHERS, ("auto",))] = "auto"
    """How processes start: inline, spawn, elastic, environment, manual, ray; auto finds out."""
    nodes_asked: Annotated[str, _key(name="nodes", metavar="N|MIN:MAX")] = "1"
    """Number of nodes; 1:4 takes as many as there are, and goes on with those that are left."""
    max_restarts: Annotated[int, _FromZero] = 0  # Times that ranks start again, from the last checkpoint.
    init_method: str = ""  # Where ranks started by hand meet: env://, tcp://HOST:PORT or file:///PATH.
    clear_meeting: bool = False  # No longer needed: a file:// that a dead run has left does no harm.
    interface: str = ""  # Network interface between ranks, such as eth1; by default the one towards their hosts.
    rank: Annotated[_MaybeInt, _FromZero] = None  # This process's rank, when started by hand.
    world_size: _MaybeInt = None  # Number of ranks, when started by hand.
    timeout: _Seconds = 60.0  # Seconds to wait for all ranks to come at the start.
    stall_timeout: _Seconds = 600.0  # Seconds without any rank's entering a new phase (a batch, a step, a save).
    batchnorm: Annotated[str, OneOf(("auto", "sync", "local"))] = "auto"
    """Batch statistics: sync (of the global micro-batch) or local (of each replica); auto is sync where it can be."""
    collectives: Annotated[str, OneOf(("auto", "gloo", "shared-memory"))] = "auto"
    """How ranks exchange CPU tensors: gloo, or shared-memory (ranks of one host), which auto takes where it can."""

    @property
    def nodes(self) -> int:
        """The number of nodes, or the least of a range."""
        return int(self.nodes_asked.partition(":")[0])

    @property
    def most_nodes(self) -> int:
        """The number of nodes, or the most of a range."""
        return int(self.nodes_asked.rpartition(":")[2])

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The indices in --gpus, in the order given; empty if none were chosen."""
        return tuple(int(word) for word in self.gpus.replace(" ", "").split(",") if word)

    @property
    def has_rendezvous_url(self) -> bool:
        """Whether ranks meet at the --init-method URL, not by the environment."""
        return self.init_method not in ("", "env:", "env:/", "env://")

    @property
    def drives_all(self) -> bool:
        """Whether each process drives all its devices. `auto` never resolves to such a strategy."""
        return self.strategy != "auto" and KINDS[self.strategy].drives_all

    @property
    def process_per_device(self) -> bool:
        """Whether a node has as many processes as devices. Of `auto`, which may be either, not."""
        return self.strategy != "auto" and KINDS[self.strategy].process_per_device


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The arithmetic."""

    name: Annotated[str, OneOf(("auto", "fp32", "tf32", "bf16", "fp16", "fp64")), _key(name="precision")] = "fp32"
    """fp32, tf32, bf16, fp16 (with loss scaling) or fp64; auto takes bf16 where the hardware has it, else fp32: then
    the model depends on the hardware."""
    channels_last: _Switch = "auto"  # Memory order of images: auto (on where it helps), on, off.
    compile: bool = False  # Compile the model with torch.compile; synchronised BatchNorm layers stay as they are.
    deterministic: bool = False  # Use only algorithms that give the same bits each time (GPU), dropout's included.


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and what a run continues from."""

    resume: str = ""  # auto (the output folder's last checkpoint, if any), or the path of a checkpoint or a run.
    checkpoint_every: _MaybeInt = None  # Optimizer steps between checkpoints; by default once an epoch.


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What a run writes down, and where."""

    output: Annotated[Path | None, _key(metavar="FOLDER")] = None  # The run's folder; by default runs/NAME.
    log_every: int = 50  # Optimizer steps between log lines (sooner where steps are slow).
    quiet: bool = False  # Show warnings, errors and one line at the end; what is recorded stays the same.


@dataclass(frozen=True, kw_only=True)
class ProofConfig:
    """What is proved while training goes on."""

    verify_every: Annotated[int | None, _FromZero, _key(metavar="STEPS")] = None
    """Optimizer steps between checks that all ranks hold the same bits, besides the one before each checkpoint; 0 for
    none at all, by default what costs under 0.5 % of the time."""
    ledger: bool = False  # Count each sample in every epoch and evaluation; stop unless it came exactly once.


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, as it was asked for.

    Raises `RequestError` at construction for values that no run can honour.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    proof: ProofConfig = field(default_factory=ProofConfig)
    epochs: int = 10  # Passes over the training set.
    max_steps: _MaybeInt = None  # Stop after so many optimizer steps; schedules still follow --epochs.
    eval_every: Annotated[int, _key(metavar="EPOCHS")] = 1  # Epochs between evaluations; the last weights always are.
    patience: Annotated[int | None, _key(metavar="EVALUATIONS")] = None  # Stop after so many without a better score.
    seed: Annotated[int, _FromZero] = 0  # Seed of the weights, of the order and of the augmentation.

    def __post_init__(self) -> None:
        check(self)
        for sentence in _contradictions(self):
            raise RequestError(sentence)


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong about options that are valid one by one, and texts that cannot be read."""
    optim, batch, parallel = config.optim, config.batch, config.parallel
    has_own_loss, milestones = ":" in optim.loss, " ".join(map("{:g}".format, optim.milestones)) or "none"
    if not has_own_loss:
        choose("--loss", optim.loss, ["cross_entropy"])
    elif optim.label_smoothing:
        yield f"--label-smoothing belongs to cross_entropy, and --loss is {optim.loss}; smooth the labels there."
    if optim.metric and not optim.step:
        yield "--metric belongs to --step, whose batches it is given; add that."
    if config.data.collate and not optim.step:
        yield "--collate belongs to --step, whose batches it makes; add that."
    if optim.step and (optim.ema or has_own_loss or optim.label_smoothing or config.data.augment):
        flags = "--ema, --loss, --label-smoothing and --augment"
        yield f"{flags} have no effect with --step, which computes its loss of the data set's own samples; drop them."
    idle = {
        "--compile": config.precision.compile,
        "--channels-last on": config.precision.channels_last == "on",
        "--on-device on": config.data.on_device == "on",
        "--eval-batch": batch.eval_batch is not None,
    }
    if optim.step and any(idle.values()):
        told = ", ".join(flag for flag, is_asked in idle.items() if is_asked)
        yield f"{told}: without effect with --step, which calls the model as it is; leave that out."
    if not all(map(_scales_lr, optim.lr_scale)):
        yield f"--lr-scale {' '.join(optim.lr_scale)}: give PATTERN=FACTOR with a factor above 0, such as fc.*=10."
    if optim.nesterov and not optim.momentum:
        yield "--nesterov needs momentum, and --momentum is 0; give more, or --no-nesterov."
    if optim.lr_rule != "none" and optim.base_batch is None:
        yield f"--lr-rule {optim.lr_rule} needs the batch that --lr was tuned for; add --base-batch N."
    rising = all(a < b for a, b in zip((0.0, *optim.milestones), optim.milestones, strict=False))
    if optim.schedule == "multistep" and not (optim.milestones and rising):
        yield f"--schedule multistep needs rising --milestones in epochs, found {milestones}."
    if optim.schedule == "step" and not (len(optim.milestones) == 1 and rising):
        yield f"--schedule step needs one --milestones value, the epochs between cuts; found {milestones}."
    if optim.warmup > config.epochs:
        yield f"--warmup {optim.warmup:g} exceeds --epochs {config.epochs}; give --warmup {config.epochs} or less."
    if batch.accumulate is not None and batch.micro_batch is not None:
        yield f"--accumulate {batch.accumulate} and --micro-batch {batch.micro_batch} say the same thing; give one."
    is_range = re.fullmatch(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?", parallel.nodes_asked, re.ASCII)
    if not is_range or parallel.nodes > parallel.most_nodes:
        yield f"--nodes {parallel.nodes_asked!r}: give 1 or more, or a range such as 1:4."
    is_list = re.fullmatch(r"(\d{1,9}(,|$))*", parallel.gpus.replace(" ", ""), re.ASCII)
    if not is_list or len({*parallel.gpu_indices}) < len(parallel.gpu_indices):
        yield f"--gpus {parallel.gpus}: give different indices with commas, such as 0,1."
    if parallel.gpus and parallel.devices not in (None, count := len(parallel.gpu_indices)):
        yield f"--devices {parallel.devices} disagrees with --gpus {parallel.gpus}, which names {count}; give one."
    if parallel.gpus and parallel.accelerator == "cpu":
        yield f"--gpus {parallel.gpus} disagrees with --accelerator cpu."
    if parallel.rank is not None and parallel.world_size is None:
        yield f"--rank {parallel.rank} lacks the number of ranks; add it, as in --world-size 2."
    if parallel.rank is not None and parallel.world_size is not None and parallel.rank >= parallel.world_size:
        yield f"--rank {parallel.rank} lies outside --world-size {parallel.world_size}: ranks count from 0."


def _scales_lr(word: str) -> bool:
    pattern, _, factor = word.rpartition("=")
    try:
        return bool(pattern) and 0 < float(factor) < math.inf
    except ValueError:
        return False
