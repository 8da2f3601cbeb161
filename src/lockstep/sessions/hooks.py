"""Hooks of a session: how a measurement follows a job from within."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session  # which imports torch


class Hooks:
    """Calls that a session makes on every rank; here they do nothing. Subclasses override what they need."""

    saves = True
    """Whether checkpoints are saved."""
    is_endless = False
    """Whether the loop goes on past its last epoch."""

    draws = ""
    """Whose random numbers are drawn until `Session.draw_by_rank`: "rank", "global", or, of "", as the run's option."""

    def prepared(self, part: Any) -> None:
        """Called with each object that `session.prepare` returns."""

    def ended_step(self, session: Session) -> None:
        """Called at the end of each optimizer step."""

    def resumed(self) -> None:
        """Called where training begins, and after an evaluation or an epoch, whose time is no step's."""


NO_HOOKS = Hooks()
