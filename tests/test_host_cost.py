"""What a call costs the host before the driver has it, by benchmarks/host_cost.py.

The goal is 2 us for decode and 5 us for a forward pass. Neither is reached on the machine that this was written on, a
shared one, where decode took 4.5 us at best and data_ptr() of one tensor 0.09: the calls of tensors' methods that the
checks need are most of it. So what is held fast here is how many those are, which no noise changes, and the time in
units of seven calls of data_ptr(), which a slow machine takes longer for, too.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from autotune import cuda_build
from benchmarks import host_cost
from benchmarks.host_cost import DECODE, FORWARD, FORWARD_KEPT, OUTPUT, OUTPUTS, UNIT

MOST_CALLS = {  # of Python functions, of C functions; properties are not counted
    DECODE: (2, 24),
    FORWARD: (4, 15),
    FORWARD_KEPT: (4, 17),
}
MOST_UNITS = {DECODE: 10.0, FORWARD: 9.0, FORWARD_KEPT: 10.0}  # half as much again as was measured; forward net of
ALLOCATION = {FORWARD: OUTPUT, FORWARD_KEPT: OUTPUTS}  # what torch takes for the outputs


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[[], object]]:
    if cuda_build.missing():
        pytest.skip(cuda_build.missing())
    with host_cost.stand_ins():
        return {**host_cost.decode_calls(), **host_cost.forward_calls()}


def events(call: Callable[[], object]) -> Counter[str]:
    """How many functions a call enters."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        found[event] += 1

    with host_cost.stand_ins():
        call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_call_enters_few_functions(calls: dict[str, Callable[[], object]], name: str):
    found = events(calls[name])
    python, c = found["call"] - 1, found["c_call"] - 1  # less the lambda, and the end of the profile
    assert (python, c) <= MOST_CALLS[name] and c <= MOST_CALLS[name][1]


def test_a_call_costs_little(calls: dict[str, Callable[[], object]], capsys: pytest.CaptureFixture[str]):
    wanted = (UNIT, DECODE, FORWARD, OUTPUT, FORWARD_KEPT, OUTPUTS)
    costs = host_cost.measure({name: calls[name] for name in wanted}, rounds=150, number=50)
    units = {
        name: (costs[name].min_us - (costs[ALLOCATION[name]].min_us if name in ALLOCATION else 0)) / costs[UNIT].min_us
        for name in MOST_UNITS
    }
    with capsys.disabled():
        shown = ", ".join(f"{name} {costs[name].min_us:.2f} us = {units[name]:.1f}" for name in units)
        print(f" [{shown}] ", end="")
    for name, most in MOST_UNITS.items():
        assert units[name] < most, name
