"""What `import lockstep` offers."""

from __future__ import annotations

import inspect
from pathlib import Path

import lockstep
from lockstep.config.options import OF_A_SESSION, flatten
from lockstep.config.schema import RunConfig

NAMES = (
    *("session", "Session", "launch", "run", "train", "recipe", "override", "RunConfig", "RunResult", "Scores"),
    *("World", "Topology", "LockstepError", "RequestError", "RunError", "ProofError", "Stopped"),
)


def test_the_public_names_are_these_and_each_one_says_what_it_is() -> None:
    """Parts of a loop, such as a strategy's wrapper alone, would leave a net's BatchNorm unsynchronised."""
    assert sorted(lockstep.__all__) == sorted(NAMES) == sorted(lockstep._HOMES)
    assert dir(lockstep) == sorted(NAMES)
    assert (Path(lockstep.__file__).parent / "py.typed").exists()
    assert all(getattr(lockstep, name).__doc__ for name in NAMES)


def test_the_options_of_a_session_are_parameters_with_their_defaults() -> None:
    defaults = flatten(RunConfig(), OF_A_SESSION)
    *parameters, unknown = inspect.signature(lockstep.session).parameters.values()
    plain = {each.name: list(each.default) if each.default == () else each.default for each in parameters}
    assert {name.replace("_", "-"): default for name, default in plain.items()} == defaults
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD
    for each in parameters:
        assert f"\n    - `{each.name}`: " in (lockstep.session.__doc__ or "")
