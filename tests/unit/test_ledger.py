"""The ledger keeps which sample went where, whatever kills the run, and what is wrong with it is found and named."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batching import BatchPlan
from lockstep.data.order import Order
from lockstep.errors import RequestError
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

    def pages(self, steps: list[Step], every: int = 3, evaluates: bool = True) -> list[Page]:
        """Return the pages of these steps: one every so many, and at the end of an epoch or of a world."""
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
            if evaluates and step.number == (step.epoch + 1) * self.per_epoch:
                pages.append(evaluated(step.number, step.epoch, 11, self.ranks(step.number)))
        return pages

    def findings(self, pages: list[Page], steps: int | None = None) -> str:
        return "; ".join(judge(pages, self.planned(steps)).findings)

    def planned(self, steps: int | None = None) -> Planned:
        return Planned(global_batch=self.batch, seed=SEED, drop_last=self.drop_last, steps=steps)


def evaluated(step: int, epoch: int, samples: int, ranks: int) -> Page:
    ends = [samples * rank // ranks for rank in range(ranks + 1)]
    return Page(EVAL, epoch, step, ranks, 1, samples, np.diff([ends]).astype(np.uint32), np.arange(samples))


def same(a: Page, b: Page) -> bool:
    return a.encode() == b.encode() and np.array_equal(a.indices, b.indices) and np.array_equal(a.counts, b.counts)


def write(path: Path, pages: list[Page]) -> Path:
    path.write_bytes(b"".join(page.encode() for page in pages))
    return path


CLEAN = Run(samples=29, batch=8, accumulation=2, worlds=((1, 1), (3, 3), (6, 2)))


@given(
    st.one_of(
        st.integers(1, 2**40), st.integers(0, 40).map(lambda k: 2**k), st.integers(0, 40).map(lambda k: 2**k + 1)
    ),
    st.integers(0, 3000),
    st.integers(0, 2**32),
)
def test_what_is_packed_comes_back(samples: int, number: int, seed: int) -> None:
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


def test_pages_come_back_with_every_share(tmp_path: Path) -> None:
    steps = CLEAN.steps()
    pages = CLEAN.pages(steps)
    found = list(read(write(tmp_path / NAME, pages)))
    assert len(found) == len(pages)
    assert all(map(same, found, pages))
    by_step = {step.number: step for step in steps}
    for page in found:
        if page.kind == TRAIN:
            for step in range(page.first_step, page.last_step + 1):
                for rank, share in enumerate(by_step[step].shares):
                    assert np.array_equal(page.share(step, rank), share)


def test_a_kill_tears_the_last_page_alone_wherever_it_strikes(tmp_path: Path) -> None:
    pages = CLEAN.pages(CLEAN.steps())
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
    pages = CLEAN.pages(CLEAN.steps())[:3]
    path = write(tmp_path / NAME, pages)
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


def test_without_a_ledger_there_is_nothing_to_rewind_or_to_carry_over(tmp_path: Path) -> None:
    rewind(tmp_path / NAME, step=3)
    carry_over(tmp_path, tmp_path / "new", step=3)
    assert list(tmp_path.iterdir()) == []


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
    pages = run.pages(run.steps(last)[first - 1 :], every)
    verdict = judge(pages, run.planned(last))
    assert verdict.findings == ()
    assert (verdict.first_step, verdict.last_step) == (first, last)
    assert (verdict.first_epoch, verdict.last_epoch) == ((first - 1) // run.per_epoch, (last - 1) // run.per_epoch)
    assert verdict.epochs == verdict.last_epoch - verdict.first_epoch + 1
    assert verdict.evaluations == last // run.per_epoch - (first - 1) // run.per_epoch


Fault = Callable[[list[Step]], object]


def _one_batch_twice(steps: list[Step]) -> None:
    steps[2].shares[1] = steps[1].shares[1]


def _one_dropped(steps: list[Step]) -> None:
    steps[2].shares[1] = steps[2].shares[1][:0]


def _another_seed_on_rank_1(steps: list[Step]) -> None:
    for step in steps:
        step.shares[1] = TWO.share(step.number, 1, seed=SEED + 1)


def _two_swapped(steps: list[Step]) -> None:
    shares = steps[4].shares
    shares[0][2], shares[1][0] = shares[1][0], shares[0][2]


def _two_swapped_within_a_rank(steps: list[Step]) -> None:
    steps[4].shares[1][:2] = steps[4].shares[1][1::-1]


def _a_missing_step(steps: list[Step]) -> None:
    del steps[4]


def _an_empty_step(steps: list[Step]) -> None:
    steps[4].shares = [share[:0] for share in steps[4].shares]


def _a_repeated_step(steps: list[Step]) -> None:
    steps.insert(5, replace(steps[4]))


def _a_step_repeated_later(steps: list[Step]) -> None:
    steps.insert(7, replace(steps[4]))


def _the_last_step_of_an_epoch_missing(steps: list[Step]) -> None:
    del steps[3]


def _one_moved_to_the_rank_before(steps: list[Step]) -> None:
    shares = steps[4].shares
    shares[0], shares[1] = np.append(shares[0], shares[1][:1]), shares[1][1:]


def _a_step_of_another_epoch(steps: list[Step]) -> None:
    steps[3].epoch = 1


TWO = Run(samples=30, batch=8, epochs=2, worlds=((1, 2),))


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        (
            _one_batch_twice,
            [
                r"^epoch 0: sample \d+ came twice \(step 2 on rank 1, step 3 on rank 1\) and 3 more samples more than "
                r"once, and 4 samples never came \(the first: \d+\); ",
                r"; rank 1 computed sample \d+ where the plan has \d+ in step 3$",
            ],
        ),
        (
            _one_dropped,
            [
                r"^epoch 0: 4 samples never came \(the first: \d+\); ",
                r"; rank 1 computed 0 samples where the plan has 4 in step 3$",
            ],
        ),
        (
            _another_seed_on_rank_1,
            [
                r"^epoch 0: sample \d+ came twice \(step \d on rank [01], step \d on rank [01]\)",
                r"; epoch 1: sample \d+ came twice",
                r"; rank 1 computed sample \d+ where the plan has \d+ in step 1; 8 shares in 8 steps deviate, "
                r"of rank 1 alone$",
            ],
        ),
        (
            _two_swapped,
            [r"^rank 0 computed sample \d+ where .* in step 5; 2 shares in 1 step deviate, of ranks 0, 1$"],
        ),
        (
            _two_swapped_within_a_rank,
            [r"^rank 1 computed its samples in another order, sample \d+ before \d+, in step 5$"],
        ),
        (_a_missing_step, [r"^step 5 is missing; epoch 1: 8 samples never came \(the first: \d+\)$"]),
        (_an_empty_step, [r"^step 5 is missing; epoch 1: 8 samples never came \(the first: \d+\)$"]),
        (
            _a_repeated_step,
            [
                r"^step 5 is there more than once; epoch 1: sample \d+ came twice "
                r"\(step 5 on rank ([01]), step 5 on rank \1\) and 7 more samples more than once$",
            ],
        ),
        (
            _a_step_repeated_later,
            [
                r"^step 5 is there more than once; epoch 1: sample \d+ came twice "
                r"\(step 5 on rank ([01]), step 5 on rank \1\) and 7 more samples more than once$",
            ],
        ),
        (
            _the_last_step_of_an_epoch_missing,
            [r"^step 4 is missing; epoch 0: 6 samples never came \(the first: \d+\)$"],
        ),
        (
            _one_moved_to_the_rank_before,
            [r"^rank 0 computed 5 samples where the plan has 4 in step 5; 2 shares in 1 step deviate, of ranks 0, 1"],
        ),
        (_a_step_of_another_epoch, [r"step 4 is noted in epoch 1, to which it does not belong$"]),
    ],
)
@pytest.mark.parametrize("every", [1, 3, 100])
def test_what_is_wrong_is_found_and_named(fault: Fault, sentences: list[str], every: int) -> None:
    steps = TWO.steps()
    assert TWO.findings(TWO.pages(steps, every)) == ""
    fault(steps)
    found = TWO.findings(TWO.pages(steps, every))
    for sentence in sentences:
        assert re.search(sentence, found), found


def test_another_order_and_another_plan_deviate_from_the_first_step_on() -> None:
    pages, planned = TWO.pages(TWO.steps()), TWO.planned()
    (seed,) = judge(pages, replace(planned, seed=SEED + 1)).findings
    assert seed.endswith("in step 1; 16 shares in 8 steps deviate, of ranks 0, 1")
    (accumulation,) = judge([replace(page, accumulation=2) for page in pages], planned).findings
    assert "in step 1; " in accumulation
    other = [replace(page, samples=31) if page.first_step > 4 else page for page in pages]
    assert judge(other, planned).findings[0] == ("from step 5 on, the training set has 31 samples, and had 30")


def test_a_ledger_that_ends_before_its_run_is_found() -> None:
    pages = TWO.pages(TWO.steps(last=6))
    assert TWO.findings(pages, steps=6) == ""
    assert TWO.findings(pages, steps=8) == "2 steps (the first: 7) are missing"
    assert TWO.findings(pages, steps=5) == "there is a step 6, and the run made 5 steps"


def test_an_index_of_no_sample_is_found() -> None:
    steps = TWO.steps()
    steps[0].shares[0][0] = 31
    found = TWO.findings(TWO.pages(steps))
    assert "1 index of none of the 30 samples came, and 1 sample never came" in found


def test_with_drop_last_an_epoch_has_whole_batches_alone() -> None:
    run = replace(TWO, drop_last=True)
    steps = run.steps()
    assert run.findings(run.pages(steps)) == ""
    steps[1].shares[0] = steps[1].shares[0][:-1]
    assert "epoch 0: 23 samples came of the 24 that were to come" in run.findings(run.pages(steps))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_evaluation_is_judged_too(ranks: int) -> None:
    good = evaluated(4, 0, 11, ranks)
    assert TWO.findings([good]) == ""
    counts = good.counts.copy()
    counts[0, -1] -= 1
    assert TWO.findings([replace(good, counts=counts, indices=good.indices[:-1])]).startswith(
        "the evaluation after step 4: 1 sample never came (the first: 10), and "
        f"rank {ranks - 1} computed {counts[0, -1]} sample"
    )
    again = good.indices.copy()
    again[-1] = 0
    assert TWO.findings([replace(good, indices=again)]).startswith(
        "the evaluation after step 4: sample 0 came twice "
        f"(step 4 on rank 0, step 4 on rank {ranks - 1}), and 1 sample never came (the first: 10), and "
    )
    if ranks > 1:
        turned = replace(good, indices=np.roll(good.indices, 1))
        assert f"{ranks} shares in 1 step deviate" in TWO.findings([turned])


def test_where_a_sample_went() -> None:
    steps = CLEAN.steps()
    pages = CLEAN.pages(steps)
    for sample in range(CLEAN.samples):
        expected = [
            (step.epoch, step.number, rank)
            for step in steps
            for rank, share in enumerate(step.shares)
            if sample in share
        ]
        assert where(pages, sample) == expected
        assert len(expected) == CLEAN.epochs


def test_the_check_says_what_it_covers(tmp_path: Path) -> None:
    path = tmp_path / NAME

    def checked(steps: int | None = None) -> Check:
        return check(path, Planned(global_batch=8, seed=SEED, steps=steps))

    pages = TWO.pages(TWO.steps())
    write(path, pages)
    found = checked(8)
    assert (found.name, found.outcome, found.times, found.tolerance) == ("ledger", Check.HOLDS, 4, "exactly")
    assert found.found == "2 epochs and 2 evaluations, steps 1 to 8"
    write(path, TWO.pages(TWO.steps()[5:]))
    assert checked().found == ("1 epoch and 1 evaluation, steps 6 to 8; what was trained before is not recorded")
    path.write_bytes(write(path, pages).read_bytes()[:-1])
    assert checked().found == "2 epochs and 1 evaluation, steps 1 to 8; a last page that a kill cut short is left out"
    write(path, [*pages, *pages])
    assert checked().outcome == Check.FAILS
    path.write_bytes(b"")
    assert checked().outcome == Check.OPEN
    write(path, pages[1:] + pages)
    path.write_bytes(path.read_bytes()[:-200] + b"x" * 200)
    with pytest.raises(RequestError, match="is damaged"):
        checked()


def _opened(path: Path | None, world: World, run: Run) -> Ledger:
    return Ledger(
        path,
        world,
        samples=run.samples,
        evaluated_samples=11,
        accumulation=run.accumulation,
        steps_per_epoch=run.per_epoch,
    )


def _trained(
    world: World, path: Path | None, run: Run, first: int, last: int, every: int, again: int | None
) -> list[str | None]:
    """Keep a ledger as the engine does, in micro-batches; rank 0 trains in step `again` on its last step's samples."""
    said = []
    with _opened(path, world, run) as kept:
        for step in range(first, last + 1):
            own = run.share(step - (step == again and world.is_main), world.rank)
            if len(own) or step % 2:  # a rank without a sample may also say nothing
                for part in np.array_split(own, 3):
                    kept.add(step, part)
            epoch = (step - 1) // run.per_epoch
            if step % every == 0:
                kept.flush(epoch)
            if step % run.per_epoch == 0:
                said.append(kept.close_epoch(epoch, run.samples))
                for index in range(11 * world.rank // world.size, 11 * (world.rank + 1) // world.size):
                    kept.add_evaluated(np.array([index]))
                kept.flush_evaluation(epoch, step)
        kept.flush((last - 1) // run.per_epoch)
        assert kept.waiting == 0
    return said


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_keep_one_ledger(pool: RankPool, tmp_path: Path, size: int) -> None:
    run = Run(samples=25, batch=8, accumulation=2, worlds=((1, size),))  # the last batch has one sample
    path = tmp_path / NAME
    assert pool.run(size, _trained, path, run, 1, 8, 3, None) == [[None, None]] * size
    pages = list(read(path))
    assert run.findings(pages, steps=8) == ""
    expected = run.pages(run.steps())
    assert sum(page.kind == EVAL for page in pages) == 2
    assert [place for sample in range(25) for place in where(pages, sample)] == [
        place for sample in range(25) for place in where(expected, sample)
    ]


UNEVEN: tuple[dict[int, list[int]], ...] = ({}, {2: [1, 2, 3]}, {3: [9], 1: [4, 5, 6, 7, 8]})
"""What each rank notes, by step."""


def _uneven(world: World, path: Path) -> None:
    with _opened(path, world, TWO) as kept:
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


def test_a_batch_that_comes_twice_is_said_on_every_rank_while_the_run_goes(pool: RankPool, tmp_path: Path) -> None:
    run = Run(samples=29, batch=8)
    path = tmp_path / NAME
    found = "epoch 1: 4 times a sample came that had come before, and "
    for file in (path, None):
        for said in pool.run(2, _trained, file, run, 1, 8, 3, 7):
            assert said[0] is None
            assert said[1].startswith(found)
    assert "sample" in run.findings(list(read(path)))


def test_an_epoch_is_accounted_over_restarts_and_worlds(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / NAME
    run = replace(CLEAN, worlds=((1, 2), (3, 3), (6, 1)))
    pool.run(2, _trained, path, run, 1, 3, 3, None)  # killed after step 3, the last checkpoint of step 2
    rewind(path, step=2)
    assert pool.run(3, _trained, path, run, 3, 5, 2, None) == [[None]] * 3
    assert pool.run(1, _trained, path, run, 6, 8, 2, None) == [[None]]
    assert run.findings(list(read(path)), steps=8) == ""
    # What came before the seam counts: without it the same steps are an epoch that is not whole.
    rewind(path, step=6)
    rewind(path, step=6)
    (said,) = pool.run(1, _trained, path, run, 8, 8, 2, None)
    assert said[0].startswith("epoch 1: 8 samples never came")
    # A ledger that begins in the middle of an epoch cannot say what was trained before.
    path.unlink()
    assert pool.run(1, _trained, path, run, 6, 8, 2, None) == [[None]]


def _refused(world: World, path: Path) -> str:
    with pytest.raises(RequestError) as found:
        _opened(path, world, TWO)
    return str(found.value)


def test_a_ledger_that_cannot_be_continued_is_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    path = write(tmp_path / NAME, TWO.pages(TWO.steps()))
    path.write_bytes(path.read_bytes()[:-1])
    torn = pool.run(2, _refused, path)
    assert torn[0] == torn[1]
    assert "is cut short" in torn[0]
    assert (
        pool.run(2, _refused, tmp_path / "none" / NAME)
        == [f"{tmp_path}/none/{NAME} cannot be written: No such file or directory; give another --output."] * 2
    )


@contextmanager
def _room(bytes_left: int, path: Path) -> Iterator[None]:
    """Have the system take so many bytes more into the file at `path`, and then refuse: a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _noted(kept: Ledger, step: int) -> None:
    for rank in range(2):
        kept.add(step, TWO.share(step, rank))
    kept.flush((step - 1) // TWO.per_epoch)


@pytest.mark.parametrize("room", range(0, 120, 7))
def test_on_a_full_disk_pages_wait_and_go_out_whole(tmp_path: Path, room: int) -> None:
    path = tmp_path / NAME
    alone = replace(TWO, worlds=((1, 1),))
    with _opened(path, World.alone(), TWO) as kept:
        _noted(kept, 1)
        before = path.read_bytes()
        with _room(room, path):
            _noted(kept, 2)
            _noted(kept, 3)
            fits = room // len(before)
            assert kept.waiting == 2 - fits
            assert kept.trouble == "File too large"
            assert [page.last_step for page in read(path)] == list(range(1, 2 + fits))
        _noted(kept, 4)
        assert (kept.waiting, kept.trouble) == (0, "")
    assert alone.findings(list(read(path)), steps=4) == ""


def test_what_no_disk_takes_is_told_and_stops_nothing() -> None:
    kept = _opened(Path("/dev/full"), World.alone(), TWO)
    for step in range(1, 5):
        _noted(kept, step)
    assert kept.waiting == 4
    assert kept.trouble == "No space left on device"
    assert kept.close_epoch(0, TWO.samples) is None
    kept.close()
    assert kept.waiting == 4
