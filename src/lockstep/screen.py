"""The one console that lockstep prints to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from .printable import visible

_WIDE = 160
Part = str | tuple[str, str]
"""A text, or a text and its style."""


def line(*parts: Part) -> Text:
    """Join the parts to one line of visible text, for a table's cell or a sentence."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text).replace("\n", " "), style) for text, style in pairs))


class Screen(Console):
    """A rich console that shows foreign text literally, not as markup or escape codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def say(self, *parts: Part, style: str = "") -> None:
        """Print a sentence in one line, however long: programs search for it."""
        self.print(line(*parts), style=style, soft_wrap=True)

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> None:
        """Print rows under their heads: `texts` columns of text, then columns of numbers.

        A row without a number, "–", is faint. Without a terminal, lines are long.
        """
        if not self.is_terminal:
            self.width = max(self.width, _WIDE)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for number, head in enumerate(heads):
            layout: dict[str, Any] = {"overflow": "fold"} if number < texts else {"justify": "right"}
            table.add_column(head, **layout)
        for row in rows:
            table.add_row(*map(line, row), style="dim" if "–" in row else "")
        self.print(table)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments with their text made `visible`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError for a closed reader (`| head`), in place of exiting."""
        raise
