"""The ledger keeps which sample went where, whatever kills the run; what is wrong in it is found and named."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.checks.ledger import Ledger, Planned, check
from lockstep.checks.pages import EVAL, NAME, TRAIN, Indices, Page, TornError, read, rewind
from lockstep.config.options import override, recipe
from lockstep.data.order import SHUFFLED, Order
from lockstep.data.resident import Data
from lockstep.engine import train
from lockstep.errors import ProofError, RequestError
from lockstep.record.checks import Check
from lockstep.world.world import World

from ..curves import Losses
from ..disks import no_file_beyond
from ..pool import RankPool

SEED, SAMPLES, BATCH, TESTED = 7, 30, 8, 11
PLANNED = Planned(global_batch=BATCH, order=SHUFFLED, seed=SEED)
Steps = dict[int, list[Indices]]
"""What each of two ranks computed, by step: two epochs of four steps, the last batch of six samples."""


def steps(seed: int = SEED) -> Steps:
    orders = [Order(SAMPLES, seed=seed, epoch=epoch).indices(0, SAMPLES) for epoch in range(2)]
    parts = [order[at : at + BATCH] for order in orders for at in range(0, SAMPLES, BATCH)]
    return {step: np.array_split(part, 2) for step, part in enumerate(parts, start=1)}


def written(held: Steps, every: int = 3) -> list[Page]:
    """Return the pages of these steps, one every so many, and of an evaluation after each epoch."""
    pages = []
    for epoch in range(2):
        own = [step for step in held if (step - 1) // 4 == epoch]
        for part in (own[at : at + every] for at in range(0, len(own), every)):
            counts = np.array([[len(each) for each in held[step]] for step in part], np.uint32)
            indices = np.concatenate([each for step in part for each in held[step]])
            pages.append(Page(TRAIN, epoch, part[0], 2, 1, SAMPLES, counts, indices))
        pages.append(Page(EVAL, epoch, own[-1], 2, 1, TESTED, np.array([[5, 6]], np.uint32), np.arange(TESTED)))
    return pages


def write(path: Path, pages: list[Page]) -> bytes:
    path.write_bytes(b"".join(page.encode() for page in pages))
    return path.read_bytes()


# ---- the file


@pytest.mark.parametrize("samples", [2, 257, 2**17 + 1, 2**40])
def test_pages_come_back_with_every_sample(tmp_path: Path, samples: int) -> None:
    indices = np.random.default_rng(0).integers(1, samples, 1003)
    indices[[0, 1002]] = samples - 1, 0
    counts = np.array([[1000, 0], [1, 2]], np.uint32)
    write(tmp_path / NAME, [Page(TRAIN, 0, 5, 2, 1, samples, counts, indices)])
    (held,) = read(tmp_path / NAME)
    assert np.array_equal(held.indices, indices)
    assert np.array_equal(held.counts, counts)
    assert list(held.places(0)) == [(6, 1)]


def test_a_kill_tears_the_last_page_alone_wherever_it_strikes(tmp_path: Path) -> None:
    path, pages = tmp_path / NAME, written(steps())
    whole = write(path, pages)
    begin = len(whole) - len(pages[-1].encode())
    for end in range(begin + 1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TornError, match="is cut short"):
            list(read(path))
        found = check(path, PLANNED)
        assert (found.outcome, found.times) == (Check.HOLDS, 3)
        assert "a last page that a kill cut short is left out" in found.found
        rewind(path, step=10**6)
        assert path.read_bytes() == whole[:begin]


def test_a_flipped_bit_is_refused_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / NAME
    whole = write(path, written(steps())[:3])
    for bit in range(len(whole) * 8):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        for use in (lambda: list(read(path)), lambda: rewind(path, step=1)):
            with pytest.raises(RequestError, match="is damaged"):
                use()
        assert path.read_bytes() == broken


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    write(path := tmp_path / NAME, written(steps()))
    os.truncate(path, 1 << 30)
    with pytest.raises(RequestError, match="it has 1,073,741,824 bytes, of which the disk holds"):
        next(read(path))


# ---- the judgement

FAULTS: dict[str, tuple[Callable[[Steps], object], str]] = {
    "one share twice": (
        lambda held: held[3].__setitem__(1, held[2][1]),
        r"^epoch 0: 26 of 30 samples came, and sample \d+ and 3 more samples came more than once, "
        r"in step 2 on rank 1 and in step 3 on rank 1; in step 3, rank 1 computed other samples than planned",
    ),
    "one sample twice": (
        lambda held: held[5].__setitem__(0, held[5][0][[0, 1, 2, 3, 0]]),
        r"^epoch 1: sample \d+ came more than once, in step 5 on rank 0 and in step 5 on rank 0; "
        r"step 5 has 9 samples of epoch 1, and 8 by the plan$",
    ),
    "one share dropped": (
        lambda held: held[3].__setitem__(1, np.empty(0, np.int64)),
        r"^epoch 0: 26 of 30 samples came; step 3 has 4 samples of epoch 0, and 8 by the plan$",
    ),
    "a number beyond the data set": (
        lambda held: held[2].__setitem__(1, np.append(held[2][1], SAMPLES)),
        r"^epoch 0: 1 number of none of the 30 samples came; step 2 has 9 samples",
    ),
    "another seed on rank 1": (
        lambda held: [each.__setitem__(1, steps(SEED + 1)[step][1]) for step, each in held.items()],
        r"^epoch 0: .* came more than once, .*; in step 1, rank 1 computed other samples .*; and \d+ more findings$",
    ),
    "two steps exchanged": (
        lambda held: held.update({1: held[2], 2: held[1]}),
        r"^in step 1, rank 0 and rank 1 computed other samples than planned, or in another order; in step 2, rank 0",
    ),
    "two ranks exchanged": (lambda held: held[6].reverse(), r"^in step 6, rank 0 and rank 1 computed other samples"),
    "a step missing": (lambda held: held.pop(5), r"^step 6 follows step 4$"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found_and_named(tmp_path: Path, name: str) -> None:
    fault, sentence = FAULTS[name]
    for every in (1, 3):
        held = steps()
        fault(held)
        write(tmp_path / NAME, written(held, every))
        found = check(tmp_path / NAME, PLANNED).found
        assert re.search(sentence, found), found


def test_what_is_known_of_the_run_has_to_be_in_it(tmp_path: Path) -> None:
    write(tmp_path / NAME, written(steps()))
    for known, sentence in (
        ({"steps": 8, "first": 1, "evaluations": [4, 8]}, "^2 epochs and 2 evaluations, steps 1 to 8$"),
        ({"steps": 9}, "^it ends with step 8, and the run made 9 steps$"),
        ({"evaluations": [4, 6, 8]}, r"^1 evaluation \(the first after step 6\) not there$"),
    ):
        found = check(tmp_path / NAME, dataclasses.replace(PLANNED, **known))
        assert re.search(sentence, found.found), found


def test_on_a_full_disk_pages_wait_and_go_out_whole(tmp_path: Path) -> None:
    path = tmp_path / NAME
    sizes = {"samples": SAMPLES, "accumulation": 1, "steps_per_epoch": 4}
    with contextlib.closing(Ledger(path, World.alone(), **sizes)) as kept:

        def note(*numbers: int) -> None:
            for step in numbers:
                kept.add(step, steps()[step][0])
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
    planned = Planned(global_batch=100, order=SHUFFLED)
    return check(folder / NAME, dataclasses.replace(planned, **values))


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
    assert re.search(r"ledger\.bin.* is damaged", _trained(pool, 2, output=run, resume="auto"))


@pytest.mark.parametrize(
    ("faulty", "part"),
    [("trained", "by ledger.bin: epoch 0: "), ("evaluated", "the evaluation after step 15: ")],
)
def test_samples_that_come_twice_or_never_stop_the_run_and_their_rank_is_named(
    pool: RankPool, tmp_path: Path, faulty: str, part: str
) -> None:
    said = _trained(pool, 3, faulty, output=tmp_path)
    assert part in said
    assert "came more than once" in said
    assert "on rank 1" in said
    assert judged(tmp_path).outcome == Check.FAILS
