"""Generates training loops and compares each on 1, 2 and 3 ranks with a plain loop.

python -m tests.bring.generate --count 1000 --seed 1    # a table of outcomes, and each failing program
python -m tests.bring.generate --program '{"epochs":1}' # any program
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from .catalogue import REFUSED, RIGHT, SKIPPED, Numbers, Outcome
from .plain import Plain
from .program import Program, draw, dumps, interpret, loads
from .runner import Runner, runner

SIZES = (1, 2, 3)


@dataclass(frozen=True)
class Finding:
    """How one program ended."""

    outcome: Outcome
    where: str = ""
    """The run that ended so: `2 ranks`, `resumed on 2 ranks`."""
    message: str = ""


def plain(program: Program) -> Numbers:
    """Return the plain twin's numbers."""
    torch.manual_seed(0)
    return interpret(program, Plain())


def observe(ranks: Runner, program: Program, *, resumed_size: int = 0) -> Finding:
    """Run a program on all sizes; return the first outcome that is not right.

    Where `resumed_size` is not 0, kill and resume it on so many ranks.
    """
    task = (dumps(program),)
    options: Any = {"accumulate": program.accumulate, "needs_processes": program.workers > 0}
    try:
        reference = plain(program) if program.has_plain else None
    except (RuntimeError, ValueError) as error:  # torch's own refusal
        return Finding(SKIPPED, "the plain loop", str(error))
    for size in SIZES:
        if reference is None:
            result = ranks.run(size, task, **options)
            reference = result.numbers
        else:
            result = ranks.compare(task, reference, size, **options)
        if result.outcome != RIGHT:
            return Finding(result.outcome, f"{size} rank{'s' * (size > 1)}", result.message)
    if resumed_size and program.uses_epochs:
        saving = {"checkpoint_every": None} if program.counts_itself else {}
        result = ranks.resume(task, resumed_size, way="error", **saving, **options)
        if not result.outcome & (RIGHT | SKIPPED):
            return Finding(result.outcome, f"resumed on {resumed_size}", result.message)
    return Finding(RIGHT)


def resumed_size(number: int) -> int:
    """Return the ranks on which the program is killed and resumed; 0 for none."""
    return number % 4


def main() -> None:
    """Print the table of outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bring.generate", description=main.__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", metavar="JSON", help="run a program of one's own")
    parser.add_argument("--resume-on", type=int, metavar="N", help="ranks of the resumed run; 0: none")
    arguments = parser.parse_args()
    programs = {number: draw(arguments.seed, number) for number in range(arguments.count)}
    if arguments.program:
        programs = {0: loads(arguments.program)}
    counts: Counter[str] = Counter()
    begun_s = time.monotonic()
    with runner() as ranks:
        for number, program in programs.items():
            size = resumed_size(number) if arguments.resume_on is None else arguments.resume_on
            finding = observe(ranks, program, resumed_size=size)
            counts[f"{finding.outcome} ({finding.where})" if finding.where else str(finding.outcome)] += 1
            if finding.outcome & ~(RIGHT | SKIPPED | REFUSED) or arguments.program:
                place = f"{arguments.seed}:{number} {finding.outcome} on {finding.where}"
                print(f"{place}: {finding.message[:300]}\n    {dumps(program)}", flush=True)
    total = sum(counts.values())
    print(f"\n{total} programs in {time.monotonic() - begun_s:.0f} s")
    for name, count in counts.most_common():
        print(f"{count:6} {name}")


if __name__ == "__main__":
    # The ranks look functions up by the module's name.
    from tests.bring.generate import main as named_main

    named_main()
