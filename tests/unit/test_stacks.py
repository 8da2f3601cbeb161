"""Stacks that C code writes where Python does not run, and what is left of the means once it is called off."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest

from lockstep import stacks

from ..command import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "output").mkdir()
    return tmp_path


def test_a_switch_that_is_no_longer_put_off_has_the_stacks_written(folder: Path) -> None:
    switch = stacks.DeadMansSwitch(3, 0.5)

    def is_armed() -> bool:
        switch.put_off(folder)
        return stacks._file(3, folder).exists()

    until(is_armed, 5)
    time.sleep(0.1)
    switch.put_off(folder)
    ctypes.PyDLL(None).usleep(1_000_000)  # with Python's lock
    assert "test_a_switch_that_is_no_longer_put_off" in stacks.left_by(3, folder)
    switch.close()
    assert stacks.left_by(3, folder) == ""
    assert list((folder / "output").iterdir()) == []


def test_a_switch_that_is_called_off_while_its_file_is_opened_leaves_nothing(folder: Path) -> None:
    for _ in range(20):
        switch = stacks.DeadMansSwitch(0, 60.0)
        switch.put_off(folder)
        switch.close()
        until(lambda switch=switch: not switch._opens.is_alive(), 5)  # type: ignore[misc]
        assert list((folder / "output").iterdir()) == []
