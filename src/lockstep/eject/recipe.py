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
from ..config.registry import KINDS, resolved, with_ranks
from ..config.schema import RunConfig
from ..data import cifar, digits, folder
from ..errors import RequestError
from ..exchange.blocks import check_found, find_blocks, inner_classes
from ..models import table
from ..training import optim
from ..versions import version_of
from .chinese import translated
from .cut import Choices, Code, clean, cut
from .link import Linked

_PROGRAM = Path(__file__).with_name("program.py")
_ELSEWHERE = {"data", "output", "log-every"}
_REFUSED = {
    "lr-scale": "learning rates by parameter",
    "freeze": "frozen parameters",
    "init-from": "initial weights from a file (the file takes --weights of the same model)",
    "step": "a step function; lockstep eject train.py turns a loop over a session into plain PyTorch",
    "holdout": "a validation set taken from the training set",
    "patience": "an early end by score",
    "skip-corrupt": "leaving out images that cannot be decoded",
    "deterministic": "deterministic algorithms; call torch.use_deterministic_algorithms there",
    "nodes": "a number of nodes; start the ranks by torchrun, by hand or in Slurm",
    "resume": "an optimizer's state; the file takes --weights",
    "shard-size": "groups of fsdp; torch has it as fully_shard over a mesh of two dimensions",
    "shard-reshard": "weights that stay gathered; torch has it as reshard_after_forward=False",
    "exchange": "compressed gradients or rare exchanges; torch has communication hooks for bf16, fp16 and powersgd",
    "exchange-every": "an exchange every few steps",
    "powersgd-rank": "PowerSGD; torch has a communication hook for that",
    "powersgd-start": "PowerSGD; torch has a communication hook for that",
    "draws": "the draws of one device on several ranks",
    "cuda-graphs": "CUDA graphs; torch has make_graphed_callables",
    "checkpoint-activations": "recomputed activations; call torch.utils.checkpoint in the model",
}
"""Options that have no plain form, with what they do."""
_HONOURED = {
    *("model", "classes", "data", "data-dir", "workers", "augment", "image-size", "optimizer", "lr", "momentum"),
    *("nesterov", "weight-decay", "schedule", "milestones", "gamma", "warmup", "lr-rule", "base-batch", "clip", "loss"),
    *("label-smoothing", "ema", "batch", "accumulate", "micro-batch", "eval-batch", "drop-last", "strategy", "devices"),
    *("gpus", "accelerator", "launcher", "init-method", "rank", "world-size", "batchnorm", "precision"),
    "shard-modules",
    *("channels-last", "compile", "epochs", "max-steps", "eval-every", "seed", "log-every"),
}
_WITHOUT_EFFECT = {
    *("samples", "download", "collate", "metric", "on-device", "max-restarts", "interface", "timeout", "stall-timeout"),
    *(
        "collectives",
        "checkpoint-every",
        "keep",
        "output",
        "remote",
        "quiet",
        "track",
        "profile",
        "verify-every",
        "ledger",
    ),
}
"""Options that do not change what is trained."""
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
    for sentence in _refusals(config, slurm=slurm):
        raise RequestError(sentence)
    parallel = config.parallel
    is_distributed = max(parallel.devices or 1, parallel.world_size or 1) > 1 or slurm
    strategy = resolved(parallel.strategy, distributed=is_distributed)
    if slurm and not KINDS[strategy].has_ranks:
        raise RequestError(f"--slurm starts several ranks, and --strategy is {strategy}; use {with_ranks()}.")
    data = _describe_data(config)
    arguments, entries, imports = _model(config, data)
    if ":" in config.optim.loss:
        module = config.optim.loss.partition(":")[0]
        imports[module.partition(".")[0]] = ("", f"import {module}")
    choices = _choices(config, strategy, data, arguments, slurm=slurm)
    program = cut(_PROGRAM.read_text(encoding="utf-8"), choices)
    body = clean(Linked(program, ["__main__"], entries, imports).text())
    header = _header(config, choices, command, data)
    text = f'"""{header.replace(chr(92), "/").replace(chr(34) * 3, "")}"""\n\n{body}'
    return translated(text) if language == "zh" else text


def _refusals(config: RunConfig, *, slurm: bool) -> Iterator[str]:
    values, defaults, parallel = flatten(config), flatten(RunConfig()), config.parallel
    for key in (key for key in values if values[key] != defaults[key]):
        if key not in _HONOURED | _WITHOUT_EFFECT:
            phrase = _REFUSED.get(key, "it")
            yield f"lockstep eject: --{key} has no plain form: {phrase}. Leave it out."
    if config.optim.name not in ("sgd", "adamw"):
        yield f"lockstep eject: --optimizer {config.optim.name} has no plain form; use sgd or adamw."
    if config.data.name in ("fake", "webdataset") or ":" in config.data.name:
        yield (
            f"lockstep eject: --data {config.data.name} has no plain form; eject digits, cifar10, cifar100 or "
            "imagefolder, and put your reader in the place of read_data."
        )
    if names := [name for name in config.data.augment if name not in ("crop", "flip", "cutout")]:
        yield f"lockstep eject: --augment {names[0]} has no plain form; torchvision.transforms.v2 has it."
    if config.data.name == "imagefolder" and table.images(config.model.name):
        yield (
            f"lockstep eject: --model {config.model.name} expects other images than the file's, which are those of "
            "torchvision's models; take one of those."
        )
    if config.precision.name == "auto":
        yield "lockstep eject: --precision auto depends on the hardware; name one."
    beside = [config.optim.ema, config.precision.compile, config.data.name == "imagefolder"]
    if parallel.strategy == "fsdp" and any(beside):
        yield "lockstep eject: --strategy fsdp has no plain form with --ema, --compile or imagefolder; take zero1."
    drives_all = parallel.strategy in ("dp", "hybrid")
    if parallel.gpus and not drives_all:
        yield "lockstep eject: --gpus has a plain form for dp and hybrid only; set CUDA_VISIBLE_DEVICES."
    if drives_all and parallel.batchnorm == "sync":
        yield f"lockstep eject: --batchnorm sync cannot work under --strategy {parallel.strategy}."
    if slurm and (parallel.launcher == "spawn" or parallel.has_rendezvous_url):
        yield "lockstep eject: --slurm starts the ranks; leave out --launcher and --init-method."


