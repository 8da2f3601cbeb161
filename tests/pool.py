"""Rank processes that stay alive across tests: each import of torch costs seconds, a new process group costs none."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class RankPool:
    """Runs a function on several gloo ranks at once, in processes that are started once and kept."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120, collectives: str = "auto"
    ) -> list[Any]:
        """Return `[function(world, *args) for each of size ranks]`; `function` must be importable by name.

        Raises AssertionError with the rank's own traceback if any rank raised, TimeoutError if one stayed silent
        (the pool is then restarted at the next call). A collective waits half of `timeout_s`, so that ranks which wait
        for one another in vain can still say so.
        """
        while len(self._ranks) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._ranks.append((process, ours))
        try:
            answers = self._answers(size, function, args, timeout_s, collectives)
        except (OSError, EOFError):  # a rank is gone, or silent: answers that still come are no later call's
            self.close()
            raise
        failed = [f"rank {rank}:\n{trace}" for rank, (_, trace) in enumerate(answers) if trace]
        assert not failed, "\n".join(failed)
        return [value for value, _ in answers]

    def _answers(
        self, size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, collectives: str
    ) -> list[tuple[Any, str]]:
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                self._ranks[rank][1].send(
                    (function, rank, size, str(Path(folder) / "store"), timeout_s / 2, collectives, args)
                )
            answers = []
            for rank in range(size):
                pipe = self._ranks[rank][1]
                if not pipe.poll(timeout_s):
                    raise TimeoutError(f"rank {rank} of {size} gave no answer within {timeout_s} s")
                answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()


def _serve(pipe: Connection) -> None:
    import torch
    from torch._C._distributed_c10d import FileStore

    from lockstep.world.topology import Topology
    from lockstep.world.world import World

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            function, rank, size, path, stall_s, collectives, args = pipe.recv()
            try:
                if size == 1:
                    world = World.alone()
                else:
                    topology = Topology(rank=rank, size=size, local_rank=rank, local_size=size)
                    store = FileStore(path, size)
                    device = torch.device("cpu")
                    world = World.join(topology, device, store, timeout_s=stall_s, collectives=collectives)
                try:
                    value = function(world, *args)
                finally:
                    world.close()
                assert not torch._C._len_torch_dispatch_stack(), "a session has left a mode"
                pipe.send((value, ""))
            except BaseException:
                pipe.send((None, traceback.format_exc()))
