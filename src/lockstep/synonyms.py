"""What others call our options and their values.

torchvision's references, timm, torchrun, accelerate and Lightning have their own words for them, too far in spelling
from ours for the nearest name to be the right one: the nearest to `gpu` is `cpu`.
"""

from __future__ import annotations

from collections.abc import Iterable

OTHER_WORDS = {
    "accelerator": "device",
    "accumulate": "gradient-accumulation-steps grad-accum-steps grad-accu-steps accumulate-grad-batches",
    "adamw": "adam",
    "batch": "batch-size bs b",
    "batchnorm": "sync-bn sync-batchnorm",
    "bf16": "bfloat16 bf16-mixed mixed amp",
    "classes": "num-classes",
    "clip": "clip-grad grad-clip max-grad-norm gradient-clip-val",
    "cuda": "gpu",
    "data": "dataset",
    "data-dir": "data-path root",
    "ddp": "distributed",
    "devices": "device nproc nproc-per-node num-processes num-gpus ngpus n-gpus gpu-nums",
    "dp": "dataparallel",
    "ema": "model-ema",
    "environment": "torchrun",
    "epochs": "num-epochs max-epochs e",
    "fp16": "half float16 16-mixed",
    "fp32": "float32 single",
    "fp64": "float64 double",
    "gamma": "lr-gamma",
    "gpus": "gpu gpu-devices",
    "image-size": "img-size input-size",
    "imagefolder": "imagenet",
    "init-method": "dist-url",
    "label-smoothing": "smoothing",
    "log-every": "log-interval print-freq",
    "lr": "learning-rate",
    "model": "arch a",
    "nodes": "nnodes num-nodes",
    "optimizer": "opt",
    "output": "output-dir save-dir",
    "precision": "amp fp16 bf16 mixed-precision dtype",
    "schedule": "scheduler sched lr-scheduler",
    "warmup": "warmup-epochs",
    "weight-decay": "wd",
    "workers": "num-workers j",
}
"""{our word: theirs}"""


def meant(word: str, names: Iterable[str]) -> list[str]:
    """Return those of our `names` that others call `word`."""
    return [ours for ours in names if word in OTHER_WORDS.get(ours, "").split()]
