"""The ledger keeps which sample went where, whatever kills the run; what is wrong in it is found and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.batching import BatchPlan
from lockstep.checks.exactly_once import Planned, check
from lockstep.checks.ledger import Ledger
from lockstep.checks.pages import EVAL, NAME, TRAIN, Indices, Page, TornError, read, rewind
from lockstep.config.options import override, recipe
from lockstep.data.order import Order
from lockstep.data.resident import Data
from lockstep.engine import train
from lockstep.errors import ProofError, RequestError
from lockstep.record.checks import Check
from lockstep.world.world import World

from ..curves import Losses
from ..disks import no_file_beyond
from ..pool import RankPool

SEED, SAMPLES, BATCH, TESTED = 7, 30, 8, 11
DAMAGED = r"is damaged|is of version"
PLANNED = Planned(global_batch=BATCH, seed=SEED)
Steps = dict[int, list[Indices]]
"""What each rank computed, by step: two epochs of four steps on two ranks, the last batch of six samples."""


def share(step: int, rank: int, seed: int = SEED) -> Indices:
    epoch, within = divmod(step - 1, 4)
    plan = BatchPlan(global_size=BATCH, ranks=2, accumulation=1)
    (part,) = plan.split(*plan.batch(within, SAMPLES), rank)
    return Order(SAMPLES, seed=seed, epoch=epoch).indices(part.start, part.stop).copy()


def planned() -> Steps:
    return {step: [share(step, rank) for rank in range(2)] for step in range(1, 9)}


def written(steps: Steps, every: int = 3) -> list[Page]:
    """Return the pages of these steps, one every so many, and of an evaluation after each epoch."""
    pages = []
    for epoch in range(2):
        held = [step for step in steps if (step - 1) // 4 == epoch]
        for part in (held[at : at + every] for at in range(0, len(held), every)):
            counts = np.array([[len(each) for each in steps[step]] for step in part], np.uint32)
            indices = np.concatenate([each for step in part for each in steps[step]])
            pages.append(Page(TRAIN, epoch, part[0], 2, 1, SAMPLES, counts, indices))
        pages.append(Page(EVAL, epoch, held[-1], 2, 1, TESTED, np.array([[5, 6]], np.uint32), np.arange(TESTED)))
    return pages


def write(path: Path, pages: list[Page]) -> bytes:
    path.write_bytes(b"".join(page.encode() for page in pages))
    return path.read_bytes()


# ---- the file


@pytest.mark.parametrize("samples", [2, 257, 2**17 + 1, 2**40])
def test_pages_come_back_with_every_share(tmp_path: Path, samples: int) -> None:
    indices = np.random.default_rng(0).integers(0, samples, 1003)
    indices[:2] = samples - 1, 0
    write(tmp_path / NAME, [Page(TRAIN, 0, 5, 2, 1, samples, np.array([[1000, 0], [1, 2]], np.uint32), indices)])
    (held,) = read(tmp_path / NAME)
    shares = [held.share(step, rank) for step in (5, 6) for rank in (0, 1)]
    assert [len(each) for each in shares] == [1000, 0, 1, 2]
    assert np.array_equal(np.concatenate(shares), indices)


def test_a_kill_tears_the_last_page_alone_wherever_it_strikes(tmp_path: Path) -> None:
    path, pages = tmp_path / NAME, written(planned())
    whole = write(path, pages)
    begin = len(whole) - len(pages[-1].encode())
    for end in range(begin + 1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TornError, match="is cut short"):
            list(read(path))
        assert len(list(read(path, torn_ok=True))) == len(pages) - 1
        found = check(path, PLANNED)
        assert found.outcome == Check.HOLDS
        assert "a last page that a kill cut short is left out" in found.found
        rewind(path, step=10**6)
        assert path.read_bytes() == whole[:begin]


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / NAME
    whole = write(path, written(planned())[:3])
    for bit in range(len(whole) * 8):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        for use in (lambda: list(read(path, torn_ok=True)), lambda: rewind(path, step=1)):
            with pytest.raises(RequestError, match=DAMAGED):
                use()
        assert path.read_bytes() == broken


# ---- the judgement

FAULTS: dict[str, tuple[Callable[[Steps], object], str]] = {
    "one batch twice": (
        lambda steps: steps[3].__setitem__(1, steps[2][1]),
        r"^epoch 0: sample \d+ and 3 more samples came more than once, and 4 samples never came.*; "
        r"rank 1 computed .* in step 3$",
    ),
    "one sample twice": (
        lambda steps: steps[5].__setitem__(0, steps[5][0][[0, 1, 2, 3, 0]]),
        r"^epoch 1: sample \d+ came more than once; rank 0 computed 5 samples where",
    ),
    "one batch dropped": (
        lambda steps: steps[3].__setitem__(1, np.empty(0, np.int64)),
        r"^epoch 0: 4 samples never came .*; rank 1 computed 0 samples where the plan has 4 in step 3$",
    ),
    "another seed on rank 1": (
        lambda steps: [each.__setitem__(1, share(step, 1, seed=SEED + 1)) for step, each in steps.items()],
        r"^epoch 0: .* more than once.*; epoch 1: .* more than once.*; 8 shares in 8 steps deviate, of rank 1 alone$",
    ),
    "a step missing": (lambda steps: steps.pop(5), r"^step 5 is missing; epoch 1: 8 samples never came"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found_and_named(tmp_path: Path, name: str) -> None:
    fault, sentence = FAULTS[name]
    for every in (1, 3):
        steps = planned()
        fault(steps)
        write(tmp_path / NAME, written(steps, every))
        found = check(tmp_path / NAME, PLANNED).found
        assert re.search(sentence, found), found


def test_on_a_full_disk_pages_wait_and_go_out_whole(tmp_path: Path) -> None:
    path = tmp_path / NAME
    sizes = {"samples": SAMPLES, "accumulation": 1, "steps_per_epoch": 4}
    with Ledger(path, World.alone(), **sizes) as kept:

        def note(*steps: int) -> None:
            for step in steps:
                kept.add(step, share(step, 0))
                kept.flush(0)

        note(1)
        with no_file_beyond(len(path.read_bytes()) + 42):
            note(2, 3)
            assert (kept.waiting, kept.trouble) == (2, "File too large")
            assert [page.last_step for page in read(path)] == [1]
        note(4)
        assert (kept.waiting, kept.trouble) == (0, "")
    assert [step for page in read(path) for step in range(page.first_step, page.last_step + 1)] == [1, 2, 3, 4]


# ---- real runs


def _patch(patch: pytest.MonkeyPatch, faulty: str) -> None:
    """Have what is trained on or evaluated be streamed with something twice and something not at all."""
    right = Data.stream

    def wrong(self: Data, shares: Iterable[Indices], *, epoch: int) -> Any:
        given = list(shares)
        if faulty == "trained" and len(self) == 1437:
            given[4] = given[3]
        elif faulty == "evaluated" and len(self) == 360:
            given = [np.array([share[0], *share[:-1]]) for share in given]
        return right(self, iter(given), epoch=epoch)

    patch.setattr(Data, "stream", wrong)


def _train(world: World, values: dict[str, Any], faulty: str) -> str:
    """Train, with a fault on rank 1; return what the run says of it, "" for nothing."""
    torch.set_num_threads(1)
    asked = {"model": "mlp", "batch": 100, "precision": "fp32", "augment": [], "ledger": True, "epochs": 2}
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
    return check(folder / NAME, Planned(**{"global_batch": 100, "seed": 0} | values))


TEXT = {"model": "tests.judged:Transformer", "data": "tests.judged:texts", "batch": 11, "lr": 0.01}
"""45 samples: the last batch has one, and one of two ranks none."""


@pytest.mark.parametrize(("ranks", "values"), [(3, {"accumulate": 3, "drop_last": True}), (2, TEXT)])
def test_a_clean_run_holds_each_sample_once(pool: RankPool, tmp_path: Path, ranks: int, values: dict[str, Any]) -> None:
    assert _trained(pool, ranks, output=tmp_path, **values) == ""
    found = judged(tmp_path, global_batch=values.get("batch", 100), drop_last=values.get("drop_last", False))
    assert (found.outcome, found.times) == (Check.HOLDS, 4)  # two epochs, two evaluations


def test_restarts_in_other_worlds_leave_one_whole_account(pool: RankPool, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    assert _trained(pool, 2, output=run, max_steps=7, checkpoint_every=3) == ""
    # What came after an older checkpoint is forgotten; and a run that has a ledger keeps it.
    older = str(run / "checkpoints" / "step-00000006")
    assert _trained(pool, 3, output=run, max_steps=19, resume=older, ledger=False) == ""
    assert _trained(pool, 1, output=copy, resume=str(run), ledger=False) == ""
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
    assert "came more than once" in said or "rank 1 computed sample" in said
    found = judged(tmp_path)
    assert found.outcome == Check.FAILS
    assert {*re.findall(r"(?<=rank )\d(?= computed| alone)", found.found)} == {"1"}, found
