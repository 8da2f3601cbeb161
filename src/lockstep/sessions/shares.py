"""Lookup of the share that a loss belongs to.

A loss has the weight of its batch's share, wherever the loop is: a loop may read ahead, go over a list of batches, or
skip one. The inputs of the model's forward identify a share by the memory of its batch's tensors; a mark on the
output's node in the autograd graph leads from the loss to the share. If the loop changes its tensors before it calls
the model, the share is one without a backward pass: the newest if the loop has trained each batch before it read the
next, else the oldest. If several are possible, and the choice matters, `RequestError` is raised.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..batching import Share
from ..errors import RequestError

_MARK = "lockstep share"  # among the metadata of a node of autograd's graph
_MOST_NODES = 100  # to visit between a loss and the model's output
_MOST_LEAVES = 64  # of a batch, to identify it by


@dataclass(eq=False)
class Handed:
    """A share that a loader has handed out."""

    share: Share
    pass_number: int
    """Number of its pass over a loader."""
    index: int
    """Its number among the micro-batches of its pass."""
    counts: bool
    """Whether its loader's batches count steps."""
    samples: int | None
    """Samples that remain after the collate function; None if the batch does not show it."""
    may_drop: bool = False
    """Whether the user's collate function may drop samples."""
    is_used: bool = False
    """Whether a loss of it has had its backward pass."""
    alive: int = 0
    """Number of its batch's living tensors."""
    references: list[weakref.ref[Tensor]] = field(default_factory=list)
    visits: int = 0
    """How often the loop has come to it under `draws="global"`."""
    indices: Any = None
    """Indices of the samples (size,)."""
    epoch: int = 0
    place: int = 0
    """Number of its loader's pass over the epoch, from 0."""

    @property
    def rows(self) -> tuple[int, int, int]:
        """This rank's first row, number of rows, and the rows of all ranks."""
        return self.share.row, self.share.size, self.share.rows

    @property
    def batch(self) -> tuple[int, int]:
        """Its global batch."""
        return self.pass_number, self.share.step


@dataclass(eq=False)
class _Memory:
    """Memory of a batch's tensor: addresses in [`start`, `end`)."""

    start: int
    end: int
    handed: Handed | None
    """None for a tensor of several batches, which identifies none."""


