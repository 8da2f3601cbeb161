"""Hooks of a session, by which a measurement follows a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session  # imports torch


class Hooks:
    """Hooks that a session calls on every rank. The base class does nothing; subclasses override methods."""

    is_measurement = False
    """Whether the run is only measured: it saves no checkpoint, and continues past its last epoch."""
    draws = ""
    """Value of the option `draws` until `Session.draw_by_rank`; "" keeps the run's option."""

    def prepared(self, part: Any) -> None:
        """Called with each object that `session.prepare` returns."""

    def ended_step(self, session: Session) -> None:
        """Called at the end of each optimizer step."""

    def resumed(self) -> None:
        """Called when training begins, and when it continues after an evaluation or an epoch."""


NO_HOOKS = Hooks()
