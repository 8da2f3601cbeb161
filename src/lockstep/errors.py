"""Every error that lockstep raises on purpose.

LockstepError                  exit code
├── RequestError                  2   the request cannot be honoured: what was asked, what was found, what to do
│   └── AbsentError               2   ranks did not come together; those of another start may
├── RunError                      1   the run failed while it ran: which rank, where, why
│   └── UnmatchedError            1   ranks exchange different things at the same moment
├── ProofError                    3   a proof failed: replicas differ, samples missing
└── Stopped                      75   stopped on request; the checkpoint resumes exactly

Each message is one sentence that a person can act on. Traces go to the run's `failures/` folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class LockstepError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command returns."""

    exit_code = 1


class RequestError(LockstepError):
    """The request cannot be honoured as it was made; nothing was trained."""

    exit_code = 2


class AbsentError(RequestError):
    """Ranks were missing, or left, before the world formed. Those of another start may come."""


class RunError(LockstepError):
    """The run started and failed. `trace` is the failing rank's own traceback, where there is one."""

    def __init__(self, message: str, *, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class UnmatchedError(RunError):
    """Ranks exchange different things at the same moment. The report adds rank and place."""


class ProofError(LockstepError):
    """A law was checked and does not hold."""

    exit_code = 3


class Stopped(LockstepError):
    """Stopped by Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 after saving; resumable."""

    exit_code = 75


_SYNONYMS = """
a=model adam=adamw amp=bf16 amp=precision arch=model b=batch batch-size=batch bf16=precision bf16-mixed=bf16
bfloat16=bf16 bs=batch clip-grad=clip dataparallel=dp dataset=data data-path=data-dir device=accelerator device=devices
dist-url=init-method distributed=ddp double=fp64 dtype=precision e=epochs float16=fp16 float32=fp32 float64=fp64
fp16=precision gpu=cuda gpu=gpus gpu-nums=devices grad-accu-steps=accumulate grad-accum-steps=accumulate grad-clip=clip
gradient-accumulation-steps=accumulate accumulate-grad-batches=accumulate gradient-clip-val=clip half=fp16
imagenet=imagefolder img-size=image-size input-size=image-size j=workers learning-rate=lr log-interval=log-every
lr-gamma=gamma lr-scheduler=schedule max-epochs=epochs max-grad-norm=clip mixed=bf16 mixed-precision=precision
model-ema=ema n-gpus=devices ngpus=devices nnodes=nodes nproc=devices nproc-per-node=devices num-classes=classes
num-epochs=epochs num-gpus=devices num-nodes=nodes num-processes=devices num-workers=workers opt=optimizer
output-dir=output print-freq=log-every root=data-dir save-dir=output sched=schedule scheduler=schedule single=fp32
smoothing=label-smoothing sync-batchnorm=batchnorm sync-bn=batchnorm torchrun=environment warmup-epochs=warmup
wd=weight-decay 16-mixed=fp16
"""
"""Names of our options and values in torchvision's references, timm, torchrun, accelerate and Lightning (theirs=ours),
spelled too differently for the nearest name to be right."""
_LIST_AT_MOST = 12
"""Names that a sentence lists; with more, it points to the list instead."""
_NAMED_AT_MOST = 4  # ranks, one by one


def unknown(kind: str, name: str, valid_names: Iterable[str], hint: str = "") -> RequestError:
    """Return the error for an unknown name, with the nearest known names.

    `kind` is the word for the thing ("strategy"), `hint` a last sentence, such as where the names are listed.
    """
    by_key = {key.lstrip("-"): key for key in sorted(valid_names)}  # dashes would make all flags alike
    word = name.lower().lstrip("-").replace("_", "-")
    synonyms = [option for synonym, option in (pair.split("=") for pair in _SYNONYMS.split()) if synonym == word]
    near = [word] if word in by_key else [option for option in synonyms if option in by_key]
    near = near or difflib.get_close_matches(word, by_key, n=3, cutoff=0.5)
    if near:
        offer = f"did you mean {' or '.join(by_key[key] for key in near)}?"
    elif len(by_key) <= _LIST_AT_MOST:
        offer = f"choose from {', '.join(by_key.values())}."
    else:
        offer = "no name is like it."
    return RequestError(f"Unknown {kind} {name!r}: {offer}{' ' + hint if hint else ''}")


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless 1."""
    plural = "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def ranks_named(ranks: Collection[int]) -> str:
    """Name ranks in a sentence: `rank 0 and rank 2`; many as spans."""
    return " and ".join(f"rank {rank}" for rank in ranks) if len(ranks) <= _NAMED_AT_MOST else ranks_in_short(ranks)


def ranks_in_short(ranks: Iterable[int]) -> str:
    """Return many ranks for a sentence: `rank 3`, `ranks 0–2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    is_plural = len(spans) > 1 or len(spans[0]) > 1
    return f"rank{'s' * is_plural} {', '.join('–'.join(map(str, span)) for span in spans)}"


def choose(kind: str, name: str, valid_names: Collection[str]) -> str:
    """Return `name` if it is valid; raise `unknown(...)` otherwise."""
    if name not in valid_names:
        raise unknown(kind, name, valid_names)
    return name
