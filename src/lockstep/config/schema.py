"""What a run is asked to do: frozen dataclasses, whole and valid once they exist.

Each leaf has one public key. The key is the command's flag (`--batch 256`), the TOML key (`batch = 256`) and
the name in `override(config, batch=256)` (see `options`); the string under a field is its help on the command line.
There is no second table of options anywhere.

    recipe (TOML in the package)  <  --config FILE.toml  <  flags

Values that other numbers follow from (shares of a rank, steps of an epoch, the chosen strategy) are not here:
they live in `BatchPlan`, `Topology` and the run's manifest, so that a config says only what was asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import RequestError, choose
from .validity import check_finite, check_text, check_wait, check_whole, listed, require

_key = tyro.conf.arg

ACCELERATORS = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "fp64")
OPTIMIZERS = ("sgd", "adamw", "muon")
SCHEDULES = ("constant", "step", "multistep", "cosine", "onecycle")
SPANNING_SCHEDULES = ("cosine", "onecycle")
"""Those whose learning rates depend on how many epochs the run has."""
LOSSES = ("cross_entropy",)
LR_RULES = ("none", "linear", "sqrt")
BATCHNORMS = ("auto", "sync", "local")
COLLECTIVES = ("auto", "gloo", "shared-memory")
SWITCHES = ("auto", "on", "off")
AUGMENTATIONS = ("crop", "flip", "cutout")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    name: Annotated[str, _key(name="model")] = "resnet18"
    """A name from `lockstep info`, a torchvision classifier, or module:attribute of your own."""
    classes: Annotated[int | None, _key(metavar="INT")] = None
    """Number of classes; by default the data set's own."""
    init_from: str = ""
    """Weights that a new run begins with: of a run or a checkpoint, a .safetensors or .pth file, or pretrained for
    torchvision's own; tensors that are not there, or of another shape, are drawn."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names, such as layer1.* conv1.*; BatchNorm layers whose
    parameters are all frozen compute as in an evaluation, and their running statistics stay as they are."""

    def __post_init__(self) -> None:
        check_whole("classes", self.classes)
        check_text("init-from", self.init_from)
        check_text("freeze", self.freeze)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how they are varied."""

    name: Annotated[str, _key(name="data")] = "digits"
    """digits, cifar10, cifar100, imagefolder, fake, or module:attribute of your own."""
    dir: Annotated[Path, _key(name="data-dir")] = Path("data")
    """Folder that holds the data set, or where it is downloaded to."""
    download: bool = True
    """Download the data set, with its checksum, where --data-dir lacks it."""
    workers: Annotated[int | None, _key(metavar="INT")] = None
    """Processes for each rank that decode JPEGs (imagefolder and your own data sets); 0 decodes in the rank itself. By
    default as many as it has processors, and 4 at most."""
    augment: tuple[str, ...] = ()
    """Variations of the training images: any of crop, flip, cutout."""
    image_size: int = 224
    """Side in pixels of imagefolder's and fake's images."""
    samples: int = 1024
    """Number of training images of the fake data set; a quarter as many are held out."""
    holdout: float = 0.0
    """Share of the training set that is held out as a validation set, chosen by --seed; 0 for none."""
    skip_corrupt: bool = False
    """Leave images out that cannot be decoded, and count them, instead of stopping."""
    collate: str = ""
    """With --step: module:attribute of your own that makes a batch of a list of samples; by default torch's."""
    on_device: str = "auto"
    """Keep small data sets in the accelerator's memory: auto, on, off."""

    def __post_init__(self) -> None:
        for name in self.augment:
            choose("augmentation", name, AUGMENTATIONS)
        choose("value of --on-device", self.on_device, SWITCHES)
        check_whole("workers", self.workers, least=0)
        check_whole("image-size", self.image_size, unit=" pixels")
        require(self.image_size <= 4096, f"--image-size {self.image_size}: give 4096 pixels or less.")
        check_whole("samples", self.samples, least=4)
        require(0 <= self.holdout < 1, f"--holdout {self.holdout}: give a share from 0 up to, not including, 1.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, and its learning rate over optimizer steps."""

    name: Annotated[str, _key(name="optimizer")] = "sgd"
    """sgd, adamw, or muon (matrices by Muon, the rest by AdamW)."""
    lr: float = 0.1
    """Peak learning rate."""
    lr_scale: tuple[str, ...] = ()
    """Factors on the learning rate by PATTERN=FACTOR of parameter names, such as fc.*=10 layer1.*=0.1; the first
    pattern that a name matches counts."""
    momentum: float = 0.9
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Nesterov's momentum."""
    weight_decay: float = 1e-4
    """Weight decay (decoupled for adamw and muon)."""
    schedule: str = "constant"
    """constant, step, multistep, cosine or onecycle."""
    milestones: tuple[float, ...] = ()
    """Epochs at which multistep multiplies the rate by gamma; for step, the one number of epochs between cuts."""
    gamma: float = 0.1
    """Factor of step and multistep."""
    warmup: float = 0.0
    """Epochs of linear warm-up before the schedule (onecycle: its rising part)."""
    lr_rule: str = "none"
    """How --lr follows the batch: none, linear or sqrt of batch ÷ base-batch."""
    base_batch: Annotated[int | None, _key(metavar="INT")] = None
    """The batch that --lr was tuned for; needed by --lr-rule linear and sqrt."""
    clip: Annotated[float | None, _key(metavar="FLOAT")] = None
    """Largest gradient norm, measured over the whole model after unscaling."""
    loss: str = "cross_entropy"
    """cross_entropy, or module:attribute of your own: called as loss(scores, labels, reduction="sum")."""
    step: str = ""
    """module:attribute of your own, for any task: called as step(model, batch), it returns the sum of the loss over the
    batch, alone or with the number of things that it is a sum over (tokens, say; by default samples)."""
    metric: str = ""
    """With --step: module:attribute of your own, called as metric(model, batch), which returns a sum over the batch, or
    (sum, count); more is better, and `best` follows it."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes."""
    ema: Annotated[float | None, _key(metavar="FLOAT")] = None
    """Decay of an exponential moving average of the weights, which evaluation then uses."""

    def __post_init__(self) -> None:
        check_finite(self)
        choose("optimizer", self.name, OPTIMIZERS)
        choose("schedule", self.schedule, SCHEDULES)
        choose("learning-rate rule", self.lr_rule, LR_RULES)
        if ":" not in self.loss:
            choose("loss", self.loss, LOSSES)
        require(not self.metric or bool(self.step), "--metric belongs to --step, whose batches it is given; add that.")
        require(
            ":" not in self.loss or not self.label_smoothing,
            f"--label-smoothing {self.label_smoothing:g} belongs to cross_entropy, and --loss is {self.loss}; smooth "
            "the labels there, or leave it out.",
        )
        require(self.lr > 0, f"--lr {self.lr}: give a number above 0.")
        check_text("lr-scale", self.lr_scale)
        for word, (pattern, factor) in zip(self.lr_scale, self.lr_scales, strict=True):
            require(
                bool(pattern) and 0 < factor < math.inf,
                f"--lr-scale {word}: give PATTERN=FACTOR with a factor above 0, such as fc.*=10; --freeze keeps "
                "parameters as they are.",
            )
        require(0 <= self.momentum < 1, f"--momentum {self.momentum}: give a number from 0 up to, not including, 1.")
        require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay}: give 0 or more.")
        require(self.gamma > 0, f"--gamma {self.gamma}: give a factor above 0.")
        require(self.warmup >= 0, f"--warmup {self.warmup}: give 0 or more epochs.")
        require(0 <= self.label_smoothing < 1, f"--label-smoothing {self.label_smoothing}: give 0 up to below 1.")
        require(self.clip is None or self.clip > 0, f"--clip {self.clip}: give a norm above 0.")
        require(self.ema is None or 0 < self.ema < 1, f"--ema {self.ema}: give a decay between 0 and 1.")
        require(
            not self.nesterov or self.momentum > 0,
            f"--nesterov needs momentum, and --momentum is {self.momentum:g}; give more, or --no-nesterov.",
        )
        check_whole("base-batch", self.base_batch)
        require(
            self.lr_rule == "none" or self.base_batch is not None,
            f"--lr-rule {self.lr_rule} needs the batch that --lr was tuned for; add --base-batch N.",
        )
        if self.schedule == "multistep":
            rising = all(a < b for a, b in zip((0.0, *self.milestones), self.milestones, strict=False))
            require(
                bool(self.milestones) and rising,
                f"--schedule multistep needs rising --milestones in epochs, found {listed(self.milestones)}.",
            )
        if self.schedule == "step":
            require(
                len(self.milestones) == 1 and self.milestones[0] > 0,
                f"--schedule step needs one --milestones value, the epochs between cuts; found "
                f"{listed(self.milestones)}.",
            )

    @property
    def lr_scales(self) -> tuple[tuple[str, float], ...]:
        """(pattern, factor) of each --lr-scale; the factor is NaN where there is no number."""
        return tuple((word.rpartition("=")[0], _number(word.rpartition("=")[2])) for word in self.lr_scale)


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch of one optimizer step, over all ranks."""

    size: Annotated[int, _key(name="batch")] = 256
    """Global batch: samples in one optimizer step, over all ranks and micro-batches."""
    accumulate: Annotated[int | None, _key(metavar="INT")] = None
    """Number of global micro-batches that one optimizer step is cut into."""
    micro_batch: Annotated[int | None, _key(metavar="INT")] = None
    """Instead of --accumulate: the most samples a rank computes at once."""
    eval_batch: Annotated[int | None, _key(metavar="INT")] = None
    """Samples a rank evaluates at once; by default the rank's share of the global batch."""
    drop_last: bool = False
    """Leave out an epoch's last, smaller batch."""

    def __post_init__(self) -> None:
        check_whole("batch", self.size)
        check_whole("accumulate", self.accumulate)
        check_whole("micro-batch", self.micro_batch)
        check_whole("eval-batch", self.eval_batch)
        require(
            self.accumulate is None or self.micro_batch is None,
            f"--accumulate {self.accumulate} and --micro-batch {self.micro_batch} say the same thing twice; give one.",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The devices, the way to use them, and how their processes meet."""

    strategy: str = "auto"
    """single, dp, ddp or hybrid; auto takes ddp where there are several devices."""
    devices: Annotated[int | None, _key(metavar="INT")] = None
    """Devices on this node; by default all GPUs, or one CPU process."""
    gpus: str = ""
    """Chosen GPUs by index, such as 0,1 (as numbered among those visible to this process)."""
    accelerator: str = "auto"
    """auto, cpu or cuda."""
    launcher: str = "auto"
    """How processes come to be: inline, spawn, elastic, environment, manual, ray; auto finds out."""
    nodes_asked: Annotated[str, _key(name="nodes", metavar="N|MIN:MAX")] = "1"
    """Number of nodes; 1:4 takes as many as there are, and goes on with those that are left."""
    max_restarts: int = 0
    """Times that ranks are started again, from the last checkpoint, after one of them was lost."""
    init_method: str = ""
    """Where ranks started by hand meet: env://, tcp://HOST:PORT or file:///PATH."""
    clear_meeting: bool = False
    """No longer needed: a file:// that a dead run has left does no harm."""
    interface: str = ""
    """Network interface of this host for the traffic between ranks, such as eth1; by default the one that leads to
    the other ranks' hosts."""
    rank: Annotated[int | None, _key(metavar="INT")] = None
    """This process's rank, when started by hand."""
    world_size: Annotated[int | None, _key(metavar="INT")] = None
    """Number of ranks, when started by hand."""
    timeout: float = 60.0
    """Seconds to wait for all ranks to come at the start."""
    stall_timeout: float = 600.0
    """Seconds without any rank's entering a new phase (a batch, a step, a save) after which the run fails."""
    batchnorm: str = "auto"
    """Batch statistics: sync (of the global micro-batch) or local (of each replica); auto is sync where it can be."""
    collectives: str = "auto"
    """How ranks exchange CPU tensors: gloo, or shared-memory (ranks of one host); auto takes that where it can be
    had."""
    find_unused: bool = False
    """ddp, hybrid: search for parameters the loss does not reach at each step (slower), instead of refusing them."""

    def __post_init__(self) -> None:
        choose("accelerator", self.accelerator, ACCELERATORS)
        choose("value of --batchnorm", self.batchnorm, BATCHNORMS)
        choose("value of --collectives", self.collectives, COLLECTIVES)
        check_finite(self)
        check_whole("devices", self.devices)
        check_whole("max-restarts", self.max_restarts, least=0)
        least, most = self.nodes, self.most_nodes
        require(1 <= least <= most, f"--nodes {self.nodes_asked!r}: give 1 or more, and the least number first.")
        check_whole("world-size", self.world_size)
        check_wait("timeout", self.timeout)
        check_wait("stall-timeout", self.stall_timeout)
        chosen = self.gpu_indices
        require(
            self.devices is None or not chosen or self.devices == len(chosen),
            f"--devices {self.devices} disagrees with --gpus {self.gpus}, which names {len(chosen)}; give one of them.",
        )
        require(not chosen or self.accelerator != "cpu", f"--gpus {self.gpus} disagrees with --accelerator cpu.")
        if self.rank is not None:
            require(
                self.world_size is not None,
                f"--rank {self.rank} without --world-size: say how many ranks there are, such as --world-size 2.",
            )
        if self.world_size is not None:
            require(
                self.rank is None or 0 <= self.rank < self.world_size,
                f"--rank {self.rank} lies outside the world of --world-size {self.world_size}; "
                f"ranks go from 0 to {self.world_size - 1}.",
            )

    @property
    def nodes(self) -> int:
        """The number of nodes, or the least of a range."""
        return self._nodes[0]

    @property
    def most_nodes(self) -> int:
        """The number of nodes, or the most of a range."""
        return self._nodes[-1]

    @property
    def _nodes(self) -> list[int]:
        words = self.nodes_asked.split(":")
        if len(words) > 2 or not all(word.isascii() and word.isdecimal() for word in words):
            raise RequestError(f"--nodes {self.nodes_asked!r}: give a number, or a range such as 1:4.")
        return [int(word) for word in words]

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The indices in --gpus, in the order given; empty if none were chosen."""
        words = [word for word in self.gpus.replace(" ", "").split(",") if word]
        if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
            raise RequestError(f"--gpus {self.gpus}: give different indices with commas, such as 0,1.")
        return tuple(int(word) for word in words)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The arithmetic."""

    name: Annotated[str, _key(name="precision")] = "fp32"
    """fp32, tf32, bf16, fp16 (with loss scaling) or fp64; auto takes bf16 where the hardware has it, else fp32: then
    the model depends on the hardware."""
    channels_last: str = "auto"
    """Memory order of images: auto (on where it helps), on, off."""
    compile: bool = False
    """Compile the model with torch.compile; synchronised BatchNorm layers stay as they are."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time (GPU); dropout is then bit for bit too."""

    def __post_init__(self) -> None:
        choose("precision", self.name, PRECISIONS)
        choose("value of --channels-last", self.channels_last, SWITCHES)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and what a run continues from."""

    resume: str = ""
    """auto (the output folder's last checkpoint, if there is one) or the path of a checkpoint or a run."""
    checkpoint_every: Annotated[int | None, _key(metavar="INT")] = None
    """Optimizer steps between checkpoints; by default once an epoch."""

    def __post_init__(self) -> None:
        check_whole("checkpoint-every", self.checkpoint_every, unit=" steps")
        check_text("resume", self.resume)


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What a run writes down, and where."""

    output: Annotated[Path | None, _key(metavar="FOLDER")] = None
    """The run's folder; by default runs/NAME, numbered if that exists."""
    log_every: int = 50
    """Optimizer steps between log lines (sooner where steps are slow)."""
    quiet: bool = False
    """Show warnings, errors and one line at the end, and nothing else; what is written down stays the same."""

    def __post_init__(self) -> None:
        check_whole("log-every", self.log_every, unit=" steps")
        check_text("output", self.output)


@dataclass(frozen=True, kw_only=True)
class ProofConfig:
    """What is proved while training goes on."""

    verify_every: Annotated[int | None, _key(metavar="STEPS")] = None
    """Optimizer steps between checks that all ranks hold the same bits, besides the one before each checkpoint; 0 for
    none at all, by default what costs under 0.5 % of the time."""
    ledger: bool = False
    """Record which sample went into which step on which rank (ledger.bin), and check that each epoch had each once."""

    def __post_init__(self) -> None:
        check_whole("verify-every", self.verify_every, least=0, unit=" steps")


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
    epochs: int = 10
    """Passes over the training set."""
    max_steps: Annotated[int | None, _key(metavar="INT")] = None
    """Stop after this many optimizer steps, even within an epoch; schedules still follow --epochs."""
    eval_every: Annotated[int, _key(metavar="EPOCHS")] = 1
    """Epochs between evaluations; the last weights are evaluated always."""
    patience: Annotated[int | None, _key(metavar="EVALUATIONS")] = None
    """Stop once so many evaluations in a row have brought no better score; by default never."""
    seed: int = 0
    """Seed of the weights, of the order and of the augmentation."""

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs)
        check_whole("max-steps", self.max_steps)
        check_whole("eval-every", self.eval_every, unit=" epochs")
        check_whole("patience", self.patience, unit=" evaluations")
        idle = [self.optim.ema is not None, ":" in self.optim.loss, self.optim.label_smoothing, self.data.augment]
        require(
            not (self.optim.step and any(idle)),
            "--ema, --loss, --label-smoothing and --augment have no effect with --step, which computes the loss of the "
            "data set's own samples; leave them out.",
        )
        require(0 <= self.seed < 2**63, f"--seed {self.seed}: give a number from 0 to 2**63 - 1.")
        require(
            self.optim.warmup <= self.epochs,
            f"--warmup {self.optim.warmup:g} (in epochs) is longer than the run's --epochs {self.epochs}, and the "
            f"learning rate would never reach --lr; give --warmup {self.epochs} or less, or 0 for none.",
        )
