"""Random draws of a training loop, equal on any number of ranks.

All ranks seed their default generators alike for each global micro-batch. They draw per-sample numbers for the whole
global micro-batch, and each rank keeps its rows; any other draw is equal on every rank. The draws consume the default
generator, so that `torch.utils.checkpoint` replays them.

The shape of a draw decides whether it is per sample: see `GlobalDraws._layout`. This is silently wrong for a draw of
another kind whose first dimension is the number of samples, and if flattened rows of a sample are not neighbours
(except for tensors joined by `torch.cat` or `torch.stack`). `along` states the layout, and a comparison of gradients
shows the error. Each rank draws as many numbers as one device would. Every operation takes about 7 µs longer, a draw 40
to 80 µs (CPU).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..errors import RequestError, counted
from ..world.random_state import Generators, seed_all
from ..world.world import World
from .layout import Layout, Share
from .mixing import Permutations
from .random_operators import Draw, place_of, user_line

_PURPOSE = 9  # no other seeds of a run have this number
_MOST_AHEAD = 64  # micro-batches that a loop may read ahead and whose joined blocks are kept
_RECURRENT: set[Any] = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_ATTENTION: set[Any] = {functional.multi_head_attention_forward, functional.scaled_dot_product_attention}
_SPECIAL = _RECURRENT | _ATTENTION | {torch.randperm}
_JOINS: set[Any] = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}
_BACKWARD: set[Any] = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class GlobalDraws:
    """Draws of user code as on one device, from `begin` to `end`."""

    def __init__(self, world: World, seed: int, is_certain: Callable[[], bool] = lambda: True) -> None:
        """Set up the draws. `is_certain()` tells whether the code at hand is about the batch of the last `begin`."""
        self._world, self._seed, self._is_alone = world, seed, world.size == 1
        self._is_certain = is_certain
        self._process_streams: Generators | None = (
            None  # this rank's own streams, while its generators are seeded alike
        )
        self._share = Share(0, 1, 1)
        self._number = 0
        self._operators, self._functions = _Operators(self), _Functions(self)
        self._permutations = Permutations(world)
        self._call: tuple[Any, tuple[Any, ...]] = (None, ())  # the torch function that is running, and its arguments
        self._stated: tuple[int | None] | None = None  # the samples' dimension, by `along`
        self._joined: dict[int, set[tuple[int, ...]]] = {}  # blocks of tensors joined in the last micro-batches
        self._seen_readings: set[tuple[Any, ...]] = set()  # layouts of earlier draws
        self._generators: dict[int, torch.Generator] = {}  # the user's, used in this micro-batch
        self.first = ""
        """Place of the first draw, or ""."""

    @property
    def has_mixed(self) -> bool:
        """Whether the current share has drawn a permutation of all samples."""
        return bool(self._permutations.references)

    @property
    def is_active(self) -> bool:
        """Whether user code is between `begin` and `end`."""
        return self._process_streams is not None

    def begin(self, start: int, size: int, total: int, number: int, visit: int = 0) -> None:
        """Begin micro-batch `number`; this rank has [start, start + size) of its `total` samples.

        A loop may come to it again: each `visit` has other draws.

        Seeds torch's, Python's and NumPy's generators, alike on all ranks.
        """
        devices = (self._world.device,)
        if self._process_streams is None:
            self._process_streams = Generators.now(devices)
            for mode in (self._operators, self._functions):
                if not any(active is mode for active in _torch.mode_stack(mode)):
                    mode.__enter__()  # type: ignore[no-untyped-call]
        self._number = number
        self._permutations.clear()
        self._joined[number] = self._joined.get(number, set()) if visit else set()  # a checkpoint may draw again
        if len(self._joined) > _MOST_AHEAD:
            del self._joined[next(iter(self._joined))]
        self._generators.clear()
        self._share = Share(start, size, total)
        seed_all(_PURPOSE, self._seed, number, *filter(None, [visit]), devices=devices)

    def end(self) -> None:
        """Continue the rank's own streams."""
        if self._process_streams is None:
            return
        self._process_streams.put_back((self._world.device,))
        self._process_streams = None
        for mode in (self._functions, self._operators):
            _torch.leave(mode)  # one that stays below a user's mode does nothing

    def check(self) -> None:
        """Compare the ranks' generators (*collective*). Raises `RequestError` if a rank drew other numbers."""
        streams = Generators.now((self._world.device,)).as_json()
        states = [generator.get_state().tolist() for generator in self._generators.values()]
        digests = self._world.gather(hashlib.sha256(json.dumps([streams, states]).encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RequestError(
                    f"draws='global': rank {rank} drew other random numbers than rank 0 in micro-batch {self._number}; "
                    "draw on all ranks, by torch rather than for each sample by Python or NumPy, from generators with "
                    "one seed, and pad the samples of all ranks to one shape."
                )

    @contextmanager
    def along(self, dimension: int | None) -> Iterator[None]:
        """State where draws have their samples: along `dimension`, or not at all (None)."""
        outer, self._stated = self._stated, (dimension,)
        try:
            yield
        finally:
            self._stated = outer

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a random operator. Raises `RequestError` if it cannot draw alike on all ranks."""
        draw = Draw(func, args, kwargs)
        if (generator := draw.arguments.get("generator")) is not None:
            self._generators[id(generator)] = generator
        if not draw.is_random:
            return func(*args, **kwargs)
        self.first = self.first or draw.place
        if func.name().startswith("aten::randperm"):
            return func(*args, **kwargs)
        if draw.is_fused:
            raise RequestError(f"draws='global': {draw.place}, a fused operator, cannot draw alike on all ranks.")
        if not self._is_alone and not self._is_certain():
            raise RequestError(
                f"draws='global': {draw.place} draws while the loop holds batches of which this rank has different "
                "parts, and it may be for any of them; draw it after the model was called with the batch, in the data "
                "set, or train each batch before you read the next."
            )
        return draw.run(self._layout(draw), self._share, self._world)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function, and remember it for the draws in it."""
        permutations = self._permutations
        if permutations.references and permutations.is_used_by(args, kwargs):
            return permutations.call(func, args, kwargs, self._share)
        outer, self._call = self._call, (func, args)
        try:
            return self._call_special(func, args, kwargs) if func in _SPECIAL else func(*args, **kwargs)
        finally:
            self._call = outer

    def _call_special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stated == (None,):
            return func(*args, **kwargs)
        if func is torch.randperm and args == (self._share.rows,) and not self._is_alone:
            return self._permutations.draw(self._share, kwargs)
        with ExitStack() as stack:
            if func in _ATTENTION:
                self._enter_attention(stack, func, args, kwargs)
            elif func in _RECURRENT:
                self._enter_recurrent(stack, args)
            return func(*args, **kwargs)

    def _enter_attention(self, stack: ExitStack, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make attention draw its dropout in an operator, with the samples first."""
        is_fused = func is functional.scaled_dot_product_attention
        position, samples = (4, 0) if is_fused else (10, 1)  # the query is (samples, …), or (tokens, samples, width)
        if kwargs.get("dropout_p", args[position] if len(args) > position else 0.0):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if args[0].dim() > 2 and not args[0].shape[samples] % self._share.rows:
            stack.enter_context(self.along(0))

    def _enter_recurrent(self, stack: ExitStack, args: tuple[Any, ...]) -> None:
        """Make a recurrent net draw its dropout in an operator, of (tokens, samples, width)."""
        is_packed = args[0].dim() == 2  # then `batch_sizes` follows
        dropout, is_training = args[5 + is_packed : 7 + is_packed]
        if not (dropout and is_training):
            return
        if is_packed and not self._is_alone:
            raise RequestError(
                f"draws='global': {place_of('a recurrent net')} cannot draw the dropout of a packed sequence alike on "
                "all ranks; pass it the padded tensor, or dropout=0."
            )
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if not is_packed and not args[0].shape[0 if args[8] else 1] % self._share.rows:
            stack.enter_context(self.along(1))

    def _layout(self, draw: Draw) -> Layout | None:
        """Return where a draw has its samples; None if it is not per sample.

        The samples are the first dimension if that has this rank's number of samples, else the second of three or
        more. In dropout, attention, and draws for a tensor with a graph, a multiple of that number means flattened
        samples. If a shape is ambiguous, an earlier draw of the same line decides; raises `RequestError` without one.
        """
        shape, share = draw.shape, self._share
        function, arguments = self._call
        subject = arguments[0] if arguments else None
        if self._is_alone or not math.prod(shape) or isinstance(subject, nn.Parameter):
            return None  # on one rank, all readings draw the same numbers
        flat = Layout(0, self._blocks(shape[0] // share.rows)) if shape and not shape[0] % share.rows else None
        second = Layout(1, (1,)) if len(shape) > 2 and shape[1] == share.rows else None
        if self._stated is not None:
            return self._stated_layout(shape, draw)
        place = user_line()
        readings = {layout: (*place, *_reading(draw, layout)) for layout in (None, flat, second)}
        seen = [layout for layout, reading in readings.items() if reading in self._seen_readings]
        is_flat = "dropout" in getattr(function, "__name__", "") or getattr(subject, "grad_fn", None) is not None
        if len(seen) == 1 or len(readings) == 1:
            layout = seen[0] if seen else None
        elif flat is not None and shape[0] == share.rows and (is_flat or math.prod(shape) > 1):
            layout = flat
        elif flat is None or (second is None and is_flat):
            layout = flat or second
        else:
            raise RequestError(
                f"draws='global': {draw.place} draws a tensor of shape {shape}, which may or may not be for the "
                f"{counted(share.rows, 'sample')} of this rank; draw it within along(0), along(1) or along(None), "
                "which state the samples' dimension."
            )
        self._seen_readings.add(readings[layout])
        return layout

    def _stated_layout(self, shape: tuple[int, ...], draw: Draw) -> Layout | None:
        """Return the layout that `along` states."""
        (dimension,) = self._stated or (None,)
        if dimension is None:
            return None
        if dimension >= len(shape) or shape[dimension] % self._share.rows:
            raise RequestError(
                f"along({dimension}): {draw.place} draws a tensor of shape {shape}, which has no multiple of this "
                f"rank's {counted(self._share.rows, 'sample')} there; state the samples' dimension, or None."
            )
        return Layout(dimension, self._blocks(shape[dimension] // self._share.rows))

    def _blocks(self, rows_per_sample: int) -> tuple[int, ...]:
        """Return the blocks of a dimension: those of joined tensors, or one."""
        fitting = [blocks for blocks in self._joined[self._number] if not rows_per_sample % sum(blocks)]
        blocks = max(fitting, key=sum, default=(1,))
        return tuple(k * rows_per_sample // sum(blocks) for k in blocks)

    def note_joined(self, tensors: Sequence[Tensor], dimension: int = 0) -> None:
        """Note tensors that are joined along their samples."""
        rows = self._share.rows
        if not dimension and len(tensors) > 1 and all(t.dim() and len(t) and not len(t) % rows for t in tensors):
            self._joined[self._number].add(tuple(len(tensor) // rows for tensor in tensors))


class _Operators(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that passes random operators to `draws`."""

    def __init__(self, draws: GlobalDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._is_random: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_random = self._is_random.get(func)
        if is_random is None:
            is_random = self._is_random[func] = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and self._draws.is_active:
            return self._draws.draw(func, args, kwargs)
        if func in _JOINS and self._draws.is_active:
            self._draws.note_joined(*args, **kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Function mode that passes torch functions to `draws`, also in a backward pass."""

    def __init__(self, draws: GlobalDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._draws.is_active:
            return func(*args, **kwargs)
        if func not in _BACKWARD:
            return self._draws.call(func, args, kwargs)
        # In a function called here, the mode is off; a checkpoint's forward pass within needs it. Edges of the graph
        # have the gradients of their tensors, and no mode takes their calls.
        if func is Tensor.backward:
            func, kwargs = torch.autograd.backward, kwargs | {"grad_tensors": kwargs.get("gradient")}
            kwargs.pop("gradient", None)
        tensors = 2 if func is torch.autograd.grad else 1  # outputs, and inputs
        args = (*map(_edges, args[:tensors]), *args[tensors:])
        kwargs = {name: _edges(value) if name == "inputs" else value for name, value in kwargs.items()}
        with self:
            return func(*args, **kwargs)


def _reading(draw: Draw, layout: Layout | None) -> tuple[Any, ...]:
    """Return the part of a draw's shape that is constant over batches, given its layout."""
    return draw.func, layout, draw.shape[0 if layout is None else layout.dimension + 1 :]


def _edges(value: Any) -> Any:
    if isinstance(value, Tensor):
        return get_gradient_edge(value)
    return tuple(map(_edges, value)) if isinstance(value, tuple | list) else value
