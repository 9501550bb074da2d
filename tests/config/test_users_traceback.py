"""In the traceback of a failed run the user's lines stand out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autolaunch_strategies.config.users_traceback import user_traceback


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def forward() -> None:
    Model()(torch.zeros(2, 4))


def in_torch_alone() -> None:
    torch.zeros(1).backward()


def caused() -> None:
    try:
        forward()
    except RuntimeError as error:
        raise ValueError("no layer for this") from error


def failure(run: Callable[[], None]) -> BaseException:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        run()
    return raised.value


def test_frames_of_libraries_are_counted() -> None:
    lines = user_traceback(failure(forward)).splitlines()
    places = [line for line in lines if line.startswith("  File") or line.startswith("  ...")]
    assert [("test_users_traceback" in line, line.startswith("  ... ")) for line in places] == [
        (True, False),  # failure, forward
        (True, False),
        (False, True),
        (True, False),  # Model.forward
        (False, True),
        (False, False),  # where torch raised it
    ]
    assert "return self.net(x)" in "\n".join(lines)
    assert lines[-1].startswith("RuntimeError: mat1 and mat2 shapes")


def test_an_error_outside_of_the_users_code_has_its_end() -> None:
    error = failure(in_torch_alone)
    while error.__traceback__ is not None and "torch" not in error.__traceback__.tb_frame.f_code.co_filename:
        error.__traceback__ = error.__traceback__.tb_next
    text = user_traceback(error)
    assert 1 <= text.count("  File") <= 3 and text.splitlines()[-1].startswith("RuntimeError: element 0")


def test_what_led_to_an_error_stands_before_it() -> None:
    text = user_traceback(failure(caused))
    first, then = text.split("\nThis was the direct cause of what follows:\n\n")
    assert first.splitlines()[-1].startswith("RuntimeError: mat1") and then.endswith("ValueError: no layer for this")


def test_a_group_of_errors_is_whole() -> None:
    group = ExceptionGroup("two", [ValueError("one"), ValueError("another")])
    assert "ValueError: another" in user_traceback(group)
