"""A config as one file of plain PyTorch, which computes the run's losses."""

from __future__ import annotations

import difflib
import hashlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from .._torch import BatchNorm
from ..config.options import flatten
from ..config.registry import resolved
from ..config.schema import RunConfig
from ..data import cifar, digits, folder
from ..errors import RequestError
from ..models import table
from ..training import optim
from ..versions import version_of
from .chinese import translated
from .choices import Choices, Code
from .cut import clean, cut
from .link import Linked

_PROGRAM = Path(__file__).with_name("program.py")
_ELSEWHERE = {"data", "output", "log-every"}
_SIZE = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000}
"""Training samples of the data sets whose number is known."""
_REFUSED = {
    "lr-scale": "learning rates by parameter",
    "freeze": "frozen parameters",
    "init-from": "initial weights from a file (the file takes --weights of the same model)",
    "step": "a step function of your own; lockstep eject train.py turns a loop over a session into plain PyTorch",
    "metric": "a metric of your own",
    "holdout": "a validation set taken from the training set",
    "patience": "an early end by score",
    "skip-corrupt": "skipping images that cannot be decoded",
}
"""Options that change what is trained, and have no plain form here."""
_NOT_CARRIED = (
    "the watchdog, restarts and resuming",
    "proofs: digests of replicas, counts of samples",
    "records: steps.jsonl, TensorBoard, checkpoints with the optimizer's state",
    "draws of dropout: they differ from the run's",
)


class _Data(NamedTuple):
    """A data set: shape of a sample, classes, normalisation."""

    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def eject(config: RunConfig, command: str, *, slurm: bool = False, language: str = "en") -> str:
    """Return the file's text. `command` is the one that made it, for its header.

    Raises `RequestError` for options that have no plain form.
    """
    for sentence in _refusals(config):
        raise RequestError(sentence)
    strategy = resolved(config.parallel.strategy, distributed=(config.parallel.devices or 1) > 1 or slurm)
    if slurm and strategy not in ("ddp", "hybrid"):
        raise RequestError(f"--slurm starts several ranks, and --strategy is {strategy}; use ddp or hybrid.")
    data = _describe_data(config)
    arguments, entries, imports = _model(config, data)
    if ":" in config.optim.loss:
        module, _, name = config.optim.loss.partition(":")
        imports[name] = (module, name)
    choices = _choices(config, strategy, data, arguments, slurm=slurm)
    program = cut(_PROGRAM.read_text(encoding="utf-8"), choices)
    body = clean(Linked(program, ["__main__"], entries, imports).text())
    header = _header(config, choices, command, data)
    text = f'"""{header.replace(chr(92), "/").replace(chr(34) * 3, "")}"""\n\n{body}'
    return translated(text) if language == "zh" else text


def _refusals(config: RunConfig) -> Iterator[str]:
    values = flatten(config)
    for key, phrase in _REFUSED.items():
        if values[key]:
            yield f"lockstep eject: --{key} has no plain form: {phrase}. Leave it out, or eject the recipe without it."
    if config.optim.name == "muon":
        yield "lockstep eject: --optimizer muon has no plain form, as it takes two optimizers; use sgd or adamw."
    if config.data.name == "fake" or ":" in config.data.name:
        yield (
            f"lockstep eject: --data {config.data.name} has no plain form; eject digits, cifar10, cifar100 or "
            "imagefolder, and put your own reader in the place of read_data."
        )
    if config.batch.draws == "global":
        yield "lockstep eject: --draws global has no plain form; use --draws rank."


def _describe_data(config: RunConfig) -> _Data:
    name = config.data.name
    if name == "digits":
        return _Data((1, 8, 8), 10, (digits.MEAN,), (digits.STD,))
    if name == "imagefolder":
        root, size = config.data.dir / "train", config.data.image_size
        classes = config.model.classes or (sum(item.is_dir() for item in root.iterdir()) if root.is_dir() else 0)
        if not classes:
            raise RequestError(f"lockstep eject: {root} is not there to count its classes; add --classes N.")
        return _Data((3, size, size), classes, folder.MEAN, folder.STD)
    kind = cifar.CIFAR10 if name == "cifar10" else cifar.CIFAR100
    return _Data((3, 32, 32), kind.classes, kind.mean, kind.std)


