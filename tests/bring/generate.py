"""Generates training loops and compares each on 1, 2 and 3 ranks with a plain loop.

python -m tests.bring.generate --count 1000 --seed 1    # a table of outcomes, and each failing program
python -m tests.bring.generate --replay 1:17            # one of them again
python -m tests.bring.generate --program '{"epochs":1}' # any program
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .catalogue import RIGHT, SKIPPED, Numbers, Outcome
from .plain import Plain
from .program import Program, draw, dumps, interpret, loads, simpler
from .runner import Runner, runner

SIZES = (1, 2, 3)
_SIMPLER_AT_MOST = 60
"""Runs of simpler programs for each one that fails."""


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


def simplest(ranks: Runner, program: Program, finding: Finding, resumed_size: int) -> tuple[Program, Finding]:
    """Return a simpler program that ends in the same way."""
    runs = 0
    size = resumed_size if finding.where.startswith("resumed") else 0
    progresses = finding.outcome != Outcome.HUNG  # each costs seconds
    while progresses:
        progresses = False
        for candidate in simpler(program):
            runs += 1
            if runs > _SIMPLER_AT_MOST:
                return program, finding
            again = observe(ranks, candidate, resumed_size=size)
            if again.outcome == finding.outcome and again.where.startswith("resumed") == bool(size):
                program, finding, progresses = candidate, again, True
                break
    return program, finding


def programs(seed: int, count: int) -> Iterator[tuple[int, Program]]:
    """Yield numbered programs of a seed."""
    for number in range(count):
        yield number, draw(seed, number)


def resumed_size(number: int) -> int:
    """Return the ranks on which the program is killed and resumed; 0 for none."""
    return number % 4


def main() -> None:
    """Print the table of outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bring.generate", description=main.__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", metavar="SEED:N", help="run one program again")
    parser.add_argument("--program", metavar="JSON", help="run a program of one's own")
    parser.add_argument("--resume-on", type=int, metavar="N", help="ranks of the resumed run; 0: none")
    parser.add_argument("--simplest", action="store_true", help="look for a simpler program that fails alike")
    parser.add_argument("--refused", action="store_true", help="print programs that are refused, too")
    arguments = parser.parse_args()
    if arguments.replay:
        seed, number = map(int, arguments.replay.split(":"))
        chosen = iter([(number, draw(seed, number))])
    elif arguments.program:
        chosen, seed = iter([(0, loads(arguments.program))]), 0
    else:
        chosen, seed = programs(arguments.seed, arguments.count), arguments.seed
    counts: Counter[str] = Counter()
    begun_s = time.monotonic()
    with runner() as ranks:
        for number, program in chosen:
            size = resumed_size(number) if arguments.resume_on is None else arguments.resume_on
            finding = observe(ranks, program, resumed_size=size)
            counts[f"{finding.outcome} ({finding.where})" if finding.where else str(finding.outcome)] += 1
            if finding.outcome & (RIGHT | SKIPPED) or (finding.outcome == Outcome.REFUSED and not arguments.refused):
                if arguments.replay or arguments.program:
                    print(dumps(program), finding.message)
                continue
            print(
                f"{seed}:{number} {finding.outcome} on {finding.where}: {finding.message[:300]}\n    {dumps(program)}"
            )
            if arguments.simplest:
                program, finding = simplest(ranks, program, finding, size)
                print(f"  → {finding.where}: {finding.message[:200]}\n    {dumps(program)}", flush=True)
    total = sum(counts.values())
    print(f"\n{total} programs in {time.monotonic() - begun_s:.0f} s")
    for name, count in counts.most_common():
        print(f"{count:6} {name}")


if __name__ == "__main__":
    # The ranks look functions up by the module's name.
    from tests.bring.generate import main as named_main

    named_main()
