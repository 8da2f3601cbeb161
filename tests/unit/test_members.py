"""What an elastic agent reads of the other nodes, from a store that others can reach."""

from __future__ import annotations

import pickle
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from lockstep.launchers.nodes import _State
from lockstep.monitor.keys import Keys


class _Touches:
    """A pickle of this makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_state_that_would_run_something_is_refused(tmp_path: Path) -> None:
    marker, keys = tmp_path / "ran", Keys(HashStore(), "job")
    for foreign in (_Touches(marker), {"participants": _Touches(marker)}):
        keys.write("nodes", b64encode(pickle.dumps(foreign)).decode())
        with pytest.raises(RendezvousStateError):
            _State(keys).get_state()
        with pytest.raises(RendezvousStateError):
            _State(keys).set_state(b"ours", "an older token")  # which hands back what is there
        assert not marker.exists()
        pickle.loads(pickle.dumps(foreign))
        assert marker.exists()  # so it would
        marker.unlink()
