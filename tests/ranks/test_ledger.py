"""The ledger keeps which sample went where, whatever kills the run, and what is wrong with it is found and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batching import BatchPlan
from lockstep.cli.main import main
from lockstep.data.order import Order
from lockstep.data.resident import ResidentTensors
from lockstep.engine import train
from lockstep.errors import ProofError, RequestError
from lockstep.options import override, recipe
from lockstep.proof import Check
from lockstep.verify.exactly_once import check, judge
from lockstep.verify.ledger import Ledger
from lockstep.verify.pages import (
    EVAL,
    NAME,
    TRAIN,
    Indices,
    Page,
    TornError,
    bits_for,
    carry_over,
    pack,
    read,
    rewind,
    unpack,
    where,
)
from lockstep.verify.planned import Planned
from lockstep.world import World

from ..curves import Losses
from ..disks import no_file_beyond
from ..pool import RankPool

SEED = 7


@dataclass
class Step:
    """What each rank computed in one optimizer step."""

    number: int
    epoch: int
    shares: list[Indices]


@dataclass(frozen=True)
class Run:
    """A run as it should go: `worlds` is the number of ranks from a step on."""

    samples: int
    batch: int
    accumulation: int = 1
    epochs: int = 2
    drop_last: bool = False
    worlds: tuple[tuple[int, int], ...] = ((1, 2),)

    def ranks(self, step: int) -> int:
        return [ranks for begin, ranks in self.worlds if begin <= step][-1]

    @property
    def per_epoch(self) -> int:
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

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
        steps = self.steps() if steps is None else steps
        pages, held = [], list[Step]()
        for step, after in zip_longest(steps, steps[1:]):
            held.append(step)
            goes_on = after is not None and (after.number, after.epoch) == (step.number + 1, step.epoch)
            if not goes_on or len(held) == every or (after and len(after.shares) != len(step.shares)):
                counts = np.array([[len(share) for share in each.shares] for each in held], np.uint32)
                indices = np.concatenate([share for each in held for share in each.shares])
                shape = (step.epoch, held[0].number, len(step.shares), self.accumulation, self.samples)
                pages.append(Page(TRAIN, *shape, counts, indices))
                held = []
            if step.number == (step.epoch + 1) * self.per_epoch:
                pages.append(evaluated(step.number, step.epoch, 11, self.ranks(step.number)))
        return pages

    def findings(self, pages: list[Page], steps: int | None = None) -> str:
        return "; ".join(judge(pages, self.planned(steps)).findings)

    def planned(self, steps: int | None = None) -> Planned:
        return Planned(global_batch=self.batch, seed=SEED, drop_last=self.drop_last, steps=steps)


def evaluated(step: int, epoch: int, samples: int, ranks: int) -> Page:
    ends = [samples * rank // ranks for rank in range(ranks + 1)]
    return Page(EVAL, epoch, step, ranks, 1, samples, np.diff([ends]).astype(np.uint32), np.arange(samples))


def write(path: Path, pages: list[Page]) -> Path:
    path.write_bytes(b"".join(page.encode() for page in pages))
    return path


CLEAN = Run(samples=29, batch=8, accumulation=2, worlds=((1, 1), (3, 3), (6, 2)))
TWO = Run(samples=30, batch=8, epochs=2, worlds=((1, 2),))


# ---- the file


@given(st.integers(1, 2**40), st.integers(-1, 1), st.integers(0, 3000), st.integers(0, 2**32))
def test_what_is_packed_comes_back(some: int, power: int, number: int, seed: int) -> None:
    samples = some if power < 0 else (1 << some.bit_length() - 1) + power  # any, 2ᵏ or 2ᵏ + 1
    indices = np.random.default_rng(seed).integers(0, samples, number)
    indices[:1], indices[1:2] = samples - 1, 0
    bits = bits_for(samples)
    data = pack(indices, bits)
    assert len(data) == -(-number * bits // 8)
    assert np.array_equal(unpack(data, number, bits), indices)
    # The bits of all indices in a row are one number, the first index lowest.
    assert int.from_bytes(data, "little") == sum(index << bits * at for at, index in enumerate(indices.tolist()))


def test_packing_crosses_its_chunks_and_refuses_what_does_not_fit() -> None:
    for bits in (1, 7, 17, 40):
        indices = np.random.default_rng(0).integers(0, 1 << bits, 200_003)
        assert np.array_equal(unpack(pack(indices, bits), len(indices), bits), indices)
    for index in (-1, 8):
        with pytest.raises(AssertionError, match="an index of no sample"):
            pack(np.array([index]), 3)


def test_pages_come_back_with_every_share_and_tell_where_a_sample_went(tmp_path: Path) -> None:
    steps, pages = CLEAN.steps(), CLEAN.pages()
    found = list(read(write(tmp_path / NAME, pages)))
    assert [page.encode() for page in found] == [page.encode() for page in pages]
    trained = {
        step: page for page in found if page.kind == TRAIN for step in range(page.first_step, page.last_step + 1)
    }
    for step in steps:
        for rank, share in enumerate(step.shares):
            assert np.array_equal(trained[step.number].share(step.number, rank), share)
    for sample in range(CLEAN.samples):
        assert where(found, sample) == [
            (step.epoch, step.number, rank)
            for step in steps
            for rank, share in enumerate(step.shares)
            if sample in share
        ]


def test_a_kill_tears_the_last_page_alone_wherever_it_strikes(tmp_path: Path) -> None:
    pages = CLEAN.pages()
    path = write(tmp_path / NAME, pages)
    whole = path.read_bytes()
    begin = len(whole) - len(pages[-1].encode())
    for end in range(begin + 1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TornError, match=f"page {len(pages)}, from byte {begin} on, is cut short"):
            list(read(path))
        assert len(list(read(path, torn_ok=True))) == len(pages) - 1
        rewind(path, step=10**6)
        assert path.read_bytes() == whole[:begin]


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / NAME, CLEAN.pages()[:3])
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        with pytest.raises(RequestError, match=r"is damaged|is of version") as found:
            list(read(path, torn_ok=True))
        assert not isinstance(found.value, TornError)
        with pytest.raises(RequestError, match=r"is damaged|is of version"):
            rewind(path, step=1)
        assert path.read_bytes() == broken


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        list(read(tmp_path / "none"))
    (tmp_path / "text").write_text("step 1")
    with pytest.raises(RequestError, match="page 1, from byte 0 on, is damaged"):
        list(read(tmp_path / "text"))


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_rewound_ledger_holds_the_steps_up_to_there(tmp_path: Path, every: int) -> None:
    steps = CLEAN.steps()
    (tmp_path / "source").mkdir()
    source = write(tmp_path / "source" / NAME, CLEAN.pages(steps, every))
    whole = source.read_bytes()
    for step in range(len(steps) + 1):
        path = tmp_path / NAME
        path.write_bytes(whole + whole[:50])
        rewind(path, step=step)
        kept = list(read(path))
        held = [at for page in kept if page.kind == TRAIN for at in range(page.first_step, page.last_step + 1)]
        assert held == list(range(1, step + 1))
        assert [page.first_step for page in kept if page.kind == EVAL] == [at for at in (4, 8) if at <= step]
        assert CLEAN.findings(kept) == ""
        copied = tmp_path / "copied"
        carry_over(source.parent, copied, step=step)
        assert copied.read_bytes() == path.read_bytes()
        assert source.read_bytes() == whole
        # From there on the run goes in other worlds, and the two halves are one ledger.
        other = replace(CLEAN, worlds=(*((at, ranks) for at, ranks in CLEAN.worlds if at <= step), (step + 1, 4)))
        assert other.findings(kept + other.pages(other.steps()[step:], every), steps=len(steps)) == ""


# ---- the judgement


@st.composite
def runs(draw: st.DrawFn) -> Run:
    ranks = st.integers(1, 5)
    batch = draw(st.integers(1, 20))
    samples = draw(st.integers(batch, 70))
    seams = draw(st.lists(st.tuples(st.integers(2, 40), ranks), max_size=3))
    accumulation = draw(st.integers(1, 3))
    worlds = ((1, draw(ranks)), *sorted(dict(seams).items()))
    return Run(samples, batch, accumulation, draw(st.integers(1, 3)), draw(st.booleans()), worlds)


@given(runs(), st.integers(1, 9), st.data())
def test_a_clean_run_holds_wherever_it_begins_and_ends(run: Run, every: int, data: st.DataObject) -> None:
    last = data.draw(st.integers(1, run.epochs * run.per_epoch))
    first = data.draw(st.integers(1, last))
    verdict = judge(run.pages(run.steps(last)[first - 1 :], every), run.planned(last))
    assert verdict.findings == ()
    assert (verdict.first_step, verdict.last_step) == (first, last)
    assert (verdict.first_epoch, verdict.last_epoch) == ((first - 1) // run.per_epoch, (last - 1) // run.per_epoch)
    assert verdict.epochs == verdict.last_epoch - verdict.first_epoch + 1
    assert verdict.evaluations == last // run.per_epoch - (first - 1) // run.per_epoch


def _give(step: Step, *shares: Indices | None) -> None:
    """Give each rank these samples in place of its own; None leaves it those."""
    step.shares = [own if share is None else share for own, share in zip(step.shares, shares, strict=True)]


def _another_seed_on_rank_1(steps: list[Step]) -> None:
    for step in steps:
        _give(step, None, TWO.share(step.number, 1, seed=SEED + 1))


def _two_swapped(steps: list[Step]) -> None:
    shares = steps[4].shares
    shares[0][2], shares[1][0] = shares[1][0], shares[0][2]


NONE = np.empty(0, np.int64)
MISSING = r"^step 5 is missing; epoch 1: 8 samples never came \(the first: \d+\)$"
TWICE = (
    r"^step 5 is there more than once; epoch 1: .* came twice \(step 5 on rank ([01]), step 5 on rank \1\) and 7 more"
)
FAULTS: dict[str, tuple[Callable[[list[Step]], object], str]] = {
    "one batch twice": (
        lambda steps: _give(steps[2], None, steps[1].shares[1]),
        r"^epoch 0: .* came twice \(step 2 on rank 1, step 3 on rank 1\) and 3 more .* and 4 samples never came.*; "
        r"rank 1 computed sample \d+ where the plan has \d+ in step 3$",
    ),
    "one sample twice": (
        lambda steps: _give(steps[4], steps[4].shares[0][[0, 1, 2, 3, 0]], None),
        r"^epoch 1: sample \d+ came twice \(step 5 on rank 0, step 5 on rank 0\); rank 0 computed 5 samples where",
    ),
    "one batch dropped": (
        lambda steps: _give(steps[2], None, NONE),
        r"^epoch 0: 4 samples never came .*; rank 1 computed 0 samples where the plan has 4 in step 3$",
    ),
    "another seed on rank 1": (
        _another_seed_on_rank_1,
        r"^epoch 0: .* came twice \(step \d on rank [01], .*; epoch 1: .* came twice.*; rank 1 computed .* in step 1; "
        r"8 shares in 8 steps deviate, of rank 1 alone$",
    ),
    "two swapped": (_two_swapped, r"^rank 0 computed .* in step 5; 2 shares in 1 step deviate, of ranks 0, 1$"),
    "two swapped within a rank": (
        lambda steps: _give(steps[4], None, steps[4].shares[1][[1, 0, 2, 3]]),
        r"^rank 1 computed its samples in another order, sample \d+ before \d+, in step 5$",
    ),
    "a step missing": (lambda steps: steps.pop(4), MISSING),
    "a step empty": (lambda steps: _give(steps[4], NONE, NONE), MISSING),
    "a step repeated": (lambda steps: steps.insert(5, replace(steps[4])), TWICE),
    "a step repeated later": (lambda steps: steps.insert(7, replace(steps[4])), TWICE),
    "an epoch's last step missing": (lambda steps: steps.pop(3), "^step 4 is missing; epoch 0: 6 samples never came"),
    "one moved to the rank before": (
        lambda steps: _give(steps[4], np.append(steps[4].shares[0], steps[4].shares[1][:1]), steps[4].shares[1][1:]),
        r"^rank 0 computed 5 samples where the plan has 4 in step 5; 2 shares in 1 step deviate, of ranks 0, 1",
    ),
    "a step of another epoch": (
        lambda steps: setattr(steps[3], "epoch", 1),
        "step 4 is noted in epoch 1, to which it does not belong$",
    ),
    "an index of no sample": (
        lambda steps: _give(steps[0], np.array([31, *steps[0].shares[0][1:]]), None),
        "1 index of none of the 30 samples came, and 1 sample never came",
    ),
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


def test_another_plan_deviates_and_an_end_that_comes_early_or_late_is_found() -> None:
    pages, planned = TWO.pages(), TWO.planned()
    (seed,) = judge(pages, replace(planned, seed=SEED + 1)).findings
    assert seed.endswith("in step 1; 16 shares in 8 steps deviate, of ranks 0, 1")
    (accumulation,) = judge([replace(page, accumulation=2) for page in pages], planned).findings
    assert "in step 1; " in accumulation
    other = [replace(page, samples=31) if page.first_step > 4 else page for page in pages]
    assert judge(other, planned).findings[0] == ("from step 5 on, the training set has 31 samples, and had 30")
    pages = TWO.pages(TWO.steps(last=6))
    assert TWO.findings(pages, steps=6) == ""
    assert TWO.findings(pages, steps=8) == "2 steps (the first: 7) are missing"
    assert TWO.findings(pages, steps=5) == "there is a step 6, and the run made 5 steps"


def test_with_drop_last_an_epoch_has_whole_batches_alone() -> None:
    run = replace(TWO, drop_last=True)
    steps = run.steps()
    steps[1].shares[0] = steps[1].shares[0][:-1]
    assert "epoch 0: 23 samples came of the 24 that were to come" in run.findings(run.pages(steps))


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_evaluation_is_judged_too(ranks: int) -> None:
    good = evaluated(4, 0, 11, ranks)
    counts, again = good.counts.copy(), good.indices.copy()
    counts[0, -1] -= 1
    again[-1] = 0
    few, last = "the evaluation after step 4: ", ranks - 1
    for page, said in (
        (good, "^$"),
        (replace(good, counts=counts, indices=good.indices[:-1]), f"{few}1 sample never came .*rank {last} computed"),
        (
            replace(good, indices=again),
            f"{few}sample 0 came twice .step 4 on rank 0, step 4 on rank {last}., and 1 sam",
        ),
        (replace(good, indices=np.roll(good.indices, 1)), f"{ranks} shares in 1 step deviate" if last else "order"),
    ):
        assert re.search(said, TWO.findings([page])), TWO.findings([page])


def test_the_check_says_what_it_covers(tmp_path: Path) -> None:
    path, pages = tmp_path / NAME, TWO.pages()
    whole = write(path, pages).read_bytes()
    found = check(path, TWO.planned(8))
    assert (found.name, found.outcome, found.times, found.tolerance) == ("ledger", Check.HOLDS, 4, "exactly")
    for held, outcome, said in (
        (whole, Check.HOLDS, "2 epochs and 2 evaluations, steps 1 to 8"),
        (
            write(path, TWO.pages(TWO.steps()[5:])).read_bytes(),
            Check.HOLDS,
            "1 epoch and 1 evaluation, steps 6 to 8; what was trained before is not recorded",
        ),
        (whole[:-1], Check.HOLDS, "1 evaluation, steps 1 to 8; a last page that a kill cut short is left out"),
        (whole + whole, Check.FAILS, "more than once"),
        (b"", Check.OPEN, ""),
    ):
        path.write_bytes(held)
        found = check(path, TWO.planned())
        assert found.outcome == outcome
        assert said in found.found
    path.write_bytes(whole[:-200] + b"x" * 200)
    with pytest.raises(RequestError, match="is damaged"):
        check(path, TWO.planned())


# ---- the ledger of a run that goes on


def _opened(path: Path, world: World, run: Run = TWO) -> Ledger:
    return Ledger(
        path,
        world,
        samples=run.samples,
        evaluated_samples=11,
        accumulation=run.accumulation,
        steps_per_epoch=run.per_epoch,
    )


UNEVEN: tuple[dict[int, list[int]], ...] = ({}, {2: [1, 2, 3]}, {3: [9], 1: [4, 5, 6, 7, 8]})
"""What each rank notes, by step."""


def _uneven(world: World, path: Path) -> None:
    with _opened(path, world) as kept:
        kept.flush(0)
        for step, own in UNEVEN[world.rank].items():
            buffer = np.array(own)
            kept.add(step, buffer)
            buffer[:] = 29  # a loader may use it again
        kept.flush(0)
        kept.flush(0)


def test_shares_may_be_as_uneven_as_they_like(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / NAME
    pool.run(3, _uneven, path)
    (page,) = read(path)
    assert (page.first_step, page.last_step, page.ranks) == (1, 3, 3)
    for rank, noted in enumerate(UNEVEN):
        for step in (1, 2, 3):
            assert page.share(step, rank).tolist() == noted.get(step, [])


def _refused(world: World, path: Path) -> str:
    with pytest.raises(RequestError) as found:
        _opened(path, world)
    return str(found.value)


def test_a_ledger_that_cannot_be_continued_is_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    path = write(tmp_path / NAME, TWO.pages())
    path.write_bytes(path.read_bytes()[:-1])
    lost = tmp_path / "none" / NAME
    for file, parts in ((path, ["is cut short"]), (lost, [f"{lost} cannot be written", "No such file", "--output"])):
        first, second = pool.run(2, _refused, file)
        assert first == second
        assert all(part in first for part in parts)


def _noted(kept: Ledger, *steps: int) -> None:
    for step in steps:
        for rank in range(2):
            kept.add(step, TWO.share(step, rank))
        kept.flush((step - 1) // TWO.per_epoch)


def _closed(path: Path, *steps: int) -> str:
    """Note these steps in the ledger at `path`; return why their epoch did not hold each sample once."""
    with _opened(path, World.alone()) as kept:
        _noted(kept, *steps)
        return kept.close_epoch((steps[-1] - 1) // TWO.per_epoch, TWO.samples) or ""


def test_an_epoch_is_accounted_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with _opened(path, World.alone()) as kept:
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


@pytest.mark.parametrize("room", [0, 7, 42, 56, 91, 119])
def test_on_a_full_disk_pages_wait_and_go_out_whole(tmp_path: Path, room: int) -> None:
    path = tmp_path / NAME
    with _opened(path, World.alone()) as kept:
        _noted(kept, 1)
        before = path.read_bytes()
        with no_file_beyond(len(before) + room):
            _noted(kept, 2, 3)
            fits = room // len(before)
            assert kept.waiting == 2 - fits
            assert kept.trouble == "File too large"
            assert [page.last_step for page in read(path)] == list(range(1, 2 + fits))
        _noted(kept, 4)
        assert (kept.waiting, kept.trouble) == (0, "")
    assert replace(TWO, worlds=((1, 1),)).findings(list(read(path)), steps=4) == ""


def test_what_no_disk_takes_is_told_and_stops_nothing() -> None:
    kept = _opened(Path("/dev/full"), World.alone())
    _noted(kept, 1, 2, 3, 4)
    assert (kept.waiting, kept.trouble) == (4, "No space left on device")
    assert kept.close_epoch(0, TWO.samples) is None
    kept.close()
    assert kept.waiting == 4


# ---- real runs

SAMPLES, BATCH = 1437, 100


def _other_order(patch: pytest.MonkeyPatch) -> None:
    right = Order.__init__

    def wrong(self: Order, samples: int, *, seed: int, epoch: int) -> None:
        right(self, samples, seed=seed + 1, epoch=epoch)

    patch.setattr(Order, "__init__", wrong)


def _other_batches(patch: pytest.MonkeyPatch, change: Any, *, trains: bool = True) -> None:
    right = ResidentTensors.stream

    def wrong(self: ResidentTensors, shares: Any, *, epoch: int) -> Any:
        # An evaluation that lacks samples does not get as far as its ledger.
        return right(self, change(shares) if (len(self) == SAMPLES) == trains else shares, epoch=epoch)

    patch.setattr(ResidentTensors, "stream", wrong)


def _twice(shares: Any) -> Any:
    before = None
    for number, share in enumerate(shares):
        yield before if number == 4 else share
        before = share


def _first_twice(shares: Any) -> Any:
    for share in shares:
        yield np.array([share[0], *share[:-1]])


def _swapped(shares: Any) -> Any:
    first, second, third, fourth, *others = shares
    yield from (first, second, fourth, third, *others)


IN_RUNS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "another seed": _other_order,
    "a batch twice, one dropped": lambda patch: _other_batches(patch, _twice),
    "an evaluated sample twice": lambda patch: _other_batches(patch, _first_twice, trains=False),
    "two batches swapped": lambda patch: _other_batches(patch, _swapped),
}


def _train(world: World, values: dict[str, Any], fault: str, faulty_rank: int) -> str:
    """Train, with a fault on one rank; return what the run says of it, "" for nothing."""
    torch.set_num_threads(1)
    asked = {"model": "mlp", "batch": BATCH, "precision": "fp32", "augment": [], "ledger": True, "epochs": 2}
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == faulty_rank:
            IN_RUNS[fault](patch)
        try:
            train(override(recipe("digits"), **asked | values), world, Losses())
        except ProofError as error:
            return str(error)
    return ""


def _trained(pool: RankPool, ranks: int, fault: str = "", faulty_rank: int = -1, **values: Any) -> str:
    """Return what a run says of its fault, the same on all ranks."""
    said, *others = pool.run(ranks, _train, values, fault, faulty_rank)
    assert others == [said] * (ranks - 1)
    return str(said)


def judged(folder: Path, **values: Any) -> Check:
    return check(folder / NAME, Planned(**{"global_batch": BATCH, "seed": 0} | values))


TEXT = {"model": "tests.judged:DroppingTransformer", "data": "tests.judged:texts", "batch": 10, "lr": 0.01}


@pytest.mark.parametrize(
    ("ranks", "values"),
    [(1, {"drop_last": True}), (2, {"accumulate": 3}), (3, {"batch": 64}), (2, TEXT | {"verify_every": 1})],
)
def test_a_clean_run_holds_each_sample_once(pool: RankPool, tmp_path: Path, ranks: int, values: dict[str, Any]) -> None:
    assert _trained(pool, ranks, output=tmp_path, **values) == ""
    found = judged(tmp_path, global_batch=values.get("batch", BATCH), drop_last=values.get("drop_last", False))
    assert (found.outcome, found.times) == (Check.HOLDS, 4)  # two epochs, two evaluations


def test_restarts_in_other_worlds_leave_one_whole_account(pool: RankPool, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for ranks, steps in ((2, 7), (3, 19), (1, 22)):
        # --ledger only at first: a run that has a ledger keeps it.
        _trained(pool, ranks, output=run, max_steps=steps, resume="auto", ledger=ranks == 2, checkpoint_every=3)
    _trained(pool, 3, output=copy, resume=str(run))
    found = judged(copy, steps=30)
    assert found.outcome == Check.HOLDS, found
    ranks_of = [page.ranks for page in read(copy / NAME) if page.kind == TRAIN]
    assert list(dict.fromkeys(ranks_of)) == [2, 3, 1]
    assert ranks_of[-1] == 3


def test_a_run_that_is_taken_up_at_an_older_checkpoint_forgets_what_came_after(pool: RankPool, tmp_path: Path) -> None:
    _trained(pool, 2, output=tmp_path, checkpoint_every=3, max_steps=20)
    older = next((tmp_path / "checkpoints").glob("step-*"))
    _trained(pool, 2, output=tmp_path, checkpoint_every=3, resume=str(older))
    assert judged(tmp_path, steps=30).outcome == Check.HOLDS


@pytest.mark.parametrize(
    ("fault", "ranks", "faulty_rank", "parts"),
    [
        ("another seed", 4, 2, ["exactly once, by ledger.bin: epoch 0: ", "came that had come before", "never came"]),
        ("a batch twice, one dropped", 3, 0, ["by ledger.bin: epoch 0: ", "came that had come before", "never came"]),
        ("an evaluated sample twice", 3, 1, ["the evaluation after step 15: ", "rank 1 computed sample"]),
        ("two batches swapped", 2, 1, []),  # each sample comes once, and yet not where the plan has it: found later
    ],
)
def test_samples_that_come_twice_or_never_stop_the_run_and_their_rank_is_named(
    pool: RankPool, tmp_path: Path, fault: str, ranks: int, faulty_rank: int, parts: list[str]
) -> None:
    said = _trained(pool, ranks, fault, faulty_rank, output=tmp_path)
    assert bool(said) == bool(parts)
    assert all(part in said for part in parts), said
    found = judged(tmp_path)
    assert found.outcome == Check.FAILS
    assert {*re.findall(r"(?<=rank )\d(?= computed| alone)", found.found)} == {str(faulty_rank)}, found


def test_without_a_folder_the_account_is_kept_too(pool: RankPool) -> None:
    assert "came that had come before" in _trained(pool, 2, "a batch twice, one dropped", 1)


def test_the_command_keeps_the_account_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "mlp", "--epochs", "1", "--ledger", "--accelerator", "cpu", "--output", str(tmp_path))
    assert main(["train", "digits", *words]) == 0
    said = capsys.readouterr().out
    assert "ledger at 2 checks" in said
    assert "ledger.bin" in said
    own = json.loads((tmp_path / "summary.json").read_text())["proof"]["ledger"]
    assert (own["outcome"], own["times"]) == ("holds", 2)
    assert "planned" not in own["claim"], "where each sample was computed, lockstep verify run asks"
    assert "each sample exactly once" in (tmp_path / "proof.md").read_text()


def test_a_damaged_ledger_is_refused_when_the_run_goes_on(tmp_path: Path) -> None:
    values = {"output": tmp_path, "max_steps": 5}
    assert _train(World.alone(), values, "", -1) == ""
    path = tmp_path / NAME
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(RequestError, match=r"ledger\.bin"):
        _train(World.alone(), values | {"resume": "auto"}, "", -1)
