"""By which launcher a script that runs already is a rank, and what is no function to launch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import lockstep
from lockstep import hardware
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.hardware import Gpu
from lockstep.launchers import start
from lockstep.runs import folders
from lockstep.sessions import script
from lockstep.world.world import World

from ..starting import config


def test_a_process_that_runs_already_is_one_rank_and_starts_no_others() -> None:
    with start.joined(config(), {}) as (found, world):
        assert (found.parallel.launcher, world.size) == ("inline", 1)
    for asked in ({"devices": 2}, {"max_restarts": 1}, {"launcher": "spawn"}):
        with (
            pytest.raises(RequestError, match=r"start it with lockstep run \[flags\] SCRIPT"),
            start.joined(config(**asked), {}),
        ):
            pass


def test_of_several_gpus_a_script_alone_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu("H200", f"GPU-{index}", 1) for index in range(8)]
    monkeypatch.setattr(hardware, "gpus", lambda visible: hardware.select(gpus, visible))
    found = start.joining(RunConfig(), {}).config.parallel
    assert (found.launcher, found.devices, found.accelerator) == ("inline", 1, "cuda")
    with pytest.raises(RequestError, match="--launcher spawn would start"):
        start.joining(override(RunConfig(), devices=2), {})


def test_determinism_that_a_group_was_not_formed_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started = script.Started(RunConfig(), World.alone("cuda"))
    monkeypatch.setattr(script, "take", lambda: started)
    with pytest.raises(RequestError, match=r"comes too late .* give lockstep run --deterministic"):
        lockstep.session(deterministic=True)


def test_the_default_folder_has_the_scripts_name() -> None:
    assert folders.default_name(override(RunConfig(), model="train", data="")) == "train"


def test_what_is_no_function_is_not_launched() -> None:
    hook = sys.excepthook
    main: Any = None  # what a function returns that was called by mistake
    with pytest.raises(RequestError, match="takes a function that each rank calls; found None"):
        lockstep.launch(main, devices=2)
    with pytest.raises(RequestError, match=r"found 0\.5: give functools\.partial"):
        lockstep.launch(print, 0.5)  # type: ignore[call-overload]
    assert sys.excepthook is hook
