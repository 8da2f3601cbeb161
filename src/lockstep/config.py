"""What a run is asked to do: frozen dataclasses, whole and valid once they exist.

Each leaf has one public key. The key is the command's flag (`--batch 256`), the TOML key (`batch = 256`) and
the name in `override(config, batch=256)`; the string under a field is its help on the command line. There is
no second table of options anywhere.

    recipe (TOML in the package)  <  --config FILE.toml  <  flags

Values that other numbers follow from (shares of a rank, steps of an epoch, the chosen strategy) are not here:
they live in `BatchPlan`, `Topology` and the run's manifest, so that a config says only what was asked.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tomli_w
import tyro

from .errors import RequestError, choose, unknown

_key = tyro.conf.arg

ACCELERATORS = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "fp64")
OPTIMIZERS = ("sgd", "adamw", "muon")
SCHEDULES = ("constant", "step", "multistep", "cosine", "onecycle")
LR_RULES = ("none", "linear", "sqrt")
BATCHNORMS = ("auto", "sync", "local")
SWITCHES = ("auto", "on", "off")
AUGMENTATIONS = ("crop", "flip", "cutout")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise RequestError(sentence)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    name: Annotated[str, _key(name="model")] = "resnet18"
    """A name from `lockstep info`, a torchvision classifier, or module:attribute of your own."""
    classes: Annotated[int | None, _key(metavar="INT")] = None
    """Number of classes; by default the data set's own."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, and how they are varied."""

    name: Annotated[str, _key(name="data")] = "digits"
    """digits, cifar10, cifar100, imagefolder, fake, or module:attribute of your own."""
    dir: Annotated[Path, _key(name="data-dir")] = Path("data")
    """Folder that holds the data set, or where it is downloaded to."""
    download: bool = True
    """Download the data set, with its checksum, where --data-dir lacks it."""
    workers: int = 4
    """Processes a rank that decode JPEGs (imagefolder and your own data sets); 0 decodes in the rank itself."""
    augment: tuple[str, ...] = ()
    """Variations of the training images: any of crop, flip, cutout."""
    image_size: int = 224
    """Side in pixels of imagefolder's and fake's images."""
    samples: int = 1024
    """Number of training images of the fake data set; a quarter as many are held out."""
    skip_corrupt: bool = False
    """Leave images out that cannot be decoded, and count them, instead of stopping."""
    on_device: str = "auto"
    """Keep small data sets in the accelerator's memory: auto, on, off."""

    def __post_init__(self) -> None:
        for name in self.augment:
            choose("augmentation", name, AUGMENTATIONS)
        choose("value of --on-device", self.on_device, SWITCHES)
        _require(self.workers >= 0, f"--workers {self.workers}: give 0 or more.")
        _require(self.image_size >= 1, f"--image-size {self.image_size}: give 1 or more pixels.")
        _require(self.samples >= 4, f"--samples {self.samples}: give 4 or more.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, and its learning rate over optimizer steps."""

    name: Annotated[str, _key(name="optimizer")] = "sgd"
    """sgd, adamw, or muon (matrices by Muon, the rest by AdamW)."""
    lr: float = 0.1
    """Peak learning rate."""
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
    label_smoothing: float = 0.0
    """Share of each label that is spread over all classes."""
    ema: Annotated[float | None, _key(metavar="FLOAT")] = None
    """Decay of an exponential moving average of the weights, which evaluation then uses."""

    def __post_init__(self) -> None:
        choose("optimizer", self.name, OPTIMIZERS)
        choose("schedule", self.schedule, SCHEDULES)
        choose("learning-rate rule", self.lr_rule, LR_RULES)
        _require(math.isfinite(self.lr) and self.lr > 0, f"--lr {self.lr}: give a finite number above 0.")
        _require(0 <= self.momentum < 1, f"--momentum {self.momentum}: give a number from 0 up to, not including, 1.")
        _require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay}: give 0 or more.")
        _require(self.warmup >= 0, f"--warmup {self.warmup}: give 0 or more epochs.")
        _require(0 <= self.label_smoothing < 1, f"--label-smoothing {self.label_smoothing}: give 0 up to below 1.")
        _require(self.clip is None or self.clip > 0, f"--clip {self.clip}: give a norm above 0.")
        _require(self.ema is None or 0 < self.ema < 1, f"--ema {self.ema}: give a decay between 0 and 1.")
        _require(
            not self.nesterov or self.momentum > 0, "--nesterov needs --momentum above 0; set it or drop --nesterov."
        )
        _require(
            self.lr_rule == "none" or (self.base_batch or 0) > 0,
            f"--lr-rule {self.lr_rule} needs the batch that --lr was tuned for; add --base-batch N.",
        )
        if self.schedule == "multistep":
            rising = all(a < b for a, b in zip((0.0, *self.milestones), self.milestones, strict=False))
            _require(
                bool(self.milestones) and rising,
                f"--schedule multistep needs rising --milestones in epochs, found {list(self.milestones)}.",
            )
        if self.schedule == "step":
            _require(
                len(self.milestones) == 1 and self.milestones[0] > 0,
                f"--schedule step needs one --milestones value, the epochs between cuts; found "
                f"{list(self.milestones)}.",
            )


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
        for flag, value in (("batch", self.size), ("accumulate", self.accumulate), ("micro-batch", self.micro_batch)):
            _require(value is None or value >= 1, f"--{flag} {value}: give 1 or more.")
        _require(self.eval_batch is None or self.eval_batch >= 1, f"--eval-batch {self.eval_batch}: give 1 or more.")
        _require(
            self.accumulate is None or self.micro_batch is None,
            f"--accumulate {self.accumulate} and --micro-batch {self.micro_batch} say the same thing twice; give one.",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The devices, the way to use them, and how their processes meet."""

    strategy: str = "auto"
    """single, dp or ddp; auto takes ddp where there are several devices."""
    devices: Annotated[int | None, _key(metavar="INT")] = None
    """Devices on this node; by default all GPUs, or one CPU process."""
    gpus: str = ""
    """Chosen GPUs by index, such as 0,1 (as numbered among those visible to this process)."""
    accelerator: str = "auto"
    """auto, cpu or cuda."""
    launcher: str = "auto"
    """How processes come to be: inline, spawn, environment, manual; auto finds out."""
    nodes: int = 1
    """Number of nodes."""
    init_method: str = ""
    """Where ranks started by hand meet: env://, tcp://HOST:PORT or file:///PATH."""
    rank: Annotated[int | None, _key(metavar="INT")] = None
    """This process's rank, when started by hand."""
    world_size: Annotated[int | None, _key(metavar="INT")] = None
    """Number of ranks, when started by hand."""
    timeout: float = 60.0
    """Seconds to wait for all ranks to come at the start."""
    stall_timeout: float = 600.0
    """Seconds that ranks wait for one another in a collective before the run fails."""
    batchnorm: str = "auto"
    """Batch statistics: sync (of the global micro-batch) or local (of each replica); auto is sync where it can be."""
    find_unused: bool = False
    """ddp: search for parameters that the loss does not reach at each step (slower), instead of refusing them."""

    def __post_init__(self) -> None:
        choose("accelerator", self.accelerator, ACCELERATORS)
        choose("value of --batchnorm", self.batchnorm, BATCHNORMS)
        _require(self.devices is None or self.devices >= 1, f"--devices {self.devices}: give 1 or more.")
        _require(self.nodes >= 1, f"--nodes {self.nodes}: give 1 or more.")
        _require(self.timeout > 0, f"--timeout {self.timeout}: give seconds above 0.")
        _require(self.stall_timeout > 0, f"--stall-timeout {self.stall_timeout}: give seconds above 0.")
        chosen = self.gpu_indices
        _require(
            self.devices is None or not chosen or self.devices == len(chosen),
            f"--devices {self.devices} disagrees with --gpus {self.gpus}, which names {len(chosen)}; give one of them.",
        )
        _require(not chosen or self.accelerator != "cpu", f"--gpus {self.gpus} disagrees with --accelerator cpu.")
        if self.rank is not None:
            _require(
                self.world_size is not None,
                f"--rank {self.rank} without --world-size: say how many ranks there are, such as --world-size 2.",
            )
        if self.world_size is not None:
            _require(self.world_size >= 1, f"--world-size {self.world_size}: give 1 or more.")
            _require(
                self.rank is None or 0 <= self.rank < self.world_size,
                f"--rank {self.rank} lies outside the world of --world-size {self.world_size}; "
                f"ranks go from 0 to {self.world_size - 1}.",
            )

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

    name: Annotated[str, _key(name="precision")] = "auto"
    """fp32, tf32, bf16, fp16 (with loss scaling) or fp64; auto takes bf16 where the hardware has it, else fp32."""
    channels_last: str = "auto"
    """Memory order of images: auto (on where it helps), on, off."""
    compile: bool = False
    """Compile the model with torch.compile."""
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
        every = self.checkpoint_every
        _require(every is None or every >= 1, f"--checkpoint-every {every}: give 1 or more steps.")


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What a run writes down, and where."""

    output: Annotated[Path | None, _key(metavar="FOLDER")] = None
    """The run's folder; by default runs/NAME, numbered if that exists."""
    log_every: int = 50
    """Optimizer steps between log lines (sooner where steps are slow)."""

    def __post_init__(self) -> None:
        _require(self.log_every >= 1, f"--log-every {self.log_every}: give 1 or more steps.")


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
    epochs: int = 10
    """Passes over the training set."""
    max_steps: Annotated[int | None, _key(metavar="INT")] = None
    """Stop after this many optimizer steps, even within an epoch; schedules still follow --epochs."""
    seed: int = 0
    """Seed of the weights, of the order and of the augmentation."""

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, f"--epochs {self.epochs}: give 1 or more.")
        _require(self.max_steps is None or self.max_steps >= 1, f"--max-steps {self.max_steps}: give 1 or more.")
        _require(0 <= self.seed < 2**63, f"--seed {self.seed}: give a number from 0 to 2**63 - 1.")


