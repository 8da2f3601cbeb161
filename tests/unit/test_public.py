"""What `import lockstep` offers."""

from __future__ import annotations

import lockstep

NAMES = (
    *("session", "Session", "launch", "run", "train", "recipe", "override", "RunConfig", "RunResult", "Scores"),
    *("World", "Topology", "LockstepError", "RequestError", "RunError", "ProofError", "Stopped"),
)


def test_the_public_names_are_these_and_each_one_says_what_it_is() -> None:
    """Parts of a loop, such as a strategy's wrapper alone, would leave a net's BatchNorm unsynchronised."""
    assert sorted(lockstep.__all__) == sorted(NAMES) == sorted(lockstep._HOMES)
    assert set(NAMES) <= set(dir(lockstep))
    assert all(getattr(lockstep, name).__doc__ for name in NAMES)
