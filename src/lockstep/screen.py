"""The one console that lockstep prints to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from .printable import visible

Part = str | tuple[str, str]
"""A text, or a text and its style."""


def line(*parts: Part) -> Text:
    """Return the parts in one line, whatever the names in them hold: a cell of a table, or a sentence."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text).replace("\n", " "), style) for text, style in pairs))


class Screen(Console):
    """A rich console on which foreign text has no power, and which raises where its reader has gone (`| head`).

    Strings are no markup here: a name such as `[red]` or `:smile:` stands as it is, and styles go by `Part`.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **how)

    def say(self, *parts: Part, style: str = "") -> None:
        """Print a sentence in one line, however long it is, for whoever searches it."""
        self.print(line(*parts), style=style, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is to be written, with a visible character for each that a terminal would obey."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Pass the BrokenPipeError on, instead of ending the process."""
        raise