class Shares:
    """Shares that a session's loaders have handed out, until their backward pass and while their batches exist."""

    def __init__(self) -> None:
        self.current: Handed | None = None
        """Share that the loop is probably at; None outside of a loader's loop."""
        self._is_sure = True  # whether tensors identified `current`, or a loss has used it
        self._alive: dict[int, Handed] = {}  # by id; a few, unless a loop keeps its batches
        self._open: dict[int, Handed] = {}  # without a backward pass, by id, in the order of the loader
        self._newest: Handed | None = None
        self._last_used: Handed | None = None
        self._is_one_by_one = False  # whether this pass has trained each batch before it read the next, so far
        self._has_read_ahead = False
        self._memory: dict[int, list[_Memory]] = {}  # by the address of the storage
        self.assumed: tuple[Handed | None] | None = None
        """Share, or none, that the last forward pass was taken to be of, if no tensor identified it."""
        self._rows: set[int] = set()  # lengths of a forward pass's inputs that belong to no batch

    def hand_out(self, handed: Handed, batch: Any) -> bool:
        """Note a share and its batch; return whether it is now the current share.

        It is not if the loop reads its loader beside the one whose batches count steps.
        """
        is_current = handed.counts or self.current is None or not self.current.counts
        if is_current:
            self.current, self._is_sure, self._rows = handed, False, set()
        if handed.counts:
            self._open[id(handed)] = handed
            if self._newest is None or self._newest.pass_number != handed.pass_number:
                self._is_one_by_one = self._has_read_ahead = False
            self._newest = handed
        for tensor in tensors_of(batch):
            self._note(handed, tensor)
        if handed.alive:
            self._alive[id(handed)] = handed
        return is_current

    def _note(self, handed: Handed, tensor: Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if not storage or not tensor.numel():
            return
        memories, start = self._memory.setdefault(storage, []), tensor.data_ptr()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        memory = _Memory(start, start + extent * tensor.element_size(), handed)
        for other in memories:
            if (other.start, other.end) == (memory.start, memory.end):  # the tensor of an earlier batch, or again
                if other.handed is not None and other.handed is not handed:
                    self._release(other.handed)
                    other.handed = None
                return
        memories.append(memory)
        handed.alive += 1
        handed.references.append(weakref.ref(tensor, partial(self._lose, storage, memory)))

    def _lose(self, storage: int, memory: _Memory, _: object) -> None:
        memories = self._memory.get(storage, [])
        if memory in memories:
            memories.remove(memory)
            if not memories:
                del self._memory[storage]
        if memory.handed is not None:
            self._release(memory.handed)

    def _release(self, handed: Handed) -> None:
        handed.alive -= 1
        if not handed.alive:
            self._alive.pop(id(handed), None)

    def _owner(self, tensor: Tensor) -> Handed | None:
        """Return the share whose batch has the tensor's memory; None for none or several."""
        memories = self._memory.get(tensor.untyped_storage().data_ptr())
        if memories is None:
            return None
        start = tensor.data_ptr()
        around = [memory for memory in memories if memory.start <= start < memory.end] or memories
        owners = {memory.handed for memory in around}
        return owners.pop() if len(owners) == 1 else None

    def leave(self) -> None:
        """Note that a loader has no further batch; the loop may still use batches that it keeps."""
        self.current, self._is_sure = None, False

    def end_pass(self, pass_number: int) -> None:
        """Drop the shares of a pass without training: all, if some batch of it no longer exists, else none."""
        if self._last_used is not None and self._last_used.pass_number == pass_number:
            return
        passed = {key: handed for key, handed in self._open.items() if handed.pass_number == pass_number}
        if not all(handed.alive for handed in passed.values()):
            for key in passed:
                del self._open[key]

    def forget(self, pass_number: int | None = None) -> None:
        """Drop the unused shares, of one pass or of all, whose batches no longer exist."""
        for key, handed in [*self._open.items()]:
            if not handed.alive and pass_number in (None, handed.pass_number):
                del self._open[key]

    @property
    def newest_open(self) -> Handed | None:
        """The last share without a backward pass, if any."""
        return next(reversed(self._open.values()), None)

    def is_certain(self, *, has_stepped: bool) -> bool:
        """Return whether the loop is at `current`, or all shares that it may be at have equal rows.

        After a step the loop may go on with another batch that it has kept.
        """
        candidates = [*self._open.values(), *filter(None, [self.current])]
        is_sure = self._is_sure and not has_stepped
        return is_sure or self._is_one_by_one or len({handed.rows for handed in candidates}) < 2

    @property
    def _is_alone(self) -> bool:
        """Whether the current share is the only candidate."""
        return len(self._alive) < 2 and len(self._open) < 2

    def see(self, values: Any) -> None:
        """Note the inputs of a model's forward."""
        if self._is_alone and self.current is not None:  # only one candidate
            return
        for tensor in tensors_of(values):
            handed = self._owner(tensor)
            if handed is not None:
                self.current, self._is_sure, self._rows = handed, True, set()
                return
        if torch.is_grad_enabled():
            self._rows = {len(tensor) for tensor in tensors_of(values) if tensor.dim()}

    def mark(self, output: Any) -> None:
        """Mark a forward pass's output with the current share."""
        is_known = self.current is not None and (self._is_sure or self._is_alone)
        self.assumed = None if is_known else (self.current,)
        if not is_known:
            return
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                metadata: Any = tensor.grad_fn.metadata  # torch annotates it as a method
                metadata[_MARK] = self.current

    def find(self, batch: Any) -> Handed:
        """Return the share of `batch` or of a part of a batch. Raises `RequestError` for other tensors."""
        for tensor in tensors_of(batch):
            if (handed := self._owner(tensor)) is not None:
                return handed
        raise RequestError(
            "session.backward(loss, batch=…) was given tensors that no prepared loader has yielded: give it the batch, "
            "or one of its tensors, as it came out of the loader."
        )

    def take(self, loss: Tensor, batch: Any = None) -> Handed | None:
        """Return the share of a loss before its backward pass; None outside of a loader's loop."""
        marked = [self.find(batch)] if batch is not None else _marks(loss)
        if marked:
            counting = [handed for handed in marked if handed.counts] or marked
            if len(set(map(_weighs, counting))) > 1 or len({handed.batch for handed in counting}) > 1:
                raise RequestError(
                    "session.backward was given the loss of several batches at once; call it for the loss of each, and "
                    "step after the last."
                )
            self.current = counting[0]
        elif not self._is_sure:
            self._choose()
        self._is_sure = True
        if self.current is not None:
            self._use(self.current)
        return self.current

    def take_current(self) -> Handed | None:
        """Return the current share, for a loop that trains each batch before it reads the next."""
        self._is_sure = True
        if self.current is not None:
            self._use(self.current)
        return self.current

    def _use(self, handed: Handed) -> None:
        if handed.is_used:
            return
        handed.is_used, self._last_used = True, handed
        self._open.pop(id(handed), None)
        is_newest = handed is self._newest
        self._has_read_ahead |= handed.counts and not is_newest
        self._is_one_by_one = is_newest and not self._has_read_ahead
        if is_newest:  # the loop has skipped earlier batches that no longer exist
            self.forget(handed.pass_number)

    def beside(self, handed: Handed) -> bool:
        """Return whether another loader's unused batch has a different fraction on this rank."""
        share = handed.share
        return any(
            other.share.size * share.total != share.size * other.share.total
            for other in self._alive.values()
            if not other.counts and not other.is_used
        )

    def joins(self, handed: Handed) -> bool:
        """Return whether the model's input joined this batch with an earlier one of another fraction.

        The number of rows shows that. A mean over both batches has no correct weight.
        """
        share = handed.share
        return max(1, share.size) not in self._rows and any(
            share.size + other.share.size in self._rows
            and other.share.size * share.total != share.size * other.share.total
            for other in self._alive.values()
            if other is not handed and other.is_used
        )

    def _choose(self) -> None:
        current, open_ = self.current, [*self._open.values()]
        if current is None and not open_:
            used = list(self._alive.values())
            # Shares of one size weigh what they always do: it does not matter which of them is meant.
            if any(handed.share.size * _ranks(handed) != handed.share.rows for handed in used):
                raise _ambiguous("a batch that it has trained on before")
            return
        if not open_ or (self._is_one_by_one and current is not None):
            return
        if current is not None and len(open_) == 1:
            self.current = open_[0] if current.is_used else current
            return
        if len(set(map(_weighs, open_))) > 1:
            raise _ambiguous(f"one of {len(open_)} batches that it has read and not trained on")
        self.current = open_[0]


def _marks(loss: Tensor) -> list[Handed]:
    """Return the shares by which the nodes nearest to the loss are marked."""
    nodes, seen, shares = [loss.grad_fn], set[Any](), list[Handed]()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = node.metadata
        handed = metadata.get(_MARK)
        if handed is None:
            nodes.extend(following for following, _ in node.next_functions)
        elif handed not in shares:
            shares.append(handed)
    return shares


def _weighs(handed: Handed) -> tuple[Any, ...]:
    share = handed.share
    if share.size == share.rows == share.total:  # on one rank a mean over any whole batch has a weight of 1
        return ()
    return share.size, share.total, share.last, share.rows, handed.samples


def _ranks(handed: Handed) -> int:
    return max(1, round(handed.share.rows / max(1, handed.share.size)))


def _ambiguous(which: str) -> RequestError:
    return RequestError(
        f"session.backward cannot know which batch the loss is of: it is {which}, and the model was not called with "
        "its tensors. Name it, as in session.backward(loss, batch=x), with a tensor as it came out of the loader."
    )


def tensors_of(value: Any, most: int = _MOST_LEAVES) -> Iterator[Tensor]:
    """Yield the first tensors in nested lists, tuples, dicts, dataclasses, and other objects' attributes."""
    stack, seen = [value], 0
    while stack and seen < most:
        item = stack.pop()
        seen += 1
        if isinstance(item, Tensor):
            if item.layout is torch.strided and not item.is_meta:
                yield item
        elif isinstance(item, list | tuple):
            stack.extend(item[most - 1 :: -1] if len(item) > most else reversed(item))
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())[:most]))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, attribute.name) for attribute in reversed(dataclasses.fields(item)))
        elif not isinstance(item, str | bytes | int | float | nn.Module | None) and hasattr(item, "__dict__"):
            stack.extend(value for value in reversed(list(vars(item).values())) if isinstance(value, Tensor))


