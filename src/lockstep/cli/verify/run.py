"""`lockstep verify run RUN`: judge a run by its records alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import RequestError, counted
from ...record.checks import Check
from ...runs import folders
from ...screen import Screen
from .. import output, variants

if TYPE_CHECKING:
    from ...verify.claims import Judgement

USAGE = """\
usage: lockstep verify run RUN

RUN is a run's folder, or one of its checkpoints. The run is judged by what it left there: every step and its samples,
the losses, the checkpoints, whether the replicas were compared to the end, the ledger, and what the run itself found
wrong. No model is built and no data set is read. What came out is added to the run's proof.md and summary.json.

Exit code: 0 nothing is wrong, 3 a claim is wrong, 2 there is no run. A run without an end is judged as far as it came.
"""
_STYLES = {Check.HOLDS: "green", Check.FAILS: "bold red", Check.OPEN: "dim"}


def main(given: list[str]) -> int:
    """Judge the run, print and write the checks. Returns the exit code."""
    if flags := [word for word in given if word.startswith("-") and len(word) > 1]:
        raise RequestError(f"lockstep verify run takes no flags, found {flags[0]}; give the run alone.")
    if len(given) != 1 or not given[0]:
        raise RequestError(
            f"lockstep verify run takes one run, found {len(given)}; as in lockstep verify run runs/digits-resnet8."
        )
    folder = folders.find(Path(given[0]), "steps.jsonl", "manifest.json")
    # Imported late, as it takes seconds: what is asked for wrongly is refused at once.
    from ...verify import claims

    judged = claims.judge(folder)
    trouble = variants.unwritten(folder, judged.checks)
    with output.written():
        _show(Screen(), folder, judged)
        if trouble:
            Screen().say((f"warning: {trouble}", "yellow"))
    if judged.failing:
        raise claims.refusal(folder, judged)
    return 0


def _show(screen: Screen, folder: Path, judged: Judgement) -> None:
    rows = [
        (check.claim, check.outcome, f"{check.times:,}" if check.times else "", check.tolerance)
        for check in judged.checks
    ]
    screen.table(("what was checked", "result", "times", "tolerance"), rows, texts=2)
    for check in judged.checks:
        if check.outcome != Check.HOLDS:
            screen.say((f"{check.name}, {check.outcome}:", _STYLES.get(check.outcome, "")), f" {check.found}.")
    outcomes = Counter(check.outcome for check in judged.checks)
    said = f"{counted(outcomes[Check.HOLDS], 'claim')} hold{'s' if outcomes[Check.HOLDS] == 1 else ''}"
    for outcome, words in ((Check.FAILS, "wrong"), (Check.OPEN, "not checked")):
        said += f", {outcomes[outcome]} {words}" if outcomes[outcome] else ""
    end = f" The run is not complete: {judged.unfinished}." if judged.unfinished else ""
    screen.say(f"{folder}: {said}.{end}")
