"""The gradients of a user's own loop, summed over the ranks at the end of the backward pass.

DistributedDataParallel exchanges gradients while the backward pass runs, for which it has to know before the forward
pass which parameters will have some, and how often; it must be called in the model's place, and a method of the model's
own passes it by without a word. Here nothing is wrapped and nothing foreseen: a micro-batch's gradients are put aside
until those of its batch's last one have come; then they are summed over the ranks, and added to whatever gradients
there are. So what follows in a plain loop (clipping, a norm, several optimizers, a second loss) finds the gradients of
the global batch, or none. The price is that communication overlaps with no computation.

The order of the parameters decides the order of the sums, so that equal worlds come to equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .. import _torch
from ..errors import RequestError
from ..world.world import World

BUCKET_BYTES = 32 << 20
"""Of gradients that are exchanged at a time: so much memory more is needed."""
Held = list[tuple[nn.Parameter, Tensor]]


class Gradients:
    """The gradients of the parameters of all models that a rank trains."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._models: list[list[nn.Parameter]] = []
        self._training: list[tuple[bool, ...]] = []
        self._buckets: list[list[list[nn.Parameter]]] = []
        self.parameters: list[nn.Parameter] = []
        """Those of all models, in order."""

    def add(self, model: nn.Module) -> None:
        """Take in the parameters of `model` that no other one has."""
        known = set(self.parameters)
        new = [each for each in model.parameters() if each not in known]
        self.parameters += new
        self._models.append(new)
        self._training.append(())
        self._buckets.append([])

    def set_aside(self) -> Held:
        """Take away, and return, the gradients that are there, so that the next backward pass leaves its own alone."""
        held = [(each, each.grad) for each in self.parameters if each.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        return held

    def void(self, weight: float | Tensor) -> None:
        """Drop the gradients that are there if `weight` (0-dim) is 0: those of a mean over nothing are no numbers."""
        if not isinstance(weight, Tensor):
            if not weight:
                self.set_aside()
            return
        for each in self.parameters:
            if each.grad is not None:
                each.grad.masked_fill_(weight <= 0, 0)

    def put_back(self, held: Held) -> None:
        """Add what `set_aside` returned to what there is now."""
        for parameter, before in held:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def sum(self, divisor: Tensor | None = None, *, exchanges: bool = True) -> None:
        """Sum the gradients over the ranks, in place, and divide them by `divisor` (0-dim) (*collective*).

        A parameter without a gradient on some ranks has one of zeros there; where no rank has one, it stays without.
        """
        if self._world.group is not None and exchanges:
            for buckets in self._taking_part():
                for bucket in buckets:
                    self._sum(bucket)
        if divisor is not None and (present := [each.grad for each in self.parameters if each.grad is not None]):
            _torch.foreach_div_(present, divisor)

    def _taking_part(self) -> Iterable[list[list[nn.Parameter]]]:
        """Return the buckets of the models that any rank has gradients of (*collective* where there are several)."""
        for number, model in enumerate(self._models):  # a user may freeze a part, and let it train later
            training = tuple([each.requires_grad for each in model])
            if training != self._training[number]:
                self._training[number] = training
                self._buckets[number] = _buckets([each for each in model if each.requires_grad])
        if len(self._models) == 1:
            return self._buckets
        own = [any(each.grad is not None for each in model) for model in self._models]
        device = self._world.device
        any_rank = self._world.max(torch.tensor(own, dtype=torch.int32, device=device)).tolist()
        return [buckets for buckets, has_some in zip(self._buckets, any_rank, strict=True) if has_some]

    def _sum(self, bucket: Sequence[nn.Parameter]) -> None:
        first = bucket[0]
        absent = [each for each in bucket if each.grad is None]
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        has = torch.ones(len(bucket), dtype=first.dtype, device=first.device)
        for number, each in enumerate(bucket):
            if each.grad is None:
                has[number] = 0
        flat = self._world.sum_(torch.cat([*(part.reshape(-1) for part in parts), has]))
        *sums, has = torch.split(flat, [*(each.numel() for each in bucket), len(bucket)])
        _torch.foreach_copy_(parts, [one.view(each.shape) for one, each in zip(sums, bucket, strict=True)])
        if absent:  # only then the host waits for the numbers
            for each, part, some in zip(bucket, parts, has.tolist(), strict=True):
                each.grad = part if some else None


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in lists of one dtype and device, of up to `BUCKET_BYTES` each."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for each in parameters:
        lists = by_kind.setdefault((each.dtype, each.device), [[]])
        if lists[-1] and sum(one.nbytes for one in lists[-1]) + each.nbytes > BUCKET_BYTES:
            lists.append([])
        lists[-1].append(each)
    return [bucket for lists in by_kind.values() for bucket in lists]


def check_loss(loss: Tensor) -> None:
    """Raise `RequestError` where `loss` is no number of which gradients can be taken."""
    if not isinstance(loss, Tensor) or loss.dim() or loss.is_complex():
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise RequestError(
            f"session.backward takes a loss of one number, a tensor without dimensions; found {found}: take its mean "
            "over this rank's samples first."
        )
    if not loss.requires_grad:
        raise RequestError(
            "session.backward was given a loss that hangs on no parameter which trains (requires_grad): it was "
            "computed under torch.no_grad(), from detached tensors, or the model is frozen."
        )