def samples_in(batch: Any, size: int) -> int | None:
    """Return the number of samples in a batch collated from `size`; None if its parts disagree."""
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, list) and batch and all(isinstance(part, tuple | Mapping) for part in batch):
        parts = [batch]  # the samples themselves
    elif isinstance(batch, list | tuple):
        parts = list(batch)
    elif isinstance(batch, Tensor):
        parts = [batch]
    else:
        parts = [batch, *getattr(batch, "__dict__", {}).values()]
    lengths = {
        len(part)
        for part in parts
        if (isinstance(part, Tensor) and part.dim())
        or (not isinstance(part, Tensor | str | bytes | Mapping) and hasattr(part, "__len__"))
    }
    if size in lengths or not lengths:
        return size
    # The parts may be samples, or lists of tensors over samples: one a view, or a scale.
    shapes = [part.shape if isinstance(part, Tensor) else None for part in parts]
    is_uniform = isinstance(batch, list) and len(parts) > 1 and None not in shapes and len(set(shapes)) == 1
    nested = [part for part in parts if isinstance(part, list | tuple)]
    inner = {len(tensor) for part in nested for tensor in part if isinstance(tensor, Tensor) and tensor.dim()}
    if len(lengths) == 1:
        return None if is_uniform or inner == {size} else lengths.pop()
    return inner.pop() if len(inner) == 1 else None
