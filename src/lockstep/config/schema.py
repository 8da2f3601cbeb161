"""The options of a run: frozen dataclasses, complete and valid after construction.

Each leaf has one public key: the command's flag (`--batch 256`), the TOML key (`batch = 256`) and the name in
`override(config, batch=256)` (see `options`). Its annotation defines the permitted values; the comment beside it, or
the string under it, is its help on the command line. Derived values (a rank's share, the chosen strategy) are not here:
a config holds only the request, and the registry's facts on a named strategy.

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
from .registry import EXCHANGES, KINDS, LAUNCHERS, RARE, TRACKERS, UNSCALED
from .validity import Bounds, OneOf, check, is_url

_key = tyro.conf.arg
_MaybeInt = Annotated[int | None, _key(metavar="N")]
_Code = Annotated[str, _key(metavar="MODULE:NAME")]
_Words = Annotated[tuple[str, ...], _key(metavar="PATTERN …")]
_FromZero = Bounds(least=0, below=2**63)
_Positive = Annotated[float, Bounds(above=0)]
_NotNegative = Annotated[float, Bounds(least=0)]
_Share = Annotated[float, Bounds(least=0, below=1)]
_Seconds = Annotated[float, Bounds(above=0, below=366 * 24 * 3600), _key(metavar="SECONDS")]
_Switch = Annotated[str, OneOf(("auto", "on", "off"))]
SPANNING_SCHEDULES = ("cosine", "onecycle")
"""Schedules whose learning rates depend on the number of epochs."""
MIXES = ("mixup", "cutmix")
"""Augmentations that mix the samples of a batch."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    name: Annotated[str, _key(name="model")] = "resnet18"
    """Name in lockstep info, torchvision classifier, timm.NAME, or your own MODULE:NAME."""
    classes: _MaybeInt = None  # Number of classes; default: the data set's.
    init_from: Annotated[str, _key(metavar="WEIGHTS")] = ""
    """Initial weights of a new run: a run, a checkpoint, a .safetensors or .pth file, or pretrained (torchvision's).
    Missing tensors, and those of another shape, keep their random initialisation."""
    freeze: _Words = ()
    """Patterns of parameter names to freeze, such as layer1.* conv1.*.
    A BatchNorm layer whose parameters are all frozen stays in evaluation mode and keeps its running statistics."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data set and its augmentation."""

    name: Annotated[str, _key(name="data")] = "digits"
    """digits, cifar10, cifar100, imagefolder, webdataset, fake, or your own MODULE:NAME."""
    dir: Annotated[Path, _key(name="data-dir")] = Path("data")  # Folder of the data set and of downloads.
    download: bool = True  # Download a missing data set, and verify its checksum.
    workers: Annotated[_MaybeInt, _FromZero] = None
    """Processes per rank that decode images (imagefolder, webdataset, your own data sets); 0: the rank itself decodes.
    Default: the rank's processors, at most 16; with --step, none."""
    augment: Annotated[
        tuple[str, ...],
        OneOf(("crop", "flip", "cutout", "randaugment", "random-erasing", *MIXES)),
        _key(metavar="NAME …"),
    ] = ()
    """Any of crop, flip, cutout; of folders and shards also randaugment, random-erasing; mixup, cutmix."""
    image_size: Annotated[int, Bounds(least=1, below=4097)] = 224  # Side in pixels, for folders, shards and fake.
    samples: Annotated[int, Bounds(least=4, below=2**63)] = 1024  # Training images of the fake data set.
    holdout: _Share = 0.0  # Fraction of each training class for validation, by --seed.
    skip_corrupt: bool = False  # Skip and count images that cannot be decoded.
    collate: _Code = ""  # With --step: makes a batch from samples; default: torch's.
    on_device: _Switch = "auto"  # Keep small data sets in GPU memory: auto, on, off.

    @property
    def variations(self) -> tuple[str, ...]:
        """The names in --augment that vary single samples."""
        return tuple(name for name in self.augment if name not in MIXES)

    @property
    def mixes(self) -> tuple[str, ...]:
        """The names in --augment that mix the samples of a batch; one of them is drawn for each."""
        return tuple(name for name in MIXES if name in self.augment)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning rate, and the loss."""

    name: Annotated[str, OneOf(("sgd", "adamw", "muon", "lamb", "lars")), _key(name="optimizer")] = "sgd"
    """sgd, adamw, muon (matrices and filters of convolutions; AdamW for the rest); for large batches lamb, or lars
    (whose rates are above 1)."""
    lr: _Positive = 0.1  # Peak learning rate.
    lr_scale: Annotated[tuple[str, ...], _key(metavar="PATTERN=X …")] = ()
    """Learning-rate factors, such as fc.*=10 layer1.*=0.1; the first matching pattern counts."""
    momentum: _Share = 0.9  # Momentum of sgd, muon and lars.
    nesterov: bool = False  # Nesterov's momentum.
    weight_decay: _NotNegative = 1e-4  # Weight decay; adamw, muon: decoupled; lamb, lars: not of vectors.
    schedule: Annotated[str, OneOf(("constant", "step", "multistep", "cosine", "onecycle"))] = "constant"
    """constant, step, multistep, cosine or onecycle."""
    milestones: Annotated[tuple[float, ...], _key(metavar="EPOCH …")] = ()
    """Multistep: epochs at which gamma applies; step: the interval."""
    gamma: _Positive = 0.1  # Learning-rate factor of step and multistep.
    warmup: Annotated[_NotNegative, _key(metavar="EPOCHS")] = 0.0
    """Linear warm-up before the schedule (onecycle: its rising part)."""
    lr_rule: Annotated[str, OneOf(("none", "linear", "sqrt"))] = "none"
    """Scale the learning rate by batch ÷ base-batch: none, linear or sqrt."""
    base_batch: _MaybeInt = None  # Batch that --lr was tuned for; needed by --lr-rule.
    clip: Annotated[float | None, Bounds(above=0), _key(metavar="X")] = None  # Maximum global gradient norm.
    loss: str = "cross_entropy"
    """cross_entropy, or your own MODULE:NAME, called as loss(scores, labels, reduction="sum")."""
    step: _Code = ""
    """Your own step for any task, called as step(model, batch).
    It returns the sum of the loss over the batch, or (sum, count) for a mean over other units, such as tokens."""
    metric: _Code = ""
    """With --step: called as metric(model, batch) in evaluations; higher is better, and checkpoints/best follows it.
    It returns a sum over the batch, or (sum, count); an epoch with count 0 has no score."""
    label_smoothing: _Share = 0.0  # Fraction of a label spread over all classes.
    ema: Annotated[float | None, Bounds(above=0, below=1), _key(metavar="X")] = None
    """Decay of an exponential moving average of the weights, which evaluation uses."""

    @property
    def lr_scales(self) -> list[tuple[str, float]]:
        """The (pattern, factor) of each --lr-scale."""
        pairs = (word.rpartition("=") for word in self.lr_scale)
        return [(pattern, float(factor)) for pattern, _, factor in pairs]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch of one optimizer step, over all ranks."""

    size: Annotated[int, _key(name="batch")] = 256  # Samples in one optimizer step, over all ranks.
    accumulate: _MaybeInt = None  # Micro-batches per optimizer step.
    micro_batch_asked: Annotated[str | None, _key(name="micro-batch", metavar="N|auto")] = None
    """Instead of --accumulate: at most N samples per rank. auto: as many as fit into memory, by halves."""
    eval_batch: _MaybeInt = None  # Samples that a rank evaluates at once; default: as in training.
    drop_last: bool = False  # Drop the last, smaller batch of an epoch.
    draws: Annotated[str, OneOf(("rank", "global"))] = "rank"  # Random numbers: rank; global, as on one device.

    @property
    def micro_batch(self) -> int | None:
        """The most samples per rank; None if unset, or if memory decides."""
        return None if self.micro_batch_asked is None or self.fits_memory else int(self.micro_batch_asked)

    @property
    def fits_memory(self) -> bool:
        """Whether the memory decides the micro-batches."""
        return self.micro_batch_asked == "auto"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices, strategy, launcher and rendezvous."""

    strategy: Annotated[str, OneOf(KINDS, ("auto",))] = "auto"
    """single, dp, ddp, zero1, fsdp, hybrid; auto: ddp with several devices."""
    devices: _MaybeInt = None  # Devices per node; default: all GPUs, or 1 CPU process.
    gpus: Annotated[str, _key(metavar="I,J,…")] = ""  # Indices of visible GPUs, such as 0,1.
    accelerator: Annotated[str, OneOf(("auto", "cpu", "cuda", "xpu", "npu", "mps"))] = "auto"
    """auto (torch's), cpu, cuda (also ROCm), xpu or npu; mps is refused."""
    launcher: Annotated[str, OneOf(LAUNCHERS, ("auto",))] = "auto"
    """How processes start: inline, spawn, elastic, environment, manual; auto detects it."""
    nodes_asked: Annotated[str, _key(name="nodes", metavar="N|MIN:MAX")] = "1"
    """Number of nodes. 1:4 takes 1 to 4 nodes, as many as are available, and continues on fewer."""
    max_restarts: Annotated[int, _FromZero] = 0  # Restarts from the last checkpoint after a lost rank.
    init_method: Annotated[str, _key(metavar="URL")] = ""
    """Rendezvous of ranks: env://, tcp://HOST:PORT or file:///PATH."""
    interface: str = ""  # Network interface between ranks, such as eth1; default: the one that reaches their hosts.
    rank: Annotated[_MaybeInt, _FromZero] = None  # Rank of this process, if you start ranks by hand.
    world_size: _MaybeInt = None  # Number of ranks, if you start them by hand.
    timeout: _Seconds = 60.0  # Time limit for all ranks to join.
    stall_timeout: _Seconds = 600.0
    """End the run after this time without progress (a batch, a step, a save)."""
    batchnorm: Annotated[str, OneOf(("auto", "sync", "local"))] = "auto"
    """Batch statistics: sync (global micro-batch) or local (each replica); auto: sync where possible."""
    shard_modules: Annotated[tuple[str, ...], _key(metavar="CLASS …")] = ()
    """Classes of modules that fsdp gathers one at a time, such as BertLayer or *Block; default: those that repeat."""
    shard_size: Annotated[_MaybeInt, Bounds(least=2, below=2**31)] = None
    """Ranks that fsdp divides the weights among, such as those of a node; default: all."""
    shard_reshard: bool = True
    """Under fsdp, free weights between forward and backward; without, they stay: one gather less, more memory."""
    exchange: Annotated[str, OneOf(EXCHANGES)] = "full"
    """Gradients between ranks: full; bf16, fp16: rounded, half of the bytes; powersgd: matrices of low rank.
    local-sgd, diloco: weights in place of gradients, every few steps."""
    exchange_every: Annotated[_MaybeInt, _key(metavar="STEPS")] = None
    """With local-sgd and diloco: steps between two exchanges; default: 100."""
    powersgd_rank: _MaybeInt = None  # With powersgd: rank of the matrices; default: 4.
    powersgd_start: Annotated[_MaybeInt, _FromZero, _key(metavar="STEPS")] = None
    """With powersgd: steps with full gradients before it begins; default: 0."""
    collectives: Annotated[str, OneOf(("auto", "gloo", "shared-memory"))] = "auto"
    """Exchange of CPU tensors: gloo, or shared-memory on one host; auto: shared-memory where possible."""

    @property
    def nodes(self) -> int:
        """The number of nodes, or the minimum of a range."""
        return int(self.nodes_asked.partition(":")[0])

    @property
    def most_nodes(self) -> int:
        """The number of nodes, or the maximum of a range."""
        return int(self.nodes_asked.rpartition(":")[2])

    @property
    def gpu_indices(self) -> tuple[int, ...]:
        """The indices in --gpus, in their order; empty without --gpus."""
        return tuple(int(word) for word in self.gpus.replace(" ", "").split(",") if word)

    @property
    def has_rendezvous_url(self) -> bool:
        """Whether ranks meet at the --init-method URL, not by the environment."""
        return self.init_method not in ("", "env:", "env:/", "env://")

    @property
    def drives_all(self) -> bool:
        """Whether each process drives all devices of its node. `auto` never resolves to such a strategy."""
        return self.strategy != "auto" and KINDS[self.strategy].drives_all

    @property
    def process_per_device(self) -> bool:
        """Whether a node has one process per device. False for `auto`, which is unresolved."""
        return self.strategy != "auto" and KINDS[self.strategy].process_per_device


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision, memory, compilation."""

    name: Annotated[str, OneOf(("auto", "fp32", "tf32", "bf16", "fp16", "fp64")), _key(name="precision")] = "fp32"
    """fp32, tf32, bf16, fp16 (with loss scaling) or fp64; auto: bf16 if the hardware supports it, else fp32,
    so that the model depends on the hardware."""
    channels_last: _Switch = "auto"  # Memory format: on, off; auto: on, except in fp64.
    compile: bool = False  # Compile the model by torch.compile.
    cuda_graphs: Annotated[str, OneOf(("off", "auto", "on"))] = "off"
    """Launch a full micro-batch's forward and backward pass as one CUDA graph each: off, on; auto: where possible."""
    deterministic: bool = False  # Use deterministic GPU algorithms only, also in dropout.
    checkpoint_activations: _Words = ()
    """Classes of modules, such as BasicBlock, whose activations are recomputed in the backward pass to save memory."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints and resuming."""

    resume: Annotated[str, _key(metavar="PATH")] = ""
    """Checkpoint or run to continue, or a run's URL; auto: the last checkpoint in --output or --remote, if any."""
    checkpoint_every: Annotated[_MaybeInt, _key(metavar="STEPS")] = None
    """Steps between checkpoints; default: one epoch."""
    keep: Annotated[int, _key(metavar="N")] = 2  # Last checkpoints to keep, besides the best.


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Records and output."""

    output: Annotated[Path | None, _key(metavar="FOLDER")] = None
    """Folder of the run; default: runs/NAME. A URL, such as s3://bucket/run, is --remote and a folder in runs."""
    remote: Annotated[str, _key(metavar="URL")] = ""  # Folder in a store (fsspec) to which the run is copied.
    log_every: Annotated[int, _key(metavar="STEPS")] = 50  # Steps between log lines; fewer if steps are slow.
    quiet: bool = False  # Print only warnings, errors and one final line.
    track: Annotated[tuple[str, ...], _key(metavar="NAME …")] = ()
    """Experiment trackers: wandb, mlflow, trackio, swanlab, csv, tensorboard (always on), or your own MODULE:NAME."""
    profile: Annotated[str, _key(metavar="FROM:TO")] = ""
    """Trace these optimizer steps by torch.profiler, such as 10:15: a file per rank in profile/, and a summary."""

    @property
    def profiled_steps(self) -> range:
        """The optimizer steps of --profile, counted from 1."""
        first, last = map(int, self.profile.split(":"))
        return range(first, last + 1)


@dataclass(frozen=True, kw_only=True)
class ProofConfig:
    """Checks during training."""

    verify_every: Annotated[int | None, _FromZero, _key(metavar="STEPS")] = None
    """Steps between comparisons of all ranks' weights, bit for bit; each checkpoint has one as well.
    0: no comparison; default: as often as costs less than 0.5 % of the time."""
    ledger: bool = False  # Stop unless each epoch has each sample exactly once.


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, as requested.

    Raises `RequestError` at construction for invalid values and contradictions.
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
    max_steps: _MaybeInt = None  # End after N steps; schedules of train still follow --epochs.
    eval_every: Annotated[int, _key(metavar="EPOCHS")] = 1  # Epochs between evaluations; the last has one.
    patience: Annotated[int | None, _key(metavar="N")] = None  # End after N evaluations without improvement.
    seed: Annotated[int, _FromZero] = 0  # Seed of weights, order and augmentation.

    def __post_init__(self) -> None:
        check(self)
        for sentence in _contradictions(self):
            raise RequestError(sentence)


def rules_out_graphs(config: RunConfig) -> str:
    """Return the option with which a model cannot be called by CUDA graphs, or ""."""
    parallel, batch = config.parallel, config.batch
    has_kind = parallel.strategy in KINDS
    options = {
        "--step": bool(config.optim.step),
        f"--strategy {parallel.strategy}": has_kind
        and (KINDS[parallel.strategy].divides_weights or parallel.drives_all),
        "--draws global": batch.draws == "global",
        "--micro-batch auto": batch.fits_memory,
        "--checkpoint-activations": bool(config.precision.checkpoint_activations),
    }
    return next((option for option, is_set in options.items() if is_set), "")


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Yield an error message for each contradiction between options, and for each malformed text."""
    optim, batch, parallel, track = config.optim, config.batch, config.parallel, config.record.track
    for name in track:
        if ":" not in name:
            choose("--track", name, (*TRACKERS, "tensorboard"))
        if track.count(name) > 1:
            yield f"--track names {name} twice; name each tracker once."
    has_own_loss, milestones = ":" in optim.loss, " ".join(map("{:g}".format, optim.milestones)) or "none"
    if not has_own_loss:
        choose("--loss", optim.loss, ["cross_entropy"])
    elif optim.label_smoothing:
        yield f"--label-smoothing belongs to cross_entropy, and --loss is {optim.loss}; smooth the labels there."
    if config.data.mixes and has_own_loss:
        flag = f"--augment {' '.join(config.data.mixes)}"
        yield f"{flag} has labels (n, classes), which cross_entropy takes, and --loss is {optim.loss}; leave one out."
    if optim.metric and not optim.step:
        yield "--metric needs --step, whose batches it takes; add --step."
    if config.data.collate and not optim.step:
        yield "--collate needs --step, whose batches it makes; add --step."
    if optim.step and (optim.ema or has_own_loss or optim.label_smoothing or config.data.augment):
        flags = "--ema, --loss, --label-smoothing and --augment"
        yield f"{flags} have no effect with --step, which computes its loss of the data set's own samples; drop them."
    idle = {
        "--compile": config.precision.compile,
        "--channels-last on": config.precision.channels_last == "on",
        "--on-device on": config.data.on_device == "on",
        "--eval-batch": batch.eval_batch is not None,
    }
    if config.record.remote and not is_url(config.record.remote):
        yield f"--remote {config.record.remote}: give a URL, such as s3://bucket/run; a folder goes with --output."
    if config.precision.checkpoint_activations and (config.precision.compile or parallel.drives_all):
        other = "--compile" if config.precision.compile else f"--strategy {parallel.strategy}"
        yield f"--checkpoint-activations cannot work with {other}; leave one of them out."
    if config.precision.cuda_graphs == "on" and (other := rules_out_graphs(config)):
        yield f"--cuda-graphs on cannot work with {other}; leave one of them out."
    if optim.step and any(idle.values()):
        flags = ", ".join(flag for flag, is_set in idle.items() if is_set)
        yield f"{flags}: without effect with --step, which calls the model as it is; leave that out."
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
    micro = batch.micro_batch_asked
    if micro is not None and not re.fullmatch(r"auto|[1-9]\d{0,17}", micro, re.ASCII):
        yield f"--micro-batch {micro}: give 1 or more, or auto."
    if batch.accumulate is not None and micro is not None:
        yield f"--accumulate {batch.accumulate} and --micro-batch {micro} both set micro-batches; give one."
    divides_weights = parallel.strategy in KINDS and KINDS[parallel.strategy].divides_weights
    unfit = {
        "--step": bool(optim.step),
        f"--strategy {parallel.strategy}": divides_weights or parallel.drives_all,
        f"--exchange {parallel.exchange}": parallel.exchange in UNSCALED,
    }
    if batch.fits_memory and any(unfit.values()):
        yield f"--micro-batch auto cannot work with {next(flag for flag in unfit if unfit[flag])}; give a number."
    if (parallel.shard_modules or parallel.shard_size or not parallel.shard_reshard) and not divides_weights:
        yield "--shard-modules, --shard-size and --no-shard-reshard belong to --strategy fsdp."
    if divides_weights and config.precision.channels_last == "on":
        yield f"--channels-last on cannot work under --strategy {parallel.strategy}, which divides contiguous tensors."
    if divides_weights and parallel.exchange in UNSCALED:
        yield f"--exchange {parallel.exchange} cannot work under --strategy {parallel.strategy}; take ddp or zero1."
    if parallel.shard_size and parallel.exchange != "full":
        yield f"--exchange {parallel.exchange} rounds nothing between the groups of --shard-size; leave one out."
    is_range = re.fullmatch(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?", parallel.nodes_asked, re.ASCII)
    if not is_range or parallel.nodes > parallel.most_nodes:
        yield f"--nodes {parallel.nodes_asked!r}: give 1 or more, or a range such as 1:4."
    is_list = re.fullmatch(r"(\d{1,9}(,|$))*", parallel.gpus.replace(" ", ""), re.ASCII)
    if not is_list or len({*parallel.gpu_indices}) < len(parallel.gpu_indices):
        yield f"--gpus {parallel.gpus}: give different indices with commas, such as 0,1."
    if parallel.gpus and parallel.devices not in (None, count := len(parallel.gpu_indices)):
        yield f"--devices {parallel.devices} disagrees with --gpus {parallel.gpus}, which names {count}; give one."
    is_span = re.fullmatch(r"([1-9]\d{0,17}:[1-9]\d{0,17})?", config.record.profile, re.ASCII)
    if not is_span or (config.record.profile and not config.record.profiled_steps):
        yield f"--profile {config.record.profile}: give the first and the last step, from 1 up, such as 10:15."
    if parallel.gpus and parallel.accelerator == "cpu":
        yield f"--gpus {parallel.gpus} disagrees with --accelerator cpu."
    if parallel.rank is not None and parallel.world_size is None:
        yield f"--rank {parallel.rank} lacks the number of ranks; add it, as in --world-size 2."
    if parallel.rank is not None and parallel.world_size is not None and parallel.rank >= parallel.world_size:
        yield f"--rank {parallel.rank} lies outside --world-size {parallel.world_size}: ranks count from 0."
    exchange = parallel.exchange
    if parallel.exchange_every is not None and exchange not in RARE:
        yield f"--exchange-every belongs to --exchange {' or '.join(RARE)}, and --exchange is {exchange}; drop it."
    if exchange != "powersgd" and (parallel.powersgd_rank, parallel.powersgd_start) != (None, None):
        flags = "--powersgd-rank and --powersgd-start"
        yield f"{flags} belong to --exchange powersgd, and --exchange is {exchange}; drop them."
    if exchange in UNSCALED and config.precision.name == "fp16":
        yield f"--exchange {exchange} cannot work with the loss scale of --precision fp16, which varies; take bf16."
    if exchange in RARE and parallel.strategy != "auto" and KINDS[parallel.strategy].divides_state:
        yield (
            f"--exchange {exchange} has each rank step all parameters, and under --strategy {parallel.strategy} a rank "
            "has only its part of the optimizer state; take --strategy ddp."
        )
    if exchange in RARE and parallel.batchnorm == "sync":
        yield (
            f"--exchange {exchange} trains another model on each rank between two exchanges, so batch statistics are "
            "those of a rank; leave --batchnorm sync out."
        )


def _scales_lr(word: str) -> bool:
    pattern, _, factor = word.rpartition("=")
    try:
        return bool(pattern) and 0 < float(factor) < math.inf
    except ValueError:
        return False
