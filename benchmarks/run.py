"""Measure the package against other implementations: `python -m benchmarks.run [--quick] [--json FILE] [--plot DIR]`.

Everything is measured in one run, in turns, on the same inputs. Nothing is timed unless every contestant's output
agrees with the float64 definition: a wrong one is named, and the run ends with exit code 1.

--quick takes a minute or two. Everything takes a quarter of an hour, most of it torch.compile's.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import cases, costs, plot, report
from benchmarks.cases import Case, Result

ROUNDS, QUICK_ROUNDS, SCALING_ROUNDS = 9, 5, 3
IMPORTS, QUICK_IMPORTS = 5, 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.run", description="Speed against other implementations.")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: one or two minutes")
    parser.add_argument("--json", metavar="FILE", help="also write all numbers; - prints them instead of the tables")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="also draw ratios.png and scaling.png")
    parser.add_argument("--threads", type=_counts, help="thread counts (default 1,2; with --quick 1)")
    parser.add_argument("--only", type=_groups, default=cases.GROUPS, help=f"some of {','.join(cases.GROUPS)}")
    args = parser.parse_args(argv)
    if args.threads is None:
        args.threads = [1] if args.quick or (os.cpu_count() or 1) < 2 else [1, 2]
    return args


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a count below 1")
    return counts


def _groups(text: str) -> list[str]:
    groups = text.split(",")
    for group in groups:
        if group not in cases.GROUPS:
            raise argparse.ArgumentTypeError(f"{group!r} is not one of {', '.join(cases.GROUPS)}")
    return groups


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    try:
        with _Bar() as bar:
            run = _measure(args, rounds, bar)
            drawn = _draw(args, run, bar) if args.plot else []
    except cases.WrongResult as error:
        print(f"refused to go on: {error}", file=sys.stderr)
        return 1
    numbers = json.dumps(report.as_json(run, rounds), indent=1)
    if args.json == "-":
        print(numbers)
        return 0
    print(report.text(run, rounds))
    if args.json:
        Path(args.json).write_text(numbers + "\n")
        drawn.append(Path(args.json))
    for path in drawn:
        print(f"wrote {path}")
    return 0


def _measure(args: argparse.Namespace, rounds: int, bar: "_Bar") -> report.Run:
    suite = cases.suite(args.only, args.threads, args.quick)
    scaling = len(cases.scaling_suite(1, args.quick)) if args.plot else 0
    bar.start(rounds * len(suite) + SCALING_ROUNDS * scaling)
    bar.say("the machine's peaks")
    run = report.Run(report.this_machine(args.threads))
    for case in suite:
        run.results.append(_measure_case(case, rounds, bar))
    if "overhead" in args.only:
        bar.say("overhead of a call")
        _measure_overhead(run, rounds)
    if "import" in args.only:
        bar.say("import")
        run.import_s = costs.import_seconds(QUICK_IMPORTS if args.quick else IMPORTS)
    run.machine = replace(run.machine, busy_cores=max(run.machine.busy_cores, report.busy_cores()))
    return run


def _measure_case(case: Case, rounds: int, bar: "_Bar") -> Result:
    bar.say(f"{case.label}: compile and check")
    prepared = cases.prepare(case)
    bar.say(f"{case.label}: time")
    return cases.measured(prepared, rounds, bar.advance)


def _measure_overhead(run: report.Run, rounds: int) -> None:
    try:
        run.overhead_us = costs.overhead_us(rounds)
    except RuntimeError as error:
        run.left_out["overhead"] = str(error)


def _draw(args: argparse.Namespace, run: report.Run, bar: "_Bar") -> list[Path]:
    machine = f"{run.machine.cpu}, torch {run.machine.torch}"
    points = [_measure_case(case, SCALING_ROUNDS, bar) for case in cases.scaling_suite(args.threads[0], args.quick)]
    run.results += points
    drawn = [plot.scaling(points, machine, args.plot / "scaling.png")]
    if any(r.case.group in plot.NAMES for r in run.results):
        drawn.append(plot.ratios(run.results, machine, args.plot / "ratios.png"))
    return drawn


class _Bar:
    """Rounds done of all rounds, on stderr, and what is going on."""

    def __enter__(self) -> "_Bar":
        from tqdm import tqdm

        # without a terminal a bar is one line a refresh
        interval = 0.5 if sys.stderr.isatty() else 20.0
        # rounds of different cases differ in length, so there is no estimate of the end
        layout = "{percentage:3.0f}%|{bar:20}| {elapsed} {desc}"
        self._bar = tqdm(total=1, file=sys.stderr, mininterval=interval, leave=False, bar_format=layout)
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def start(self, total: int) -> None:
        self._bar.reset(total)

    def say(self, what: str) -> None:
        self._bar.set_description_str(what)

    def advance(self, done: int, rounds: int) -> None:
        self._bar.update(1)


if __name__ == "__main__":
    sys.exit(main())
