"""What a loop trains, as it is recorded, saved and proved: of a session's own, or of `lockstep train`'s job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .progress import Progress
from .state import State

if TYPE_CHECKING:
    from .loop import Loop
    from .meter import NonFiniteLossError


class Parts(Protocol):
    """Models, optimizers and what else belongs to them. Methods marked *collective* are called by every rank."""

    takes_sums: bool
    """Whether the losses that come are sums over a rank's samples, and not its parts of the batch's mean."""
    is_scored: bool
    """Whether the last weights have to be evaluated before the run is over."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices that this process computes on."""

    def begin(self, source: Any) -> None:
        """Make ready for batches of `source`: a loader whose steps are counted, or None."""

    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, what has to be the same bits on every rank at the end of a step."""

    def local_buffers(self) -> dict[str, Tensor]:
        """Return, by name, the models' buffers that each rank keeps for itself."""

    def copies(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the weights as further devices of this process have them."""

    def state(self, progress: Progress) -> State:
        """Return all that a checkpoint holds of them (*collective*). Raises `RunError` for what must not be saved."""

    def load(self, state: State) -> None:
        """Continue from `state`, in place. Raises `RequestError` where it is of other parts."""

    def told(self, progress: Progress) -> dict[str, Any]:
        """Return what the record says of them when a run begins: `lines` and `chosen`, and what else there is."""

    def result(self, loop: Loop) -> dict[str, Any]:
        """Return what the run has come to, for its summary (*collective*)."""

    def remedy(self) -> str:
        """Return a sentence that says what to do about numbers that are not finite."""

    def note_bad(self, bad: NonFiniteLossError) -> str:
        """Note which samples this rank had where the loss was not finite; return a clause that says where, or ""."""
