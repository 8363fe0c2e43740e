"""Cases of one family against rivals, each with its own contestants, measured and printed alike.

A case is a function that makes {"ours": run, rival: run, ...}, having checked every contestant against the float64
definition. It is timed in turns, in one process, at each number of threads.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune import measure, verify
from benchmarks import cases, report

ROUNDS = 9
Form = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One case: how much longer each rival takes than ours."""

    name: str
    threads: int
    ours_ms: float
    ratios: dict[str, float]


def fastest(variants: dict[str, Form]) -> Form:
    return cases.fastest({name: cases.Contestant(run, None) for name, run in variants.items()})[1].run


def check(runs: dict[str, Form], exact: Sequence[torch.Tensor], names: Sequence[str], dtype: str = "float32") -> None:
    """Each contestant gives what is exact, within what the dtype allows."""
    for who, run in runs.items():
        for name, got, want in zip(names[: len(exact)], run(), exact, strict=True):
            verify.check_close(f"{who}: {name}", got.detach(), want, dtype=dtype)


def measured(name: str, case: Callable[[], dict[str, Form]], threads: int) -> Row:
    torch.set_num_threads(threads)
    torch.compiler.reset()
    with torch.set_grad_enabled("backward" in name):
        runs = case()
        start = time.perf_counter()
        runs["ours"]()
        rounds = ROUNDS if time.perf_counter() - start < 1 else 7
        times = measure.interleaved(runs, rounds=rounds, min_round_s=5e-3)
    ours = times["ours"].median_us
    return Row(name, threads, ours / 1e3, {n: t.median_us / ours for n, t in times.items() if n != "ours"})


def table(rows: Sequence[Row]) -> str:
    rivals = list(dict.fromkeys(name for row in rows for name in row.ratios))
    width = max(10, *(len(name) + 2 for name in rivals))
    head = "".join(f"{name:>{width}}" for name in rivals)
    lines = [f"{'':24}{'threads':>8}{'ours':>12}{head}   times as long as ours"]
    for row in rows:
        rest = "".join(f"{row.ratios[n]:>{width - 1}.2f}x" if n in row.ratios else " " * width for n in rivals)
        lines.append(f"{row.name:24}{row.threads:>8}{row.ours_ms:>9.2f} ms{rest}")
    return "\n".join(lines)


def main(
    module: str, about: str, every: Mapping[str, Callable[[], dict[str, Form]]], argv: Sequence[str] | None
) -> int:
    """Measure and print. A decode step is measured on the first number of threads alone."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{module}", description=about)
    parser.add_argument("--threads", default="1,2", help="thread counts (default 1,2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    counts = [int(n) for n in args.threads.split(",")]
    rows = []
    for name, case in every.items():
        for threads in counts if not name.startswith("decode") else counts[:1]:
            print(f"{name}, {threads} thread{'s' if threads > 1 else ''} ...", file=sys.stderr)
            rows.append(measured(name, case, threads))
    machine = report.this_machine(counts)
    if args.json:
        print(json.dumps({"machine": str(machine), "rows": [vars(row) for row in rows]}, indent=1))
        return 0
    print(table(rows))
    return 0
