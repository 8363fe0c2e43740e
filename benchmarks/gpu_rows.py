"""Checks on a device and the rows that they leave: one failing check stops no other.

A section of benchmarks.gpu_check is a list of checks. A check is right if it returns, wrong if it raises, and not run
if it raises NotRun, which says why.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ALIVE_BYTES = 64


@dataclass(frozen=True)
class Session:
    """Where the checks run, and how many of them."""

    device: torch.device
    quick: bool = False  # fewer cases, smaller sizes
    backend: str = "binary"  # the one under test; a named backend never falls back

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Found:
    """What a check that is right has to say."""

    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)  # JSON values


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], Found]


@dataclass(frozen=True)
class Row:
    """One check that was made, or was not."""

    section: str
    name: str
    ok: bool | None  # None: not run, and detail says why
    detail: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)


class NotRun(Exception):
    """A check that cannot be made here; the text says why."""


class WrongResult(RuntimeError):
    """Something other than a number is not as it must be."""


class DeviceLost(RuntimeError):
    """The device answers nothing any more: only a new process can go on."""


def attempt(section: str, check: Check) -> Row:
    """Make a check. Whatever it raises is its failure, with the exception's type and first line."""
    start = time.perf_counter()
    numbers: dict[str, Any] = {}
    try:
        found = check.run()
    except NotRun as why:
        ok, detail = None, str(why)
    except Exception as error:  # any other check can still be made
        ok, detail = False, first_line(error)
    else:
        ok, detail, numbers = True, found.detail, found.numbers
    return Row(section, check.name, ok, detail, round(time.perf_counter() - start, 3), numbers)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def run_section(
    section: str,
    checks: Callable[[Session], Sequence[Check]],
    session: Session,
    on_row: Callable[[Row, int], None],
    *,
    on_start: Callable[[str], None] = lambda name: None,
    first: int = 0,
    deadline: float = float("inf"),
) -> None:
    """Make the section's checks in order, and hand each row on as it comes, with the number of checks.

    Args:
        on_start: told the name of each check before it is made.
        first: the check to begin with; those before it were made by a process that was lost.
        deadline: of time.monotonic(); checks that would begin after it are not run, and say so.

    Raises:
        DeviceLost: after the row of a check that broke the device.
    """
    try:
        found = checks(session)
    except Exception as error:  # the other sections can still be gone through
        on_row(Row(section, "listing the checks", False, first_line(error)), 1)
        return
    for check in found[first:]:
        if time.monotonic() > deadline:
            row = Row(section, check.name, None, "the section's time was used up")
        else:
            on_start(check.name)
            row = attempt(section, check)
        on_row(row, len(found))
        if row.ok is False and session.cuda:
            _check_alive(session.device)


def _check_alive(device: torch.device) -> None:
    """After an illegal access every later call fails with its error, whatever it does."""
    try:
        torch.zeros(ALIVE_BYTES, dtype=torch.uint8, device=device).sum().item()
    except RuntimeError as error:
        raise DeviceLost(first_line(error)) from error
