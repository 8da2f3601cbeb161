"""The findings of an audit, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..checkpoint.state import few


@dataclass(frozen=True)
class Finding:
    """A fault, or what a script does by design, with its evidence."""

    kind: str
    sentence: str
    by_design: bool = False
    evidence: Mapping[str, object] = field(default_factory=dict)


_BY_DESIGN = {"local BatchNorm", "no_sync missing", "padded epoch"}
_SENTENCES = {
    "gradients differ": "{0} {1} at step {step} ({place}); {2}.",
    "weights differ": "Before step {step} the ranks' weights differ ({tensor}, by up to {difference:.1e}): they train "
    "different models; wrap the model in DistributedDataParallel, which also gives all ranks rank 0's weights, or seed "
    "all ranks alike before the model is made.",
    "buffers differ": "In step {step} the ranks compute with different buffers ({tensors}): each rank keeps statistics "
    "of its samples, and only one rank's are saved; let DistributedDataParallel broadcast them, or convert to "
    "SyncBatchNorm.",
    "steps differ": "The ranks make different numbers of optimizer steps, {steps}, and wait for one another ({place}): "
    "decide on all ranks alike whether a step is made or left out.",
    "steps differ: batches": "For step {step} the ranks read {batches} batches ({place}): some leave out batches that "
    "others train, and different ones are paired from then on.",
    "steps differ: calls": "At step {step} the ranks call the model {calls} times ({place}): some leave out batches "
    "that others train, and different ones are paired from then on.",
    "wrong count": "Every gradient is {factor:.6g} times one process's at step {step} ({place}): the ranks' gradients, "
    "or the micro-batches', are summed or divided by a wrong count.",
    "clipped alone": "Each rank clips its own gradients before they are exchanged (gradients {gap:.1%} off at step "
    "{step}, {place}): exchange first, and clip the sum.",
    "mean of means": "Ranks with {samples} samples count alike (gradients {gap:.1%} off at step {step}, {place}): the "
    "mean of the ranks' means is not the mean over all samples; weigh each rank's loss by its share of the samples, or "
    "drop the uneven batch.",
    "mean over other counts": "The loss is a mean over a count that differs between ranks, such as tokens (gradients "
    "{gap:.1%} off at step {step}, {place}): one process weighs the ranks by {one_process}, and here they count by "
    "{weights}; divide the sum by the count over all ranks.",
    "coupled samples": "The loss or a layer couples the samples of a batch, as a contrastive loss does, or adds means "
    "over different counts, and each rank sees its own share alone (gradients {gap:.1%} off at step {step}, {place}); "
    "gather what the loss compares, or the counts, from all ranks.",
    "gathered without gradients": "Gradients are {gap:.1%} off one process's at step {step} ({0}): the collective at "
    "{place} computes no gradients of the tensors that it gathers; use torch.distributed.nn.functional's, and mind "
    "that DistributedDataParallel divides by the ranks.",
    "last window": "Step {step} has {micro_batches[1]} micro-batches in place of {micro_batches[0]}, as at an epoch's "
    "end, and of the same samples its gradients are {factor:.3g} times the others' ({place}): divide the loss by the "
    "number of micro-batches, or of samples, that the step really has, and leave none over for the next epoch.",
    "same samples": "Ranks train {samples} of {of} samples in common at step {step} ({place}): each rank reads the "
    "whole data set; give the loader a DistributedSampler, or prepare it.",
    "same samples: epoch": "Each rank trains the same {samples} samples in each epoch ({place}): give the loader a "
    "DistributedSampler, or prepare it.",
    "same samples: some": "Several ranks train {repeated} of {samples} samples in one epoch ({place}).",
    "missing samples": "{missing} of {of} samples are not in the epoch of any rank ({place}): the data set is divided "
    "twice; give the DistributedSampler the whole data set.",
    "same order": "Each epoch has the same order of samples ({place}): the sampler does not know the epoch; call "
    "sampler.set_epoch(epoch) before each.",
    "same draws": "Ranks draw the same random numbers for their samples at step {step} (of shape {0}): each rank "
    "repeats the noise or dropout; seed each rank differently, as by torch.manual_seed(seed + rank).",
    "same draws: loaders": "Ranks draw the same random numbers in their loaders at step {step}: samples of one rank "
    "are augmented as those of the others; seed torch, `random` and NumPy differently on each rank.",
    "schedule": "{0} the schedule was stepped {ranks} times on {1} ranks and {one_process} times in one process "
    "(learning rate {learning_rate}): it is stepped for each rank, as Accelerate does with a prepared schedule; a "
    "schedule counts optimizer steps or epochs.",
    "evaluation pads": "{repeated} of {of} samples are evaluated twice ({place}): the sampler pads, and the mean "
    "counts them again; leave out the padding.",
    "evaluation drops": "{missing} of {of} samples are never evaluated ({place}): the sampler or loader drops the rest "
    "that does not divide; keep it, or evaluate it apart.",
    "evaluation differs": "The evaluation reduces {ranks:.6g} over {0} ranks ({place}), where one process has "
    "{one_process:.6g} of the same samples: a mean of means; reduce sums and counts, and divide once.",
    "evaluation of a part": "Each rank evaluates its own part, rank 0 {samples} of {of} samples ({place}), and nothing "
    "is reduced: the reported score, by which checkpoints may be chosen, is one rank's; all-reduce sums and counts.",
    "checkpoint by every rank": "{0} ranks write {path} at once ({place}): readers may find a torn file; let rank 0 "
    "write it under another name and rename it when it is complete.",
    "local BatchNorm": "BatchNorm uses the statistics of each rank's own samples (gradients {gap:.0%} off at step "
    "{step}, {place}): by design of DistributedDataParallel; torch.nn.SyncBatchNorm.convert_sync_batchnorm gives one "
    "process's.",
    "no_sync missing": "Gradients are exchanged in each of {micro_batches} micro-batches of step {step} ({place}); "
    "under no_sync, around forward and backward of all but the last, {0} of {micro_batches} exchanges are saved.",
    "padded epoch": "{repeated} of {samples} samples come twice in an epoch ({place}), so that all ranks have as many: "
    "by design of the sampler.",
}
"""By kind of a finding; where a kind has several sentences, by KIND: VARIANT."""


class _Series(list[object]):
    """A list in a sentence: names, or a number for each rank."""

    def __str__(self) -> str:
        if all(isinstance(item, str) for item in self):
            return few([str(item) for item in self])
        return " and ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in self)


def make_finding(name: str, *words: object, **evidence: object) -> Finding:
    """Return the finding of a kind, or KIND: VARIANT. Its sentence has the evidence, and the words by position."""
    kind = name.partition(":")[0]
    values = {key: _Series(value) if isinstance(value, list) else value for key, value in evidence.items()}
    return Finding(kind, _SENTENCES[name].format(*words, **values), kind in _BY_DESIGN, evidence)
