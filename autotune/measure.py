"""Timing protocol: warm, in turns, in an order that changes, median and spread; and this CPU's roofs."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MATMUL_SIZE = 1024
_COPY_BYTES = 256 << 20  # beyond any last-level cache
_TRIES = 7


@dataclass(frozen=True)
class Timing:
    """Time of one call, over the rounds."""

    median_us: float
    min_us: float
    iqr_us: float  # between the first and the third quartile
    rounds: int
    inner: int  # calls behind one sample
    samples_us: tuple[float, ...]


def interleaved(
    fns: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    min_round_s: float = 1e-3,
    warmup: int = 1,
    progress: Callable[[int, int], None] | None = None,
    finish: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times functions against each other, so that what slows the machine meanwhile slows them all.

    Every round takes one sample of each, in an order that changes from round to round.

    Args:
        fns: each returns when its work is done, or `finish` waits for it.
        min_round_s: a sample repeats its function until it lasts about this long, as found while warming up.
        warmup: calls of each before anything is timed.
        progress: called with (rounds done, rounds) after each round.
        finish: called at the end of each sample, within its time: torch.cuda.synchronize for work on a GPU.

    Returns:
        A Timing per name.
    """
    if rounds < 1:
        raise ValueError(f"interleaved: rounds is {rounds}; expected at least 1")
    names = list(fns)
    inner = {name: _warm(fns[name], warmup, min_round_s * 1e9, finish) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for done in range(rounds):
        for i in _order(len(names), done):
            name = names[i]
            samples[name].append(_elapsed_ns(fns[name], inner[name], finish) / inner[name] / 1e3)
        if progress is not None:
            progress(done + 1, rounds)
    return {name: _timing(samples[name], inner[name]) for name in names}


def peak_gflops(threads: int) -> float:
    """fp32 GFLOP/s of torch's matmul of 1024 x 1024 on this many threads: the best of several."""
    import torch

    n = _MATMUL_SIZE
    a, b, out = (torch.rand(n, n, dtype=torch.float32, device="cpu") for _ in range(3))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return 2 * n**3 / _best_ns(lambda: torch.mm(a, b, out=out))
    finally:
        torch.set_num_threads(before)


def bandwidth_gbps() -> float:
    """GB/s (1e9 bytes, reads and writes counted) of a large copy on torch's threads: the best of several."""
    import torch

    # Written, not merely allocated: untouched pages are all one page of zeros, and that sits in L1.
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    copy = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_ns(lambda: copy.copy_(source))


def _order(n: int, turn: int) -> list[int]:
    """A Williams design: within 2 n turns everyone follows everyone else, and is first, equally often."""
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    order = [(i + turn) % n for i in zigzag]
    return order[::-1] if turn // max(n, 1) % 2 else order


def _warm(fn: Callable[[], object], warmup: int, min_ns: float, finish: Callable[[], object] | None = None) -> int:
    """Warms fn up; returns how many calls last min_ns."""
    for _ in range(warmup):
        fn()
    inner = 1
    while (elapsed := _elapsed_ns(fn, inner, finish)) < min_ns:
        # A first call is often slow, so one guess may fall short; a tenfold step bounds an overshoot.
        wanted = math.ceil(inner * min_ns / max(elapsed, 1))
        inner = min(10 * inner, max(inner + 1, wanted))
    return inner


def _elapsed_ns(fn: Callable[[], object], calls: int, finish: Callable[[], object] | None = None) -> int:
    start = time.perf_counter_ns()
    for _ in range(calls):
        fn()
    if finish is not None:
        finish()
    return time.perf_counter_ns() - start


def _best_ns(fn: Callable[[], Any]) -> int:
    fn()
    return min(_elapsed_ns(fn, 1) for _ in range(_TRIES))


def _timing(samples_us: list[float], inner: int) -> Timing:
    return Timing(
        median_us=statistics.median(samples_us),
        min_us=min(samples_us),
        iqr_us=_iqr(samples_us),
        rounds=len(samples_us),
        inner=inner,
        samples_us=tuple(samples_us),
    )


def _iqr(samples: list[float]) -> float:
    if len(samples) == 1:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first
