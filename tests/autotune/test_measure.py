"""The timing protocol, on functions whose time is known."""

import itertools
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from autotune import measure
from autotune.measure import interleaved


class Clock:
    """perf_counter_ns that only stands still or is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0
        self.calls: list[str] = []
        monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: self.now)

    def fn(self, name: str, *times_ns: int) -> Callable[[], None]:
        """Takes the given times in turn, and then always the last one."""
        times = itertools.chain(times_ns, itertools.repeat(times_ns[-1]))

        def call() -> None:
            self.calls.append(name)
            self.now += next(times)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_statistics_are_those_of_the_samples(clock: Clock):
    # One call warms up and one is for the inner count; then the five that count.
    times_ms = [99, 2, 5, 1, 3, 2, 9]
    timing = interleaved({"f": clock.fn("f", *(ms * 1_000_000 for ms in times_ms))}, rounds=5)["f"]
    assert timing.samples_us == (5000, 1000, 3000, 2000, 9000)
    assert (timing.median_us, timing.min_us, timing.iqr_us) == (3000, 1000, 3000)
    assert (timing.rounds, timing.inner) == (5, 1)


def test_a_fast_function_is_repeated_until_a_sample_lasts(clock: Clock):
    # The first calls are slow, as first calls are; the count must come from the warm ones.
    timing = interleaved({"f": clock.fn("f", 90_000, 50_000, 2_000)}, min_round_s=1e-3)["f"]
    assert timing.median_us == 2.0
    assert 1e-3 <= timing.inner * 2e-6 <= 1e-2


def test_a_slow_function_is_not_repeated(clock: Clock):
    timing = interleaved({"f": clock.fn("f", 2_000_000)}, rounds=3, warmup=2)["f"]
    assert timing.inner == 1
    assert len(clock.calls) == 2 + 1 + 3


def test_every_round_times_each_once_and_reports(clock: Clock):
    progress: list[tuple[int, int]] = []
    seen: list[list[str]] = []

    def note(done: int, rounds: int) -> None:
        progress.append((done, rounds))
        seen.append(clock.calls.copy())
        clock.calls.clear()

    fns = {name: clock.fn(name, 2_000_000) for name in "abc"}
    timings = interleaved(fns, rounds=4, progress=note)
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(sorted(calls) == ["a", "b", "c"] for calls in seen[1:])
    assert len({tuple(calls) for calls in seen[1:]}) == 3
    assert list(timings) == ["a", "b", "c"]


@pytest.mark.parametrize("n", range(2, 8))
def test_nobody_always_follows_the_same_neighbour(n: int):
    orders = [measure._order(n, turn) for turn in range(2 * n)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    followed = [pair for order in orders for pair in itertools.pairwise(order)]
    assert {followed.count(pair) for pair in itertools.permutations(range(n), 2)} == {2}
    for place in range(n):
        assert sorted(order[place] for order in orders) == sorted([*range(n)] * 2)


def test_drift_of_the_machine_is_shared(clock: Clock):
    """Two equal functions on a machine that slows down by half: back to back they would differ by a third."""
    slowdown = itertools.count(0)

    def equal() -> None:
        clock.now += 2_000_000 + 50_000 * next(slowdown)

    timings = interleaved({"a": equal, "b": equal}, rounds=10)
    assert timings["a"].median_us == pytest.approx(timings["b"].median_us, rel=0.03)


def test_one_round_has_no_spread(clock: Clock):
    timing = interleaved({"f": clock.fn("f", 2_000_000)}, rounds=1)["f"]
    assert (timing.median_us, timing.iqr_us) == (2000, 0)


def test_nothing_to_time():
    assert interleaved({}) == {}


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds is 0"):
        interleaved({"f": lambda: None}, rounds=0)


def test_an_exception_propagates():
    with pytest.raises(ZeroDivisionError):
        interleaved({"f": lambda: 1 / 0})


@pytest.mark.timing
def test_real_time():
    timings = interleaved({"sleep": lambda: time.sleep(0.004), "fast": lambda: None}, rounds=5)
    assert 4000 <= timings["sleep"].min_us <= timings["sleep"].median_us < 50_000
    assert timings["fast"].median_us < 100
    assert timings["fast"].inner > 100
    assert timings["fast"].median_us == statistics.median(timings["fast"].samples_us)


def test_the_roofs_are_plausible():
    assert 1 < measure.peak_gflops(1) < 20_000
    assert 0.5 < measure.bandwidth_gbps() < 20_000


def test_the_thread_count_is_restored(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    seen: list[int] = []

    def fail(*args: object, **kwargs: object) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError

    measure.peak_gflops(other)
    assert torch.get_num_threads() == before
    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(RuntimeError):
        measure.peak_gflops(other)
    assert seen == [other]
    assert torch.get_num_threads() == before