def _describe_data(config: RunConfig) -> _Data:
    name = config.data.name
    if name == "digits":
        return _Data((1, 8, 8), 10, (digits.MEAN,), (digits.STD,))
    if name == "imagefolder":
        root, size = config.data.dir / "train", config.data.image_size
        if root.is_dir() and folder.folders(config.data)["test"] != "val":
            raise RequestError(
                f"lockstep eject: {config.data.dir} has a test folder, and the file evaluates val; move it."
            )
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
    has_ranks, drives_all = KINDS[strategy].has_ranks, KINDS[strategy].drives_all
    names, is_folder = set(config.data.augment), config.data.name == "imagefolder"
    accumulate = batch.accumulate or 1
    if batch.fits_memory:
        raise RequestError(
            "--micro-batch auto: an ejected file has a fixed number of micro-batches; give --accumulate N."
        )
    if batch.micro_batch is not None:
        ranks = max(1, parallel.world_size or parallel.devices or 1) if has_ranks else 1
        accumulate = -(-batch.size // (batch.micro_batch * ranks))
    by_hand = has_ranks and parallel.has_rendezvous_url and not slurm
    if parallel.accelerator not in ("auto", "cpu", "cuda"):
        raise RequestError(
            f"--accelerator {parallel.accelerator}: an ejected file computes on CUDA's GPUs or on a CPU; leave it out."
        )
    on_cpu = parallel.accelerator == "cpu"
    with torch.device("meta"):
        built = table.build_for(config.model.name, classes=config.model.classes or data.classes, shape=data.shape)
    patterns = parallel.shard_modules
    blocks = sorted({type(part).__name__ for part in find_blocks(built, patterns)} if strategy == "fsdp" else ())
    if strategy == "fsdp":
        check_found(len(blocks), inner_classes(built), patterns)
    has_batchnorm = any(isinstance(module, BatchNorm) for module in built.modules())
    syncs = has_batchnorm and KINDS[strategy].process_per_device and parallel.batchnorm != "local"
    paths = {"digits": Code('Path(__file__).with_name("digits.npz")'), "imagefolder": str(config.data.dir)}
    smoothing = f", label_smoothing={optimizer.label_smoothing!r}" * bool(optimizer.label_smoothing)
    loss = optimizer.loss.replace(":", ".") if ":" in optimizer.loss else "F.cross_entropy"
    name = precision.name
    called = "net" if strategy != "single" or name in ("bf16", "fp16") else "model"
    return dict(  # noqa: C408 -- as arguments read best
        ddp=KINDS[strategy].process_per_device,
        zero1=strategy == "zero1",
        fsdp=strategy == "fsdp",
        blocks=blocks,
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
        device_ids=[*parallel.gpu_indices] or ([*range(parallel.devices)] if parallel.devices else None),
        world_size=parallel.world_size or 1,
        init_method=parallel.init_method,
        model=model,
        syncs=syncs,
        compiled=precision.compile,
        channels_last=strategy != "fsdp"
        and (precision.channels_last == "on" or (precision.channels_last == "auto" and not on_cpu)),
        averages=optimizer.ema is not None,
        ema=optimizer.ema or 0.0,
        digits=config.data.name == "digits",
        cifar=config.data.name.startswith("cifar"),
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
        eval_batch=batch.eval_batch or -(-batch.size // accumulate),
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
        allows_tf32=Code(name == "tf32"),
        half=name in ("bf16", "fp16"),
        dtype=Code(f"torch.{'bfloat16' if name == 'bf16' else 'float16'}"),
        scales=name == "fp16",
        loss=Code(f'{loss}({called}(x), y, reduction="sum"{smoothing})'),
        test_loss=Code(f'{loss}(scores, y, reduction="sum")'),
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
    if choices["by_hand"]:
        start = f"python train.py --rank R  # for R from 0 to {choices['world_size'] - 1}, on each process's host"
    elif choices["slurm"]:
        start = "srun --ntasks N python train.py  # in a job"
    elif choices["ranks"] and not choices["spawn"]:
        start = f"torchrun --nproc-per-node {choices['devices'] if choices['ddp'] else 1} train.py"
    lines = [f"{config.model.name} on {config.data.name}, in plain PyTorch.", "", f"    {start}", ""]
    origin = (
        f"Written by lockstep {version_of('lockstep-torch')}. In float64 its losses are the run's. Config {digest}:"
    )
    lines += [origin, *textwrap.wrap(command, 110, initial_indent="    ", subsequent_indent="        "), ""]
    lines += ["Not carried over:", *(f"- {phrase}" for phrase in _NOT_CARRIED)]
    if choices["digits"]:
        copy = "cp $(python -c 'import lockstep.data as data; print(data.__path__[0])')/digits.npz ."
        lines += ["", "It reads digits.npz beside it; copy it from the package:", f"    {copy}"]
    return "\n".join(lines) + "\n"
