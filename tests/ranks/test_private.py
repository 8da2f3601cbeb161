"""What breaks without the private names that `_torch` uses.

Of the others: replicas in threads and compiled ones in
unit/test_strategies, a start without torch's compiler in unit/test_cli, hooks on a step in unit/test_session,
BatchNorms of users' own in unit/test_sync_batchnorm, what draws within operators, and their arguments, in
ranks/test_gradients, the stack of modes in unit/test_draws, a cluster of Ray's that listens on loopback alone in
real/test_ray.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from lockstep import _torch
from lockstep.world.world import World

from ..pool import RankPool


class _Counted(_torch.TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_tensors_take_one_operation() -> None:
    ours, theirs = [torch.ones(each) for each in range(9)], [torch.full((each,), 3.0) for each in range(9)]
    with _Counted() as counted:
        _torch.foreach_copy_(ours, theirs)
    assert counted.count == 1, "else one a tensor"
    assert ours[4].tolist() == [3.0] * 4


def test_a_step_needs_no_more_than_its_own_code() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    _torch.step(optimizer)
    assert (parameter.tolist(), called) == ([0.5, 0.5], [])


class _Hostile:
    def __reduce__(self) -> Any:
        return print, ("code of a stranger's",)


def test_a_rendezvous_is_read_and_nothing_else_runs() -> None:
    state = _RendezvousState()
    state.round = 3
    assert _torch.plain_rendezvous(pickle.dumps(state)).round == 3
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        _torch.plain_rendezvous(pickle.dumps(_Hostile()))


def _grouped(world: World) -> tuple[int, int]:
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    with _torch.as_default_group(groups[world.rank]):
        alone = dist.get_world_size()
        dist.all_reduce(torch.ones(1))  # the other rank makes none
    return alone, dist.get_world_size()


def test_a_step_of_the_users_own_may_be_alone_for_a_while(pool: RankPool) -> None:
    assert pool.run(2, _grouped) == [(1, 2)] * 2


def _waited(world: World, folder: str) -> float:
    """Return how long rank 0 waited for a rank that does not come, where forming the group may take longer."""
    world.close()
    store = _torch.FileStore(str(Path(folder) / "again"), 2)
    world = World.join(world.topology, world.device, store, timeout_s=1.0, form_s=60.0, collectives="gloo")
    begun_s = time.monotonic()
    if world.rank:
        time.sleep(4)
    else:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            world.barrier()
    waited_s = time.monotonic() - begun_s
    world.close()
    return waited_s


@pytest.mark.long  # rank 1 sleeps for 4 seconds
def test_the_time_limit_of_collectives_is_not_that_of_forming_the_group(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, _waited, str(tmp_path))[0] < 3.5


_STUCK = """
import sys, time
import numpy as np
from lockstep.data.feed import Batches, Feed

class Stuck:
    def __getitem__(self, index):
        time.sleep(1000 * (index > 0))
        return index

feed = Feed(Batches(Stuck()), stays=False, num_workers=2, pin_memory=False)
answers = feed.answers(np.zeros(3, np.uint64), [(np.zeros(3, np.uint64), np.array([at]), at) for at in range(9)])
assert next(answers)[1] == 0
if sys.argv[1] == "closed":
    feed.close()
    answers.close()
"""


@pytest.mark.long  # torch waits for 5 seconds
@pytest.mark.parametrize("how", ["closed", "left"])
def test_workers_that_are_stuck_in_a_sample_are_killed_in_the_end(how: str) -> None:
    subprocess.run([sys.executable, "-c", _STUCK, how], check=True, timeout=60)


def test_hooks_are_taken_off_parameters_and_put_back() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    calls: list[str] = []
    own = {each: each.register_post_accumulate_grad_hook(lambda _: calls.append("own")) for each in (first, second)}
    hooks = _torch.UserHooks()
    with hooks.removed([first, second], own) as taken:
        assert taken == []
    hook = first.register_hook(lambda gradient: gradient * 2)
    first.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    with hooks.removed([first, second], own) as taken:
        (first * second).sum().backward()
    assert calls == ["own", "own"]
    assert first.grad is not None
    assert first.grad.tolist() == [1.0, 1.0]
    ((parameter, before, after),) = taken
    assert (parameter is first, len(before), len(after)) == (True, 1, 1)
    (first * second).sum().backward()
    assert sorted(calls[2:]) == ["after", "own", "own"]
    assert first.grad.tolist() == [3.0, 3.0]
    hook.remove()
    (first * second).sum().backward()
    assert first.grad.tolist() == [4.0, 4.0]
