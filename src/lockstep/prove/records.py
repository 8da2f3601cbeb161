"""A run judged by its records alone: no model is built, no data set is read.

Each claim is judged from several files that were written at different times (the config, the manifest, the steps, the
summary, the checkpoints), and holds where they agree.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..data.order import OF_A_SAMPLER
from ..errors import ProofError, RequestError, counted
from ..files import understanding
from ..proof import Check, from_json
from ..verify import exactly_once
from ..verify.pages import NAME, read
from ..verify.planned import Planned
from . import on_disk
from .claim import Claim
from .on_disk import CONFIG, MANIFEST, STEPS, SUMMARY, Records
from .recorded_checkpoints import checkpoints, saved
from .recorded_scores import evaluations, summary
from .recorded_steps import losses, rates, sequence, steps

_COMPLETE = (0, 75)
"""Exit codes of runs that came to an end of their own: done, and stopped on request."""
_BUT = "; but the run's last step is"

_FILES = Claim("files", f"{CONFIG}, {MANIFEST}, {STEPS} and {SUMMARY} can be read to their ends")
_REPLICAS = Claim("replicas", "All ranks hold the same bits", "bit for bit")
_LEDGER = Claim("ledger", exactly_once.CLAIM, "exactly")
_NO_LEDGER = _LEDGER.open("not recorded; --ledger records it")


@dataclass(frozen=True)
class Judgement:
    """What became of each claim about a run."""

    checks: tuple[Check, ...]
    """Those judged here, then those that the run itself wrote beside them."""
    unfinished: str
    """Why the run has no end, as a clause; "" for one that is complete."""

    @property
    def failing(self) -> list[Check]:
        """The claims that are wrong, the most basic first."""
        return [check for check in self.checks if check.fails]


def judge(folder: Path) -> Judgement:
    """Return what became of each claim about the run in `folder`, from its files alone; writes nothing."""
    run = on_disk.read(folder)
    held = _held(run)
    claims: tuple[Callable[[Records], Check], ...] = (files, steps, losses, rates, evaluations, summary, checkpoints)
    if on_disk.is_own_loop(run):  # of its rates and scores the records do not say what they should be
        claims = (files, sequence, losses, saved)
    checks = [_timed(claim, run) for claim in claims]
    checks += [_judged(_REPLICAS.name, lambda: replicas(run, held.get(_REPLICAS.name)))]
    checks += [_judged(_LEDGER.name, lambda: ledger(run, held.get(_LEDGER.name)))]
    names = {check.name for check in checks}
    others = [check for name, check in held.items() if name not in names]
    return Judgement((*checks, *others), run.unfinished)


def _timed(claim: Callable[[Records], Check], run: Records) -> Check:
    begun_s = time.perf_counter()
    check = _judged(claim.__name__, lambda: claim(run))
    return dataclasses.replace(check, cost_s=time.perf_counter() - begun_s)


def _judged(name: str, judge: Callable[[], Check]) -> Check:
    try:
        with understanding(Path("its records")):
            return judge()
    except RequestError as error:  # over what no event, config or checkpoint of ours holds
        return Claim(name, "Its records can be judged").judged([str(error).partition(";")[0]], times=0)


def _held(run: Records) -> Mapping[str, Check]:
    """Return the checks that the run, or others beside it, have written, as far as they are whole.

    What the run itself has proved is read from its events, which nobody writes to afterwards.
    """
    found = {check.name: check for check in from_json((run.summary or {}).get("proof"))}
    for part in run.parts:
        told = next((row for row in reversed(part.rows) if row.event == "proof"), None)
        if told is not None:
            own = from_json(told.fields.get("checks"))
            # A start that made no step has nothing to say but what it has looked at.
            has_steps = part.last_step > part.first_step or part is run.parts[0]
            found |= {check.name: check for check in own if has_steps or check.times}
    return found


def files(run: Records) -> Check:
    """Judge whether the run's files are there and whole; the checkpoints are judged by themselves."""
    return _FILES.judged(run.damage, times=4)


def replicas(run: Records, held: Check | None) -> Check:
    """Judge what the run itself wrote of its replicas: they must have been the same, also after the last step."""
    if not run.parts or run.summary is None:
        why = run.lacking(STEPS) or run.unfinished or f"{SUMMARY} cannot be read"
        return _REPLICAS.open(f"nothing tells how often they were compared: {why}")
    if held is None:
        ranks = run.parts[-1].start["plan"].get("ranks", 1)
        return _REPLICAS.open("one process only" if ranks == 1 else f"{SUMMARY} has no comparison of {ranks} ranks")
    # What is wrong with replicas ends a run; in the summary of any other, only an earlier judgement can say that.
    if held.outcome == Check.OPEN or run.exit not in _COMPLETE or held.at_step is None:
        return held
    found = held.found.partition(_BUT)[0]
    if held.at_step == run.last_step:
        return dataclasses.replace(held, outcome=Check.HOLDS, found=found)
    return dataclasses.replace(held, outcome=Check.FAILS, found=f"{found}{_BUT} {run.last_step}")


def ledger(run: Records, held: Check | None) -> Check:
    """Judge the ledger, where one was recorded; `held` is what the run itself wrote of it, and what recording cost."""
    path, config = run.folder / NAME, run.config
    if config is None:
        return _LEDGER.open(f"{CONFIG} cannot be read")
    if not path.exists():
        noted = any(on_disk.keeps_ledger(part) for part in run.parts if part.last_step > part.first_step)
        is_lost = noted or (held is not None and held.times > 0)
        return _LEDGER.judged([f"the run kept a {NAME}, and it is not there"], times=0) if is_lost else _NO_LEDGER
    made = run.last_step if run.exit in _COMPLETE and run.parts else None
    try:
        if made is not None:
            for _ in read(path):  # raises for a last page that is cut short, as no kill leaves it in a run with an end
                pass
        begun = next((part.first_step for part in run.parts if on_disk.keeps_ledger(part)), None)
        planned = Planned(
            global_batch=config.batch.size,
            seed=config.seed,
            drop_last=config.batch.drop_last,
            first=None if begun is None else begun + 1,
            steps=made,
            evaluations=[] if begun is None else [row["step"] for row in run.rows("eval") if row["step"] > begun],
        )
        if on_disk.is_own_loop(run):
            planned = _of_own_loop(run, planned)
        check = exactly_once.check(path, planned)
        if planned.order == OF_A_SAMPLER:
            check = dataclasses.replace(
                check, claim=f"{check.claim}, in an order of a sampler's own that is not judged"
            )
    except RequestError as error:
        check = _LEDGER.judged([str(error).partition(";")[0]], times=0)
    return dataclasses.replace(check, cost_s=held.cost_s) if held is not None and held.cost_s is not None else check


def _of_own_loop(run: Records, planned: Planned) -> Planned:
    """Return what a loop of the user's own was to do: batch and order are its own, and it tells them at its start."""
    start = run.parts[-1].start
    order, drop_last = start["chosen"].get("order", OF_A_SAMPLER), start["chosen"].get("drop-last") is True
    return dataclasses.replace(planned, global_batch=start["plan"]["global_size"], order=order, drop_last=drop_last)


def refusal(folder: Path, judged: Judgement) -> ProofError:
    """Return the error for a run of which claims are wrong: it names the first one, and the place."""
    first, *others = judged.failing
    more = f" {counted(len(others), 'more claim')} {'fail' if others[1:] else 'fails'}." if others else ""
    return ProofError(f"{folder} is not what its records claim: {first.name} {first.outcome}: {first.found}.{more}")