def _model(config: RunConfig, data: _Data) -> tuple[Code, dict[str, Path], dict[str, tuple[str, str]]]:
    """Return the code that builds the model, {name: file} of its definition, and what it imports."""
    classes = config.model.classes or data.classes
    name, file, module, arguments = table.source(config.model.name, classes=classes, shape=data.shape)
    call = Code(f"{name}({', '.join(f'{key}={_quoted(value)}' for key, value in arguments.items())})")
    first = name.partition(".")[0]
    return call, {first: file} if file else {}, {first: (module, first)} if module else {}


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _choices(config: RunConfig, strategy: str, data: _Data, model: Code, *, slurm: bool) -> Choices:
    parallel, batch, optimizer, precision = config.parallel, config.batch, config.optim, config.precision
    has_ranks, drives_all = strategy in ("ddp", "hybrid"), strategy in ("dp", "hybrid")
    names, is_folder = set(config.data.augment), config.data.name == "imagefolder"
    accumulate = batch.accumulate or 1
    if batch.micro_batch is not None:
        ranks = max(1, parallel.world_size or parallel.devices or 1) if has_ranks else 1
        accumulate = -(-batch.size // (batch.micro_batch * ranks))
    by_hand = has_ranks and parallel.has_rendezvous_url and not slurm
    on_cpu = parallel.accelerator == "cpu"
    with torch.device("meta"):
        built = table.build_for(config.model.name, classes=config.model.classes or data.classes, shape=data.shape)
    has_batchnorm = any(isinstance(module, BatchNorm) for module in built.modules())
    syncs = has_batchnorm and strategy == "ddp" and parallel.batchnorm != "local"
    paths = {"digits": Code('Path(__file__).with_name("digits.npz")'), "imagefolder": str(config.data.dir)}
    smoothing = f", label_smoothing={optimizer.label_smoothing!r}" * bool(optimizer.label_smoothing)
    own_loss = optimizer.loss.partition(":")[2] if ":" in optimizer.loss else ""
    name = precision.name
    called = "net" if strategy != "single" or name in ("bf16", "fp16") else "model"
    return Choices(
        ddp=strategy == "ddp",
        hybrid=strategy == "hybrid",
        ranks=has_ranks,
        splits=has_ranks or accumulate > 1,
        drives_all=drives_all,
        wraps=strategy != "single",
        spawn=has_ranks and parallel.launcher == "spawn",
        by_hand=by_hand,
        slurm=slurm,
        on_cpu=on_cpu,
        devices=parallel.devices or 1,
        device_ids=[*parallel.gpu_indices] or None,
        world_size=parallel.world_size or 1,
        init_method=parallel.init_method,
        model=model,
        own_sync=syncs and parallel.accelerator != "cuda",
        torch_sync=syncs and parallel.accelerator == "cuda",
        compiled=precision.compile,
        channels_last=precision.channels_last == "on" or (precision.channels_last == "auto" and not on_cpu),
        averages=optimizer.ema is not None,
        ema=optimizer.ema or 0.0,
        digits=config.data.name == "digits",
        folder=is_folder,
        reader=Code("datasets.CIFAR10" if config.data.name == "cifar10" else "datasets.CIFAR100"),
        data_path=paths.get(config.data.name, str(config.data.dir)),
        mean=data.mean,
        std=data.std,
        varies=bool(names & {"cutout"} if is_folder else names),
        moves=not is_folder and bool(names & {"crop", "flip"}),
        crops="crop" in names,
        flips="flip" in names,
        cuts="cutout" in names,
        image_size=config.data.image_size,
        workers=4 if config.data.workers is None else config.data.workers,
        batch=batch.size,
        eval_batch=batch.eval_batch or batch.size,
        accumulates=accumulate > 1,
        accumulate=accumulate,
        drops_last=batch.drop_last,
        epochs=config.epochs,
        eval_every=config.eval_every,
        ends_early=config.max_steps is not None,
        max_steps=config.max_steps or 0,
        log_every=config.record.log_every,
        seed=config.seed,
        double=name == "fp64",
        tf32=name == "tf32",
        half=name in ("bf16", "fp16"),
        dtype=Code(f"torch.{'bfloat16' if name == 'bf16' else 'float16'}"),
        scales=name == "fp16",
        loss=Code(f'{own_loss or "F.cross_entropy"}({called}(x), y, reduction="sum"{smoothing})'),
        sgd=optimizer.name == "sgd",
        lr=optim.peak_lr(optimizer, batch.size),
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
        weight_decay=optimizer.weight_decay,
        clips=optimizer.clip is not None,
        clip=optimizer.clip or 0.0,
        step=optimizer.schedule == "step",
        multistep=optimizer.schedule == "multistep",
        cosine=optimizer.schedule == "cosine",
        onecycle=optimizer.schedule == "onecycle",
        spans=optimizer.schedule in ("cosine", "onecycle"),
        milestones=optimizer.milestones,
        gamma=optimizer.gamma,
        warms_up=optimizer.warmup > 0,
        warmup=optimizer.warmup,
    )


CHAPTERS = {
    "03-data-parallel": ("nn.DataParallel",),
    "04-rendezvous": ("init_process_group", "RANK", "init-method", "mp.spawn", "SLURM"),
    "05-all-reduce": ("dist.all_reduce",),
    "06-ddp": ("no_sync", "DistributedDataParallel"),
    "07-means": ("/ total",),
    "08-samples": ("tensor_split", "rank::world"),
    "09-accumulation": ("micro_batch", "ACCUMULATE"),
    "10-batchnorm": ("SyncBatchNorm",),
    "11-precision": ("autocast", "scaler"),
}
"""{chapter of the notes: what lines have that it explains}"""


def difference(single: str, text: str) -> str:
    """Return the unified difference of a file from that for one device, with chapters of the notes at each hunk."""
    lines = [*difflib.unified_diff(single.splitlines(), text.splitlines(), "single.py", "train.py", lineterm="", n=2)]
    starts = [number for number, line in enumerate(lines) if line.startswith("@@")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        added = "\n".join(line[1:] for line in lines[start:end] if line.startswith("+"))
        chapters = [chapter for chapter, words in CHAPTERS.items() if any(word in added for word in words)]
        lines[start] += "".join(f"  docs/notes/{chapter}.md" for chapter in chapters)
    return "".join(f"{line}\n" for line in lines)


def _header(config: RunConfig, choices: Choices, command: str, data: _Data) -> str:
    values = {key: value for key, value in flatten(config).items() if key not in _ELSEWHERE}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
    start = "python train.py"
    if choices.by_hand:
        start = f"python train.py --rank R  # for R from 0 to {choices.world_size - 1}, on each process's host"
    elif choices.slurm:
        start = "srun --ntasks N python train.py  # in a job"
    elif choices.ranks and not choices.spawn:
        start = f"torchrun --nproc-per-node {choices.devices if choices.ddp else 1} train.py"
    lines = [f"{config.model.name} on {config.data.name}, in plain PyTorch.", "", f"    {start}", ""]
    origin = f"Written by lockstep {version_of('lockstep-torch')}; its losses are those of the run. Config {digest}:"
    lines += [origin, *textwrap.wrap(command, 110, initial_indent="    ", subsequent_indent="        "), ""]
    lines += ["Not carried over:", *(f"- {phrase}" for phrase in _NOT_CARRIED)]
    if choices.digits:
        lines += ["", "It reads digits.npz beside it, from lockstep/data in the package."]
    return "\n".join(lines) + "\n"