@dataclass(frozen=True)
class Leaf:
    """One option: its public `key`, the config `section` it lives in (None: RunConfig itself), attribute and type."""

    key: str
    section: str | None
    attribute: str
    type: Any


def leaves() -> Iterator[Leaf]:
    """Yield every option of a run, in the order of the dataclasses."""

    def of(owner: type, section: str | None) -> Iterator[Leaf]:
        hints = get_type_hints(owner, include_extras=True)
        for item in dataclasses.fields(owner):
            hint = hints[item.name]
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                yield from of(hint, item.name)
                continue
            plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            named = [mark.name for mark in marks if mark.name]
            yield Leaf(named[0] if named else item.name.replace("_", "-"), section, item.name, plain)

    yield from of(RunConfig, None)


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return {public key: value} of every option, paths and tuples as TOML and JSON hold them."""
    flat = {}
    for leaf in leaves():
        owner = getattr(config, leaf.section) if leaf.section else config
        value = getattr(owner, leaf.attribute)
        flat[leaf.key] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return flat


def override(config: RunConfig, **values: Any) -> RunConfig:
    """Return `config` with options replaced by their public keys (`batch=256, data_dir="data"`).

    Raises `RequestError` for a key that no option has, a value of another type, or one that cannot be honoured.
    """
    return apply(config, values, source="override")


def apply(config: RunConfig, values: Mapping[str, Any], *, source: str) -> RunConfig:
    """Return `config` with `{public key: value}` applied; `source` names their origin in errors."""
    known = {leaf.key: leaf for leaf in leaves()}
    sections: dict[str | None, dict[str, Any]] = {}
    for name, value in values.items():
        leaf = known.get(name.replace("_", "-"))
        if leaf is None:
            raise unknown(f"option in {source}", name, known)
        sections.setdefault(leaf.section, {})[leaf.attribute] = _coerce(leaf, value, source)
    top = sections.pop(None, {})
    # A section is built once with all its new values, so that options which check one another agree.
    parts = {name: dataclasses.replace(getattr(config, name), **new) for name, new in sections.items() if name}
    return dataclasses.replace(config, **parts, **top)


def _coerce(leaf: Leaf, value: Any, source: str) -> Any:
    """Return `value` as the leaf's type, or raise: TOML has no paths and tuples, and writes 1 where 1.0 is meant."""
    accepted = get_args(leaf.type) if type(None) in get_args(leaf.type) else (leaf.type,)
    if value is None and type(None) in accepted:
        return None
    for kind in accepted:
        if kind is Path and isinstance(value, str | Path):
            return Path(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (int, bool, str) and type(value) is kind:
            return value
        if get_args(kind) and isinstance(value, list | tuple):
            item = get_args(kind)[0]
            if item is str and all(isinstance(each, str) for each in value):
                return tuple(value)
            if item is float and all(isinstance(each, int | float) for each in value):
                return tuple(float(each) for each in value)
    names = " or ".join("nothing" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in accepted)
    raise RequestError(f"{leaf.key} in {source} is {value!r}; it takes {names}.")


def to_toml(config: RunConfig) -> str:
    """Return the config as TOML that `from_toml` reads back to an equal config; unset options are left out."""
    return tomli_w.dumps({key: value for key, value in flatten(config).items() if value is not None})


def from_toml(text: str, *, base: RunConfig | None = None, source: str = "TOML") -> RunConfig:
    """Return `base` (by default RunConfig()) with the options in `text`.

    Raises `RequestError` where the text is not TOML or an option is unknown or of another type.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{source} is not valid TOML: {error}.") from error
    return apply(base or RunConfig(), values, source=source)


def read_toml(path: Path, *, base: RunConfig | None = None) -> RunConfig:
    """Return the config in the file at `path`, over `base`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--config {path} cannot be read: {error}.") from error
    return from_toml(text, base=base, source=str(path))


def recipes() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = resources.files("lockstep") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def recipe(name: str, **values: Any) -> RunConfig:
    """Return the named recipe, with options replaced by their public keys."""
    if name not in (names := recipes()):
        raise unknown("recipe", name, names, "Your own file goes with --config FILE.toml.")
    text = (resources.files("lockstep") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    return override(from_toml(text, source=f"recipe {name}"), **values)
