"""linattn-tl build: compile kernels for given architectures, without tuning. A GPU's need no GPU."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from linattn_tl.cli._text import head_dims

NAME = "build"
HELP = "compile and check kernels for given architectures, also those that this machine has not got"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="cpu-v3,cpu-v4", help="comma-separated, e.g. cpu-v4,sm_80,sm_90a")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="comma-separated (default: all three)")
    parser.add_argument(
        "--dims", default="64,128", help="for GPUs, head dims K = V, or KxV: 64,128x256 (default 64,128)"
    )
    parser.add_argument("--ops", help="families, comma-separated (default: all)")
    parser.add_argument("--all-configs", action="store_true", help="every config that may launch, not the best alone")
    parser.add_argument("--jobs", type=int, default=0, help="builds at a time (default: one a core)")


def run(args: argparse.Namespace) -> int:
    from linattn_tl import settings, tuning

    outcomes = tuning.build_best(
        args.arch.split(","),
        args.dtypes.split(","),
        head_dims(args.dims),
        ops=args.ops.split(",") if args.ops else None,
        every_config=args.all_configs,
        jobs=args.jobs,
        say=_say,
    )
    failed = [o for o in outcomes if o.status != "ok"]
    if args.json:
        print(json.dumps({"cache": str(settings.cache_dir()), "built": [asdict(o) for o in outcomes]}, indent=1))
    else:
        print(f"{len(outcomes) - len(failed)} binaries in {settings.cache_dir()}")
        for o in failed:
            print(f"  failed: {_name(o)}: {o.error or o.status}")
    return 1 if failed else 0


def _name(built: Any) -> str:
    dims = f" {built.K}x{built.V}" if built.arch.startswith("sm_") else ""
    return f"{built.kernel} {built.dtype}{dims} {built.arch}"


def _say(built: Any, done: int, total: int) -> None:
    print(f"[{done}/{total}] {_name(built)}: {built.status}", file=sys.stderr)
