"""The ledger keeps which sample went where, whatever kills the run; what is wrong in it is found and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.batching import BatchPlan
from lockstep.data.order import Order
from lockstep.data.resident import ResidentTensors
from lockstep.engine import train
from lockstep.errors import ProofError, RequestError
from lockstep.options import override, recipe
from lockstep.proof import Check
from lockstep.verify.exactly_once import check, judge
from lockstep.verify.ledger import Ledger
from lockstep.verify.pages import EVAL, NAME, TRAIN, Indices, Page, TornError, read, rewind
from lockstep.verify.planned import Planned
from lockstep.world import World

from ..curves import Losses
from ..disks import no_file_beyond
from ..pool import RankPool

SEED = 7
DAMAGED = r"is damaged|is of version"


@dataclass
class Step:
    number: int
    epoch: int
    shares: list[Indices]
    """What each rank computed."""


@dataclass(frozen=True)
class Run:
    """A run as it should go: `worlds` is the number of ranks from a step on."""

    samples: int
    batch: int
    accumulation: int = 1
    epochs: int = 2
    drop_last: bool = False
    worlds: tuple[tuple[int, int], ...] = ((1, 2),)

    @property
    def per_epoch(self) -> int:
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def ranks(self, step: int) -> int:
        return [ranks for begin, ranks in self.worlds if begin <= step][-1]

    def share(self, step: int, rank: int, seed: int = SEED) -> Indices:
        epoch, within = divmod(step - 1, self.per_epoch)
        plan = BatchPlan(global_size=self.batch, ranks=self.ranks(step), accumulation=self.accumulation)
        order = Order(self.samples, seed=seed, epoch=epoch)
        shares = plan.split(*plan.batch(within, self.samples), rank)
        return np.concatenate([order.indices(share.start, share.stop).copy() for share in shares])

    def steps(self, last: int | None = None) -> list[Step]:
        return [
            Step(step, (step - 1) // self.per_epoch, [self.share(step, rank) for rank in range(self.ranks(step))])
            for step in range(1, (last or self.epochs * self.per_epoch) + 1)
        ]

    def pages(self, steps: list[Step] | None = None, every: int = 3) -> list[Page]:
        """Return the pages of these steps, or all: one every so many, and at the end of an epoch or of a world."""
        pages: list[Page] = []
        steps = self.steps() if steps is None else steps
        alike = groupby(enumerate(steps), lambda at: (at[1].epoch, len(at[1].shares), at[1].number - at[0]))
        for (epoch, ranks, _), group in alike:
            held = [step for _, step in group]
            for part in (held[at : at + every] for at in range(0, len(held), every)):
                counts = np.array([[len(share) for share in step.shares] for step in part], np.uint32)
                indices = np.concatenate([share for step in part for share in step.shares])
                shape = (epoch, part[0].number, ranks, self.accumulation, self.samples)
                pages.append(Page(TRAIN, *shape, counts, indices))
            if held[-1].number == (epoch + 1) * self.per_epoch:
                pages.append(evaluated(held[-1].number, epoch, 11, ranks))
        return pages

    def findings(self, pages: list[Page], steps: int | None = None) -> str:
        return "; ".join(judge(pages, self.planned(steps)).findings)

    def planned(self, steps: int | None = None) -> Planned:
        return Planned(global_batch=self.batch, seed=SEED, drop_last=self.drop_last, steps=steps)


def evaluated(step: int, epoch: int, samples: int, ranks: int) -> Page:
    ends = [samples * rank // ranks for rank in range(ranks + 1)]
    return Page(EVAL, epoch, step, ranks, 1, samples, np.diff([ends]).astype(np.uint32), np.arange(samples))


def write(path: Path, pages: list[Page]) -> bytes:
    path.write_bytes(b"".join(page.encode() for page in pages))
    return path.read_bytes()


CLEAN = Run(samples=29, batch=8, accumulation=2, worlds=((1, 1), (3, 3), (6, 2)))
TWO = Run(samples=30, batch=8)


# ---- the file


@pytest.mark.parametrize("samples", [1, 2, 3, 256, 257, 2**17, 2**17 + 1, 2**40])
def test_pages_come_back_with_every_share(tmp_path: Path, samples: int) -> None:
    indices = np.random.default_rng(0).integers(0, samples, 70_003)
    indices[:2] = samples - 1, 0
    page = Page(TRAIN, 0, 5, 2, 1, samples, np.array([[70_000, 0], [1, 2]], np.uint32), indices)
    write(tmp_path / NAME, [page, evaluated(6, 0, 7, 3)])
    held, other = read(tmp_path / NAME)
    shares = [held.share(step, rank) for step in (5, 6) for rank in (0, 1)]
    assert [len(share) for share in shares] == [70_000, 0, 1, 2]
    assert np.array_equal(np.concatenate(shares), indices)
    assert (other.kind, other.first_step, other.share(6, 1).tolist()) == (EVAL, 6, [2, 3])


def test_a_kill_tears_the_last_page_alone_wherever_it_strikes(tmp_path: Path) -> None:
    path, pages = tmp_path / NAME, CLEAN.pages()
    whole = write(path, pages)
    begin = len(whole) - len(pages[-1].encode())
    for end in range(begin + 1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TornError, match="is cut short"):
            list(read(path))
        assert len(list(read(path, torn_ok=True))) == len(pages) - 1
        rewind(path, step=10**6)
        assert path.read_bytes() == whole[:begin]


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / NAME
    whole = write(path, CLEAN.pages()[:3])
    for bit in range(len(whole) * 8):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(RequestError, match=DAMAGED):
            list(read(path, torn_ok=True))
        with pytest.raises(RequestError, match=DAMAGED):
            rewind(path, step=1)
        assert path.read_bytes() == broken


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_rewound_ledger_holds_the_steps_up_to_there(tmp_path: Path, every: int) -> None:
    path, steps = tmp_path / NAME, CLEAN.steps()
    whole = write(path, CLEAN.pages(steps, every))
    for step in range(len(steps) + 1):
        path.write_bytes(whole + whole[:50])
        rewind(path, step=step)
        kept = list(read(path))
        held = [at for page in kept if page.kind == TRAIN for at in range(page.first_step, page.last_step + 1)]
        assert held == list(range(1, step + 1))
        assert [page.first_step for page in kept if page.kind == EVAL] == [at for at in (4, 8) if at <= step]
        assert CLEAN.findings(kept) == ""


# ---- the judgement


@pytest.mark.parametrize("every", [1, 3])
def test_a_clean_run_holds_wherever_it_begins_and_ends(every: int) -> None:
    others = replace(CLEAN, drop_last=True, worlds=((1, 5),)), Run(7, 20, epochs=4, worlds=((1, 4), (2, 1)))
    for run in (CLEAN, *others):
        for first, last in combinations(range(1, run.epochs * run.per_epoch + 1), 2):
            verdict = judge(run.pages(run.steps(last)[first - 1 :], every), run.planned(last))
            assert verdict.findings == ()
            assert (verdict.first_step, verdict.last_step) == (first, last)


def _put(step: Step, rank: int, share: Indices) -> Step:
    """Give `rank` these samples in place of its own."""
    step.shares[rank] = share
    return step


FAULTS: dict[str, tuple[Callable[[list[Step]], object], str]] = {
    "one batch twice": (
        lambda steps: _put(steps[2], 1, steps[1].shares[1]),
        r"^epoch 0: .* came twice \(step 2 on rank 1, step 3 on rank 1\) and 3 more .* and 4 samples never came.*; "
        r"rank 1 computed .* in step 3$",
    ),
    "one sample twice": (
        lambda steps: _put(steps[4], 0, steps[4].shares[0][[0, 1, 2, 3, 0]]),
        r"^epoch 1: sample \d+ came twice \(step 5 on rank 0, step 5 on rank 0\); rank 0 computed 5 samples where",
    ),
    "one batch dropped": (
        lambda steps: _put(steps[2], 1, np.empty(0, np.int64)),
        r"^epoch 0: 4 samples never came .*; rank 1 computed 0 samples where the plan has 4 in step 3$",
    ),
    "another seed on rank 1": (
        lambda steps: [_put(step, 1, TWO.share(step.number, 1, seed=SEED + 1)) for step in steps],
        r"^epoch 0: .* came twice .*; epoch 1: .* came twice.*; 8 shares in 8 steps deviate, of rank 1 alone$",
    ),
    "two swapped": (
        lambda steps: _put(steps[4], 1, steps[4].shares[1][[1, 0, 2, 3]]),
        r"^rank 1 computed its samples in another order, .* in step 5$",
    ),
    "a step missing": (lambda steps: steps.pop(4), r"^step 5 is missing; epoch 1: 8 samples never came"),
    "a step repeated": (lambda steps: steps.insert(5, replace(steps[4])), r"^step 5 is there more than once; epoch 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found_and_named(name: str) -> None:
    fault, sentence = FAULTS[name]
    for every in (1, 3, 100):
        steps = TWO.steps()
        assert TWO.findings(TWO.pages(steps, every)) == ""
        fault(steps)
        found = TWO.findings(TWO.pages(steps, every))
        assert re.search(sentence, found), found


def test_another_seed_and_an_end_that_comes_early_or_late_are_found() -> None:
    (seed,) = judge(TWO.pages(), replace(TWO.planned(), seed=SEED + 1)).findings
    assert "16 shares in 8 steps deviate" in seed
    pages = TWO.pages(TWO.steps(last=6))
    assert TWO.findings(pages, steps=6) == ""
    assert TWO.findings(pages, steps=8) == "2 steps (the first: 7) are missing"
    assert TWO.findings(pages, steps=5) == "there is a step 6, and the run made 5 steps"


def test_the_check_says_what_it_covers(tmp_path: Path) -> None:
    path, pages = tmp_path / NAME, TWO.pages()
    whole = write(path, pages)
    found = check(path, TWO.planned(8))
    assert (found.name, found.outcome, found.times, found.tolerance) == ("ledger", Check.HOLDS, 4, "exactly")
    late = write(path, TWO.pages(TWO.steps()[5:]))
    for held, outcome, said in (
        (whole, Check.HOLDS, "2 epochs and 2 evaluations, steps 1 to 8"),
        (late, Check.HOLDS, "1 epoch and 1 evaluation, steps 6 to 8; what was trained before is not recorded"),
        (whole[:-1], Check.HOLDS, "1 evaluation, steps 1 to 8; a last page that a kill cut short is left out"),
        (whole + whole, Check.FAILS, "more than once"),
        (b"", Check.OPEN, ""),
    ):
        path.write_bytes(held)
        found = check(path, TWO.planned())
        assert found.outcome == outcome
        assert said in found.found


# ---- the ledger of a run that goes on


def _opened(path: Path) -> Ledger:
    sizes = {"samples": TWO.samples, "evaluated_samples": 11, "accumulation": 1, "steps_per_epoch": TWO.per_epoch}
    return Ledger(path, World.alone(), **sizes)


def _noted(kept: Ledger, *steps: int) -> None:
    for step in steps:
        for rank in range(2):
            kept.add(step, TWO.share(step, rank))
        kept.flush((step - 1) // TWO.per_epoch)


def _closed(path: Path, *steps: int) -> str:
    """Note these steps in the ledger at `path`; return why their epoch did not hold each sample once."""
    with _opened(path) as kept:
        _noted(kept, *steps)
        return kept.close_epoch((steps[-1] - 1) // TWO.per_epoch, TWO.samples) or ""


def test_an_epoch_is_accounted_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with _opened(path) as kept:
        _noted(kept, 1, 2, 3)
    rewind(path, step=2)  # killed after step 3, the last checkpoint of step 2
    assert _closed(path, 3, 4) == ""
    assert _closed(path, 5, 6, 7, 8) == ""
    # What came before the seam counts: without it the same steps are an epoch that is not whole.
    rewind(path, step=6)
    assert _closed(path, 8).startswith("epoch 1: 8 samples never came")
    # A ledger that begins in the middle of an epoch cannot say what was trained before.
    path.unlink()
    assert _closed(path, 7, 8) == ""


@pytest.mark.parametrize("room", [0, 42, 91])
def test_on_a_full_disk_pages_wait_and_go_out_whole(tmp_path: Path, room: int) -> None:
    path = tmp_path / NAME
    with _opened(path) as kept:
        _noted(kept, 1)
        before = len(path.read_bytes())
        with no_file_beyond(before + room):
            _noted(kept, 2, 3)
            assert (kept.waiting, kept.trouble) == (2 - room // before, "File too large")
            assert [page.last_step for page in read(path)] == list(range(1, 2 + room // before))
        _noted(kept, 4)
        assert (kept.waiting, kept.trouble) == (0, "")
    assert replace(TWO, worlds=((1, 1),)).findings(list(read(path)), steps=4) == ""


def test_what_no_disk_takes_is_told_and_stops_nothing() -> None:
    kept = _opened(Path("/dev/full"))
    _noted(kept, 1, 2, 3, 4)
    assert kept.close_epoch(0, TWO.samples) is None
    assert kept.trouble == "No space left on device"
    kept.close()
    assert kept.waiting == 4


# ---- real runs

BATCH = 100


def _patch(patch: pytest.MonkeyPatch, faulty: str) -> None:
    """Have what is trained on or evaluated be streamed with something twice and something not at all."""
    right = ResidentTensors.stream

    def wrong(self: ResidentTensors, shares: Iterable[Indices], *, epoch: int) -> Any:
        given = list(shares)
        if faulty == "trained" and len(self) == 1437:
            given[4] = given[3]
        elif faulty == "evaluated" and len(self) == 360:
            given = [np.array([share[0], *share[:-1]]) for share in given]
        return right(self, iter(given), epoch=epoch)

    patch.setattr(ResidentTensors, "stream", wrong)


def _train(world: World, values: dict[str, Any], faulty: str) -> str:
    """Train, with a fault on rank 1; return what the run says of it, "" for nothing."""
    torch.set_num_threads(1)
    asked = {"model": "mlp", "batch": BATCH, "precision": "fp32", "augment": [], "ledger": True, "epochs": 2}
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            _patch(patch, faulty)
        try:
            train(override(recipe("digits"), **asked | values), world, Losses())
        except (ProofError, RequestError) as error:
            return str(error)
    return ""


def _trained(pool: RankPool, ranks: int, faulty: str = "", **values: Any) -> str:
    """Return what a run says of its fault, the same on all ranks."""
    said, *others = pool.run(ranks, _train, values, faulty)
    assert others == [said] * (ranks - 1)
    return str(said)


def judged(folder: Path, **values: Any) -> Check:
    return check(folder / NAME, Planned(**{"global_batch": BATCH, "seed": 0} | values))


TEXT = {"model": "tests.judged:DroppingTransformer", "data": "tests.judged:texts", "batch": 11, "lr": 0.01}
"""45 samples: the last batch has one, and one of two ranks none."""


@pytest.mark.parametrize(
    ("ranks", "values"), [(1, {"drop_last": True}), (3, {"accumulate": 3}), (2, TEXT | {"verify_every": 1})]
)
def test_a_clean_run_holds_each_sample_once(pool: RankPool, tmp_path: Path, ranks: int, values: dict[str, Any]) -> None:
    assert _trained(pool, ranks, output=tmp_path, **values) == ""
    found = judged(tmp_path, global_batch=values.get("batch", BATCH), drop_last=values.get("drop_last", False))
    assert (found.outcome, found.times) == (Check.HOLDS, 4)  # two epochs, two evaluations


def test_restarts_in_other_worlds_leave_one_whole_account(pool: RankPool, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    _trained(pool, 2, output=run, max_steps=7, checkpoint_every=3)
    # What came after an older checkpoint is forgotten; and a run that has a ledger keeps it.
    older = str(run / "checkpoints" / "step-00000006")
    _trained(pool, 3, output=run, max_steps=19, resume=older, ledger=False)
    _trained(pool, 1, output=copy, resume=str(run), ledger=False)
    assert judged(copy, steps=30).outcome == Check.HOLDS
    ranks = {page.first_step: page.ranks for page in read(copy / NAME) if page.kind == TRAIN}
    assert list(dict.fromkeys(ranks.values())) == [2, 3, 1]
    path = run / NAME
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 4
    path.write_bytes(damaged)
    assert re.search(rf"ledger\.bin.*{DAMAGED}", _trained(pool, 2, output=run, resume="auto"))


@pytest.mark.parametrize(
    ("faulty", "part"),
    [("trained", "by ledger.bin: epoch 0: "), ("evaluated", "the evaluation after step 15: ")],
)
def test_samples_that_come_twice_or_never_stop_the_run_and_their_rank_is_named(
    pool: RankPool, tmp_path: Path, faulty: str, part: str
) -> None:
    said = _trained(pool, 3, faulty, output=tmp_path)
    assert part in said
    assert "came that had come before" in said or "rank 1 computed sample" in said
    found = judged(tmp_path)
    assert found.outcome == Check.FAILS
    assert {*re.findall(r"(?<=rank )\d(?= computed| alone)", found.found)} == {"1"}, found


def test_without_a_folder_the_account_is_kept_too(pool: RankPool) -> None:
    assert "came that had come before" in _trained(pool, 2, "trained")
