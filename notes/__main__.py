"""`python -m notes CHAPTER`: print a chapter's numbers, measured now.

--write     keep the numbers in notes/data, and draw the figures in docs/notes/figures (needs matplotlib)
--draw      draw the figures from the numbers that are kept
--answer A  check an answer to the chapter's exercise; exit code 0 if it is right, 1 if not
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

from .chapter import Chapter, data_file

CHAPTERS = {
    1: "one_model",
    2: "batch",
    3: "data_parallel",
    4: "rendezvous",
    5: "all_reduce",
    6: "ddp",
    7: "means",
    8: "samples",
    9: "accumulation",
    10: "batchnorm",
    11: "precision",
    12: "learning_rate",
    13: "speed",
    14: "faults",
    15: "sharding",
    16: "slow_networks",
}
"""The module of each chapter here, and its page in docs/notes: 7 is `means.py` and `07-means.md`."""
FIGURES = {"en": "docs/notes/figures", "zh": "docs/zh/notes/figures"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m notes", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", type=int, choices=CHAPTERS, metavar="CHAPTER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--answer")
    options = parser.parse_args()
    chapter: Chapter = importlib.import_module(f".{CHAPTERS[options.chapter]}", __package__).CHAPTER
    file = data_file(options.chapter)
    if options.answer is not None:
        return _check(chapter, options.answer, json.loads(file.read_text()))
    if not options.draw:
        numbers = chapter.measure()
        print(json.dumps(numbers, indent=2))
        if options.write:
            file.write_text(
                json.dumps({"numbers": numbers, "measured": _circumstances(options.chapter)}, indent=2) + "\n"
            )
    if options.write or options.draw:
        draw(options.chapter, chapter)
    return 0


def _check(chapter: Chapter, answer: str, kept: dict[str, Any]) -> int:
    try:
        is_right = chapter.check(answer, kept["numbers"])
    except ValueError as error:
        print(error)
        return 1
    print("Right." if is_right else "No. Measure again, and compare.")
    return 0 if is_right else 1


def _circumstances(number: int) -> dict[str, str]:
    import torch

    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "command": f"python -m notes {number} --write",
        "processor": f"{os.cpu_count()} × {processor.partition(':')[2].strip() or platform.processor()}",
        "torch": torch.__version__,
    }


def draw(number: int, chapter: Chapter) -> None:
    """Draw a chapter's figure in both languages."""
    import matplotlib

    warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has the fonts
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 11, "axes.grid": True}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3}
    from matplotlib.figure import Figure

    numbers = json.loads(data_file(number).read_text())["numbers"]
    for language, folder in FIGURES.items():
        figure = Figure(figsize=(7, 3.6), layout="constrained", facecolor="white")
        chapter.draw(numbers, figure, chapter.chinese.__getitem__ if language == "zh" else str)
        path = Path(__file__).parents[1] / folder / f"{number:02}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
