"""linattn-tl tune: find the fastest verified kernels for this device and keep them."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from linattn_tl.cli._progress import Bars
from linattn_tl.cli._text import head_dims, speed_text, table

NAME = "tune"
HELP = "build, check and time kernels for this device; keep the fastest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        default="native",
        help="native (this CPU), a level of it, or GPU 0, as sm_90a (default native)",
    )
    parser.add_argument("--budget", type=float, default=170.0, metavar="SECONDS", help="time to spend (default 170)")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="comma-separated (default: all three)")
    parser.add_argument("--dims", default="64,128", help="head dims K = V, or KxV: 64,128x256 (default 64,128)")
    parser.add_argument("--ops", help="families, comma-separated (default: all)")
    parser.add_argument("--jobs", type=int, default=0, help="builds at a time (default: one a core)")
    parser.add_argument("--fresh", action="store_true", help="time again what an earlier run has timed")
    parser.add_argument(
        "--skip-verify", action="store_true", help="for kernel development: check nothing, and serve nothing of it"
    )


def run(args: argparse.Namespace) -> int:
    from linattn_tl import tuning

    plan = tuning.make_plan(
        arch=args.arch,
        budget_s=args.budget,
        dtypes=args.dtypes.split(","),
        dims=head_dims(args.dims),
        ops=args.ops.split(",") if args.ops else None,
        jobs=args.jobs,
        checked=not args.skip_verify,
    )
    with Bars({"build": "build and check", "time": "time the survivors"}, keep=True) as bars:
        report, path = tuning.run(plan, progress=bars.show, fresh=args.fresh)
    if args.json:
        print(json.dumps({**asdict(report), "table": str(path)}, indent=1))
    else:
        print(_text(report, str(path)))
    return 0 if report.rows else 1


def _text(report: Any, path: str) -> str:
    rows = [
        (
            r["kernel"],
            r["dtype"],
            r["K"],
            r["V"],
            *speed_text(r),
            r["candidates"],
        )
        for r in report.rows
    ]
    summary = (
        f"{report.candidates} candidates in {report.seconds:.0f} s: "
        f"{report.built} built, {report.found} already there, "
        f"{len(report.dropped)} dropped as wrong or broken, {report.skipped} left for lack of time"
    )
    lines = [table(("kernel", "dtype", "K", "V", "fastest config", "us", "GFLOP/s", "of"), rows), "", summary]
    lines += [f"  dropped {d['kernel']} {d['dtype']} {d['config']}: {d['why']}" for d in report.dropped]
    if report.skipped:
        lines.append("run it again to go on where it stopped")
    return "\n".join([*lines, f"table: {path}"])
